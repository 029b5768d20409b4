"""What a pipeline rank holds at once, against a list of the tensors that are alive."""

from __future__ import annotations

import random

import pytest

from mpcore.pipeline.messages import releases
from mpcore.pipeline.schedules import NAMES, Schedule, build_schedule
from mpcore.tools.analysis.peak import peak
from mpcore.tools.analysis.work import MicroBatchMemory


def draw_stages(plan: Schedule, rank: int, seed: int) -> list[MicroBatchMemory]:
    """Stages of any sizes. The first has no input with a gradient, and no stage follows the last."""
    pick = random.Random(seed)
    found: list[MicroBatchMemory] = []
    mine, size = plan.stages_of(rank), dict[int, int]()
    for stage in mine:
        first, last = stage == 0, stage == plan.stages - 1
        size[stage] = pick.randint(1, 50)  # of the gradient of its input, which the stage before gets back
        received, inputs, output = 0 if first else pick.randint(5, 50), pick.randint(0, 5), pick.randint(1, 60)
        found.append(MicroBatchMemory(
            received=received, activations=received + output + pick.randint(1, 200), output=output,
            between=inputs + pick.randint(1, 300), between_inputs=0 if first else inputs,
            returned=0 if last else pick.randint(1, 50), sent_back=0 if first else size[stage],
            gathered=pick.randint(0, 90), unsummed=pick.randint(0, 90), made=pick.randint(0, 90),
            forward_more=pick.randint(0, 400), backward_more=pick.randint(-30, 400), weight_more=pick.randint(0, 700),
        ))  # fmt: skip
    for i, stage in enumerate(mine):
        if stage + 1 in size:
            found[i].returned = size[stage + 1]
    return found


def tensors_alive(plan: Schedule, rank: int, stages: list[MicroBatchMemory]) -> tuple[int, int]:
    """Go through the actions with every tensor by name: the most bytes after a forward, and the most ever."""
    of = dict(zip(plan.stages_of(rank), stages, strict=True))
    whole = plan.with_messages if len(plan.ranks) > 1 else plan
    released, alive = releases(whole, rank), dict[tuple, int]()
    not_made = {stage: kept.made for stage, kept in of.items()}
    after_forward, ever = [0], [0]
    for action in whole.ranks[rank]:
        kind, s, m = action
        kept = of[s]
        for send in released.get(action, ()):
            del alive[("y" if send.kind == "SEND_F" else "dx", send.stage, send.micro_batch)]
        if kind == "RECV_F":
            alive["x", s, m] = kept.received
        if kind == "RECV_B":
            alive["dx", s + 1, m] = kept.returned
        now = sum(alive.values()) - sum(not_made.values())
        if kind == "F":
            gathered = 0 if ("gathered", s) in alive else kept.gathered
            ever.append(now + gathered + kept.forward_more)
            alive["gathered", s] = kept.gathered
            alive["graph", s, m] = kept.activations - kept.received - kept.output
            alive["y", s, m] = kept.output  # if the next stage is on this rank, it is that stage's input
            if s == 0:
                assert kept.received == 0
            after_forward.append(sum(alive.values()))
            if s == plan.stages - 1:
                del alive["y", s, m]
        if kind in ("B", "W"):
            now += not_made.pop(s, 0)
        if kind in ("B", "I"):
            ever.append(now + kept.backward_more)
            alive["dx", s, m] = kept.sent_back
        if kind == "W":
            ever.append(now + kept.weight_more)
        if (kind == "B" or kind == ("W" if s == 0 else "I")) and s < plan.stages - 1:
            del alive["dx", s + 1, m]
        if kind == "I":
            here = s - 1 in of
            del alive["graph", s, m]
            alive.pop(("x", s, m), None)
            alive["waits", s, m] = kept.between - (kept.between_inputs if here else 0)
        if kind in ("B", "W"):
            del alive["graph" if kind == "B" else "waits", s, m]
            alive.pop(("x", s, m), None)
            alive["unsummed", s] = kept.unsummed
            if s - 1 in of:
                del alive["y", s - 1, m]
    return max(after_forward), max(ever)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_peak_is_that_of_the_tensors_that_are_alive(name, ranks):
    if name == "zbv" and ranks == 1:
        plan = build_schedule("zbv", 2, 8)
    else:
        plan = build_schedule(name, ranks, 2 * max(ranks, 2) if name != "dualpipev" else 6)
    for rank in range(len(plan.ranks)):
        for seed in range(12):
            stages = draw_stages(plan, rank, seed)
            assert peak(plan, rank, stages) == tensors_alive(plan, rank, stages), (rank, stages)


def test_a_rank_of_1f1b_holds_as_many_activations_as_there_are_stages_from_it_on():
    """Narayanan et al. 2021, section 2.2; GPipe holds all micro-batches."""
    stage = MicroBatchMemory(activations=100, forward_more=130, backward_more=60)
    for ranks, m in ((2, 6), (4, 8)):
        for rank in range(ranks):
            ahead = ranks - rank  # forwards before the first backward
            assert peak(build_schedule("1f1b", ranks, m), rank, [stage]) == (ahead * 100, ahead * 100 + 60)
            assert peak(build_schedule("gpipe", ranks, m), rank, [stage]) == (m * 100, m * 100 + 60)
    assert peak(build_schedule("gpipe", 1, 5), 0, [MicroBatchMemory(activations=100, output=20)])[0] == 4 * 80 + 100
