"""Threads that take turns: who runs next, and when no thread can go on."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mpcore.tools.simulation import turns
from mpcore.tools.simulation.turns import StoppedError, Turns, process_state, restore


class StuckError(RuntimeError):
    pass


def play(*parts: Callable[[Turns, int], object], turns_of: Callable[..., Turns] = Turns) -> tuple[Turns, list[int]]:
    """Run each part in a thread of its own. Returns the turns, and the threads that a `StoppedError` ended."""
    made = turns_of(len(parts), lambda: StuckError("stuck"))
    stopped: list[int] = []

    def run(rank: int) -> None:
        made.take(rank)
        try:
            parts[rank](made, rank)
        except StoppedError:
            stopped.append(rank)
        except BaseException as error:
            made.fail(rank, error)
        made.finish(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    made.begin()
    assert made.over.wait(20), "the threads hang"
    for thread in threads:
        thread.join(5)
    return made, stopped


def test_threads_that_wait_for_each_other_are_stuck_and_all_are_stopped():
    made, stopped = play(*[lambda made, rank: made.wait(rank, lambda: False)] * 3)
    assert made.failure is not None
    assert isinstance(made.failure[1], StuckError)
    assert made.failure[0] == 2, "the thread that waited last"
    assert sorted(stopped) == [0, 1, 2]


def test_the_first_error_is_kept_and_stops_the_others():
    later: list[str] = []

    def fails(made: Turns, rank: int) -> None:
        raise KeyError(rank)

    def waits(made: Turns, rank: int) -> None:
        try:
            made.wait(rank, lambda: False)
        finally:
            later.append("ended")

    made, stopped = play(waits, fails, fails)
    assert made.failure is not None
    assert (made.failure[0], made.failure[1].args) == (1, (1,))
    assert (stopped, later) == ([0], ["ended"])
    second = KeyError("second")
    made.fail(2, second)
    assert made.failure[1] is not second
    with pytest.raises(StoppedError):
        made.wait(0, lambda: True)


class Clock:
    """Wall time and CPU time that pass only when told."""

    def __init__(self, monkeypatch: Any) -> None:
        self.now = self.work = 50.0
        monkeypatch.setattr(turns.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(turns.time, "thread_time", lambda: self.work)


def polls(clock: Clock, rank_of: list[int], wall: float, work: float = 0.0, most: int = 100) -> Callable:
    def part(made: Turns, rank: int) -> None:
        for _ in range(most):
            made.wait(rank, lambda: False, polls=True)
            rank_of.append(rank)
            clock.now += wall
            clock.work += work

    return part


@pytest.mark.parametrize(("patience", "polled"), [(0.95, 10), (3.0, 31)])
def test_polls_in_vain_end_after_some_seconds(patience, polled, monkeypatch):
    monkeypatch.setattr(turns, "PATIENCE_S", patience)
    clock, order = Clock(monkeypatch), []
    made, stopped = play(polls(clock, order, 0.1))
    assert made.failure is not None
    assert isinstance(made.failure[1], StuckError)
    assert abs(len(order) - polled) <= 1, len(order)
    assert stopped == [0]


@pytest.mark.parametrize(("wall", "work"), [(1.6, 0.0), (0.1, 0.02)])
def test_a_thread_that_did_other_work_between_polls_is_not_in_vain(wall, work, monkeypatch):
    clock, order = Clock(monkeypatch), []
    made, _ = play(polls(clock, order, wall, work, most=60))
    assert (made.failure, len(order)) == (None, 60)


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), float(sys.modules["numpy"].random.rand())]


def test_what_a_process_has_once_is_kept_and_restored():
    assert "numpy" in sys.modules
    before, one, other = process_state(), process_state(new=True), process_state(new=True)
    try:
        restore(one)
        first = draw()
        torch.set_default_dtype(torch.float64)
        restore(other)
        assert torch.get_default_dtype() == torch.float32
        assert draw() == first
    finally:
        restore(before)
    assert draw() == first
