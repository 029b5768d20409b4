"""Simulated ranks: sizes, names, lines and logs, by hand."""

from __future__ import annotations

import io
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mpcore as mp
from mpcore.collectives import all_reduce
from mpcore.mesh.build import build_mesh
from mpcore.tools.simulation import DeadlockError, RankError, ranks, simulate
from mpcore.tools.simulation.ranks import _Marked, _module_names, _name_of, _outside, _running_modules


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        ({}, {}),
        ({"tp": 2}, {"tp": 2}),
        ({"tp": 2, "cp": 3}, {"tp": 2, "cp": 3}),
        ({"ep": 3}, {"ep": 3, "dp": 3}),  # the smallest dp that fits
        ({"ep": 2, "tp": 2}, {"ep": 2, "tp": 2, "dp": 2, "etp": 2}),
        ({"ep": 2, "tp": 2, "mesh": {"etp": 1}}, {"ep": 2, "tp": 2, "dp": 1, "etp": 1}),
        ({"ep": 4, "cp": 2}, {"ep": 4, "cp": 2, "dp": 2}),
        ({"ep": 6, "cp": 4}, {"ep": 6, "cp": 4, "dp": 3}),
        ({"ep": 2, "pp": 2, "dp": 4}, {"ep": 2, "pp": 2, "dp": 4}),
        ({"cp": 4, "mesh": {"cp_inner": 2}}, {"cp": 4}),
    ],
)
def test_the_mesh_has_the_sizes_that_are_given_and_the_least_dp_that_they_need(sizes, axes):
    def look(mesh: mp.Mesh) -> dict[str, int]:
        assert mesh.device.type == "cpu"
        return {name: getattr(mesh, name).size for name in ("tp", "cp", "pp", "ep", "dp", "etp", "world")}

    found = simulate(look, **sizes)
    want = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "dp": 1} | axes
    world = want["tp"] * want["cp"] * want["pp"] * want["dp"]
    want |= {"etp": axes.get("etp", want["tp"]), "world": world}
    assert found == [want] * world


def test_a_function_of_ranks_builds_its_own_mesh_and_gets_its_arguments():
    def own(a: int, b: int) -> tuple[int, int, int, int]:
        mesh = build_mesh(tp=2, device_type="cpu")
        return a, b, mesh.tp.rank, mesh.dp.rank

    assert simulate(own, 7, 8, ranks=4) == [(7, 8, 0, 0), (7, 8, 1, 0), (7, 8, 0, 1), (7, 8, 1, 1)]
    assert simulate(lambda mesh, a: a, 5, tp=2) == [5, 5]


@pytest.mark.parametrize(
    "told", [{"ranks": 2, "dp": 1}, {"ranks": 2, "mesh": {}}, {"ranks": 2, "ep": 2}, {"ranks": -1}]
)
def test_ranks_and_sizes_are_not_given_together(told):
    with pytest.raises(ValueError, match=r"give one of them|ranks -1 is smaller than 1"):
        simulate(lambda *_: None, **told)


@pytest.mark.parametrize("sizes", [{"tp": 0}, {"dp": 0}, {"tp": 2, "ep": 3, "dp": 2}, {"cp": -1}])
def test_sizes_that_make_no_mesh_are_refused_before_any_rank_starts(sizes):
    began = []
    with pytest.raises(ValueError, match=r"\d"):
        simulate(began.append, **sizes)
    assert not began


def test_an_error_names_the_rank_and_its_axes():
    def fails(mesh: mp.Mesh, rank: int) -> None:
        if mesh.world.rank == rank:
            raise ValueError("why")

    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"tp": 2, "cp": 2, "dp": 2, "pp": 2}, 13, r"rank 13 of 16 \(tp 1, cp 0, dp 1, pp 1\)"),
        ({"pp": 3}, 2, r"rank 2 of 3 \(pp 2\)"),
        ({}, 0, "rank 0 of 1"),
    ]
    for sizes, rank, name in cases:
        with pytest.raises(RankError) as error:
            simulate(fails, rank, **sizes)
        said = str(error.value)
        head, _, what = said.partition(": ")
        assert what == "ValueError: why"
        number, _, axes = head.partition(" (")
        assert number == name.partition(r" \(")[0]
        assert sorted(axes.rstrip(")").split(", ")) == sorted(name.partition(r" \(")[2].rstrip(")\\").split(", "))
        assert isinstance(error.value.__cause__, ValueError)


def test_an_interrupt_of_the_caller_stops_the_ranks(monkeypatch):
    ended: list[int] = []

    def work(mesh: mp.Mesh) -> None:
        try:
            all_reduce(torch.ones(1), mesh.tp)
        finally:
            ended.append(mesh.tp.rank)

    waits = threading.Event.wait

    def interrupt(event: Any, timeout: float | None = None) -> bool:
        if timeout is None and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return waits(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        simulate(work, tp=2)
    monkeypatch.undo()
    assert simulate(lambda mesh: 1, tp=2) == [1, 1], "the next one runs"
    assert not dist.is_initialized()


def test_a_debuggers_trace_function_is_that_of_each_rank_and_is_left_behind():
    seen: list[str] = []

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_name == "traced":
            seen.append(threading.current_thread().name)
        return None

    def traced(mesh: mp.Mesh) -> object:
        return sys.gettrace()

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = simulate(traced, tp=2)
    finally:
        sys.settrace(before)
    if before is None:
        assert seen == ["rank 0 of 2", "rank 1 of 2"]
        assert found == [trace, trace]
        assert simulate(traced, tp=2) == [None, None]


def test_a_thread_that_is_no_rank_waits_by_looking_again_and_never_polls(monkeypatch):
    job, looked = ranks._Job(2), []
    slept: list[float] = []
    monkeypatch.setattr(ranks.time, "sleep", slept.append)
    job.wait(lambda: looked.append(1) or len(looked) > 3)
    assert (len(looked), slept) == (4, [0.001] * 3)
    job.wait(lambda: False, polls=True)
    job.turns.fail(1, KeyError())
    job.wait(lambda: False)
    assert len(slept) == 3
    assert job.waits_in == [None, None], "no rank waits"


# --- lines ------------------------------------------------------------------------------------------------------------


def marked(*written: tuple[int | None, str]) -> str:
    stream = io.StringIO()
    out: Any = _Marked(stream)  # type: ignore[arg-type]
    real = ranks.simulated_rank
    try:
        for rank, text in written:
            ranks.simulated_rank = lambda rank=rank: rank  # type: ignore[assignment]
            assert out.write(text) == len(text)
    finally:
        ranks.simulated_rank = real
    return stream.getvalue()


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ([(0, "a\n")], "rank 0: a\n"),
        ([(0, "a\nb\n")], "rank 0: a\nrank 0: b\n"),
        ([(0, "a"), (0, "b\n")], "rank 0: ab\n"),
        ([(0, "a"), (1, "b\n")], "rank 0: a\nrank 1: b\n"),
        ([(0, "a\n"), (1, "b"), (1, "\n")], "rank 0: a\nrank 1: b\n"),
        ([(0, "a"), (1, "b"), (0, "c")], "rank 0: a\nrank 1: b\nrank 0: c"),
        ([(0, ""), (1, "b")], "rank 1: b"),
        ([(0, "\n")], "rank 0: \n"),
        ([(None, "plain"), (None, " text\n")], "plain text\n"),
        ([(2, "a\r\nb")], "rank 2: a\r\nrank 2: b"),
    ],
)
def test_each_line_begins_with_the_rank_that_wrote_it(written, shown):
    assert marked(*written) == shown


def test_lines_and_other_attributes_of_a_stream():
    stream = io.StringIO()
    out: Any = _Marked(stream)  # type: ignore[arg-type]
    out.writelines(["a\n", "b"])
    assert (stream.getvalue(), out.getvalue()) == ("a\nb", "a\nb")


# --- logs -------------------------------------------------------------------------------------------------------------


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Inner()])

    def forward(self, found: list[Any]) -> None:
        found.append([_name_of(_running_modules(sys._getframe()))])
        self.inner[0](found)


class Inner(nn.Module):
    def forward(self, found: list[Any]) -> None:
        running = _running_modules(sys._getframe())
        found.append((running, _name_of(running), _module_names(running)))


def test_running_modules_are_named_in_the_outermost_one():
    model, found = Outer(), []
    model(found)
    running, name, names = found[1]
    assert [type(module) for module in running[:1]] == [Inner]
    assert running[-1] is model
    assert name == ", in inner.0"
    assert names[id(model)] == ""
    assert found[0] == [""], "the model itself has no name"
    assert (_name_of([]), _module_names([]), _running_modules(None)) == ("", {}, [])

    def no_method(self: Any) -> list[nn.Module]:
        other = self
        return _running_modules(sys._getframe()) if other is not None else []

    assert no_method(model)[0] is model, "the first argument of a function that is called self"
    assert _running_modules(sys._getframe()) == []


def test_the_callers_frame_is_outside_of_the_simulation():
    frame = sys._getframe()
    assert _outside(frame) is frame
    assert _outside(None) is None
    assert __file__.startswith(ranks._HERE) is False
    inside: list[Any] = []
    threading.Thread(target=lambda: inside.append(sys._getframe().f_back)).run()
    assert inside[0].f_code.co_filename == threading.__file__
    assert _outside(inside[0]) is frame


def test_a_deadlock_lists_the_calls_of_a_group_by_the_name_of_its_axis():
    def work(mesh: mp.Mesh) -> None:
        all_reduce(torch.ones(2), mesh.dp)
        dist.all_reduce(torch.ones(3))
        if mesh.dp.rank == 0:
            all_reduce(torch.ones(4), mesh.dp)

    with pytest.raises(DeadlockError) as error:
        simulate(work, dp=2)
    said = str(error.value)
    assert said.startswith("no rank can go on: ")
    assert "rank 0 entered all_reduce(dp) of [4] float32" in said
    assert "the end of its function" in said


def test_only_the_last_collectives_are_kept_of_a_rank(monkeypatch):
    monkeypatch.setattr(ranks, "_KEPT", 3)
    jobs: list[Any] = []
    real = ranks._Job
    monkeypatch.setattr(ranks, "_Job", lambda size: jobs.append(real(size)) or jobs[-1])

    def work(mesh: mp.Mesh) -> None:
        for i in range(5):
            all_reduce(torch.ones(i + 1), mesh.tp)

    simulate(work, tp=2)
    for rank in range(2):
        calls = [call for call, *_ in jobs[0].calls[rank]]
        assert [(call.kind, call.shape, call.dtype, call.done, call.backend) for call in calls] == [
            ("all_reduce", (i,), "float32", False, "simulated") for i in (3, 4, 5)
        ]
        assert len({call.number for call in calls}) == 3
        assert "test_ranks.py" in calls[0].site
        assert jobs[0].waits_in[rank] is None
