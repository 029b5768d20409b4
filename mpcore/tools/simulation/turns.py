"""Run threads one at a time: each runs until it waits for another. A deadlock is detected at once."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch

from mpcore._torch.compile import set_stance, stance

PATIENCE_S = 3.0  # seconds in which all threads may poll in vain before it counts as a deadlock
_LOOKS = 3  # polls of each thread at least, which may take longer than that on a busy machine
_AWAY_S, _WORK_S = 1.5, 0.01  # more wall time or CPU time between two polls of a thread: it did other work


class RankError(RuntimeError):
    """Some ranks failed. The message has the error of each of them."""


class StoppedError(BaseException):
    """Raised in a waiting thread after another thread has failed. Not an `Exception`, so that no thread catches it."""


def process_state(new: bool = False) -> list[tuple[Callable[[Any], object], Any]]:
    """Return the state that a process has once and each rank needs for itself.

    This is the random states, the default dtype and the compiler's stance. A new rank gets a NumPy generator of its
    own: to exchange generators takes 1 us, to read and write the state of one takes 200 us.
    """
    state: list[tuple[Callable[[Any], object], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (torch.set_default_dtype, torch.get_default_dtype()),
        (random.setstate, random.getstate()),
        (set_stance, stance()),
    ]
    if torch.cuda.is_initialized():
        state.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if (numpy := sys.modules.get("numpy")) is not None:
        generator = numpy.random.get_bit_generator()
        state.append((numpy.random.set_bit_generator, deepcopy(generator) if new else generator))
    return state


def restore(state: list[tuple[Callable[[Any], object], Any]]) -> None:
    for put, value in state:
        put(value)


class Turns:
    """Run one of N threads at a time, in a fixed order."""

    def __init__(self, size: int, stuck: Callable[[], BaseException]) -> None:
        self.size = size
        self.stuck = stuck
        self.alive: set[int] = set(range(size))
        self.failure: tuple[int, BaseException] | None = None
        self.over: threading.Event = threading.Event()
        self._locks = [threading.Semaphore(0) for _ in range(size)]
        self._states = [process_state(new=True) for _ in range(size)]
        self._waits: list[tuple[Callable[[], bool], bool] | None] = [None] * size  # None: it can continue
        self._looks: int | None = None  # the thread that was chosen to poll again
        self._vain: Counter[int] = Counter()  # polls of each thread since the last change
        self._since = self._looked = self._worked = 0.0

    def begin(self) -> None:
        self._locks[0].release()

    def take(self, rank: int) -> None:
        """Wait, in the thread of this rank, until it is this thread's turn to run."""
        self._locks[rank].acquire()
        restore(self._states[rank])

    def changed(self) -> None:
        self._vain.clear()

    def wait(self, rank: int, ready: Callable[[], bool], polls: bool = False) -> None:
        """Let other threads run until `ready()` is true."""
        if polls and self._looks == rank:
            self._looks = None
            if time.monotonic() - self._looked > _AWAY_S or time.thread_time() - self._worked > _WORK_S:
                self.changed()
            else:
                self._since = self._since if self._vain else self._looked
                self._vain[rank] += 1
        while self.failure is None and not ready():
            self._waits[rank] = ready, polls
            other = self._next(rank)
            if other is None:
                other = self._looks = self._next_look(rank)
                if other is None:
                    self.fail(rank, self.stuck())
                    break
            if other != rank:
                self._states[rank] = process_state()
                self._locks[other].release()
                self.take(rank)
            if self._looks == rank:
                self._looked, self._worked = time.monotonic(), time.thread_time()
                break
        self._waits[rank] = None
        if self.failure is not None:
            raise StoppedError

    def finish(self, rank: int) -> None:
        """End the thread of a rank, which is running."""
        self.alive.discard(rank)
        self.changed()
        if not self.alive:
            self.over.set()
            return
        other = self._next(rank)
        if other is None:
            other = self._looks = self._next_look(rank)
        if other is None:
            self.fail(rank, self.stuck())
            other = min(self.alive)
        self._locks[other].release()

    def fail(self, rank: int, error: BaseException) -> None:
        """Keep the first error. After it every waiting thread is stopped."""
        if self.failure is None:
            self.failure = rank, error

    def _next_look(self, rank: int) -> int | None:
        """Return the thread that polls again, or None for a deadlock.

        It is the thread with the fewest polls in vain, this rank first. All threads poll once before one polls twice,
        because a thread may poll only once and then continue.
        """
        polls = [thread for thread in self.alive if (self._waits[thread] or (0, False))[1]]
        in_vain = all(self._vain[thread] >= _LOOKS for thread in polls)
        if not polls or (in_vain and time.monotonic() - self._since > PATIENCE_S):
            return None
        return min(polls, key=lambda thread: (self._vain[thread], (thread - rank) % self.size))

    def _can_go(self, thread: int) -> bool:
        waits = self._waits[thread]
        return self.failure is not None or waits is None or waits[0]()

    def _next(self, rank: int) -> int | None:
        """Return the first living thread after this rank that can go on, this rank last."""
        order = ((rank + step) % self.size for step in range(1, self.size + 1))
        return next((thread for thread in order if thread in self.alive and self._can_go(thread)), None)
