"""Wishes through a store, and signals, without a process that ends."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import mpcore as mp
from mpcore.tools.fault_tolerance import signals
from mpcore.tools.fault_tolerance.signals import StopSignals, Wishes


def wishes(store: Any, rank: int, size: int = 3, name: str = "g") -> Wishes:
    group: Any = SimpleNamespace(group_name=name, size=lambda: size)
    return Wishes(mp.Axis(size, rank, group))


@pytest.fixture
def store(monkeypatch) -> dist.HashStore:
    made = dist.HashStore()
    monkeypatch.setattr(signals, "default_store", lambda: made)
    return made


def test_wishes_of_any_rank_are_granted_on_all_after_the_next_step_and_no_other(store):
    ranks = [wishes(store, rank) for rank in range(3)]
    asked = {2: [{"stop"}, set(), {"save"}], 3: [set(), {"stop"}, set()], 6: [set(), set(), {"eval"}]}
    granted = {3: {"stop", "save"}, 4: {"stop"}, 7: {"eval"}}
    for step in range(1, 9):
        for rank, each in enumerate(ranks):
            mine = dict.fromkeys(("stop", "save", "eval"), False)
            mine |= dict.fromkeys(asked.get(step, [set()] * 3)[rank], True)
            assert each.after_step(step, **mine) == granted.get(step, set())


def test_a_rank_that_does_not_ask_for_a_wish_is_not_told_of_it(store):
    one, other = wishes(store, 0), wishes(store, 1)
    one.after_step(1, stop=True)
    assert other.after_step(2, save=False) == set()
    assert other.after_step(2, save=False, stop=False) == {"stop"}


def test_runs_and_groups_have_wishes_of_their_own(store):
    first, second, group = wishes(store, 0), wishes(store, 0), wishes(store, 0, name="h")
    assert [each.name for each in (first, second, group)] == [
        "mpcore/wishes/g/run 1", "mpcore/wishes/g/run 2", "mpcore/wishes/h/run 1",
    ]  # fmt: skip
    assert wishes(store, 1).name == first.name, "each rank counts its own"
    first.after_step(1, stop=True)
    assert second.after_step(2, stop=False) == group.after_step(2, stop=False) == set()
    assert first.after_step(2, stop=False) == {"stop"}


def test_a_process_alone_asks_no_store_and_is_told_at_once(monkeypatch):
    monkeypatch.setattr(signals, "default_store", pytest.fail)
    for alone in (mp.Axis(), mp.Axis(1, 0, SimpleNamespace(group_name="g", size=lambda: 1)), mp.Axis(3, 1)):  # type: ignore[arg-type]
        assert Wishes(alone).after_step(4, stop=True, save=False) == {"stop"}


class LeftError(Exception):
    """The process would have ended, with this status."""


@pytest.fixture
def listened(monkeypatch) -> Any:
    """What a `StopSignals` does with signals at these times: its statuses of the end, and its lines."""

    def listen(*numbers_at: tuple[int, float], **options: Any) -> tuple[list, list[str]]:
        stop, ends, said = StopSignals(**options), [], []
        now = iter([at for _, at in numbers_at] + [0.0] * 9)
        monkeypatch.setattr(signals.time, "monotonic", lambda: next(now))

        def leave(status: int) -> None:
            ends.append(status)
            raise LeftError

        monkeypatch.setattr(signals.os, "_exit", leave)
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        signals.log.addHandler(handler)
        stop._read, write = socket.socketpair()
        write.send(bytes(number for number, _ in numbers_at))
        write.close()
        try:
            stop._listen()
        except LeftError:
            pass
        finally:
            signals.log.removeHandler(handler)
        return ends, said

    return listen


INT, TERM, ONCE = signal.SIGINT, signal.SIGTERM, "stopping after this step; ctrl-C again leaves at once"


def test_a_second_interrupt_ends_the_process_if_it_comes_late_enough(listened):
    assert listened((INT, 5.0)) == ([], [ONCE])
    for later, ends in ((0.5, []), (0.9, []), (1.1, [130])):
        assert listened((INT, 5.0), (INT, 5.0 + later)) == (ends, [ONCE])
        assert listened((INT, 5.0), (INT, 5.0 + 3 * later), apart=3.0) == (ends, [ONCE])
    assert listened((INT, 5.0), (INT, 5.4), (INT, 5.9)) == ([], [ONCE])
    assert listened((INT, 5.0), (INT, 5.4), (INT, 6.1)) == ([130], [ONCE]), "the time counts from the first"
    assert listened((TERM, 5.0), (signal.SIGUSR1, 9.0)) == ([], [])


@pytest.mark.parametrize(("number", "status"), [(INT, 130), (TERM, 75), (signal.SIGUSR1, 75)])
def test_before_there_is_something_to_save_any_signal_ends_the_process(listened, number, status):
    said = [f"left on {signal.Signals(number).name} before the first step: nothing to save"]
    assert listened((number, 5.0), leave_with=75) == ([status], said)
    assert listened((number, 5.0), leave_with=0) == ([130 if number == INT else 0], said)


def test_a_block_gives_back_every_handler_that_is_still_its_own():
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    wake = socket.socketpair()
    wake[1].setblocking(False)
    old = signal.set_wakeup_fd(wake[1].fileno(), warn_on_full_buffer=False)
    try:
        with StopSignals() as stop:
            assert (stop.asked, stop.apart, stop.leave_with) == (False, 1.0, None)
            assert [signal.getsignal(number) for number in numbers] == [stop._ask] * 3
            (thread,) = [each for each in threading.enumerate() if each.name == "mpcore-signals"]
            assert thread.daemon
            assert not stop._write.getblocking()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as leave_together does
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        assert [signal.getsignal(number) for number in numbers[1:]] == [before[number] for number in numbers[1:]]
        assert signal.set_wakeup_fd(-1) == wake[1].fileno()
        thread.join(5)
        assert not thread.is_alive(), "the thread ends with the block"
    finally:
        signal.signal(signal.SIGTERM, before[signal.SIGTERM])
        signal.set_wakeup_fd(old)
