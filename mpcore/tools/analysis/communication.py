"""Measure how long a rank waits in collectives and messages, on a CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from mpcore import collectives
from mpcore._torch.distributed import replace_wait
from mpcore.mesh.axis import Mesh
from mpcore.tools._torch.simulated import simulated_rank


class CommunicationClock:
    """Measure the seconds in which this thread waits for collectives and messages, while this context is entered.

    All waits count: in `mpcore.collectives`, in pipeline messages, in torch's `fully_shard` and in calls of
    `torch.distributed`. The time that a rank waits for a slower rank counts too. Outside of the context the clock costs
    no time.

    Attributes:
        seconds: the seconds measured since the context was entered.

    Example:
        >>> import torch
        >>> from mpcore.tools.analysis.communication import CommunicationClock
        >>> with CommunicationClock() as clock:
        ...     loss = torch.ones(2).sum()  # one process has no other rank to wait for
        >>> clock.seconds
        0.0

    Note:
        - On a GPU the host doesn't wait for collectives: use torch's profiler.
        - Collectives inside a compiled graph are not measured.
        - Only one clock per process may be entered at a time.
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
                if threading.get_ident() == self._thread:  # skip a background save's waits
                    self.seconds += time.perf_counter() - began

        return timed


class StepTimes:
    """The seconds of a step on this rank: in all, and in data; on a CPU also in communication and compute.

    Communication is what the rank waits for collectives and messages, for slower ranks too. Compute is the rest. On a
    GPU the host doesn't wait, and a compiled graph hides its collectives: there the two are not measured.
    """

    def __init__(self, mesh: Mesh, compiled: bool = False) -> None:
        self.seconds = self.data_seconds = 0.0
        seen = mesh.device_type == "cpu" and not compiled and simulated_rank() is None
        self.clock: CommunicationClock | None = CommunicationClock() if seen else None

    def __enter__(self) -> StepTimes:
        if self.clock is not None:
            self.clock.__enter__()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds: float = time.perf_counter() - self._began
        if self.clock is not None:
            self.clock.__exit__(*error)

    @contextmanager
    def data(self) -> Iterator[None]:
        """Count the seconds within as those of data."""
        began = time.perf_counter()
        yield
        self.data_seconds: float = time.perf_counter() - began

    def record(self) -> dict[str, float]:
        found = {"seconds": self.seconds, "data_seconds": self.data_seconds}
        if self.clock is not None:
            found["communication_seconds"] = self.clock.seconds
            found["compute_seconds"] = self.seconds - self.data_seconds - self.clock.seconds
        return found
