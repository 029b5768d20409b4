"""The clock of waits, on waits of a known length."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

import mpcore as mp
from mpcore import collectives
from mpcore.pipeline import Pipeline
from mpcore.tools.analysis import CommunicationClock

LONG = 0.03


def test_a_wait_of_another_thread_does_not_count(monkeypatch):
    monkeypatch.setattr(collectives, "_wait", lambda x: time.sleep(LONG))
    with CommunicationClock() as clock:
        other = threading.Thread(target=collectives._wait, args=(None,))
        other.start()
        other.join()
    assert clock.seconds == 0


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
