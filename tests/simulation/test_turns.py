"""Threads that take turns: who runs next, and when no thread can go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from mpcore.tools.simulation import turns
from mpcore.tools.simulation.turns import StoppedError, Turns


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
