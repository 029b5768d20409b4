"""Pipeline schedules as data: what each rank of a pipeline runs, and in which order.

    naive        one micro-batch after another, with one stage busy at a time: the baseline
    gpipe        all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)
    1f1b         one forward, one backward (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)
    interleaved  1f1b with V stages per rank (the same paper, section 2.2.2)
    bfs          looped breadth-first: gpipe with V stages per rank (Lamy-Poirier 2023, arXiv:2211.05953)
    zb           ZB-H1: backward split into input (I) and weight (W); V stages per rank (Qi et al. 2024,
                 arXiv:2401.10241)
    zbv          the same split with two stages per rank, placed in a V (the same paper, section 6)
    dualpipev    the V-shaped half of DeepSeek-V3's DualPipe (arXiv:2412.19437)

torch makes the plans of the last five. They are read here, checked by `mpcore.pipeline.prove` and run by
`mpcore.pipeline.engine`, so the plan that is checked and drawn is the plan that runs.
"""

from __future__ import annotations

import csv
import os
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from mpcore._torch import pipelining

COMPUTE = ("F", "B", "I", "W")
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
EXPOSED = "exposed "  # of the span in which a rank waits for a message
CSV_LIMIT = 2**21  # bytes: some 300,000 actions
_ACTION = re.compile(rf"(\d+)({'|'.join((*COMPUTE, *MESSAGES))})(\d+)")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
NAMES = ("naive", "gpipe", "1f1b", *pipelining.PLANNERS)
V_SHAPED = ("zbv", "dualpipev")


class Action(NamedTuple):
    """One action of a rank, printed as in torch, for example `3F0`.

    Attributes:
        kind: F forward, B full backward, I backward of the input only, W backward of the weights only. SEND_F and
            RECV_F transfer a stage's output; SEND_B and RECV_B transfer the gradient of its input.
        stage: the index of the stage; 0 is the first.
        micro_batch: the index of the micro-batch, from 0.
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


class Span(NamedTuple):
    """The time at which a rank runs an action, in a plan or in a run."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank, in order. `mpcore.pipeline.prove` checks them; this class does not.

    Attributes:
        stages: the number of stages of the model.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    stages: int
    micro_batches: int

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank of each stage that computes anything: the rank with most of its actions."""
        counts: dict[int, Counter[int]] = defaultdict(Counter)
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                counts[action.stage][rank] += action.kind in COMPUTE
        return {stage: count.most_common(1)[0][0] for stage, count in counts.items() if count.total()}

    @cached_property
    def actions(self) -> frozenset[Action]:
        return frozenset(a for actions in self.ranks for a in actions)

    @cached_property
    def with_messages(self) -> Schedule:
        return with_messages(self)

    @cached_property
    def places(self) -> tuple[dict[Action, int], ...]:
        return tuple({action: i for i, action in enumerate(actions)} for actions in self.ranks)

    def stages_of(self, rank: int) -> list[int]:
        return sorted(stage for stage, owner in self.rank_of.items() if owner == rank)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the gradients of inputs and of weights are computed separately."""
        return any(a.kind == "W" for a in self.actions)


def build_schedule(name: str, ranks: int, micro_batches: int, virtual_stages: int | None = None) -> Schedule:
    """Build a published schedule.

    Args:
        name: one of `NAMES`.
        ranks: P, the pipeline size.
        micro_batches: M, the number of micro-batches per step.
        virtual_stages: V, the number of stages per rank; None: 2 for interleaved, bfs and the V-shaped schedules, 1 for
            the others.

    Returns:
        The schedule of P x V stages.

    Raises:
        ValueError: if the name is unknown, or the schedule does not support these numbers.
    """
    V = virtual_stages if virtual_stages is not None else default_virtual_stages(name)
    P, M = ranks, micro_batches
    check_schedule(name, P, M, V)
    if name in pipelining.PLANNERS:
        actions = [[Action(*cell) for cell in row] for row in pipelining.planned(name, P, M, V)]
    else:
        actions = [_one_stage_a_rank(name, rank, P, M) for rank in range(P)]
    return Schedule(name, tuple(tuple(row) for row in actions), P * V, M)


def default_virtual_stages(name: str) -> int:
    return 2 if name in ("interleaved", "bfs", *V_SHAPED) else 1


def check_schedule(name: str, P: int, M: int, V: int) -> None:
    """Raise ValueError if `build_schedule` can't build the schedule; build nothing."""
    if name not in NAMES:
        raise ValueError(f"schedule {name!r} is none of {', '.join(NAMES)}, and no path that ends in .csv")
    for what, value in (("ranks", P), ("micro-batches", M), ("virtual stages", V)):
        if value < 1:
            raise ValueError(f"{name} over {value} {what}: at least 1 is needed")
    if name in V_SHAPED and V != 2:
        raise ValueError(
            f"{name} has exactly 2 virtual stages a rank, not {V}: pass two stages on each rank, as "
            f"pipeline_stages(.., schedule={name!r}) does: rank r of {P} has stages r and {2 * P - 1} - r"
        )
    if name in ("naive", "gpipe", "1f1b") and V != 1:
        raise ValueError(f"{name} has one stage a rank, not {V}: interleaved, bfs and zb take more")
    needed = {"1f1b": P, "dualpipev": 2 * P}.get(name, 1)
    if needed > M:
        size = f"the pp size {P}" if needed == P else f"the {needed} stages of pp size {P}"
        raise ValueError(
            f"{M} micro-batches are fewer than {size}, and {name} needs as many: make micro-batches smaller, or the "
            f"batch larger"
        )
    rounds = max(1, M // P)
    if name in ("interleaved", "zb") and M % rounds:
        raise ValueError(
            f"{M} micro-batches on pp size {P} make {rounds} rounds, and {name} needs a multiple of that: "
            f"{M // rounds * rounds} or {M // P * P} will do"
        )


def _one_stage_a_rank(name: str, rank: int, P: int, M: int) -> list[Action]:
    forward = [Action("F", rank, m) for m in range(M)]
    backward = [Action("B", rank, m) for m in range(M)]
    ahead = {"naive": 0, "gpipe": M, "1f1b": min(P - 1 - rank, M)}[name]  # forwards before the first pair
    pairs = [a for pair in zip(forward[ahead:], backward, strict=False) for a in pair]
    return [*forward[:ahead], *pairs, *backward[M - ahead :]]


def with_messages(schedule: Schedule) -> Schedule:
    """Return the schedule with its sends and receives, in torch's order, which does not deadlock."""
    rows = pipelining.with_messages(schedule.ranks, schedule.rank_of, schedule.stages)
    ranks = tuple(tuple(Action(*cell) for cell in row) for row in rows)
    return Schedule(schedule.name, ranks, schedule.stages, schedule.micro_batches)


# --- files --------------------------------------------------------------------------------------------------------


def write_csv(schedule: Schedule, path: Path | str) -> None:
    """Write a schedule in torch's format: one row per rank, one cell per action."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([str(a) for a in actions] for actions in schedule.ranks)


def read_csv(path: Path | str) -> Schedule:
    """Read a schedule in torch's format: one row per rank, one cell such as `3F0` per action; empty cells are ignored.

    Args:
        path: the file.

    Returns:
        The schedule. The numbers of stages and micro-batches are taken from the largest indices. Prove it before you
        run it.

    Raises:
        ValueError: if the file can't be read or has no action, or a cell is not an action; with its row and column.
    """
    try:
        with open(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > CSV_LIMIT:
                raise ValueError(f"the schedule {path} has {size} bytes, more than {CSV_LIMIT}")
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise ValueError(f"the schedule {path} can't be read: {problem}") from problem
    ranks = tuple(
        tuple(a for column, cell in enumerate(row) for a in _parse(cell, f"{path}, row {rank}, column {column}"))
        for rank, row in enumerate(rows)
    )
    every = [a for actions in ranks for a in actions]
    if not every:
        raise ValueError(f"the schedule {path} has no action")
    most = max(max(a.stage, a.micro_batch) for a in every)
    if most > CSV_LIMIT:
        raise ValueError(f"the schedule {path} has {len(every)} actions, but a stage or micro-batch {most}")
    stages, micro_batches = max(a.stage for a in every) + 1, max(a.micro_batch for a in every) + 1
    return Schedule(Path(path).name, ranks, stages, micro_batches)


def _parse(cell: str, where: str) -> list[Action]:
    cell = cell.strip()
    if not cell:
        return []
    overlapped = _OVERLAP.fullmatch(cell)
    actions = []
    for text in overlapped[1].split(";") if overlapped else [cell]:
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"{where}: {text!r} is no action; 3F0 is the forward of micro-batch 0 on stage 3, and kinds are "
                f"{', '.join((*COMPUTE, *MESSAGES))}"
            )
        actions.append(Action(match[2], int(match[1]), int(match[3])))
    return actions


def find_schedule(name: str, ranks: int, micro_batches: int, virtual_stages: int | None = None) -> Schedule:
    """Return a schedule by its name, or from a path that ends in .csv.

    Args:
        name: one of `NAMES`, or the path.
        ranks, micro_batches, virtual_stages: see `build_schedule`. A file must have these numbers.

    Raises:
        ValueError: if there is no such schedule for these numbers, or stages 0, 1, .. of a file lie on other ranks.
    """
    if not str(name).endswith(".csv"):
        return build_schedule(name, ranks, micro_batches, virtual_stages)
    schedule = read_csv(name)
    has = {"ranks": len(schedule.ranks), "micro-batches": schedule.micro_batches, "stages": schedule.stages}
    wanted = {"ranks": ranks, "micro-batches": micro_batches}
    wanted |= {} if virtual_stages is None else {"stages": ranks * virtual_stages}
    for what, number in wanted.items():
        if has[what] != number:
            raise ValueError(f"the schedule {name} is for {has[what]} {what}, the run has {number}")
    for stage in range(ranks):
        if (rank := schedule.rank_of.get(stage, stage)) != stage:
            raise ValueError(f"the schedule {name} has stage {stage} on rank {rank}: let row {stage} begin with it")
    return schedule
