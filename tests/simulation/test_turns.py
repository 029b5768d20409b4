"""Threads that take turns: who runs next, and when no thread can go on."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Sequence
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


def test_one_thread_runs_at_a_time_and_the_next_one_follows_where_one_waits():
    order: list[str] = []
    arrived: list[int] = []

    def part(made: Turns, rank: int) -> None:
        order.append(f"{rank} begins")
        arrived.append(rank)
        made.changed()
        made.wait(rank, lambda: len(arrived) == 3)
        order.append(f"{rank} goes on")

    made, stopped = play(part, part, part)
    assert order == ["0 begins", "1 begins", "2 begins", "2 goes on", "0 goes on", "1 goes on"]
    assert (made.failure, stopped, made.alive) == (None, [], set())


def test_a_thread_that_need_not_wait_goes_on_at_once():
    order: list[int] = []

    def part(made: Turns, rank: int) -> None:
        for _ in range(3):
            made.wait(rank, lambda: True)
            order.append(rank)

    play(part, part)
    assert order == [0, 0, 0, 1, 1, 1]


def test_the_first_thread_after_the_one_that_waits_takes_its_turn():
    """Of 4: rank 2 waits for what is never so until 3 has run; then 0, which could go on earlier, comes before 1."""
    order: list[int] = []
    go = {0: False, 1: False, 2: False}

    def waits(made: Turns, rank: int) -> None:
        made.wait(rank, lambda: go[rank])
        order.append(rank)

    def last(made: Turns, rank: int) -> None:
        go.update(dict.fromkeys(go, True))
        order.append(rank)

    play(waits, waits, waits, last)
    assert order == [3, 0, 1, 2]


def test_threads_that_wait_for_each_other_are_stuck_and_all_are_stopped():
    made, stopped = play(*[lambda made, rank: made.wait(rank, lambda: False)] * 3)
    assert made.failure is not None
    assert isinstance(made.failure[1], StuckError)
    assert made.failure[0] == 2, "the thread that waited last"
    assert sorted(stopped) == [0, 1, 2]


def test_a_thread_that_waits_for_one_that_has_ended_is_stuck():
    made, stopped = play(lambda made, rank: made.wait(rank, lambda: False), lambda *_: None)
    assert made.failure is not None
    assert (made.failure[0], type(made.failure[1])) == (1, StuckError)
    assert stopped == [0]


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


# --- polls ------------------------------------------------------------------------------------------------------------


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


def test_a_poll_returns_although_it_is_not_ready_and_all_poll_in_turn(monkeypatch):
    clock, order = Clock(monkeypatch), []
    made, _ = play(*[polls(clock, order, 0.1, most=3)] * 3)
    assert made.failure is None
    fewest = [2, 0, 1, 1, 2, 0, 0, 1, 2]  # the one that looked last comes first of those with equally few looks
    assert order == fewest


@pytest.mark.parametrize(("patience", "polled"), [(0.95, 10), (3.0, 31)])
def test_polls_in_vain_end_after_some_seconds(patience, polled, monkeypatch):
    monkeypatch.setattr(turns, "PATIENCE_S", patience)
    clock, order = Clock(monkeypatch), []
    made, stopped = play(polls(clock, order, 0.1))
    assert made.failure is not None
    assert isinstance(made.failure[1], StuckError)
    assert abs(len(order) - polled) <= 1, len(order)
    assert stopped == [0]


def test_each_thread_polls_some_times_however_long_it_takes(monkeypatch):
    monkeypatch.setattr(turns, "PATIENCE_S", 1.0)
    clock, order = Clock(monkeypatch), []
    play(*[polls(clock, order, 1.4)] * 3)
    assert [order.count(rank) for rank in range(3)] == [3, 3, 3]


@pytest.mark.parametrize(("wall", "work"), [(1.6, 0.0), (0.1, 0.02)])
def test_a_thread_that_did_other_work_between_polls_is_not_in_vain(wall, work, monkeypatch):
    clock, order = Clock(monkeypatch), []
    made, _ = play(polls(clock, order, wall, work, most=60))
    assert (made.failure, len(order)) == (None, 60)


def test_a_change_begins_the_seconds_again(monkeypatch):
    clock, seen = Clock(monkeypatch), []

    def part(made: Turns, rank: int) -> None:
        for _ in range(100):
            made.wait(rank, lambda: False, polls=True)
            clock.now += 0.5
            seen.append(clock.now)
            made.changed()

    made, _ = play(part)
    assert (made.failure, len(seen)) == (None, 100)


def test_a_thread_that_waits_goes_on_before_any_polls_again(monkeypatch):
    clock, order, done = Clock(monkeypatch), [], []

    def looks(made: Turns, rank: int) -> None:
        while not done:
            made.wait(rank, lambda: bool(done), polls=True)
            order.append(f"look {len(order)}")
            clock.now += 0.1
            done.append(1) if len(order) > 3 else None

    def waits(made: Turns, rank: int) -> None:
        made.wait(rank, lambda: bool(done))
        order.append("waited")

    made, _ = play(looks, waits)
    assert made.failure is None
    assert order[-1] == "waited"


# --- the state of a process -------------------------------------------------------------------------------------------


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), float(sys.modules["numpy"].random.rand())]


def test_what_a_process_has_once_is_kept_and_restored():
    assert "numpy" in sys.modules
    before = process_state()
    try:
        first = draw()
        torch.set_default_dtype(torch.float64)
        restore(before)
        assert torch.get_default_dtype() == torch.float32
        assert draw() == first
    finally:
        restore(before)


def test_each_thread_has_the_state_that_it_left(monkeypatch):
    drawn: dict[int, list[float]] = {0: [], 1: []}

    def part(made: Turns, rank: int) -> None:
        torch.manual_seed(rank)
        random.seed(rank)
        for i in range(3):
            drawn[rank] += draw()[:2]
            torch.set_default_dtype((torch.float64, torch.float32)[rank])
            made.changed()
            made.wait(rank, lambda i=i: all(len(each) >= 2 * (i + 1) for each in drawn.values()))
            assert torch.get_default_dtype() == (torch.float64, torch.float32)[rank]

    state = process_state()
    try:
        made, _ = play(part, part)
        assert made.failure is None
        for rank in range(2):
            torch.set_default_dtype(torch.float32)
            torch.manual_seed(rank)
            random.seed(rank)
            alone = draw()[:2]
            assert drawn[rank][:2] == alone
    finally:
        restore(state)


def test_the_generators_of_gpus_are_part_of_it(monkeypatch):
    held = ["here"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(held))
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda state: held.__setitem__(slice(None), state))
    state: Sequence[Any] = process_state()
    held[0] = "there"
    restore(list(state))
    assert held == ["here"]
