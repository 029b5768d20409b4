"""Detect slow ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from mpcore.mesh.agreement import exchange
from mpcore.mesh.axis import Mesh


class SlowRank(NamedTuple):
    """A rank that is slower than the others.

    Attributes:
        rank: the rank in the job.
        phase: the name of the timed phase; "compute" for the probe.
        ratio: its time divided by the median of the other ranks' times.
    """

    rank: int
    phase: str
    ratio: float

    def __str__(self) -> str:
        return f"rank {self.rank} is slow: {self.phase} takes {self.ratio:.1f} times as long as on the others"


class Stragglers:
    """Detect slow ranks by timing work without communication.

    In synchronous training every rank's step takes as long as the slowest rank's, so step times can't show which rank
    is slow. `with stragglers.timed("data"):` times a phase, such as data loading. `probe`, called once per step, times
    a fixed matrix multiplication. `check` compares the ranks' mean times. It reports a rank that took more than
    `threshold` times the median of the other ranks in `patience` consecutive checks.

    Args:
        mesh: this rank's mesh.
        threshold: the ratio to the median above which a rank counts as slow.
        least: seconds by which a slow rank's mean time per timed block must also exceed the median. This ignores noise
            in short phases.
        patience: the number of consecutive checks in which a rank must be slow.
        size: the rows and columns of the matrices that the probe multiplies.

    Raises:
        ValueError: if `threshold` is not above 1.

    Example:
        >>> stragglers = Stragglers(mpcore.Mesh())
        >>> for step in range(3):
        ...     with stragglers.timed("data"):
        ...         batch = torch.randn(4, 4)  # read the step's batch here
        ...     stragglers.probe()
        >>> stragglers.check()  # one rank alone isn't slow
        []
    """

    def __init__(
        self, mesh: Mesh, threshold: float = 1.5, least: float = 1e-3, patience: int = 2, size: int = 256
    ) -> None:
        if threshold <= 1:
            raise ValueError(f"threshold {threshold} is not more than 1")
        self.mesh = mesh
        self.threshold = threshold
        self.least = least
        self.patience = patience
        self.times: dict[str, list[float]] = {}
        self.row: dict[tuple[int, str], int] = {}
        self.matrix: Tensor = torch.ones(size, size, device=mesh.device)
        self._multiply()  # the setup of the first call isn't timed

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Time a block of work without communication.

        On a GPU the time includes the block's kernels and excludes the kernels queued before it.
        """
        self._synchronize()
        began = time.perf_counter()
        yield
        self._synchronize()
        self.times.setdefault(phase, []).append(time.perf_counter() - began)

    def probe(self) -> None:
        """Time a fixed computation. Call it once per step; it takes some milliseconds on a CPU."""
        with self.timed("compute"):
            self._multiply()

    def _multiply(self) -> None:
        for _ in range(4):
            torch.mm(self.matrix, self.matrix)

    def _synchronize(self) -> None:
        if self.mesh.device_type == "cuda":
            torch.cuda.synchronize(self.mesh.device)

    def check(self) -> list[SlowRank]:
        """Return the slow ranks since the last check. All ranks must call it, and get the same result."""
        mine = {phase: statistics.fmean(seconds) for phase, seconds in self.times.items()}
        self.times = {}
        late = exchange(None, mine, self.mesh.world.group, lambda times: late_ranks(times, self.threshold, self.least))
        late = [SlowRank(*one) for one in late]
        if self.mesh.worlds.size > 1:  # report the rank's number in the job
            late = [one._replace(rank=one.rank + self.mesh.job.rank - self.mesh.world.rank) for one in late]
        self.row = {(one.rank, one.phase): self.row.get((one.rank, one.phase), 0) + 1 for one in late}
        return [one for one in late if self.row[one.rank, one.phase] >= self.patience]


def late_ranks(times: Sequence[dict[str, float]], threshold: float, least: float) -> list[SlowRank]:
    """Return the ranks whose time in a phase is more than `threshold` times the median of the other ranks' times.

    `times` has for each rank its seconds by phase; `threshold` and `least` are those of `Stragglers`.
    """
    found = []
    for phase in sorted({phase for own in times for phase in own}):
        for rank, own in enumerate(times):
            others = [other[phase] for place, other in enumerate(times) if place != rank and phase in other]
            if phase not in own or not others:
                continue
            usual = statistics.median(others)
            if own[phase] > max(threshold * usual, usual + least):
                found.append(SlowRank(rank, phase, own[phase] / max(usual, 1e-9)))
    return found
