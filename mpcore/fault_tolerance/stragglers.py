"""Find slow ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from mpcore.mesh.agreement import exchange
from mpcore.mesh.axis import Mesh


class SlowRank(NamedTuple):
    """A rank that is slower than the others.

    Attributes:
        rank: of the job.
        phase: "compute" of the probe, or as it was timed.
        ratio: its time over the median of the others'.
    """

    rank: int
    phase: str
    ratio: float

    def __str__(self) -> str:
        return f"rank {self.rank} is slow: {self.phase} takes {self.ratio:.1f} times as long as on the others"


class Stragglers:
    """Find slow ranks, by the times of work that each does alone: loading data, and a fixed probe.

    In a synchronous step every rank takes as long as the slowest, so step times don't show which one is slow. A rank is
    late when it took more than `threshold` times the median of the other ranks in `patience` checks in a row.

    Args:
        mesh: of this rank.
        threshold: ratio from which a rank is late.
        least: seconds a call by which it must be slower too, so that noise in short phases doesn't count.
        patience: checks in a row.
        size: of the square matrices that the probe multiplies.
    """

    def __init__(
        self, mesh: Mesh, threshold: float = 1.5, least: float = 1e-3, patience: int = 2, size: int = 256
    ) -> None:
        if threshold <= 1:
            raise ValueError(f"threshold {threshold} is not more than 1")
        self.mesh, self.threshold, self.least, self.patience = mesh, threshold, least, patience
        self.times: dict[str, list[float]] = {}
        self.row: dict[tuple[int, str], int] = {}
        self.matrix = torch.ones(size, size, device=mesh.device)
        self._multiply()  # what the first call sets up isn't timed

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Time the work in this context, on the GPU too, without work queued before. It must not communicate."""
        self._synchronize()
        began = time.perf_counter()
        yield
        self._synchronize()
        self.times.setdefault(phase, []).append(time.perf_counter() - began)

    def probe(self) -> None:
        """Time a fixed computation: once a step, some milliseconds on a CPU."""
        with self.timed("compute"):
            self._multiply()

    def _multiply(self) -> None:
        for _ in range(4):
            torch.mm(self.matrix, self.matrix)

    def _synchronize(self) -> None:
        if self.mesh.device_type == "cuda":
            torch.cuda.synchronize(self.mesh.device)

    def check(self) -> list[SlowRank]:
        """Compare the ranks since the last check: a collective on all of them, with the same result on each."""
        mine = {phase: statistics.fmean(seconds) for phase, seconds in self.times.items()}
        self.times = {}
        late = exchange(None, mine, self.mesh.world.group, lambda times: late_ranks(times, self.threshold, self.least))
        if self.mesh.workers.size > 1:  # people know ranks by their number in the job
            late = [one._replace(rank=one.rank + self.mesh.job.rank - self.mesh.world.rank) for one in late]
        self.row = {(one.rank, one.phase): self.row.get((one.rank, one.phase), 0) + 1 for one in late}
        return [one for one in late if self.row[one.rank, one.phase] >= self.patience]


def late_ranks(times: Sequence[dict[str, float]], threshold: float, least: float) -> list[SlowRank]:
    """List the ranks whose seconds in a phase are more than `threshold` times the median of the other ranks'.

    Args:
        times: of each rank, by phase.
        threshold, least: as of `Stragglers`.
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
