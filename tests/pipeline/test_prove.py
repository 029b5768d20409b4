"""The prover against the closed forms of the papers, and against schedules broken on purpose."""

import itertools
import random

import pytest

from mpcore.pipeline.prove import Times, prove
from mpcore.pipeline.schedules import NAMES, Action, Schedule, Span, build_schedule, with_messages

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


@pytest.mark.parametrize("V", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
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


def change(schedule, rank, actions, name="broken"):
    ranks = [list(row) for row in schedule.ranks]
    ranks[rank] = list(actions)
    return Schedule(name, tuple(map(tuple, ranks)), schedule.stages, schedule.micro_batches)


def pick(draw, schedule, kinds):
    """A random action of some kinds: its rank, its place, the rank's actions, itself."""
    rank = draw.choice([r for r, row in enumerate(schedule.ranks) if any(a.kind in kinds for a in row)])
    actions = list(schedule.ranks[rank])
    action = draw.choice([a for a in actions if a.kind in kinds])
    return rank, actions.index(action), actions, action


def missing(draw, schedule):
    rank, at, actions, action = pick(draw, schedule, "FBI")
    return change(schedule, rank, actions[:at] + actions[at + 1 :]), f"^{action} is missing$"


def twice(draw, schedule):
    rank, _, actions, action = pick(draw, schedule, "FBIW")
    other = draw.randrange(len(schedule.ranks))
    target = list(schedule.ranks[other]) if other != rank else actions
    return change(schedule, other, [*target, action]), f"^{action} is there twice: on rank \\d+ and on rank \\d+"


def strayed(draw, schedule):
    rank, at, actions, action = pick(draw, schedule, "FBIW")
    broken = change(schedule, rank, actions[:at] + actions[at + 1 :])
    other = (rank + 1) % len(schedule.ranks)
    return change(broken, other, [action, *schedule.ranks[other]]), f"^{action} is on rank {other}, but rank {rank} has"


def outside(draw, schedule):
    rank, _, actions, action = pick(draw, schedule, "F")
    far = action._replace(micro_batch=schedule.micro_batches)
    return change(schedule, rank, [*actions, far]), f"^{far} on rank {rank} is outside of"


def both(draw, schedule):
    rank, _, actions, action = pick(draw, schedule, "BI")
    other = action._replace(kind="I" if action.kind == "B" else "B")
    return change(schedule, rank, [*actions, other]), rf"B{action.micro_batch} and {action.stage}I\d+ are both there"


def too_early(draw, schedule):
    """A backward before its own forward."""
    rank, at, actions, action = pick(draw, schedule, "BI")
    forward = actions.index(Action("F", action.stage, action.micro_batch))
    actions[at], actions[forward] = actions[forward], actions[at]
    return (
        change(schedule, rank, actions),
        rf"deadlocks: .*\b{action}, action {forward} of rank {rank}, waits for {actions[at]}, only later on the same",
    )


def weight_first(draw, schedule):
    """A weight gradient before the pass that leaves what it needs."""
    rank, at, actions, action = pick(draw, schedule, "W")
    given = actions.index(Action("I", action.stage, action.micro_batch))
    actions[at], actions[given] = actions[given], actions[at]
    return change(
        schedule, rank, actions
    ), rf"deadlocks: .*{action}, action {given} of rank {rank}, waits for {actions[at]}"


def sent_first(draw, schedule):
    """A message before the pass that gives what it carries."""
    whole = with_messages(schedule)
    rank, at, actions, action = pick(draw, whole, ("SEND_F", "SEND_B"))
    passes = "F" if action.kind == "SEND_F" else "BI"
    given = next(i for i, a in enumerate(actions) if a.kind in passes and a[1:] == action[1:])
    actions[at], actions[given] = actions[given], actions[at]
    return change(
        whole, rank, actions
    ), rf"deadlocks: .*{action}, action {given} of rank {rank}, waits for {actions[at]}"


def crossed(draw, schedule):
    """Rank 0 ends micro-batch m before it begins n, the last rank wants n first."""
    m, n = sorted(draw.sample(range(schedule.micro_batches), 2))
    last = len(schedule.ranks) - 1
    naive = build_schedule("naive", last + 1, schedule.micro_batches)
    rows = list(naive.ranks[last])
    i, j = rows.index(Action("F", last, m)), rows.index(Action("F", last, n))
    rows[i], rows[j] = rows[j], rows[i]
    return change(
        naive, last, rows
    ), rf"deadlocks: .*\b{last}F{n}, action {i} of rank {last}, waits for {last - 1}F{n}, action"


def no_receive(draw, schedule):
    rank, at, actions, action = pick(draw, with_messages(schedule), ("RECV_F", "RECV_B"))
    return change(
        with_messages(schedule), rank, actions[:at] + actions[at + 1 :]
    ), f"^{action} is missing: the schedule names"


def no_reader(draw, schedule):
    """A message from the last stage on to nobody."""
    whole = with_messages(schedule)
    stray, rank = Action("SEND_F", whole.stages - 1, 0), whole.rank_of[whole.stages - 1]
    return change(whole, rank, [*whole.ranks[rank], stray]), f"^{stray} on rank {rank} is too many: nothing passes"


def swapped(draw, schedule):
    """PITFALL 35: two messages of one pair of ranks change places at one end; their shapes are the same."""
    whole = with_messages(schedule)
    rank = draw.randrange(len(whole.ranks))
    actions = list(whole.ranks[rank])
    receives = [i for i, a in enumerate(actions) if a.kind == ("RECV_B" if rank == 0 else "RECV_F")]
    i, j = sorted(draw.sample(receives, 2))
    first, second = actions[i], actions[j]
    actions[i], actions[j] = second, first
    return change(
        whole, rank, actions
    ), rf"message \d+ from rank \d+ to rank {rank} is sent as .*received as {second}: {first} "


def late_receive(draw, schedule):
    """1f1b with each receive posted only where it is used: neighbours send to each other and both wait."""
    whole = build_schedule("1f1b", draw.choice((2, 3, 4)), draw.choice((4, 6, 8)))
    ranks = []
    for actions in whole.ranks:
        row = []
        for a in actions:
            letter, edges = ("F", (0, whole.stages - 1)) if a.kind == "F" else ("B", (whole.stages - 1, 0))
            row += [Action(f"RECV_{letter}", a.stage, a.micro_batch)] * (a.stage != edges[0])
            row.append(a)
            row += [Action(f"SEND_{letter}", a.stage, a.micro_batch)] * (a.stage != edges[1])
        ranks.append(tuple(row))
    return (
        Schedule("late", tuple(ranks), whole.stages, whole.micro_batches),
        r"deadlocks: \d+SEND_\w\d+, action \d+ of rank \d+, waits for \d+RECV_",
    )


FAULTS = [
    missing, twice, strayed, outside, both, too_early, weight_first, sent_first, crossed, no_receive, no_reader,
    swapped, late_receive,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_pitfall_35_broken_schedules_are_refused_and_the_fault_is_named(fault):
    for seed in range(12):
        draw = random.Random(seed)
        names = ("zb", "zbv", "dualpipev") if fault is weight_first else NAMES
        names = ("gpipe", "1f1b") if fault is swapped else names
        schedule = build_schedule(draw.choice(names), draw.choice((2, 4)), 8)
        prove(schedule)
        broken, message = fault(draw, schedule)
        with pytest.raises(ValueError, match=message) as found:
            prove(broken)
        assert len(str(found.value)) < 600
