"""How a rank leaves: what it says and returns, how it finds the rank that failed first; requests that ranks share."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

import mpcore as mp
from mpcore.tools.fault_tolerance.leave import leave_together
from mpcore.tools.fault_tolerance.signals import SharedRequests, StopSignals
from tests.pool import on_ranks

module: Any = importlib.import_module("mpcore.tools.fault_tolerance.leave")  # the package has a function of this name


@pytest.fixture
def lines() -> Any:
    """The lines of the log."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    module.log.addHandler(handler)
    yield said
    module.log.removeHandler(handler)


@pytest.fixture(autouse=True)
def usual_signal() -> Any:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def rank(number: int, size: int = 4, store: Any = None, **options: Any) -> leave_together:
    together = leave_together(mp.Mesh(), **options)
    together.rank, together.size, together.store = number, size, store or dist.HashStore()
    return together


def leaves(together: leave_together, error: BaseException) -> int:
    """The exit status with which a rank leaves for an error."""
    with pytest.raises(SystemExit) as found:
        together.__exit__(type(error), error, None)
    return found.value.code  # type: ignore[return-value]


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as found:
        return found


STORED = [  # of an error: its exit status, what the store says, and the last line of the log
    (LookupError("lost"), 1, "failed first: LookupError: lost", "LookupError: lost"),
    (KeyboardInterrupt(), 130, "was interrupted", None),
    (SystemExit(3), 3, "left with exit status 3", None),
    (SystemExit(0), 1, "left before the end, with exit status 0", "left before the end, which is a failure"),
    (SystemExit(None), 1, "left before the end, with exit status 0", "left before the end, which is a failure"),
    (SystemExit("no more"), 1, "left: no more", "no more"),
    (SystemExit("rank 2: no more"), 1, "left: rank 2: no more", "no more"),
]


@pytest.mark.parametrize(("error", "status", "cause", "line"), STORED, ids=repr)
def test_a_failed_rank_says_why_and_tells_the_store_if_it_is_the_first(monkeypatch, lines, error, status, cause, line):
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    together = rank(2)
    assert leaves(together, raised(error)) == status
    assert together.over.is_set()
    assert together.store.get("mpcore/cause").decode() == f"rank 2 {cause}"
    assert together.store.check(["mpcore/left/2"])
    assert [text.rstrip().splitlines()[-1] for text in lines] == ([] if line is None else [line])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    lines.clear()
    other = rank(3, store=together.store)
    assert leaves(other, raised(error)) == status
    assert other.store.get("mpcore/cause").decode() == f"rank 2 {cause}", "the first one's stays"


def test_a_traceback_goes_to_the_folder_or_to_the_log(monkeypatch, lines, tmp_path):
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    error = raised(LookupError("lost"))
    leaves(rank(1), error)
    assert lines[0].startswith(f"failed on {socket.gethostname()}: Traceback (most recent call last):\n")
    assert lines[0].endswith("\nLookupError: lost")
    folder = tmp_path / "deep" / "er"
    for _ in range(2):  # also into a folder that is there
        leaves(rank(1, folder=folder), error)
        assert lines.pop() == f"failed on {socket.gethostname()}: LookupError: lost (details: {folder / 'rank1.txt'})"
    assert (folder / "rank1.txt").read_text().startswith("Traceback (most recent call last):\n")
    leaves(rank(1, folder="/dev/null/no"), error)
    assert lines[-1].startswith(f"failed on {socket.gethostname()}: Traceback"), "it couldn't be written"


def test_one_rank_of_a_host_prints_what_several_say(monkeypatch, lines):
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    store = dist.HashStore()
    for number in range(3):
        leaves(rank(number, store=store), raised(LookupError("lost")))
    assert len(lines) == 1
    leaves(rank(3, store=store), raised(LookupError("other")))
    assert len(lines) == 2


class Broken:
    """A store whose host is gone."""

    def __getattr__(self, name: str) -> Any:
        def ask(*_: object) -> None:
            raise RuntimeError("Connection reset by peer")

        return ask


def test_without_the_store_a_rank_still_leaves_with_its_own_words(monkeypatch, lines):
    alarms = []
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(module, "end_after", lambda *given: alarms.append(given) or threading.Timer(9, print))
    assert leaves(rank(1, store=Broken()), raised(LookupError("lost"))) == 1
    assert lines.pop().endswith("LookupError: lost")
    assert alarms == []
    assert leaves(rank(1, store=Broken(), grace=0.5), raised(RuntimeError("Connection reset by peer"))) == 70
    assert lines == ["stopped, because rank 0, or the host that keeps the store of the run, is gone"]
    line = "stopped, because the store of the run gives no answer: its host is down, or the link to it is cut"
    assert alarms == [(3.0, line, 70)]
    rank(0, store=Broken())._watch()  # it ends in silence


def test_a_rank_whose_peer_failed_names_the_first_and_leaves_with_70(monkeypatch, lines):
    monkeypatch.setattr(module, "end_after", lambda *given: threading.Timer(9, print))
    store = dist.HashStore()
    store.set("mpcore/cause", "rank 3 failed first: why")
    error = ValueError("the save failed")
    error.__cause__ = RuntimeError("Connection closed by peer [127.0.0.1]:9")
    assert leaves(rank(0, store=store), raised(error)) == 70
    assert lines == ["stopped, because rank 3 failed first: why"]
    assert store.check(["mpcore/left/0"])


@pytest.fixture
def clock(monkeypatch) -> list:
    """The seconds that were slept, on a clock that nothing else moves."""
    slept: list = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    monkeypatch.setattr(module.time, "monotonic", lambda: sum(slept))
    return slept


def test_one_rank_finds_who_gives_no_answer_and_the_others_wait_for_it(clock):
    store = dist.HashStore()
    store.set("mpcore/alive/1", "")
    store.set("mpcore/left/3", "")
    assert rank(0, 5, store, grace=1.0)._ask() == "ranks 2, 4 give no answer: killed, or cut off"
    assert store.get("mpcore/cause") == b"ranks 2, 4 give no answer: killed, or cut off"
    assert clock.count(1.0) == 1
    assert sum(clock) == pytest.approx(2.0, abs=0.021)
    clock.clear()
    assert rank(1, 5, store)._ask() == "ranks 2, 4 give no answer: killed, or cut off"
    assert clock == []
    store.delete_key("mpcore/cause")
    assert rank(3, 5, store, grace=1.0)._ask() == "a rank is gone"  # another one asks, and doesn't answer
    assert sum(clock) == pytest.approx(3.0, abs=0.05)
    one = dist.HashStore()
    assert rank(0, 2, one)._ask() == "rank 1 gives no answer: killed, or cut off"
    for number in range(2):
        one.set(f"mpcore/alive/{number}", "")
    one.delete_key("mpcore/cause")
    one.delete_key("mpcore/asked")
    assert rank(0, 2, one)._ask() == "the network between the ranks failed: all of them are there"


def test_a_rank_that_ended_too_early_is_told_from_a_dead_one(clock):
    store = dist.HashStore()
    rank(2, 3, store).__exit__(None, None, None)
    store.set("mpcore/left/0", "")
    cause = "rank 2 ended before rank 1, without an error: let all ranks take the same number of steps"
    assert rank(1, 3, store)._ask() == cause


def test_a_block_without_an_error_ends_its_thread(monkeypatch):
    monkeypatch.setattr(module, "clone_store", lambda: dist.HashStore())
    mesh = mp.Mesh(job=mp.Axis(2, 1, name="world"))
    with leave_together(mesh, grace=0.2) as together:
        assert together.thread.is_alive()
        assert together.thread.daemon
        assert together.thread.name == "mpcore-leave"
    assert not together.thread.is_alive()
    assert (together.rank, together.size, together.folder) == (1, 2, None)
    alone = leave_together(mp.Mesh())
    assert (alone.store, alone.grace) == (None, 2.0)
    with pytest.raises(LookupError, match="as it was"), alone:
        raise LookupError("as it was")
    assert not alone.thread.is_alive()


@on_ranks(2)
def test_ranks_in_other_steps_or_with_other_requests_are_told_so():
    mesh, step = mp.build_mesh(tp=2), 0
    for wrong in ({"stop": False}, {}):
        wishes = SharedRequests(mesh.world)
        step = 7 if mesh.tp.rank and wrong else 6
        wishes.after_step(step, **(wrong if mesh.tp.rank else {"stop": False}))
        with pytest.raises(ValueError, match="steps 6 and 7" if wrong else r"other requests than \["):
            wishes.after_step(9, stop=False)
        dist.barrier()
    for count in (16, 17, 17 + mesh.tp.rank):
        wishes, mine = SharedRequests(mesh.world), {f"wish {i:02}": i == 15 for i in range(count)}
        wishes.after_step(1, **mine)
        if count == 16:
            assert wishes.after_step(2, **mine) == {"wish 15"}
            continue
        with pytest.raises(ValueError, match=r"after_step got 17 keywords, and a message has 16|other requests than"):
            wishes.after_step(2, **mine)
    wishes = SharedRequests(mesh.world)
    wishes.after_step(1, save=True, stop=False)
    assert wishes.after_step(2, stop=False) == {"save"}, "requests keep their names if the next step has others"


def test_a_block_leaves_a_handler_that_another_set():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.asked
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as leave_together does
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_with_a_handler_of_its_own_does_not_stop_the_run(monkeypatch):
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    before = signal.signal(signal.SIGWINCH, lambda *_: None)
    with StopSignals(leave_with=75) as stop:
        os.kill(os.getpid(), signal.SIGWINCH)
        time.sleep(0.3)
    signal.signal(signal.SIGWINCH, before)
    assert (left, stop.asked) == ([], False)
