"""Check a schedule and the stages before anything runs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

from torch import nn

from mpcore.layers.linear import ParallelLinear
from mpcore.mesh.agreement import check_same, together
from mpcore.mesh.axis import Axis, Mesh
from mpcore.pipeline.prove import prove
from mpcore.pipeline.schedules import COMPUTE, MESSAGES, NAMES, Schedule, build_schedule, find_schedule
from mpcore.sharding.declarations import declarations


def split_linears(stages: Iterable[nn.Module], plan: Schedule) -> None:
    """Hand the stages' linear layers products whose backward computes both gradients separately, or at once."""
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, ParallelLinear):
                module.product = module.product.split(plan.splits_backward)


def check_pending(stages: Iterable[nn.Module], mesh: Mesh) -> None:
    """Raise ValueError for tied parameters whose gradients would be summed over an axis where some ranks hold none."""
    for axis in (mesh.pp, mesh.ends):
        shapes = Counter(
            f"of shape {tuple(p.shape)}"
            for p, sharding in {p: sharding for stage in stages for _, p, sharding in declarations(stage)}.items()
            if any(pending.group is axis.group for pending in sharding.partial)
        )
        what = (
            f"number of parameters pending over {axis.name}, which all its ranks must hold, unless one rank holds both "
            f"stages: then share one module between them, without add_partial"
        )
        check_same(what, shapes, axis)


def agree_on_schedule(schedule: str | Schedule, pp: Axis, micro_batches: int, stages: int) -> Schedule:
    """Return the proved schedule, the same on all ranks. Errors are raised on all ranks."""
    plan = together(pp, lambda: _check_plan(schedule, pp, micro_batches, stages))
    check_same("pipeline", hashlib.sha256(repr(plan).encode()).hexdigest(), pp)
    return plan


def check_published(plan: Schedule, micro_batches: int) -> None:
    """Raise ValueError if no schedule of this name can be built again with another number of micro-batches."""
    ranks = len(plan.ranks)
    if plan.name not in NAMES or build_schedule(plan.name, ranks, plan.micro_batches, plan.stages // ranks) != plan:
        raise ValueError(
            f"the schedule {plan.name} is your own, for {plan.micro_batches} micro-batches: build a Pipeline with one "
            f"for {micro_batches}"
        )


def _check_plan(schedule: str | Schedule, pp: Axis, micro_batches: int, stages: int) -> Schedule:
    if isinstance(schedule, Schedule):
        plan = schedule
    elif not isinstance(schedule, str):
        raise ValueError(f"schedule is {schedule!r}: give a name such as '1f1b', a file, or a Schedule, also with pp 1")
    else:
        plan = find_schedule(schedule, pp.size, micro_batches, None if schedule.endswith(".csv") else stages)
    if (len(plan.ranks), plan.micro_batches) != (pp.size, micro_batches):
        raise ValueError(
            f"the schedule {plan.name} is for {len(plan.ranks)} ranks and {plan.micro_batches} micro-batches, the "
            f"pipeline has {pp.size} and {micro_batches}"
        )
    for action in (action for actions in plan.ranks for action in actions):
        if action.kind in MESSAGES:
            raise ValueError(f"the schedule {plan.name} names messages, as {action}: leave them out, the run adds them")
        if action.kind not in COMPUTE or min(action.stage, action.micro_batch) < 0:
            kinds = ", ".join(COMPUTE)
            raise ValueError(f"the schedule {plan.name} has {action!r}: kinds are {kinds}, and numbers begin at 0")
    prove(plan)
    if pp.size > 1:
        prove(plan.with_messages)
    mine = plan.stages_of(pp.rank)
    if len(mine) != stages:
        raise ValueError(f"the schedule {plan.name} lays {len(mine)} stages on rank {pp.rank}, which holds {stages}")
    return plan
