"""The prover against the closed forms of the papers, and against schedules broken on purpose."""

import itertools
import re

import pytest

from mpcore.pipeline.prove import Times, prove
from mpcore.pipeline.schedules import NAMES, Action, Schedule, Span, build_schedule

# (ranks, micro-batches): all small ones, and a thinned rest up to (16, 64)
SIZES = [*itertools.product(range(1, 6), range(1, 9)), *itertools.product((7, 8, 16), (1, 3, 8, 16, 17, 32, 64))]


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_schedules_of_one_stage_a_rank_match_their_closed_forms(name):
    for P, M in SIZES:
        if name == "1f1b" and P > M:
            continue
        proof = prove(build_schedule(name, P, M))
        bubble = (P - 1) / P if name == "naive" else (P - 1) / (M + P - 1)
        assert proof.bubble == pytest.approx(bubble, abs=1e-12), (name, P, M)
        peak = {"naive": 1, "gpipe": M, "1f1b": P}[name]
        assert proof.peaks[0] == peak, (name, P, M)
        assert max(proof.peaks) == peak
        assert proof.messages == 2 * M * (P - 1)
        if name == "1f1b":
            assert proof.peaks == tuple(P - rank for rank in range(P))


@pytest.mark.parametrize("V", [1, 3, *(pytest.param(V, marks=pytest.mark.slow) for V in (2, 4))])
@pytest.mark.parametrize("name", ["interleaved", "bfs", "zb"])
def test_virtual_stages_match_their_closed_forms(name, V):
    """(P - 1) / (V M + P - 1), and with the backward split a third of that idle time. Both need M >= P."""
    sizes = [size for size in SIZES if size[0] * size[1] * V <= 1500] + [(16, 64)] * (V == 4)
    for P, M in sizes:
        if P > M or (name != "bfs" and M % (M // P)):
            continue
        proof = prove(build_schedule(name, P, M, V))
        work = 3 if name == "zb" else 1
        assert proof.bubble == pytest.approx((P - 1) / (work * V * M + P - 1), abs=1e-12), (name, P, V, M)
        assert proof.messages == 2 * M * (P * V - 1) if P > 1 else proof.messages == 0
        if name == "bfs":
            assert max(proof.peaks) == M
        if name == "zb" and V == 1:
            assert proof.peaks == (P,) * P, "weight gradients that wait hold their activations"


def test_v_shaped_schedules():
    """ZBV has no bubble but the first and last ramp, and holds no more than 1f1b (section 6 of the paper)."""
    for P, M in [(2, 4), (4, 8), (4, 16), (8, 16), (16, 64)]:
        zbv, dual = prove(build_schedule("zbv", P, M)), prove(build_schedule("dualpipev", P, M))
        assert max(zbv.stalls) == pytest.approx(0, abs=1e-12)
        assert max(zbv.peaks) == P
        assert zbv.bubble == pytest.approx((P - 1) / (6 * M + P - 1), abs=1e-12)
        assert zbv.bubble <= dual.bubble < prove(build_schedule("1f1b", P, M)).bubble
        assert max(dual.peaks) == P + 0.5
        assert zbv.messages == 2 * M * (2 * P - 2), "neighbours at the turn pass nothing"


def test_parts_that_take_no_time_leave_nobody_idle():
    proof = prove(build_schedule("1f1b", 2, 2), Times(0, 0, 0))
    assert (proof.bubble, proof.bubbles, proof.stalls, proof.makespan) == (0, (0, 0), (0, 0), 0)


def test_times_are_what_was_given():
    forward, backward, message = 2.0, 5.0, 0.25
    P, M = 3, 4
    proof = prove(build_schedule("gpipe", P, M), Times(forward, backward=backward, message=message))
    assert proof.makespan == pytest.approx((M + P - 1) * (forward + backward) + 2 * (P - 1) * message)
    assert prove(build_schedule("1f1b", 1, 3), Times(1, 2, 4)).makespan == 3 * 7
    slow = prove(build_schedule("gpipe", 2, 10), Times(stages=(1, 3)))
    assert slow.makespan == 10 * 9 + 3, "the slow stage sets the pace"
    assert slow.bubbles == pytest.approx((1 - 30 / 93, 3 / 93))
    with pytest.raises(ValueError, match="times of 3 stages for a schedule of 2"):
        prove(build_schedule("gpipe", 2, 2), Times(stages=(1, 2, 3)))


@pytest.mark.parametrize("name", NAMES)
def test_spans_keep_the_order_of_each_rank_and_of_each_dependency(name):
    schedule = build_schedule(name, 3, 6)
    proof = prove(schedule, Times(1.1, 0.7, 1.3, message=0.2))
    at = {span.action: span for span in proof.spans}
    assert set(at) == schedule.actions
    for rank, actions in enumerate(schedule.ranks):
        for before, after in itertools.pairwise(actions):
            assert at[before].end <= at[after].start
        assert {at[a].rank for a in actions} == {rank}
    for stage, m in itertools.product(range(1, schedule.stages), range(6)):
        delay = 0.2 if schedule.rank_of[stage] != schedule.rank_of[stage - 1] else 0.0
        assert at[Action("F", stage, m)].start >= at[Action("F", stage - 1, m)].end + delay - 1e-12
        last = at.get(Action("B", stage, m)) or at[Action("I", stage, m)]
        first = at.get(Action("B", stage - 1, m)) or at[Action("I", stage - 1, m)]
        assert first.start >= last.end + delay - 1e-12
    assert isinstance(proof.spans[0], Span)
    assert proof.makespan == max(span.end for span in proof.spans)


BROKEN = {  # each rank's actions in its order, and the fault
    "0F0 0B0 / 1F0": "^1B0 is missing$", "0F0 0I0 / 1F0 1I0 1W0": "^0W0 is missing$",
    "0F0 0F0 0B0 / 1F0 1B0": "^0F0 is there twice: on rank 0 and on rank 0",
    "0F0 0B0 / 1F0 0F0 1B0": "^0F0 is there twice: on rank 0 and on rank 1",
    "0F0 0B0 0F1 / 1F0 1B0 1F1 1B1 0B1": "^0B1 is on rank 1, but rank 0 has",
    "0F0 0B0 0F9 / 1F0 1B0": "^0F9 on rank 0 is outside of",
    "0F0 0B0 0I0 0W0 / 1F0 1B0": "0B0 and 0I0 are both there",
    "0B0 0F0 / 1F0 1B0": "deadlocks: .*0B0, action 0 of rank 0, waits for 0F0, only later on the same",
    "0F0 0W0 0I0 / 1F0 1I0 1W0": "deadlocks: .*0W0, action 1 of rank 0, waits for 0I0",
    "0SEND_F0 0F0 0RECV_B0 0B0 / 1RECV_F0 1F0 1B0 1SEND_B0": "deadlocks: .*0SEND_F0, action 0 of rank 0, waits for 0F0",
    "0F0 0B0 0F1 0B1 / 1F1 1B1 1F0 1B0": "deadlocks: .*1F1, action 0 of rank 1, waits for 0F1, action 2",
    "0F0 0SEND_F0 0RECV_B0 0B0 / 1F0 1B0 1SEND_B0": "^1RECV_F0 is missing: the schedule names",
    "0F0 0SEND_F0 0RECV_B0 0B0 / 1RECV_F0 1F0 1B0 1SEND_B0 1SEND_F0":
        "^1SEND_F0 on rank 1 is too many: nothing passes",
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 / 1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1":
        "message 0 from rank 0 to rank 1 is sent as .*received as 1RECV_F1: ",  # of one shape: PITFALL 35
    "0RECV_B1 0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0B0 0B1 / 1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1":
        "message 0 from rank 1 to rank 0 is sent as .*received as 0RECV_B1: ",
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 / 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1":
        r"deadlocks: .*\dSEND_\w\d, action \d of rank \d, waits for \dRECV_",  # receives where they are used
}  # fmt: skip


@pytest.mark.parametrize("plan", BROKEN)
def test_pitfall_35_broken_schedules_are_refused_and_the_fault_is_named(plan):
    ranks = [re.findall(r"(\d)([A-Z_]+)(\d)", actions) for actions in plan.split("/")]
    ranks = tuple(tuple(Action(kind, int(stage), int(m)) for stage, kind, m in actions) for actions in ranks)
    with pytest.raises(ValueError, match=BROKEN[plan]) as found:
        prove(Schedule("broken", ranks, 2, 2 if "F1" in plan else 1))
    assert len(str(found.value)) < 600
