"""Headers, messages, the sends that have arrived, and the makespan: without a rank."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mpcore.pipeline.makespan import resolve
from mpcore.pipeline.messages import (
    Message,
    Meta,
    input_of,
    peer_of,
    post,
    receive_header,
    receive_tensors,
    releases,
    send_header,
    send_tensors,
    sent_on,
)
from mpcore.pipeline.prove import Times, prove
from mpcore.pipeline.schedules import NAMES, Action, Schedule, build_schedule, with_messages

CPU = torch.device("cpu")
WHERE = Action("SEND_F", 0, 0)


class Wire:
    """A process group whose sends wait in a queue for its receives, which must have their dtype and size."""

    def __init__(self) -> None:
        self.queue: list[tuple[Tensor, int]] = []
        self.peers: list[int] = []

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        (x,) = tensors
        assert x.is_contiguous()
        self.queue.append((x.detach().clone(), tag))
        self.peers.append(peer)
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        (x,) = tensors
        sent, its_tag = self.queue.pop(0)
        assert (sent.dtype, sent.numel(), its_tag) == (x.dtype, x.numel(), tag)
        with torch.no_grad():
            x.view(-1).copy_(sent.view(-1))
        self.peers.append(peer)
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def wire(monkeypatch) -> Wire:
    made = Wire()
    monkeypatch.setattr(dist, "send", lambda x, group, group_dst: group.send([x], group_dst, 0))
    monkeypatch.setattr(dist, "recv", lambda x, group, group_src: group.recv([x], group_src, 0))
    return made


def axis(wire: Wire) -> Any:
    return SimpleNamespace(group=wire)


METAS = [
    (), ((),), ((2, 3), ()), ((0, 4),), ((7,), (1, 1, 1, 1), (2,)),
]  # fmt: skip


@pytest.mark.parametrize("shapes", METAS)
def test_a_header_tells_shapes_dtypes_and_flags(wire, shapes):
    dtypes = itertools.cycle([torch.bfloat16, torch.int64, torch.float64, torch.bool, torch.complex64])
    metas = tuple(Meta(shape, next(dtypes), bool(i % 2)) for i, shape in enumerate(shapes))
    send_header(metas or None, axis(wire), 3, CPU)
    assert receive_header(axis(wire), 5, CPU) == (metas or None)
    assert wire.queue == []
    assert set(wire.peers[: len(wire.peers) // 2]) == {3}
    assert set(wire.peers[len(wire.peers) // 2 :]) == {5}
    send_header(metas, axis(wire), 3, CPU)
    assert all(x.dtype == torch.int64 for x, _ in wire.queue)


def test_every_dtype_has_a_number_of_its_own(wire):
    every = [x for x in vars(torch).values() if isinstance(x, torch.dtype)]
    metas = tuple(Meta((), dtype, False) for dtype in dict.fromkeys(every))
    send_header(metas, axis(wire), 0, CPU)
    assert receive_header(axis(wire), 0, CPU) == metas


def test_tensors_arrive_with_their_bits_also_in_dtypes_that_backends_dont_know(wire):
    given = (torch.randn(2, 3).bfloat16(), torch.tensor([True, False]), torch.zeros(0, 3), torch.tensor(5),
             torch.tensor([1 + 2j]), torch.arange(4).to(torch.float8_e4m3fn))  # fmt: skip
    send_tensors(given, axis(wire), 1, CPU)
    got = receive_tensors(axis(wire), 0, CPU)
    assert [(x.dtype, x.shape) for x in got] == [(x.dtype, x.shape) for x in given]
    assert all(torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)) for a, b in
               zip(got, given, strict=True))  # fmt: skip
    assert wire.queue == []
    send_tensors(None, axis(wire), 1, CPU)
    with pytest.raises(ValueError, match="the stage before failed on rank 0 of the pipeline, which says why"):
        receive_tensors(axis(wire), 0, CPU)


def test_a_message_waits_for_all_its_parts_and_names_what_failed(wire):
    waited = []
    works: Any = [SimpleNamespace(wait=lambda i=i: waited.append(i)) for i in range(3)]
    Message((), works, WHERE, 2).wait()
    assert waited == [0, 1, 2]

    def gone() -> None:
        raise RuntimeError("connection reset")

    with pytest.raises(RuntimeError, match=r"^0SEND_F0, to or from rank 2 of the pipeline, failed: connection reset$"):
        Message((), [SimpleNamespace(wait=gone)], WHERE, 2).wait()  # type: ignore[list-item]
    message = post(dist.isend, (torch.ones(2), torch.ones(0)), axis(wire), 4, WHERE)
    assert (len(message.works), message.action, message.peer, len(message.tensors)) == (1, WHERE, 4, 2)
    assert post(dist.isend, (), axis(wire), 4, WHERE).works == []


def test_what_goes_on_is_a_tuple_of_contiguous_tensors():
    a, b = torch.ones(2, 3).T, torch.ones(2)
    for out in ((a, b), [a, b]):
        sent = sent_on(out, 1, "batch 2")
        assert [x.is_contiguous() for x in sent] == [True, True]
        assert torch.equal(sent[0], a)
    assert sent_on(b, 1, "batch 2")[0] is b
    for out, said in (
        ((a, 3), "output 1 of stage 1 in batch 2 is a int"), ({"x": a}, "the output of stage 1 in batch 2 is a dict"),
        ((None,), "the output of stage 1 in batch 2 is a NoneType"), ((), "stage 1 returns nothing in batch 2"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            sent_on(out, 1, "batch 2")


# --- which sends have arrived -----------------------------------------------------------------------------------------


def test_the_input_and_the_peer_of_an_action_follow_from_the_schedule():
    schedule = with_messages(build_schedule("1f1b", 3, 3))
    assert input_of(Action("F", 1, 2)) == Action("RECV_F", 1, 2)
    assert input_of(Action("B", 1, 2)) == input_of(Action("I", 1, 2)) == Action("RECV_B", 1, 2)
    for message, peer in (("SEND_F", 2), ("RECV_F", 0), ("SEND_B", 0), ("RECV_B", 2)):
        assert peer_of(schedule, Action(message, 1, 0)) == peer


SIZES = [(name, P, M) for name in NAMES for P, M in ((2, 4), (3, 6), (4, 8))]


@pytest.mark.parametrize(("name", "P", "M"), SIZES)
def test_a_send_is_released_by_the_first_action_whose_input_was_computed_after_it(name, P, M):
    """By hand: the peer has used a message before it sends what it computed later."""
    schedule = with_messages(build_schedule(name, P, M))
    for rank, actions in enumerate(schedule.ranks):
        found = releases(schedule, rank)
        got = {send: action for action, sends in found.items() for send in sends}
        assert len(got) == sum(map(len, found.values())), "each send once"
        for i, (kind, stage, m) in enumerate(actions):
            if not kind.startswith("SEND"):
                continue
            send, ahead = actions[i], 1 if kind == "SEND_F" else -1
            peer = peer_of(schedule, send)
            row = schedule.ranks[peer]
            users = [Action(user, stage + ahead, m) for user in ("F" if kind == "SEND_F" else "BI")]
            used = next(at for at, action in enumerate(row) if action in users)
            want = None
            for action in actions[i + 1 :]:
                receive = input_of(action) if action.kind in ("F", "B", "I") else action
                if receive is not action and receive in actions and peer_of(schedule, receive) == peer:
                    letter, back = receive.kind[-1], -1 if action.kind == "F" else 1
                    if row.index(Action(f"SEND_{letter}", action.stage + back, action.micro_batch)) > used:
                        want = action
                        break
            assert got.get(send) == want, (rank, send)


# --- how long a schedule takes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_resolved_schedule_takes_as_long_as_its_proof_says(name):
    schedule = build_schedule(name, 3, 6)
    factors = (1.0, 3.0, 2.0, 1.5, 0.5, 2.5)[: schedule.stages]
    for message in (0.0, 0.7):
        times = Times(1.0, 1.25, 0.5, message=message, stages=factors)
        each = {"F": 1.0, "I": 1.25, "W": 0.5, "B": 1.75}
        found = resolve(schedule).makespan({kind: [x * f for f in factors] for kind, x in each.items()}, message)
        assert found == pytest.approx(prove(schedule, times).makespan, rel=1e-12)
    resolved = resolve(schedule)
    assert resolved.ranks == 3
    assert len(resolved.steps) == len(schedule.actions)
    assert all(needed < i for i, (*_, needed) in enumerate(resolved.steps))


def test_a_schedule_that_deadlocks_has_no_length():
    rows = ((Action("F", 0, 0), Action("B", 0, 0)), (Action("B", 1, 0), Action("F", 1, 0)))
    with pytest.raises(ValueError, match=r"the schedule x deadlocks: prove\(schedule\) says where"):
        resolve(Schedule("x", rows, 2, 1))
