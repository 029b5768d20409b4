"""The checks of `mpcore preflight` one by one: how each ends, and what its parts are told."""

from __future__ import annotations

import pytest

from mpcore.tools.preflight import FAILED, OK, SKIPPED, Check, Command, Options, Skip, read_command, run_checks
from mpcore.tools.preflight import checks as running
from mpcore.tools.preflight.command import checks_of_model
from mpcore.tools.verify.pool import RankError


@pytest.mark.parametrize(("words", "wanted"), [
    ("python -m a.b", ("a.b", [], None, None)), ("python --module a.b -m c", ("a.b", ["-m", "c"], None, None)),
    ("torchrun --nproc_per_node 4 -m a", ("a", [], 4, 4)),
    ("torchrun --nnodes 2:6 --nproc-per-node=4 -m a", ("a", [], 24, 4)),
    ("torchrun --nnodes 3 -m a", ("a", [], None, None)),
    ("python -m torch.distributed.launch --nproc_per_node=2 -m a.b --x", ("a.b", ["--x"], 2, 2)),
    ("srun --nodes=2 --ntasks-per-node=8 --ntasks=12 -m a", ("a", [], 12, 8)),
    ("srun -n 6 a.b:c_d --layouts x", ("a.b:c_d", ["--layouts", "x"], 6, None)), ("srun -n6 -m a", ("a", [], 6, None)),
    ("mpirun -np 6 python -m a", ("a", [], 6, None)), ("mpiexec -np6 python -m a", ("a", [], 6, None)),
    ("srun -N2 --ntasks-per-node 8 numactl -N0 -m0 a:b -n 5", ("a:b", ["-n", "5"], 16, 8)),
    ("nice -n 5 numactl -N 0 -m 0 torchrun --nproc-per-node 2 -m a -n 5 --y=3", ("a", ["-n", "5", "--y=3"], 2, 2)),
])  # fmt: skip
def test_a_command_is_read_up_to_its_module(words, wanted):
    command = read_command(words.split())
    assert (command.target, command.flags, command.ranks, command.each) == wanted
    assert Command("x", []) == Command("x", [], None, None)


@pytest.mark.parametrize(("words", "message"), [
    ("", "^nothing starts no module"), ("python x.py", "^python x.py starts no module"),
    ("python -m", "^python -m starts no module"), ("python -m -x", "starts no module"), ("1a:b", "starts no module"),
    ("a:b:c", "starts no module"), ("torchrun --nproc-per-node auto -m a", "--nproc-per-node auto is no number"),
    ("srun -N x -m a", "-N x is no number"),
])  # fmt: skip
def test_words_that_start_nothing_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        read_command(words.split())


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


@pytest.mark.parametrize(("ends", "result"), [
    (["SIGSEGV"], (OK, "all is well; a process had crashed before (SIGSEGV)")),
    (["SIGABRT"], (OK, "all is well; a process had crashed before (SIGABRT)")),
    (["SIGBUS", "SIGSEGV"], (FAILED, "rank 1: the process died (SIGSEGV)")),
    (["SIGKILL"], (FAILED, "rank 1: the process died (SIGKILL)")),
])  # fmt: skip
def test_a_check_runs_again_once_if_a_process_crashed(ends, result):
    left = list(ends)

    def run() -> str:
        if left:
            raise RankError(f"rank 1: the process died ({left.pop(0)})")
        return "all is well"

    (found,) = run_checks([Check("a", run, "what a means")])
    assert (found.state, found.detail) == result
    assert not left


def test_a_model_has_a_check_for_each_layout_and_a_save_of_each_that_is_sharded(capsys):
    for flags, layouts, saved in (
        ("", ["tp2", "dp2"], ["tp2", "dp2"]), ("--layouts tp2,", ["tp2"], ["tp2"]),
        ("--layouts tp1,pp2,tp2sp,dp2zero3", ["tp1", "pp2", "tp2sp", "dp2zero3"], ["tp2sp", "dp2zero3"]),
    ):  # fmt: skip
        checks = checks_of_model("tests.verify_models:Encoder", flags.split(), Options(timeout=7.0), None)
        want = ["gradient of one process", *(f"{layout} against unsharded" for layout in layouts), "two micro-batches"]
        assert [check.name for check in checks] == [*want, *(f"save {name}, load on 1" for name in saved)]
    with pytest.raises(SystemExit):
        checks_of_model("tests.verify_models:Encoder", ["--layout", "tp2"], Options(), None)
    assert "unknown --layout; did you mean --layouts?" in capsys.readouterr().err
