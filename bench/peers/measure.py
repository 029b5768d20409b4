"""Measure one row in processes of its own: compare the results of both sides, then time them in turn."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.interleave import spread
from bench.peers.work import Work, count
from mpcore.tools.verify.pool import Pool

MODULES = ["bench.peers.table", "torch.distributed.tensor.parallel"]
TURN_S, MOST_ROUNDS, LEAST_ROUNDS = 0.03, 200, 5
Step = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: what both sides do.
        peer: who else does it.
        ours, theirs: build a side, with the same weights and inputs, and return its step: a call that does the work
            once and returns the tensors that both sides must agree on.
        at_least: the target for the peer's processor time over ours.
        ranks: how many gloo ranks run it.
        fake: the size of a group that sends nothing, on one rank: what is left is the host's work.
        needs: the package of the peer.
        tolerance: relative to the largest element.
        memory: measure peak memory too, of each side in a process of its own.
        turn_s: the seconds of a turn; long where ranks wait for each other many times a step.
        longer: by how many times it is timed longer than other rows.
        why: what the counted work shows, where the target is missed.
    """

    name: str
    peer: str
    ours: Callable[[], Step]
    theirs: Callable[[], Step]
    at_least: float = 1.0
    ranks: int = 1
    fake: int = 0
    needs: str = "torch"
    tolerance: float = 1e-5
    memory: bool = False
    turn_s: float = TURN_S
    longer: float = 1.0
    why: str = ""


@dataclass
class Result:
    """The measurements of a row.

    Attributes:
        row: what was measured.
        problem: why there are no times, or "".
        cpu: by side, for each round the seconds of processor time that a step took on all ranks together.
        wall: the same in seconds on the clock, of the slowest rank.
        peak_mib: by side, the most memory.
        work: by side, what one step of rank 0 does.
        runs: the ratio of each run, where `add` has put several together.
    """

    row: Row
    problem: str = ""
    cpu: dict[str, list[float]] = field(default_factory=dict)
    wall: dict[str, list[float]] = field(default_factory=dict)
    peak_mib: dict[str, float] = field(default_factory=dict)
    work: dict[str, Work] = field(default_factory=dict)
    runs: list[float] = field(default_factory=list)

    def add(self, other: Result) -> None:
        """Add the rounds of another run of the same row."""
        self.problem = self.problem or other.problem
        if not self.problem:
            self.runs = [*(self.runs or [self.ratio()[1]]), other.ratio()[1]]
            for mine, theirs in ((self.cpu, other.cpu), (self.wall, other.wall)):
                for side, rounds in theirs.items():
                    mine[side] = mine[side] + rounds

    def ratio(self, clock: str = "cpu") -> tuple[float, float, float]:
        """The peer's time over ours: the 20th percentile, the median and the 80th percentile over rounds."""
        ours, theirs = getattr(self, clock).values()
        return spread([b / a for a, b in zip(ours, theirs, strict=True)])

    @property
    def verdict(self) -> str:
        """As `bench.interleave.judge`."""
        if self.problem:
            return self.problem
        _, middle, high = self.ratio()
        return "met" if middle >= self.row.at_least else "missed" if high < self.row.at_least else "unclear"


def run(row: Row, seconds: float) -> Result:
    """Compare and time a row, or say why not."""
    result = Result(row)
    if importlib.util.find_spec(row.needs) is None:
        result.problem = "not installed"
        return result
    try:
        each = in_ranks(row, time_both, row, seconds)
        for side in ("mpcore", row.peer):
            result.cpu[side] = [sum(turn) for turn in zip(*(rank["cpu"][side] for rank in each), strict=True)]
            result.wall[side] = [max(turn) for turn in zip(*(rank["wall"][side] for rank in each), strict=True)]
            result.work[side] = each[0]["work"][side]
        for side in ("mpcore", row.peer) if row.memory else ():
            result.peak_mib[side] = max(in_ranks(row, peak_of, row, side))
    except Exception as error:
        result.problem = f"error: {str(error).strip().splitlines()[-1][:120]}"
        print(error)
    return result


def in_ranks(row: Row, check: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `check` in fresh processes, one for each rank of the row."""
    pool = Pool(row.ranks, preload=MODULES)
    try:
        return pool(row.ranks, check, *args)
    finally:
        pool.stop()
        pool.folder.cleanup()


def begin(row: Row) -> None:
    """In a rank: one thread, and the row's fake group where it has one."""
    torch.set_num_threads(1)
    if row.fake:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=row.fake)


def time_both(row: Row, seconds: float) -> dict[str, dict[str, Any]]:
    """In a rank: processor and wall seconds a step of each side, by round; and the work that a step does.

    Raises:
        ValueError: if the sides' results differ.
    """
    begin(row)
    steps = {"mpcore": row.ours(), row.peer: row.theirs()}
    for turn in range(3):  # gradients and updates show in the second and third
        check_equal(row, turn, *(step() for step in steps.values()))
    cost = {side: most_of_ranks(_turn(step, 2)[1] / 2) for side, step in steps.items()}
    iterations = max(1, round(row.turn_s / max(cost.values())))
    rounds = int(seconds * row.longer / sum(cost.values()) / iterations)
    cpu, wall = ({side: [] for side in steps} for _ in range(2))
    for turn in range(min(max(rounds, LEAST_ROUNDS), MOST_ROUNDS)):
        for side in list(steps) if turn % 2 else reversed(list(steps)):
            used, passed = _turn(steps[side], iterations)
            cpu[side].append(used / iterations)
            wall[side].append(passed / iterations)
    return {"cpu": cpu, "wall": wall, "work": {side: count(step) for side, step in steps.items()}}


def _turn(step: Step, iterations: int) -> tuple[float, float]:
    used, passed = time.process_time(), time.perf_counter()
    for _ in range(iterations):
        step()
    return time.process_time() - used, time.perf_counter() - passed


def most_of_ranks(value: float) -> float:
    """The largest over the ranks, so that all take as many turns."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def check_equal(row: Row, turn: int, ours: Any, theirs: Any) -> None:
    """Refuse a row whose sides compute something else."""
    for i, (a, b) in enumerate(zip(_listed(ours), _listed(theirs), strict=True)):
        a, b = (torch.as_tensor(x).detach().double() for x in (a, b))
        off = float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
        if not off <= row.tolerance:
            raise ValueError(f"result {i} of step {turn} is {off:.2e} off, beyond {row.tolerance:g}")


def _listed(results: Any) -> Iterable[Any]:
    return results if isinstance(results, list | tuple) else [] if results is None else [results]


def peak_of(row: Row, side: str) -> float:
    """In a rank: by how many MiB building one side and three of its steps raise the peak of resident memory."""
    begin(row)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is resident now
    before = _status("VmRSS")
    step = row.ours() if side == "mpcore" else row.theirs()
    for _ in range(3):
        step()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))
