"""The pool of ranks: what a call's time is, and what is said of ranks that never come."""

from __future__ import annotations

import atexit
import functools
import gc
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mpcore.tools.verify import pool as pool_module
from mpcore.tools.verify import what_happened
from tests.pool import Pool, RankError, RepeatingPool


def slow() -> None:
    time.sleep(2.0)


def die() -> None:
    os._exit(3)


def test_a_calls_time_begins_when_all_ranks_have_started():
    pool = Pool(1, prepare=slow)
    try:
        assert pool(1, os.getpid, timeout=1.8) == [process.pid for process, _ in pool.workers]
        with pytest.raises(RankError, match=r"still running when the time was over\n  .*\n    File .* in slow\n"):
            pool(1, slow, timeout=0.1)
    finally:
        pool.stop()


def test_what_the_ranks_parent_froze_is_collected_when_it_exits():
    """Otherwise Triton 3.9 lists its objects there, after the last line of `mpcore verify`."""
    with (
        mock.patch.object(atexit, "register") as register,
        mock.patch.object(gc, "freeze") as freeze,
        mock.patch.object(pool_module, "mesh_caches", return_value=["cache"]),
    ):
        assert pool_module.imported_caches.__wrapped__() == ["cache"]
    freeze.assert_called_once_with()
    register.assert_called_once_with(gc.unfreeze)


def test_more_ranks_than_the_pool_has_are_refused():
    with pytest.raises(ValueError, match="3 ranks of a pool of 2: make it with most=3"):
        Pool(2)(3, print)


def test_ranks_that_die_as_they_start_are_told_of():
    with pytest.raises(RankError, match="a rank died as it started"):
        Pool(1, prepare=die)(1, os.getpid)


def rank_1_is_killed() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def test_the_signal_that_killed_a_rank_is_named_before_its_peers_broken_connection(ranks):
    with pytest.raises(RankError) as told:
        ranks(2, rank_1_is_killed)
    assert "rank 0" in str(told.value)
    assert what_happened(str(told.value), 1.0) == "rank 1: the process died (SIGKILL)"
    aborted = what_happened("--- rank 2 of 4\nthe process died (SIGABRT)\n--- rank 3 of 4\nRuntimeError: closed")
    assert re.fullmatch(r"rank 2: the process died \(SIGABRT\)\. Gloo aborts .* in the same order", aborted)


def abort(times: int, folder: Path) -> int:
    """Abort in the first calls; the next returns how many there were."""
    calls = len(list(folder.iterdir()))
    (folder / str(calls)).touch()
    if calls < times:
        os.abort()
    return calls


@pytest.mark.parametrize("times", [1, 2])
def test_a_call_is_repeated_once_after_a_crash_in_native_code(tmp_path, monkeypatch, times):
    monkeypatch.setattr("tests.pool.CRASHES", told := [])
    pool = RepeatingPool(1)
    try:
        if times == 1:
            assert pool(1, abort, times, tmp_path) == [1]
        else:
            with pytest.raises(RankError, match=r"died \(SIGABRT\)"):
                pool(1, abort, times, tmp_path)
    finally:
        pool.stop()
    assert len(told) == 1
    assert "SIGABRT in tests/test_pool.py::test_a_call_is_repeated" in told[0]


def end_the_world() -> int:
    dist.destroy_process_group()
    return dist.get_world_size() if dist.is_initialized() else 0


@pytest.mark.parametrize("size", [1, 2])
def test_a_call_after_one_that_ended_its_world_has_another(ranks, size):
    assert ranks(size, end_the_world) == [0] * size
    assert ranks(size, dist.get_world_size) == [size] * size
    worlds = ranks.worlds
    assert ranks(size, dist.get_world_size) == [size] * size
    assert ranks.worlds == worlds, "the next call stays in its world"


# --- the protocol, without a process ----------------------------------------------------------------------------------


class Process:
    """A process that ends when it is killed."""

    def __init__(self, exitcode: int | None = None) -> None:
        self.exitcode, self.pid, self.calls = exitcode, os.getpid(), []

    def __getattr__(self, name: str) -> Callable:
        return lambda *given: self.calls.append((name, *given))


def answered(pool: Pool, answers: Callable[[int], Any]) -> tuple[list, list[Process]]:
    """Give a pool workers that answer each call by their number, or close. Returns what they are asked."""
    asked: list = []
    processes = []
    for number in range(pool.most + (pool.most > 1)):
        ours, theirs = multiprocessing.Pipe()

        def serve(number: int = number, theirs: Any = theirs) -> None:
            with suppress(EOFError, OSError):
                while True:
                    asked.append((number, *theirs.recv()))
                    answer = answers(number)
                    theirs.send(answer) if answer is not None else theirs.close()

        processes.append(Process(exitcode=-9))
        pool.workers.append((processes[-1], ours))
        threading.Thread(target=serve, daemon=True).start()
    pool.worlds = pool.lone = 5
    pool.store = SimpleNamespace(port=77)
    return asked, processes


WORLDS = [  # the ranks of a call, whether they leave their world, and its name
    (1, True, "5"), (2, True, "6"), (2, True, "6"), (1, True, "5"), (2, True, "6"), (3, True, "7"), (2, True, "8"),
    (2, False, "8"), (2, True, "9"), (1, False, "5"), (1, True, "10"), (2, True, "9"), (1, True, "10"), (3, True, "11"),
]  # fmt: skip


def test_each_number_of_ranks_has_a_world_until_a_call_ends_it():
    pool, there = Pool(3), []
    asked, _ = answered(pool, lambda number: (True, f"from {number}", there[-1]))
    for size, stays, world in WORLDS:
        asked.clear()
        there.append(stays)
        numbers = range(size) if size > 1 else [3]  # a rank alone has a process of its own
        assert pool(size, len, "a", key=1) == [f"from {number}" for number in numbers]
        assert sorted(asked) == [
            (number, rank, size, (77, world), len, ("a",), {"key": 1}) for rank, number in enumerate(numbers)
        ]
    pool.workers.clear()


def test_a_pool_of_one_has_one_process():
    pool = Pool(1)
    processes = answered(pool, lambda number: (True, number, True))[1]
    assert len(processes) == 1
    assert pool(1, len) == [0]
    pool.workers.clear()


def test_every_rank_that_failed_or_died_is_told_in_order_and_the_processes_end(monkeypatch):
    pool = Pool(3)
    _, processes = answered(
        pool, lambda number: {0: (True, 1, True), 1: None, 2: (False, "its traceback", True)}[number]
    )
    with pytest.raises(RankError) as told:
        pool(3, len)
    assert str(told.value) == "--- rank 1 of 3\nthe process died (SIGKILL)\n--- rank 2 of 3\nits traceback"
    assert (pool.workers, pool.size, pool.store) == ([], 0, None)
    for process in processes:
        assert [name for name, *_ in process.calls if name in ("kill", "join")][-2:] == ["kill", "join"]


def test_after_a_failure_the_others_have_the_grace_and_no_more(monkeypatch):
    monkeypatch.setattr(pool_module.os, "kill", lambda *_: None)
    for grace, said in ((0.05, pool_module.LATE), (30.0, "")):
        pool = Pool(2, grace=grace)
        path = pool_module._stack_file(pool.folder.name, os.getpid())
        path.write_text("where it is\n")

        def answer(number: int) -> tuple:
            time.sleep(0.3 * number)
            return (bool(number), "lost", True)

        answered(pool, answer)
        began = time.monotonic()
        with pytest.raises(RankError, match="--- rank 0 of 2\nlost") as told:
            pool(2, len, timeout=60.0)
        assert time.monotonic() - began < 20
        assert str(told.value).partition("--- rank 1 of 2\n")[2] == (f"{said}\n  where it is\n" if said else "")


def test_how_a_process_ended_is_read_from_its_status():
    for status, said in ((-9, " (SIGKILL)"), (-11, " (SIGSEGV)"), (3, ""), (0, ""), (None, "")):
        process = Process(status)
        assert pool_module._death(process) == pool_module.DIED + said
        assert process.calls == [("join", pool_module.GRACE_S)]


class Context:
    """A context of `multiprocessing` whose processes are there at once, or end as they start."""

    def __init__(self, first: Callable[[Any], None]) -> None:
        self.first, self.made, self.pipes = first, [], []

    def set_forkserver_preload(self, names: list[str]) -> None:
        self.preload = names

    def Pipe(self) -> tuple:  # noqa: N802  (as of multiprocessing)
        self.pipes.append(multiprocessing.Pipe())
        return self.pipes[-1]

    def Process(self, **how: Any) -> Process:  # noqa: N802
        self.made.append(how)
        self.first(how["args"][0])
        return Process()


@pytest.mark.parametrize(("most", "count"), [(1, 1), (2, 3), (4, 5)])
def test_a_pool_starts_its_processes_and_one_for_a_rank_alone(monkeypatch, most, count):
    context = Context(lambda connection: connection.send(True))
    asked = []
    monkeypatch.setattr(pool_module.mp, "get_context", lambda start: asked.append(start) or context)
    pool = Pool(most, slow, ("json",), start="spawn")
    pool.worlds = 3
    pool._start()
    assert asked == ["spawn"]
    assert context.preload == ["torch", "torch.distributed", "mpcore", "json", "mpcore.tools.verify.preloaded"]
    assert len(pool.workers) == len(context.made) == count
    assert (pool.lone, pool.worlds, pool.size) == (4, 4, 0)
    for how, (ours, theirs), (process, connection) in zip(context.made, context.pipes, pool.workers, strict=True):
        assert how == {"target": pool_module._work, "args": (theirs, slow, pool.folder.name), "daemon": True}
        assert process.calls == [("start",)]
        assert connection is ours
        assert theirs.closed, "or the pool would never hear of the end of a process"
    store = dist.TCPStore("127.0.0.1", pool.store.port, wait_for_workers=False)
    store.set("there", "yes")
    assert pool.store.get("there") == b"yes"


@pytest.mark.parametrize("first", [lambda connection: connection.send(False), lambda connection: connection.close(),
                                   lambda connection: None], ids=["False", "closed", "late"])  # fmt: skip
def test_a_process_that_is_not_there_in_time_ends_all(monkeypatch, first):
    context = Context(first)
    monkeypatch.setattr(pool_module.mp, "get_context", lambda start: context)
    monkeypatch.setattr(pool_module, "START_S", 0.05)
    monkeypatch.setattr(pool_module.dist, "TCPStore", pytest.fail)
    pool = Pool(2)
    with pytest.raises(RankError, match="a rank died as it started, or was not there after 0 seconds"):
        pool._start()
    assert pool.workers == []


@pytest.fixture
def worker(monkeypatch) -> Callable:
    """Run `_work` on some calls: what it answers, and what it asks of torch.distributed."""
    told: list = []
    monkeypatch.setattr(pool_module.faulthandler, "register", lambda *given: told.append(("register", given[0])))
    monkeypatch.setattr(pool_module.dist, "TCPStore", lambda *given, **how: told.append(("store", *given, how)) or "at")
    monkeypatch.setattr(pool_module.dist, "PrefixStore", lambda *given: given)
    monkeypatch.setattr(pool_module, "imported_caches", lambda: ["imported"])
    monkeypatch.setattr(pool_module, "mesh_caches", lambda: ["made"])
    monkeypatch.setattr(pool_module, "forget_meshes", lambda caches: told.append(("forget", caches)))
    running = [False]

    def begin(backend: str, **how: Any) -> None:
        running[0] = True
        told.append(("init", backend, how))

    def end() -> None:
        running[0] = False
        told.append(("destroy",))

    monkeypatch.setattr(pool_module.dist, "init_process_group", begin)
    monkeypatch.setattr(pool_module.dist, "destroy_process_group", end)
    monkeypatch.setattr(pool_module.dist, "is_initialized", lambda: running[0])
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_GLOO_LAZY_INIT"):
        monkeypatch.setenv(name, "")

    def run(calls: list, folder: str) -> tuple[list, list]:
        ours, theirs = multiprocessing.Pipe()
        for call in calls:
            ours.send(call)
        answers: list = []
        thread = threading.Thread(target=pool_module._work, args=(theirs, None, folder), daemon=True)
        thread.start()
        for _ in range(len(calls) + 1):
            answers.append(ours.recv())
        ours.close()
        thread.join(10)
        assert not thread.is_alive(), "a worker whose pool is gone ends"
        return answers, told

    return run


def draws() -> float:
    return torch.rand(()).item()


def fails() -> None:
    raise LookupError("lost")


def test_a_worker_joins_a_world_when_its_name_changes_and_draws_the_same_numbers_in_each_call(worker, tmp_path):
    calls = [(2, 3, (77, name), check, (), {}) for name, check in (("5", draws), ("5", draws), ("6", fails))]
    answers, told = worker(calls, str(tmp_path))
    torch.manual_seed(0)
    number = draws()
    assert answers[:3] == [True, (True, number, True), (True, number, True)]
    assert answers[3][0::2] == (False, True)
    assert answers[3][1].endswith("LookupError: lost\n")
    assert "in fails" in answers[3][1]
    store = ("store", "127.0.0.1", 77, {"wait_for_workers": False})
    init = [("init", "gloo", {"store": (name, "at"), "rank": 2, "world_size": 3}) for name in "56"]
    assert told == [
        ("register", signal.SIGUSR2), store, init[0], ("destroy",), ("forget", ["imported", "made"]), store, init[1],
    ]  # fmt: skip
    assert (os.environ["TORCH_FR_BUFFER_SIZE"], os.environ["TORCH_GLOO_LAZY_INIT"]) == ("256", "1")


def test_a_mesh_is_made_once_for_its_sizes(monkeypatch):
    monkeypatch.setattr(pool_module, "_mesh", functools.cache(pool_module._mesh.__wrapped__))
    made = []
    monkeypatch.setattr(pool_module, "build_mesh", lambda **sizes: made.append(sizes) or len(made))
    assert [pool_module.mesh(tp=2, dp=3), pool_module.mesh(dp=3, tp=2), pool_module.mesh(tp=3)] == [1, 1, 2]
    assert made == [{"device_type": "cpu", "tp": 2, "dp": 3}, {"device_type": "cpu", "tp": 3}]
    monkeypatch.setattr(pool_module, "simulated_rank", lambda: 0)
    assert pool_module.mesh(tp=3, device_type="cuda") == 3
    assert made[2] == {"device_type": "cuda", "tp": 3}
