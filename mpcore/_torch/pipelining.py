"""torch's pipeline schedules, and the order in which its runtime posts messages.

Checked with torch 2.11 and 2.13. This file imports pipelining, which takes half a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _Action,
    _add_send_recv,
    _ComputationType,
)

Cell = tuple[str, int, int]
"""An action: its kind, such as F or B; the stage; the micro-batch."""

PLANNERS: dict[str, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "bfs": ScheduleLoopedBFS,
    "zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
"""The schedules that torch plans, by name."""


class PlannedStage:
    """The attributes that torch's schedules need of a stage to compute a plan: no module, no process group."""

    def __init__(self, ranks: int, stages: int) -> None:
        self.group_size, self.group_rank, self.num_stages = ranks, 0, stages
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.submod = None


def planned(name: str, ranks: int, micro_batches: int, virtual_stages: int) -> list[list[Cell]]:
    stages = [PlannedStage(ranks, ranks * virtual_stages) for _ in range(virtual_stages)]
    order = PLANNERS[name](stages, micro_batches).pipeline_order
    return [_cells(order[rank]) for rank in range(ranks)]


def with_messages(rows: Sequence[Iterable[Cell]], rank_of: Mapping[int, int], stages: int) -> list[list[Cell]]:
    """Add the sends and receives that torch's runtime posts for these actions of each rank, in its order."""
    given = {
        rank: [_Action(stage, _ComputationType(kind), micro_batch) for kind, stage, micro_batch in row]
        for rank, row in enumerate(rows)
        if row
    }
    lowered = _add_send_recv(given, rank_of.__getitem__, stages)
    return [_cells(lowered.get(rank, ())) for rank in range(len(rows))]


def _cells(row: Iterable[Any]) -> list[Cell]:
    """Return a rank's actions, an overlapped pair as two: torch's runtime runs them one after the other."""
    plain = [b for a in row if a is not None for b in (a.sub_actions or (a,))]
    return [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in plain]
