"""The clock of waits, on waits of a known length."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mpcore as mp
from mpcore import collectives
from mpcore.pipeline import Pipeline
from mpcore.tools.analysis import CommunicationClock

LONG = 0.03


def test_the_clock_adds_the_waits_of_its_own_thread_and_leaves_nothing(monkeypatch):
    def slow(x: torch.Tensor, *more: object) -> torch.Tensor:
        time.sleep(LONG)
        return x

    monkeypatch.setattr(collectives, "_wait", slow)
    monkeypatch.setattr(dist.Work, "wait", slow)
    before = collectives._wait, dist.Work.wait
    clock = CommunicationClock()
    assert clock.seconds == 0
    for _ in range(2):  # it begins at 0 again
        with clock as entered:
            assert entered is clock
            assert clock.seconds == 0
            x, began = torch.ones(1), time.perf_counter()
            assert collectives._wait(x) is x
            one = clock.seconds
            assert LONG <= one <= time.perf_counter() - began
            work_wait: Any = dist.Work.wait
            work_wait(x, 5.0)
            assert clock.seconds >= one + LONG
            two = clock.seconds
            other = threading.Thread(target=collectives._wait, args=(x,))
            other.start()
            other.join()
            assert clock.seconds == two, "what another thread waits for"
        assert (collectives._wait, dist.Work.wait) == before
    collectives._wait(x)
    assert clock.seconds == two


def test_a_wait_that_raises_counts_too(monkeypatch):
    def fails(x: object) -> None:
        time.sleep(LONG)
        raise RuntimeError("gone")

    monkeypatch.setattr(collectives, "_wait", fails)
    with CommunicationClock() as clock, pytest.raises(RuntimeError, match="gone"):
        collectives._wait(None)
    assert clock.seconds >= LONG
    assert collectives._wait is fails


def waits() -> list[dict[str, float]]:
    """In a rank of a mesh: a wait on each axis, one of a collective that is started before another."""
    on, found = mp.build_mesh(tp=2, pp=2, device_type="cpu"), []
    with CommunicationClock(on) as clock:
        collectives.all_reduce(torch.ones(2), on.tp)
        found.append(dict(clock.axes))
        first, second = (
            collectives.start_all_reduce(torch.ones(3), on.pp),
            collectives.start_all_gather(torch.ones(2), on.tp),
        )
        collectives.wait(second)
        collectives.wait(first)
        found.append(dict(clock.axes))
        kinds = [name for name, *times in clock.messages if times == sorted(times)]
        assert kinds == ["tp all_reduce", "tp all_gather_into_tensor", "pp all_reduce"], clock.messages
        assert clock.messages[2][1] <= clock.messages[1][1], "it started first"
        assert [span.rank for span in clock.spans(1)] == [1] * 6
        line = Pipeline(nn.Linear(2, 2), on, 2, lambda y, t: y.sum())
        for _ in range(2):
            line.forward_backward(torch.ones(2, 2), torch.ones(2))
        found.append(dict(clock.axes))
    return found


def test_a_wait_is_of_its_axis(ranks):
    for found in ranks(4, waits):
        assert [set(each) - {"other"} for each in found] == [{"tp"}, {"tp", "pp"}, {"tp", "pp"}]
        assert found[2]["pp"] > found[1]["pp"]
