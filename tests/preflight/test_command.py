"""The checks of `mpcore preflight` one by one: how each ends, and what its parts are told."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import mpcore as mp
from mpcore.mesh.axis import Mesh
from mpcore.sharding.state_dict import full_state_dict
from mpcore.tools.preflight import (
    FAILED,
    OK,
    SKIPPED,
    Check,
    Command,
    Options,
    Skip,
    checks_of,
    main,
    read_command,
    run_checks,
)
from mpcore.tools.preflight import checks as running
from mpcore.tools.preflight import command as preflight
from mpcore.tools.preflight.command import checks_of_model, load_model, save_model, step_of
from mpcore.tools.verify import parse_layout
from mpcore.tools.verify.pool import RankError
from mpcore.tools.verify.run import SHIFT, Task

# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("python -m a.b", ("a.b", [], None, None)),
        ("python --module a.b -m c", ("a.b", ["-m", "c"], None, None)),
        ("torchrun --nproc_per_node 4 -m a", ("a", [], 4, 4)),
        ("torchrun --nnodes 2:6 --nproc-per-node=4 -m a", ("a", [], 24, 4)),
        ("torchrun --nnodes 3 -m a", ("a", [], None, None)),
        ("python -m torch.distributed.launch --nproc_per_node=2 -m a.b --x", ("a.b", ["--x"], 2, 2)),
        ("srun --nodes=2 --ntasks-per-node=8 --ntasks=12 -m a", ("a", [], 12, 8)),
        ("srun -n 6 a.b:c_d --layouts x", ("a.b:c_d", ["--layouts", "x"], 6, None)),
        ("a:b -n 5", ("a:b", ["-n", "5"], None, None)),
        ("python -m a --y=3", ("a", ["--y=3"], None, None)),
    ],
)
def test_a_command_is_read_up_to_its_module(words, wanted):
    command = read_command(words.split())
    assert (command.target, command.flags, command.ranks, command.each) == wanted
    assert Command("x", []) == Command("x", [], None, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "^nothing starts no module"),
        ("python x.py", "^python x.py starts no module"),
        ("python -m", "^python -m starts no module"),
        ("python -m -x", "starts no module"),
        ("1a:b", "starts no module"),
        ("a:b:c", "starts no module"),
        ("torchrun --nproc-per-node auto -m a", "--nproc-per-node auto is no number"),
        ("srun -N x -m a", "-N x is no number"),
    ],
)
def test_words_that_start_nothing_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        read_command(words.split())


# --- checks -----------------------------------------------------------------------------------------------------------


def test_checks_run_in_order_until_one_that_is_needed_fails(monkeypatch):
    clock, began, ran = iter(range(0, 900, 3)), [], []
    monkeypatch.setattr(running.time, "perf_counter", lambda: float(next(clock)))

    def check(name: str, needed: bool = False, error: Exception | None = None) -> Check:
        def run() -> str:
            ran.append(name)
            if error is not None:
                raise error
            return f"{name} is fine"

        return Check(name, run, f"what {name} means", needed)

    checks = [
        check("a", needed=True), check("b", error=ValueError("no b")), check("c", needed=True, error=Skip("no c here")),
        check("d", error=OSError("disk")), check("e", error=KeyError("k")),
        check("f", True, RankError("--- rank 0 of 2\nwhy\n")),
        check("g"), check("h", True, ValueError("later")), check("i"),
    ]  # fmt: skip
    results = list(run_checks(checks, began.append))
    assert ran == list("abcdef")
    assert began == list(range(9))
    assert [(r.name, r.state, r.detail) for r in results] == [
        ("a", OK, "a is fine"), ("b", FAILED, "no b"), ("c", SKIPPED, "no c here"), ("d", FAILED, "disk"),
        ("e", FAILED, "KeyError: 'k'"), ("f", FAILED, "why"), ("g", SKIPPED, "f failed"), ("h", SKIPPED, "f failed"),
        ("i", SKIPPED, "f failed"),
    ]  # fmt: skip
    assert {r.seconds for r in results} == {3.0}
    assert [r.meaning for r in results] == [f"what {name} means" for name in "abcdefghi"]
    assert [r.state for r in run_checks(checks[:1])] == [OK]


@pytest.mark.parametrize(
    ("ends", "result"),
    [
        (["SIGSEGV"], (OK, "all is well; a process had crashed before (SIGSEGV)")),
        (["SIGABRT"], (OK, "all is well; a process had crashed before (SIGABRT)")),
        (["SIGBUS", "SIGSEGV"], (FAILED, "rank 1: the process died (SIGSEGV)")),
        (["SIGKILL"], (FAILED, "rank 1: the process died (SIGKILL)")),
    ],
)
def test_a_check_runs_again_once_if_a_process_crashed(ends, result):
    left = list(ends)

    def run() -> str:
        if left:
            raise RankError(f"rank 1: the process died ({left.pop(0)})")
        return "all is well"

    (found,) = run_checks([Check("a", run, "what a means")])
    assert (found.state, found.detail) == result
    assert not left


def test_an_error_of_the_users_code_is_named_and_a_write_in_place_has_its_line():
    def other() -> str:
        raise RuntimeError("something else")

    def wrong_type() -> str:
        raise TypeError("of an in-place operation")

    (result, second) = run_checks([Check("x", other), Check("y", wrong_type)])
    assert (result.detail, second.detail) == ("RuntimeError: something else", "TypeError: of an in-place operation")

    def writes() -> str:
        raise RuntimeError("one of the variables has been modified by an inplace operation")

    (result,) = run_checks([Check("x", writes)])
    line = writes.__code__.co_firstlineno + 1
    assert result.detail.startswith(f"{__file__}:{line}, writes: ")
    assert result.detail.endswith("RuntimeError: one of the variables has been modified by an inplace operation")


# --- a model ----------------------------------------------------------------------------------------------------------


class Lent:
    """A pool that answers with the given results, and keeps what it was asked."""

    def __init__(self, answer: Any = None) -> None:
        self.answer, self.calls, self.stopped = answer, [], 0

    def __call__(self, size: int, check: Any, *args: Any, timeout: float) -> Any:
        self.calls.append((size, check, args, timeout))
        return self.answer(size, check, *args)

    def stop(self) -> None:
        self.stopped += 1


def made(monkeypatch: Any, flags: str, answer: Any = None) -> tuple[dict[str, Check], Lent, Any]:
    found = (lambda mesh: None), {"x": torch.ones(2)}, (lambda output: None)
    asked: list[str] = []
    monkeypatch.setattr(preflight, "find", lambda target: asked.append(target) or found)
    pool: Any = Lent(answer)
    checks = checks_of_model("a.b:c", flags.split(), Options(timeout=7.0), pool)
    assert asked == ["a.b:c"]
    assert all(check.meaning and not check.needed for check in checks)
    return {check.name: check for check in checks}, pool, found


def test_a_model_has_a_check_for_each_layout_and_a_save_of_each_that_is_sharded(monkeypatch):
    of = "gradient of one process", "two micro-batches"
    against = "{} against unsharded"
    for flags, layouts, saved in (
        ("", ["tp2", "dp2"], ["tp2", "dp2"]),
        (
            "--layouts tp1,pp2,tp2sp,dp1mb2,dp2zero3",
            ["tp1", "pp2", "tp2sp", "dp1mb2", "dp2zero3"],
            ["tp2sp", "dp2zero3"],
        ),
        ("--layouts tp2,", ["tp2"], ["tp2"]),
    ):
        checks, _, _ = made(monkeypatch, flags)
        want = [of[0], *map(against.format, layouts), of[1], *(f"save {name}, load on 1" for name in saved)]
        assert list(checks) == want


def test_a_flag_that_a_model_has_not_is_named(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        made(monkeypatch, "--layout tp2")
    assert capsys.readouterr().err.startswith("a.b:c: error: unknown --layout; did you mean --layouts?")


def test_the_slope_is_that_of_one_process_moved_both_ways(monkeypatch):
    seen = {0.0: ("gradients", "norm", "x"), SHIFT: (0, 0, "above"), -SHIFT: (0, 0, "below")}

    def answer(size: int, check: Any, task: Task, layout: Any) -> Any:
        gradients, norm, loss = seen[task.shift]
        return [SimpleNamespace(gradients=gradients, norm=norm, loss=loss)]

    checks, pool, (build, batch, loss) = made(monkeypatch, "", answer)
    monkeypatch.setattr(preflight, "check_slope", lambda *of: told.append(of) or 0.002)
    told: list[Any] = []
    assert "0.002" in checks["gradient of one process"].run()
    assert told == [("gradients", "norm", "above", "below")]
    assert [call[:2] for call in pool.calls] == [(1, step_of)] * 3
    assert {call[3] for call in pool.calls} == {7.0}
    assert all(call[2] == (Task(build, batch, loss, shift=s), parse_layout("tp1"))
               for call, s in zip(pool.calls, seen, strict=True))  # fmt: skip


def test_what_a_layout_saved_is_what_one_process_loads_on_every_rank(monkeypatch):
    whole = {"w": torch.ones(3), "b": torch.zeros(2)}
    there: list[dict[str, torch.Tensor]] = [dict(whole), dict(whole)]
    folders: list[Path] = []

    def answer(size: int, check: Any, task: Task, layout: Any, folder: str) -> Any:
        folders.append(Path(folder))
        assert Path(folder).is_dir()
        return [whole] if size == 1 else there

    checks, pool, _ = made(monkeypatch, "--layouts dp2zero3", answer)
    check = checks["save dp2zero3, load on 1"]
    assert check.run() == "2 tensors"
    layouts = [parse_layout(name) for name in ("dp2zero3", "tp1", "dp2zero3")]
    assert [(size, run, of[1]) for size, run, of, _ in pool.calls] == [
        (2, save_model, layouts[0]), (1, load_model, layouts[1]), (2, load_model, layouts[2]),
    ]  # fmt: skip
    assert {call[3] for call in pool.calls} == {7.0}
    assert len(set(folders)) == 1
    assert not folders[0].exists()
    there[1]["b"] = torch.ones(2)
    with pytest.raises(ValueError, match="b of dp2zero3 is another one when one process loads it"):
        check.run()


class Model(nn.Module):
    """Two sharded layers."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.up = mp.ColumnParallelLinear(4, 6, tp=mesh.tp)
        self.down = mp.RowParallelLinear(6, 4, tp=mesh.tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def test_a_model_is_saved_as_it_begins_and_loaded_over_other_values(tmp_path):
    task = Task(Model, {"x": torch.ones(2, 4)}, seed=3)
    layout, one = parse_layout("tp2"), parse_layout("tp1")
    mp.simulate(save_model, task, layout, str(tmp_path), ranks=2)
    loaded = mp.simulate(load_model, task, layout, str(tmp_path), ranks=2)
    (alone,) = mp.simulate(load_model, task, one, str(tmp_path), ranks=1)

    def begins(mesh: Mesh, seed: int) -> dict[str, torch.Tensor]:
        run = preflight._prepared(dataclasses.replace(task, seed=seed), one)
        with run.parameters() as model:
            return full_state_dict(model)

    (same,), (other,) = (mp.simulate(begins, seed, tp=1) for seed in (3, 4))
    assert set(alone) == {"up.weight", "up.bias", "down.weight", "down.bias"}
    for name, value in alone.items():
        assert torch.equal(value, same[name]), name
        assert all(torch.equal(rank[name], value) for rank in loaded), name
    assert not torch.equal(alone["up.weight"], other["up.weight"])


def test_a_step_is_that_of_verify(tmp_path):
    task = Task(Model, {"x": torch.ones(2, 4)}, seed=3)
    (seen,) = mp.simulate(step_of, task, parse_layout("tp1"), ranks=1)
    (moved,) = mp.simulate(step_of, dataclasses.replace(task, shift=SHIFT), parse_layout("tp1"), ranks=1)
    assert set(seen.gradients) == {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert seen.loss != moved.loss


def test_the_run_that_saves_has_the_layouts_axes_and_policies(monkeypatch):
    told: dict[str, Any] = {}
    monkeypatch.setattr(preflight, "mesh", lambda **sizes: told.update(sizes=sizes) or "mesh")
    monkeypatch.setattr(preflight, "build_model", lambda *of: told.update(built=of) or "model")
    monkeypatch.setattr(preflight, "prepare", lambda *of, **named: told.update(of=of, named=named) or "run")
    layout, task = parse_layout("tp2cp3dp4mb5zero3"), Task(Model, {}, seed=9)
    assert preflight._prepared(task, layout) == "run"
    assert told["sizes"] == {"tp": 2, "cp": 3, "pp": 1, "dp": 4, "ep": 1}
    assert told["built"] == (task, "mesh", layout)
    assert told["of"] == ("model", "mesh")
    named = told["named"]
    assert (named["seed"], named["micro_batches"], named["initialize"]) == (9, 5, False)
    assert (named["data"].stage, list(named["blocks"])) == (3, [])
    optimizer = named["optimizer"](nn.Linear(1, 1))
    assert (type(optimizer), optimizer.defaults["lr"]) == (torch.optim.SGD, preflight.STEP)


# --- the command ------------------------------------------------------------------------------------------------------


def write_package(folder: Path, name: str, text: str | None) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("")
    if text is not None:
        (folder / name / "preflight.py").write_text(text)


def test_the_checks_of_a_module_are_those_of_its_package(tmp_path, monkeypatch):
    text = "def checks(flags, options, pool):\n    return [flags, options, pool]\n"
    write_package(tmp_path, "pre_with", text)
    write_package(tmp_path, "pre_without", None)
    (tmp_path / "pre_alone.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != ""])
    pool: Any = Lent()
    options = Options(8)
    try:
        assert checks_of(Command("pre_with.train", ["--a"]), options, pool) == [["--a"], options, pool]
        assert sys.path.count("") == 1, "the folder of the command is searched"
        assert checks_of(Command("pre_with.train", []), options, pool)[0] == []
        assert sys.path.count("") == 1
        for target, name in (("pre_without.train", "pre_without.preflight"), ("pre_alone", "pre_alone.preflight"),
                             ("pre_none.sub.train", "pre_none.sub.preflight")):  # fmt: skip
            with pytest.raises(ValueError, match=f"^{target} has no module {name} with checks"):
                checks_of(Command(target, []), options, pool)
    finally:
        for name in [name for name in sys.modules if name.startswith("pre_")]:
            del sys.modules[name]
    told: list[Any] = []
    monkeypatch.setattr(preflight, "checks_of_model", lambda *of: told.append(of) or ["model"])
    assert checks_of(Command("a:b", ["--x"]), options, pool) == ["model"]
    assert told == [("a:b", ["--x"], options, pool)]


@pytest.fixture
def command(monkeypatch) -> dict[str, Any]:
    """The command with checks that are given: what it asked for."""

    def fails() -> str:
        raise ValueError("no")

    told: dict[str, Any] = {"pool": Lent(), "checks": [Check("a", lambda: "fine"), Check("b", fails, "do this")]}

    def checks(command: Command, options: Options, pool: Any) -> list[Check]:
        told.update(command=command, options=options, given=pool)
        return told["checks"]

    monkeypatch.setattr(preflight, "checks_of", checks)
    monkeypatch.setattr(preflight, "Pool", lambda most: told.update(most=most) or told["pool"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return told


def test_the_command_prints_each_result_and_the_verdict(command, capsys):
    words = ["--timeout", "9", "--", "torchrun", "--nproc-per-node", "4", "-m", "a.b", "--tp", "2"]
    assert main(words) == 1
    *lines, failed, what = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["ok", "a"], ["FAILED", "b"]]
    assert failed.endswith("1 of 2 checks failed (b).")
    assert what == "- b: do this."
    assert command["command"] == Command("a.b", ["--tp", "2"], 4, 4)
    assert command["options"] == Options(4, 4, None, 9.0)
    assert (command["most"], command["given"], command["pool"].stopped) == (8, command["pool"], 1)
    command["checks"] = command["checks"][:1]
    assert main(["--", "-m", "a.b"]) == 0
    assert "1 checks in 0 s" in capsys.readouterr().out
    assert command["options"].timeout == 120


def test_processes_are_stopped_also_when_checks_cannot_run(command, monkeypatch, capsys):
    assert main(["--"]) == 2
    assert command["pool"].stopped == 1
    assert main([]) == 2
    assert capsys.readouterr().err.count("nothing starts no module") == 2
    with pytest.raises(SystemExit):
        main(["a:b"])  # the command comes behind --
    assert "unknown a:b" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["mpcore preflight", "--", "a:b"])
    assert main() == 1
    assert command["command"].target == "a:b"


@pytest.mark.parametrize(("words", "memory"), [([], 85e9), (["--memory", "40"], 40e9)])
def test_the_memory_is_that_of_the_first_gpu_unless_it_is_given(words, memory, command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpus = [SimpleNamespace(total_memory=85 * 10**9), SimpleNamespace(total_memory=1)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    main([*words, "--", "a:b"])
    assert command["options"].memory == memory
    assert isinstance(command["options"].memory, float)
