"""Floor 4: a schedule as data, what each rank of a pipeline runs and in which order.

    naive        micro-batches one after the other, one stage at work at a time: the baseline
    gpipe        all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)
    1f1b         one forward, one backward (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)
    interleaved  1f1b over V stages a rank (the same, section 2.2.2)
    bfs          looped breadth-first: gpipe over V stages a rank (Lamy-Poirier 2023, arXiv:2211.05953)
    zb           backward split in input (I) and weight (W), ZB-H1; V stages a rank (Qi et al. 2024, arXiv:2401.10241)
    zbv          the same on two stages a rank, laid in a V (the same, section 6)
    dualpipev    the V-shaped half of DeepSeek-V3's DualPipe (arXiv:2412.19437)

torch plans the last five; their plans are read here, checked by `mpcore.pipeline.prove` and run by
`mpcore.pipeline.engine`, so that what is proved and drawn is what runs.
"""

from __future__ import annotations

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from mpcore._torch import pipelining
from mpcore.pipeline.partition import stage_ranks

COMPUTE = ("F", "B", "I", "W")
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
_ACTION = re.compile(rf"(\d+)({'|'.join((*COMPUTE, *MESSAGES))})(\d+)")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
NAMES = ("naive", "gpipe", "1f1b", *pipelining.PLANNERS)
V_SHAPED = ("zbv", "dualpipev")


class Action(NamedTuple):
    """One thing that a rank does; printed as torch prints it, `3F0`.

    Attributes:
        kind: F forward, B whole backward, I the backward of the input alone, W that of the weights alone; SEND_F,
            RECV_F, SEND_B, RECV_B pass a stage's output on, and the gradient of its input back.
        stage: the stage that it is of, 0 the first.
        micro_batch: the micro-batch, from 0.
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


class Span(NamedTuple):
    """When a rank ran an action, in a plan or in a run."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """What each rank runs, in order. Nothing is checked here: `mpcore.pipeline.prove` does that.

    Attributes:
        name: how messages call it.
        ranks: for each rank its actions.
        stages: how many stages the model has.
        micro_batches: how many micro-batches a step has.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    stages: int
    micro_batches: int

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank of each stage that computes anything: the one that has most of its actions."""
        counts: dict[int, Counter[int]] = defaultdict(Counter)
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                counts[action.stage][rank] += action.kind in COMPUTE
        return {stage: count.most_common(1)[0][0] for stage, count in counts.items() if count.total()}

    @cached_property
    def actions(self) -> frozenset[Action]:
        """All actions of all ranks."""
        return frozenset(a for actions in self.ranks for a in actions)

    @cached_property
    def with_messages(self) -> Schedule:
        """The schedule with its sends and receives, as `with_messages` orders them."""
        return with_messages(self)

    @cached_property
    def places(self) -> tuple[dict[Action, int], ...]:
        """For each rank the place of each of its actions."""
        return tuple({action: i for i, action in enumerate(actions)} for actions in self.ranks)

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, in order."""
        return sorted(stage for stage, owner in self.rank_of.items() if owner == rank)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the gradients of inputs and of weights are computed apart."""
        return any(a.kind == "W" for a in self.actions)


def build_schedule(name: str, ranks: int, micro_batches: int, virtual_stages: int | None = None) -> Schedule:
    """A published schedule.

    Args:
        name: one of `NAMES`.
        ranks: P, the pipeline size.
        micro_batches: M, how many a step has.
        virtual_stages: V, how many stages each rank holds; None takes 2 for interleaved, bfs and the V-shaped
            schedules, 1 for the others.

    Returns:
        The schedule of P x V stages.

    Raises:
        ValueError: if the name is unknown, or the schedule can't be had with these numbers.
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
    """How many stages a rank holds where nobody says."""
    return 2 if name in ("interleaved", "bfs", *V_SHAPED) else 1


def check_schedule(name: str, P: int, M: int, V: int) -> None:
    """Refuse what `build_schedule` can't build, without building it.

    Args:
        name: one of `NAMES`.
        P, M, V: ranks, micro-batches, stages a rank.

    Raises:
        ValueError: as of `build_schedule`.
    """
    if name not in NAMES:
        raise ValueError(f"schedule {name!r} is none of {', '.join(NAMES)}, and no path that ends in .csv")
    for what, value in (("ranks", P), ("micro-batches", M), ("virtual stages", V)):
        if value < 1:
            raise ValueError(f"{name} over {value} {what}: at least 1 is needed")
    if name in V_SHAPED and V != 2:
        raise ValueError(f"{name} has exactly 2 virtual stages a rank, not {V}")
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
    """The schedule with its sends and receives, in an order in which no rank waits for ever (torch's).

    Args:
        schedule: one of F, B, I and W alone that `mpcore.pipeline.prove` has passed.
    """
    rows = pipelining.with_messages(schedule.ranks, schedule.rank_of, schedule.stages)
    ranks = tuple(tuple(Action(*cell) for cell in row) for row in rows)
    return Schedule(schedule.name, ranks, schedule.stages, schedule.micro_batches)


# --- files --------------------------------------------------------------------------------------------------------


def write_csv(schedule: Schedule, path: Path | str) -> None:
    """Write a schedule as torch does: a row for each rank, a cell for each action."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([str(a) for a in actions] for actions in schedule.ranks)


def read_csv(path: Path | str) -> Schedule:
    """A schedule from torch's format: a row for each rank, a cell such as `3F0` for each action, empty cells ignored.

    Args:
        path: the file.

    Returns:
        The schedule. Stages and micro-batches are as many as the largest number says: prove it before it runs.

    Raises:
        ValueError: if the file can't be read, has no action, or a cell is none, with its row and column.
    """
    try:
        with open(path, newline="") as file:
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
    """A schedule by its name, or from a path that ends in .csv.

    Args:
        name: one of `NAMES`, or the path.
        ranks, micro_batches, virtual_stages: as of `build_schedule`; a file must be for these numbers.

    Raises:
        ValueError: if there is none with these numbers.
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
    return schedule


def default_placement(name: str, ranks: int, virtual_stages: int) -> Sequence[int]:
    """The rank of each stage under a published schedule: looped, or in a V."""
    return stage_ranks(ranks, virtual_stages, "v" if name in V_SHAPED else "loop")
