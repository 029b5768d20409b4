"""Headers, messages, the sends that have arrived, and the makespan: without a rank."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import mpcore as mp
from mpcore.pipeline.messages import (
    Meta,
    receive_early,
    receive_header,
    receive_tensors,
    send_header,
    send_tensors,
    sent_on,
)
from mpcore.pipeline.prove import Times, prove
from mpcore.pipeline.schedules import NAMES, build_schedule
from mpcore.tools.analysis.seconds import resolve

CPU = torch.device("cpu")


def test_what_goes_on_is_a_tuple_of_contiguous_tensors():
    a, b = torch.ones(2, 3).T, torch.ones(2)
    for out in ((a, b), [a, b]):
        sent = sent_on(out, 1, "batch 2")
        assert [x.is_contiguous() for x in sent] == [True, True]
        assert torch.equal(sent[0], a)
    assert sent_on(b, 1, "batch 2")[0] is b
    for out in ((a, 3), ()):
        with pytest.raises(ValueError, match=r"stage 1 .*in batch 2"):
            sent_on(out, 1, "batch 2")


def passes() -> None:
    """Rank 0 sends headers and tensors, also in dtypes that backends don't know, and says that it failed."""
    pp, dtypes = mp.build_mesh(pp=2, device_type="cpu").pp, itertools.cycle([torch.bfloat16, torch.int64, torch.bool])
    every = dict.fromkeys(x for x in vars(torch).values() if isinstance(x, torch.dtype))
    headers = [tuple(Meta((), dtype, False) for dtype in every)]
    for shapes in ((), ((),), ((2, 3), ()), ((0, 4),), ((7,), (1, 1, 1, 1), (2,))):
        headers.append(tuple(Meta(shape, next(dtypes), bool(i % 2)) for i, shape in enumerate(shapes)) or None)
    given = (torch.arange(6.0).view(2, 3).bfloat16(), torch.tensor([True, False]), torch.zeros(0, 3), torch.tensor(5),
             torch.tensor([1 + 2j]), torch.arange(4).to(torch.float8_e4m3fn))  # fmt: skip
    if pp.rank == 0:
        for header in headers:
            send_header(header, pp, 1, CPU)
        send_tensors(given, pp, 1, CPU)
        send_tensors(None, pp, 1, CPU)
        return
    assert [receive_header(pp, 0, CPU) for _ in headers] == headers
    got = receive_tensors(pp, 0, CPU)
    assert [(x.dtype, x.shape) for x in got] == [(x.dtype, x.shape) for x in given]
    for a, b in zip(got, given, strict=True):
        assert torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
    with pytest.raises(ValueError, match="the stage before failed on rank 0 of the pipeline, which says why"):
        receive_tensors(pp, 0, CPU)


def test_headers_and_tensors_arrive_as_they_were_sent():
    mp.simulate(passes, ranks=2)


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


@pytest.mark.parametrize("name", NAMES)
def test_a_receiver_never_holds_a_message_that_takes_no_longer_than_a_forward(name):
    for ranks, micro_batches in ((2, 4), (3, 6), (4, 8)):
        schedule = build_schedule(name, ranks, micro_batches)
        plan = schedule.with_messages
        early = replace(plan, ranks=tuple(tuple(receive_early(plan, rank)) for rank in range(ranks)))
        for message in (0.25, 1.0):
            times = Times(1.0, 1.5, 0.5, message=message)
            assert prove(early, times).makespan == prove(schedule, times).makespan  # this one's messages just travel
