"""When a watchdog fires, what it writes and says, and whom it waits for: without a process that ends."""

from __future__ import annotations

import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpcore as mp
from mpcore.tools.fault_tolerance import watchdog as module
from mpcore.tools.fault_tolerance.trace import Log, explain
from mpcore.tools.fault_tolerance.watchdog import EXIT_CODE, Watchdog


def log(rank: int) -> Log:
    return Log(rank, {}, [], f"rank{rank}.py:1")


def alone(**options: Any) -> Watchdog:
    return Watchdog(mp.Mesh(), **options)


def job(rank: int, size: int, monkeypatch: pytest.MonkeyPatch, store: Any, **options: Any) -> Watchdog:
    monkeypatch.setattr(module, "clone_store", lambda: store)
    return Watchdog(mp.Mesh(job=mp.Axis(size, rank, name="world")), **options)


@pytest.mark.parametrize(("timeout", "polls"), [(0.4, 0.1), (4.0, 1.0), (4000.0, 1.0)])
def test_it_looks_four_times_in_the_timeout_and_at_least_every_second(monkeypatch, timeout, polls):
    watch, now, waits, did = alone(timeout=timeout), [0.0], [], []
    watch.last = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        now[0] += timeout / 2 if len(waits) != 2 else timeout / 2 * 1.0001
        return bool(did)

    monkeypatch.setattr(watch.over, "wait", wait)
    monkeypatch.setattr(watch, "_report", lambda: did.append("report"))
    monkeypatch.setattr(module.os, "_exit", lambda status: did.append(status))
    watch._watch()
    assert did == ["report", EXIT_CODE]
    assert waits == [polls] * 3, "not yet after exactly the timeout"


def test_a_beat_starts_the_time_anew_and_the_end_of_the_block_ends_the_thread():
    watch = alone(timeout=50.0)
    watch.last = 0.0
    with watch:
        assert abs(time.monotonic() - watch.last) < 20
        assert watch.thread.daemon
        assert watch.thread.is_alive()
        assert watch.thread.name == "mpcore-watchdog"
        watch.last = 0.0
        watch.beat()
        assert abs(time.monotonic() - watch.last) < 20
    watch.thread.join(10)
    assert not watch.thread.is_alive()
    usual = alone()
    assert (usual.timeout, usual.grace, usual.folder, usual.store) == (600.0, 3.0, None, None)
    assert usual.watched == threading.get_ident()


@pytest.mark.parametrize("wrong", [{"timeout": 0.0}, {"timeout": -1.0}, {"grace": 0.0}, {"grace": -2.0}])
def test_times_that_are_none_are_refused(wrong):
    given = {"timeout": 600.0, "grace": 3.0, **wrong}
    with pytest.raises(ValueError, match=f"timeout {given['timeout']} s and grace {given['grace']} s must be more"):
        alone(**wrong)


@pytest.fixture
def reported(monkeypatch) -> Any:
    """Report on a rank whose log, store and clock are given. Returns the lines, the alarms and the pauses."""

    def report(watch: Watchdog, others: tuple[Log, ...] = ()) -> tuple[list[str], list[tuple], list[float]]:
        said, alarms, slept = [], [], []
        mine = log(watch.mesh.job.rank)
        asked = (watch.mesh, watch.model, watch.watched)
        monkeypatch.setattr(module, "read_log", lambda *given: mine if given == asked else pytest.fail(str(given)))
        monkeypatch.setattr(module, "end_after", lambda *given: alarms.append(given))
        monkeypatch.setattr(module.time, "sleep", slept.append)
        monkeypatch.setattr(watch, "_exchange", lambda own: [own, *others])
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        module.log.addHandler(handler)
        try:
            watch._report()
        finally:
            module.log.removeHandler(handler)
        return said, alarms, slept

    return report


def test_the_lowest_rank_that_answers_explains_and_every_rank_writes_its_log(reported, tmp_path, monkeypatch):
    store = dist.HashStore()
    model = torch.nn.Linear(2, 2)
    for rank, others, speaks in ((0, (log(1),), True), (1, (), True), (1, (log(2),), True), (1, (log(0),), False)):
        folder = tmp_path / "deep" / f"{rank}{len(others)}"
        watch = job(rank, 3, monkeypatch, store, model=model, timeout=12.5, folder=folder, grace=2.0)
        said, alarms, slept = reported(watch, others)
        text = explain([log(rank), *others], 3)
        assert said == ([f"no progress for 12.5 s: {text}"] if speaks else [])
        assert (folder / f"rank{rank}.json").read_text() == log(rank).to_json()
        line = (
            "no progress for 12.5 s: the store of the run gives no answer: its host is down, or the link to it is cut"
        )
        assert alarms == [(7.0, line, EXIT_CODE)]
        assert slept == [0.2]
    said, alarms, _ = reported(alone(folder=tmp_path))
    assert (len(said), alarms) == (1, [])
    reported(alone(folder=tmp_path))  # a folder that is there
    assert {path.name for path in tmp_path.iterdir()} == {"deep", "rank0.json"}


def test_logs_are_exchanged_until_all_are_there_or_the_grace_is_over(monkeypatch):
    store, now, slept = dist.HashStore(), [100.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds
        if len(slept) == 2:
            store.set("mpcore/trace/2", log(2).to_json())

    monkeypatch.setattr(module.time, "sleep", sleep)
    store.set("mpcore/trace/0", log(0).to_json())
    watch = job(1, 3, monkeypatch, store, grace=0.99)
    assert [each.rank for each in watch._exchange(log(1))] == [1, 0, 2]
    assert slept == [0.05] * 3
    assert Log.from_json(store.get("mpcore/trace/1").decode()) == log(1)
    slept.clear()
    assert [each.rank for each in job(1, 4, monkeypatch, store, grace=0.99)._exchange(log(1))] == [1, 0, 2]
    assert len(slept) == 20, "of 0.05 s, in 0.99 s"
    slept.clear()
    assert alone()._exchange(log(0)) == [log(0)]
    assert slept == []

    def gone(*_: object) -> None:
        raise RuntimeError("connection reset")

    for name in ("set", "check", "get"):
        broken = SimpleNamespace(set=store.set, check=store.check, get=store.get, **{})
        setattr(broken, name, gone)
        assert [each.rank for each in job(1, 4, monkeypatch, broken)._exchange(log(1))] == [1]
