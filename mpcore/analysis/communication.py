"""Measure how long a rank stands in collectives and messages, on a CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mpcore import collectives
from mpcore._torch.distributed import replace_wait


class CommunicationClock:
    """Measure the seconds in which this thread waits for collectives and messages while this context is entered.

    All waits count: those of `mpcore.collectives`, of pipelines' messages, of torch's `fully_shard` and of calls of
    `torch.distributed`. A rank that waits for a slower one waits too. Outside of the context nothing is measured, and
    nothing costs time.

    Attributes:
        seconds: measured since the context was entered.

    Example:
        >>> import torch
        >>> from mpcore.analysis.communication import CommunicationClock
        >>> with CommunicationClock() as clock:
        ...     loss = torch.ones(2).sum()  # one process: it waits for nobody
        >>> clock.seconds
        0.0

    Note:
        - On a GPU the host doesn't wait for collectives: use `--profile`, or torch's profiler.
        - Collectives inside of a compiled graph are not seen.
        - One clock a process may be entered.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> CommunicationClock:
        self.seconds, self._thread = 0.0, threading.get_ident()
        self._functional, self._work = collectives._wait, dist.Work.wait
        collectives._wait = self._timed(self._functional)
        replace_wait(self._timed(self._work))
        return self

    def __exit__(self, *_: object) -> None:
        collectives._wait = self._functional
        replace_wait(self._work)

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return wait(*args, **kwargs)
            finally:
                if threading.get_ident() == self._thread:  # not a save in the background
                    self.seconds += time.perf_counter() - began

        return timed
