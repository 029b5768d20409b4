"""Messages run beside work: the order in which the hosts of two ranks start, compute and wait."""

from __future__ import annotations

import pkgutil
from contextlib import nullcontext
from unittest import mock

import pytest
import torch.distributed as dist

from bench.overlap.link import Event, critical_path
from bench.overlap.measure import measure
from bench.overlap.modes import MODES
from mpcore.collectives import wait
from mpcore.pipeline.messages import receive_early
from mpcore.pipeline.schedules import build_schedule
from mpcore.tools.analysis.seconds import resolve

# Seconds exposed and messages of a step, where each message and each whole product takes a second; with a pipeline's
# bubble.
EXPOSED = {
    "tensor parallel, tp 2": (4, 8), "the same with sequence parallel": (12, 16),
    "tensor parallel, `overlap_communication`": (6, 12), "sequence parallel, `overlap_communication`": (6, 16),
    "sequence parallel, `overlap_halves`": (13, 32),
    "tensor parallel, `overlap_halves`": (5, 16), "ring attention on cp 2": (6, 8), "1F1B on pp 2": (13, 5),
    "GPipe on pp 2": (12, 5), "DualPipeV on pp 2": (9, 9),
    "experts on ep 2, one shared": (2, 12), "experts on ep 2, none shared": (12, 12),
    "experts on ep 2, none shared, `overlap_experts`": (5 - 1 / 32, 24),
}  # fmt: skip
PLANTED = {
    "tensor parallel, tp 2": "mpcore.layers.linear_ops.start_sum",
    "tensor parallel, `overlap_halves`": "mpcore.experimental.overlap_halves.start_all_reduce",
    "sequence parallel, `overlap_communication`": "mpcore.layers.overlap.start_rows",
    "sequence parallel, `overlap_halves`": "mpcore.collectives.Flying.begin",
    "GPipe on pp 2": "mpcore.pipeline.executor.receive_early",
    "experts on ep 2, none shared, `overlap_experts`": "mpcore.collectives.Flying.begin",
}
"""What to replace in a mode, so that a message no longer runs beside work."""


def seconds(event):
    return event.key[0] if event.kind == "compute" else float(event.kind not in ("wait", "receive"))


def serial(start):
    """Wait for a message as soon as it has started; post receives in the schedule's order."""

    def started(*args):
        if start is receive_early:
            return args[0].ranks[args[1]]
        flying = start(*args)
        return None if flying is None else wait(flying)

    return started


def check_order(planted):
    found = {}
    for index, mode in enumerate(MODES):
        if mode.name in (planted or EXPOSED):
            where = planted.get(mode.name)
            with mock.patch(where, serial(pkgutil.resolve_name(where))) if where else nullcontext():
                found[mode.name] = measure(index, True, 0.0, 0.0, steps=1).events
    dist.destroy_process_group()
    return found


def paths(both, name):
    events = [[event._replace(seconds=seconds(event)) for event in rank[name]] for rank in both]
    return max(sum(event.kind in ("start", "send") for event in rank) for rank in events), critical_path(events)[1]


def test_messages_start_before_the_work_that_hides_them_and_are_waited_for_after_it(ranks):
    both = ranks(2, check_order, {})
    assert {name: paths(both, name)[::-1] for name in EXPOSED} == EXPOSED


def test_a_message_that_no_longer_runs_beside_work_is_exposed(ranks):
    both = ranks(2, check_order, PLANTED)
    assert all(paths(both, name)[1] > EXPOSED[name][0] for name in PLANTED)


@pytest.mark.parametrize(("mode", "stages"), [("1F1B on pp 2", 2), ("GPipe on pp 2", 2), ("DualPipeV on pp 2", 4)])
def test_the_planners_makespan_is_that_of_the_executor(mode, stages):
    """A stage has two products, and the first stage's input needs no gradient. The loss's sum is one more message."""
    later, plan = stages - 1, build_schedule(mode.split()[0].lower(), 2, 4)
    times = {"F": [2] * stages, "B": [3, *[4] * later], "I": [0, *[2] * later], "W": [3, *[2] * later]}
    busy = min(sum(times[action.kind][action.stage] for action in row) for row in plan.ranks)
    assert resolve(plan).makespan(times, message=1) - busy + 1 == EXPOSED[mode][0]


def test_the_critical_path_of_two_ranks_by_hand():
    key = ((0, 1), 0)
    late = [Event("compute", (), 3.0), Event("start", key, 2.0), Event("compute", (), 1.0), Event("wait", key)]
    early = [Event("start", key, 2.0), Event("wait", key)]
    assert critical_path([late, early]) == (5.0, 5.0)
    more = [Event("start", key, 4.0), Event("wait", key)]  # an all-to-all where one rank sends more
    assert critical_path([late, more]) == critical_path([more, late]) == (7.0, 7.0)
    with pytest.raises(ValueError, match="no other one starts"):
        critical_path([late, []])
