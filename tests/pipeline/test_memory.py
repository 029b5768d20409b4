"""What a rank of a pipeline holds: counted by the dry run, measured on real ranks, and flat in the micro-batches."""

from __future__ import annotations

import time
from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from mpcore import Mesh
from mpcore.memory_footprint import StorageTracker
from mpcore.pipeline import Pipeline
from mpcore.pipeline.messages import other_end, peer_of, releases
from mpcore.pipeline.schedules import NAMES, Action, Schedule, build_schedule, with_messages
from mpcore.tools.analysis.dry_run import Work, dry_run
from tests.pool import mesh

ROWS, LENGTH, WIDTH = 16, 8, 128  # of a micro-batch: a message has 64 KiB
FLAT = ("naive", "1f1b", "interleaved", "zb", "zbv", "dualpipev")  # gpipe and bfs hold every micro-batch


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 192), nn.Linear(192, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def stages_of(on: Mesh, plan: Schedule) -> list[nn.Module]:
    return [nn.Sequential(OrderedDict({str(i): Stage()})) for i in plan.stages_of(on.pp.rank)]


def loss_of(y: Tensor) -> Tensor:
    return y.square().sum()


def measure(name: str, pp: int, micro_batches: int) -> int:
    """The most bytes that this rank holds at the end of a forward, in its second step, without its gradients."""
    on, most = mesh(pp=pp), 0
    plan = build_schedule(name, pp, micro_batches)
    stages, storages = stages_of(on, plan), StorageTracker()
    own = [p for stage in stages for p in stage.parameters()]

    def sample(*_) -> None:
        nonlocal most
        held = []
        for _ in range(3):  # gloo's threads let go of their tensors a little later
            held.append(storages.held([p.grad for p in own if p.grad is not None]))
            time.sleep(0.001)
        most = max(most, min(held))

    def loss(y: Tensor, _: Tensor) -> Tensor:
        total = loss_of(y)
        sample()
        return total

    pipeline = Pipeline(stages, on, micro_batches, loss, plan)
    for stage in stages[:-1] if on.pp.rank == pipeline.last_rank else stages:
        stage.register_forward_hook(sample)
    x = torch.ones(micro_batches * ROWS, LENGTH, WIDTH)
    with storages:
        pipeline.forward_backward(x, x)
        most = 0
        pipeline.forward_backward(x, x)
    return most


def build(on: Mesh, arguments: list[str]) -> Work:
    plan = build_schedule(arguments[0], on.pp.size, int(arguments[1]))
    with torch.device("meta"):
        stages = stages_of(on, plan)
    adam = partial(torch.optim.AdamW, foreach=False, fused=False)
    return Work(stages, plan, lambda _: ((torch.empty(ROWS, LENGTH, WIDTH),), {}), loss_of, adam)


def counted(name: str, pp: int, micro_batches: int) -> list[int]:
    return [dry_run(build, [name, str(micro_batches)], rank, pp=pp).peak for rank in range(pp)]


CASES = [
    pytest.param(name, pp, m, marks=() if (pp, m) == (2, 8) else pytest.mark.slow, id=f"{name}-pp{pp}-m{m}")
    for name in NAMES for pp in (2, 4) for m in (4, 8, 32, 256) if m >= {"dualpipev": 2 * pp}.get(name, pp)
]  # fmt: skip


@pytest.mark.parametrize(("name", "pp", "m"), CASES)
def test_the_bytes_held_are_those_counted(ranks, name, pp, m):
    got, want = ranks(pp, measure, name, pp, m, timeout=250), counted(name, pp, m)
    print(f"{name}, pp {pp}, {m} micro-batches: measured {got}, counted {want}")
    assert got == pytest.approx(want, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_memory_does_not_grow_with_micro_batches_where_the_schedule_allows_it(name):
    few, many = (counted(name, 4, m) for m in (12, 16))
    assert (few == many) == (name in FLAT), (few, many)


def knowledge(plan: Schedule) -> dict[Action, list[int]]:
    """For each action, how many actions of each rank are certainly done when it runs, by rank: vector clocks."""
    known: dict[Action, list[int]] = {}
    at, clock = [0] * len(plan.ranks), [[0] * len(plan.ranks) for _ in plan.ranks]
    waits = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}
    while any(i < len(actions) for i, actions in zip(at, plan.ranks, strict=True)):
        for rank, actions in enumerate(plan.ranks):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                receive = action._replace(kind=waits.get(action.kind, ""))
                if receive in plan.actions:  # its sender's knowledge comes with it
                    if other_end(receive) not in known:
                        break
                    clock[rank] = [max(pair) for pair in zip(clock[rank], known[other_end(receive)], strict=True)]
                known[action] = list(clock[rank])
                at[rank] += 1
                clock[rank][rank] = at[rank]
    return known


@pytest.mark.parametrize(("pp", "m"), [(2, 8), (4, 8), (4, 16)])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_released_before_it_has_arrived(name, pp, m):
    plan = with_messages(build_schedule(name, pp, m))
    known = knowledge(plan)
    for rank, actions in enumerate(plan.ranks):
        released = releases(plan, rank)
        for action, sends in released.items():
            for send in sends:
                peer, receive = peer_of(plan, send), other_end(send)
                kinds = ("F",) if send.kind == "SEND_F" else ("B", "I")
                used = next(i for i, a in enumerate(plan.ranks[peer]) if a[0] in kinds and a[1:] == receive[1:])
                assert known[action][peer] > used, f"{send} of rank {rank} is released at {action}"
        confirmed = {send for sends in released.values() for send in sends}
        assert actions == () or pp == 1 or confirmed or name in ("gpipe", "bfs", "naive"), "all wait for the step's end"
