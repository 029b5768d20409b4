"""Measure how long a rank waits in collectives and messages, on a CPU."""

from __future__ import annotations

import itertools
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mpcore import collectives
from mpcore._torch.distributed import replace_wait
from mpcore.mesh.axis import Mesh
from mpcore.pipeline.schedules import EXPOSED, Action, Span
from mpcore.tools._torch.simulated import simulated_rank

_OTHER = "other", "wait", 0.0


class CommunicationClock:
    """Measure the seconds in which this thread waits for collectives and messages, while this context is entered.

    All waits count: in `mpcore.collectives`, in pipeline messages, in torch's `fully_shard` and in calls of
    `torch.distributed`. The time that a rank waits for a slower rank counts too. Outside of the context the clock costs
    no time.

    Args:
        mesh: its axes name the groups of `axes`.

    Attributes:
        seconds: the seconds measured since the context was entered.
        axes: the same by axis. Pipeline messages are of "pp", and what `fully_shard` sends of "data". Calls of
            `torch.distributed` and groups of no axis are "other".
        messages: each wait of `mpcore.collectives`: axis and kind, and the times of its start, its wait and its end.

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

    def __init__(self, mesh: Mesh | None = None) -> None:
        self.seconds, self.axes = 0.0, dict[str, float]()
        self.messages: list[tuple[str, float, float, float]] = []
        axes = [] if mesh is None else [(axis.group_name, name) for name, axis in mesh.axes.items() if axis.group]
        self._names = dict(reversed(axes))  # the first of axes that share a group

    def __enter__(self) -> CommunicationClock:
        self.seconds, self.axes, self.messages = 0.0, {}, []
        self._thread = threading.get_ident()
        self._begun = _OTHER
        self._flying = dict[int, tuple[str, str, float]]()  # of results that are not waited for, by address
        self._functional, self._call, self._work = collectives._wait, collectives._call, dist.Work.wait
        collectives._wait, collectives._call = self._timed(self._functional, self._noted), self._named
        replace_wait(self._timed(self._work, _axis_of_caller))
        return self

    def __exit__(self, *_: object) -> None:
        collectives._wait, collectives._call = self._functional, self._call
        replace_wait(self._work)

    def _named(self, op: Any, x: Tensor, *args: Any, wait: bool = False) -> Any:
        """Remember the axis of a collective, whose group is its last argument, until it is waited for."""
        if threading.get_ident() != self._thread:
            return self._call(op, x, *args, wait=wait)
        if args:
            begun = self._names.get(args[-1], "other"), op.overloadpacket.__name__, time.time()
        else:
            begun = self._flying.pop(x.data_ptr(), _OTHER)
        self._begun = begun
        out = self._call(op, x, *args, wait=wait)
        self._begun = _OTHER
        if args and not wait:
            self._flying[out.data_ptr()] = begun
        return out

    def _noted(self, spent: float) -> str:
        axis, kind, start = self._begun
        now = time.time()
        self.messages.append((f"{axis} {kind}", start or now - spent, now - spent, now))
        return axis

    def spans(self, rank: int) -> list[Span]:
        """Return the messages as spans, from start to end, each with a span of its wait, as `Pipeline.recorded` does.

        They belong to no stage and no micro-batch, so both are -1.
        """
        kinds = [(Action(kind, -1, -1), Action(EXPOSED + kind, -1, -1), *times) for kind, *times in self.messages]
        return [
            span
            for sent, waited, start, began, end in kinds
            for span in (Span(rank, sent, start, end), Span(rank, waited, began, end))
        ]

    def _timed(self, wait: Callable[..., Any], axis: Callable[[float], str]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return wait(*args, **kwargs)
            finally:
                if threading.get_ident() == self._thread:  # skip a background save's waits
                    spent = time.perf_counter() - began
                    name = axis(spent)
                    self.seconds += spent
                    self.axes[name] = self.axes.get(name, 0.0) + spent

        return timed


def _axis_of_caller(_: float) -> str:
    """Return the axis of a wait for torch's `Work`, which doesn't know its group, from the files that called it."""
    files = [frame.f_code.co_filename for frame, _ in itertools.islice(traceback.walk_stack(None), 2, 8)]
    places = {"pp": f"pipeline{os.sep}messages.py", "data": f"{os.sep}fsdp{os.sep}"}
    return next((axis for axis, place in places.items() if any(place in file for file in files)), "other")


class StepTimes:
    """The seconds of a step on this rank: in all, and in data; on a CPU also in communication and compute.

    Communication is what the rank waits for collectives and messages, for slower ranks too: what no compute hides. The
    record has it by axis, too. Compute is the rest. On a GPU the host doesn't wait, and a compiled graph hides its
    collectives: there they are not measured.
    """

    def __init__(self, mesh: Mesh, compiled: bool = False) -> None:
        self.seconds = self.data_seconds = 0.0
        seen = mesh.device_type == "cpu" and not compiled and simulated_rank() is None
        self.clock: CommunicationClock | None = CommunicationClock(mesh) if seen else None

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

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = {"seconds": self.seconds, "data_seconds": self.data_seconds}
        if self.clock is not None:
            found["communication_seconds"] = self.clock.seconds
            found["exposed_seconds"] = dict(self.clock.axes)
            found["compute_seconds"] = self.seconds - self.data_seconds - self.clock.seconds
        return found
