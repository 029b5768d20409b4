"""Catch the signals that ask a run to stop, and share them with all ranks."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpcore.mesh.axis import Axis
from mpcore.mesh.log import Logger, get_logger
from mpcore.tools._torch.simulated import simulated_rank

log: Logger = get_logger("mpcore.tools.fault_tolerance")
_LENGTH = 20  # of a message: the keywords' checksum, the step, both negated, and at most 16 requests


class StopSignals:
    """Record SIGTERM, SIGUSR1 and ctrl-C as a request to stop after the current step. A second ctrl-C ends the process.

    A supervisor forwards a ctrl-C that the terminal already sent to every process. So the second ctrl-C counts only if
    it comes at least `apart` seconds after the first.

    Args:
        apart: the least time between two ctrl-C, in seconds.
        leave_with: the initial value of the attribute `leave_with`.

    Under `mpcore.simulate` no signal is caught: only the main thread can catch signals, and each simulated rank runs in
    another thread.

    Attributes:
        asked: whether a signal has come. Ranks may see it at different steps: let them agree (`SharedRequests`) before
            they act.
        leave_with: the exit status with which a signal ends the process at once, as long as there is nothing to save.
            Set it to None before the first step.
    """

    def __init__(self, apart: float = 1.0, leave_with: int | None = None) -> None:
        self.asked: bool = False
        self.apart = apart
        self.leave_with = leave_with
        self._first: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if simulated_rank() is not None:
            return self
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            self._before[number] = signal.signal(number, self._ask)
        # Python's handlers don't run while the main thread is in a collective. This thread receives signals even then.
        self._wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="mpcore-signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._before:
            return
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._ask:  # leave_together may have set it to ignore
                signal.signal(number, handler)
        self._write.close()

    def _ask(self, *_: object) -> None:
        self.asked = True

    def _listen(self) -> None:
        while data := self._read.recv(16):
            for number in filter(self._before.__contains__, data):  # others have handlers of their own
                if self.leave_with is not None:
                    log.warning("left on %s before the first step: nothing to save", signal.Signals(number).name)
                    os._exit(128 + number if number == signal.SIGINT else self.leave_with)
                if number != signal.SIGINT:
                    continue
                now = time.monotonic()
                if self._first is None:
                    self._first = now
                    log.warning("stopping after this step; ctrl-C again leaves at once")
                elif now - self._first > self.apart:
                    os._exit(128 + signal.SIGINT)


class SharedRequests:
    """Share requests of any rank with all ranks, so that all ranks act after the same step.

    The requests of a step are sent in a small all-reduce that runs beside the next step. No rank waits for it, because
    all ranks have sent theirs before they finish the next step.

    Args:
        world: the ranks that step together. All of them must create their `SharedRequests` objects in the same order.

    Example:
        >>> wishes = SharedRequests(mpcore.Mesh().world)
        >>> with StopSignals() as stop:
        ...     wishes.after_step(1, save=True, stop=stop.asked)  # on more ranks, the answer comes after step 2
        {'save'}
    """

    def __init__(self, world: Axis) -> None:
        self.world = world
        self._sent: tuple[Any, Tensor, list[str]] | None = None

    def after_step(self, step: int, **mine: bool) -> set[str]:
        """Return the requests that all ranks act on now: those that any rank made at the previous step.

        On one process, the requests of this step are returned.

        Args:
            step: the number of steps done.
            mine: this rank's requests, each a keyword with True or False. All ranks must pass the same keywords.

        Raises:
            ValueError: on every rank, one step later, if ranks passed different keywords or steps, or more than 16
                keywords.
        """
        if self.world.size == 1 or self.world.group is None:
            return {name for name, wish in mine.items() if wish}
        names = sorted(mine)
        about = [zlib.crc32(" ".join(names).encode()), step]
        values = [*about, *(-x for x in about), *(int(mine[name]) for name in names)]
        values = (values + [0] * _LENGTH)[:_LENGTH]
        before, group = self._sent, self.world.group
        config = dist.get_backend_config(group)
        device = "cpu" if "cpu" in config or "nccl" not in config else "cuda"
        sent = torch.tensor(values, dtype=torch.int64, device=device)
        self._sent = dist.all_reduce(sent, dist.ReduceOp.MAX, group, async_op=True), sent, names
        if before is None:
            return set()
        work, sent, names = before
        work.wait()
        most, last, least, first, *found = sent.tolist()
        if (most, last) != (-least, -first):
            raise ValueError(
                f"ranks called after_step after steps {-first} and {last}"
                + (f", and with other requests than {names}" if most != -least else "")
                + ": let all ranks take the same steps, and pass the same keywords"
            )
        if len(names) > len(found):
            raise ValueError(f"after_step got {len(names)} keywords, and a message has {len(found)}: pass fewer")
        return {name for name, wish in zip(names, found, strict=False) if wish}
