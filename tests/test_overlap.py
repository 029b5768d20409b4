"""Messages run beside work: the order in which the hosts of two ranks start, compute and wait."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from bench.overlap.link import Event, critical_path
from bench.overlap.measure import measure
from bench.overlap.modes import MODES

# Seconds exposed and messages of a step, where each message and each whole product takes a second; with a pipeline's
# bubble.
EXPOSED = {
    "tensor parallel, tp 2": (4, 8), "the same with sequence parallel": (12, 16),
    "tensor parallel, `overlap_communication`": (6, 12), "sequence parallel, `overlap_communication`": (6, 16),
    "ring attention on cp 2": (6, 8), "1F1B on pp 2": (13, 5),
    "experts on ep 2, one shared": (10, 14),
}  # fmt: skip


def seconds(event):
    return event.key[0] if event.kind == "compute" else float(event.kind != "wait")


def check_order():
    found = {}
    for index, mode in enumerate(MODES):
        if mode.name in EXPOSED:
            found[mode.name] = measure(index, True, 0.0, 0.0, steps=1).events
    dist.destroy_process_group()
    return found


def test_messages_start_before_the_work_that_hides_them_and_are_waited_for_after_it(ranks):
    both = ranks(2, check_order)
    for name, (exposed, messages) in EXPOSED.items():
        events = [[event._replace(seconds=seconds(event)) for event in rank[name]] for rank in both]
        assert max(sum(event.kind in ("start", "send") for event in rank) for rank in events) == messages, name
        assert critical_path(events)[1] == exposed, name


def test_the_critical_path_of_two_ranks_by_hand():
    key = ((0, 1), 0)
    late = [Event("compute", (), 3.0), Event("start", key, 2.0), Event("compute", (), 1.0), Event("wait", key)]
    early = [Event("start", key, 2.0), Event("wait", key)]
    assert critical_path([late, early]) == (5.0, 5.0)
    more = [Event("start", key, 4.0), Event("wait", key)]  # an all-to-all where one rank sends more
    assert critical_path([late, more]) == critical_path([more, late]) == (7.0, 7.0)
    with pytest.raises(ValueError, match="no other one starts"):
        critical_path([late, []])
