"""Catch the signals that ask a run to stop, and tell all ranks."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any

from mpcore._torch.distributed import default_store
from mpcore.mesh.axis import Axis
from mpcore.mesh.log import get_logger

log = get_logger("mpcore.fault_tolerance")


class StopSignals:
    """Turn SIGTERM, SIGUSR1 and ctrl-C in this block into a request for an orderly stop. A second ctrl-C exits at once.

    A launcher passes on the ctrl-C that the terminal has sent already, so a second one counts only after `apart`
    seconds.

    Attributes:
        asked: whether a signal has come. Ranks may see it a step apart: let them agree (`Wishes`) before they act on
            it.
        leave_with: exit status with which a signal ends the process at once, while there is nothing to save. Set it to
            None before the first step.
    """

    def __init__(self, apart: float = 1.0, leave_with: int | None = None) -> None:
        self.asked, self.apart, self.leave_with = False, apart, leave_with
        self._first: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            self._before[number] = signal.signal(number, self._ask)
        # Python's handlers wait while the main thread is inside a collective; this thread hears of signals even then.
        self._wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="mpcore-signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._ask:  # leave_together may have had it ignored
                signal.signal(number, handler)
        self._write.close()

    def _ask(self, *_: object) -> None:
        self.asked = True

    def _listen(self) -> None:
        while data := self._read.recv(16):
            for number in data:
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


class Wishes:
    """Tell all ranks of a request of any rank, such as to stop, after the same step and without a collective.

    A rank writes its request for the next step into the job's store. Each rank reads the store once a step. Every step
    must have a collective of all ranks for whose result the host waits: then no rank can have ended the next step.

    Args:
        world: the ranks that step together. All of them make this in the same order.
    """

    def __init__(self, world: Axis) -> None:
        self.world, self.store, self.name = world, None, ""
        if world.size > 1 and world.group is not None:
            self.store = default_store()
            number = self.store.add(f"mpcore/wishes/{world.group_name}/{world.rank}", 1)
            self.name = f"mpcore/wishes/{world.group_name}/run {number}"

    def after_step(self, step: int, **mine: bool) -> set[str]:
        """Return the requests that any rank made in the step before: the same on all ranks.

        Args:
            step: the number of steps that are done.
            mine: whether this rank makes a request, by the name of the request.
        """
        wished = {name for name, wish in mine.items() if wish}
        if self.store is None:
            return wished
        for name in wished:
            self.store.set(f"{self.name}/{step + 1}/{name}", "")
        if wished:  # after its names: who finds it finds them
            self.store.set(f"{self.name}/{step + 1}", "")
        if not self.store.check([f"{self.name}/{step}"]):
            return set()
        return {name for name in mine if self.store.check([f"{self.name}/{step}/{name}"])}
