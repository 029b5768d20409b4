"""Catch the signals that ask a run to stop, and tell all ranks."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from typing import Any


class StopSignals:
    """Take SIGTERM, SIGUSR1 and ctrl-C in this block as a wish for an orderly stop. A second ctrl-C leaves at once.

    A supervisor passes on the ctrl-C that the terminal has sent already, so a second one counts after `apart` seconds.

    Attributes:
        asked: whether a signal has come. Ranks may learn of it a step apart: agree before acting on it.
    """

    def __init__(self, apart: float = 1.0) -> None:
        self.asked, self.apart = False, apart
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
            signal.signal(number, handler)
        self._write.close()

    def _ask(self, *_: object) -> None:
        self.asked = True

    def _listen(self) -> None:
        while data := self._read.recv(16):
            for number in data:
                if number != signal.SIGINT:
                    continue
                now = time.monotonic()
                if self._first is None:
                    self._first = now
                    print("stopping after this step; ctrl-C again leaves at once", file=sys.stderr, flush=True)
                elif now - self._first > self.apart:
                    os._exit(128 + signal.SIGINT)
