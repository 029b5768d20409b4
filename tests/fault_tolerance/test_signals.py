"""Requests through a store, and signals, without a process that ends."""

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
from mpcore.tools.fault_tolerance.signals import SharedRequests, StopSignals
from tests.pool import on_ranks


@on_ranks(2)
def test_ranks_in_other_steps_or_with_other_requests_are_told_so():
    mesh, step = mp.build_mesh(tp=2), 0
    for wrong in ({"stop": False}, {}):
        wishes = SharedRequests(mesh.world)
        step = 7 if mesh.tp.rank and wrong else 6
        wishes.after_step(step, **(wrong if mesh.tp.rank else {"stop": False}))
        with pytest.raises(ValueError, match="steps 6 and 7" if wrong else r"other requests than \['stop'\]"):
            wishes.after_step(9, stop=False)
        dist.barrier()


def test_a_process_alone_asks_no_store_and_is_told_at_once(monkeypatch):
    for alone in (mp.Axis(), mp.Axis(1, 0, SimpleNamespace(group_name="g", size=lambda: 1)), mp.Axis(3, 1)):  # type: ignore[arg-type]
        assert SharedRequests(alone).after_step(4, stop=True, save=False) == {"stop"}


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
