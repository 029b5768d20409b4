"""The command `mpcore plan`: what it asks the search, and what it prints of its answer, by numbers."""

from __future__ import annotations

import re
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mpcore import Mesh
from mpcore.tools import parsers
from mpcore.tools.analysis import __main__ as commands
from mpcore.tools.analysis import plan
from mpcore.tools.analysis.command import parse, sizes_of
from mpcore.tools.analysis.machine import Machine, load_machine
from mpcore.tools.analysis.plan import Progress, _size_of_model, main, what_if
from mpcore.tools.analysis.report import explain, table
from mpcore.tools.analysis.search import Estimate, choices, meshes, useful
from mpcore.tools.analysis.seconds import Seconds
from mpcore.tools.analysis.work import DryRunCounts, LayoutSpec, Model
from mpcore.tools.parsers import WIDE
from tests.test_plan import BUILD, D
from tests.test_plan import build as build_mlp

GIB = 2**30
H100 = load_machine("h100")


def estimate(step: float, memory: float, *arguments: str, **sizes: int) -> Estimate:
    return Estimate({"tp": 1, "pp": 1, "dp": 4} | sizes, arguments, int(memory * GIB), Seconds(step), spread=0.05)


FOUND = [estimate(1.0, 40), estimate(2.0, 30, "--zero", "3", tp=2), estimate(3.0, 35, pp=2), estimate(4.0, 20, tp=4)]
LARGE = estimate(1.0, 200)


@pytest.fixture
def asked(monkeypatch) -> list[dict[str, Any]]:
    """Each call of the search, which answers with FOUND and a layout that is too large."""
    calls: list[dict[str, Any]] = []

    def search(
        counter: Any, machine: Machine, given: Any, layouts: Any, unfused: bool = False, each: Any = None
    ) -> list:
        handler = signal.getsignal(signal.SIGTERM)
        calls.append({"counter": counter, "machine": machine, "given": list(given), "layouts": list(layouts),
                      "unfused": unfused, "each": each, "handler": handler})  # fmt: skip
        return [*FOUND, LARGE]

    monkeypatch.setattr(plan, "search", search)
    return calls


def run(capsys: Any, *words: str) -> list[str]:
    main([BUILD, "--world", "4", *words])
    return capsys.readouterr().out.splitlines()


def test_the_search_gets_every_mesh_with_every_choice(asked, capsys):
    run(capsys, "--vary", "x=1,2", "--given", "7", "--tp", "1,2", "--ep", "2", "--cp-inner", "1")
    (call,) = asked
    cuts = list(meshes(4, 8, tp=[1, 2], ep=[2], cp_inner=[1]))
    assert call["layouts"] == useful((cut, option) for option in choices(["x=1,2"]) for cut in cuts)
    assert call["given"] == ["--given", "7"]
    assert (call["machine"], call["unfused"]) == (H100, False)
    assert call["counter"].build is build_mlp
    assert (call["counter"].stands_for_gpu, call["counter"].share) == (True, True)
    assert call["each"].of == len(call["layouts"])
    assert call["handler"] is signal.default_int_handler, "SIGTERM ends the search as Ctrl-C does"
    run(capsys, "--wide", "--vary", "x=1", "--cpu", "--unfused", "--node", "1", "--memory", "90", "--machine", "h200")
    call = asked[-1]
    assert call["layouts"] == useful((cut, o) for o in choices(["x=1", *WIDE]) for cut in meshes(4, 1))
    assert (call["counter"].stands_for_gpu, call["unfused"]) == (False, True)
    assert call["machine"] == load_machine("h200", memory=90 * GIB, node=1)


def test_the_head_says_what_the_machine_and_the_model_are(asked, capsys):
    first = run(capsys)[0]
    room = (H100.memory / GIB, H100.reserve / GIB)
    numbers = ["4", "100", "8", f"{room[0]:.1f}", f"{room[1]:.1f}", f"{2 * D * D:,}"]
    assert re.findall(r"[\d.,]*\d", first) == numbers
    assert re.findall(r"[\d.,]*\d", run(capsys, "--memory", "100", "--node", "2")[0])[2:4] == ["2", "100.0"]


def test_the_table_the_best_and_the_nearly_fastest_are_printed(asked, capsys):
    lines = run(capsys, "--given", "7")
    text = table([*FOUND, LARGE], H100, 20).splitlines()
    assert lines[1 : 1 + len(text)] == text
    best, near, choice, command = lines[1 + len(text) :]
    assert rows_of(best) == ["1", "2", "4"], "the third is slower and larger than the second"
    assert rows_of(near) == ["1"], "twice as long is more than two errors of 6 %"
    assert choice.startswith("choose row 1: ")
    assert command.endswith("--tp 1 --pp 1 --given 7 --explain 1")
    text = table([*FOUND, LARGE], H100, 1).splitlines()
    lines = run(capsys, "--top", "1")
    assert lines[1 : 1 + len(text)] == text
    assert rows_of(lines[-4]) == ["1", "2", "4"], "row 1, and 2 more (--top 4 prints them)"
    assert rows_of(run(capsys, "--top", "2")[-4]) == ["1", "2", "1", "4"]
    assert rows_of(run(capsys, "--top", "4")[-4]) == ["1", "2", "4"]


def rows_of(line: str) -> list[str]:
    """The numbers behind the first "row" or "rows" and its colon."""
    return re.findall(r"\d+", line.partition(": row")[2])


def test_rows_to_choose_are_named_up_to_two_errors_of_their_difference(monkeypatch):
    """Errors of 0.06 / sqrt 2 each: a difference up to 2 x 1.08 x 0.06 may be none."""
    sure = tuple([0.0] * 6)
    for step, rows in ((1.09, ["1", "2"]), (1.1, ["1"])):  # 2 x 1.09 x 0.0424 is 0.0925
        found = [replace(estimate(s, m), errors=sure) for s, m in ((1.0, 2), (step, 3))]
        _, (best, near, _) = plan._rows_to_choose(found, H100, 20)
        assert (rows_of(best), rows_of(near)) == (["1"], rows)
        assert near.count(": rows ") == (len(rows) > 1)
    unsure = replace(found[1], errors=(0.1, *sure[1:]))
    assert rows_of(plan._rows_to_choose([found[0], unsure], H100, 20)[1][1]) == ["1", "2"]
    alike = [replace(each, errors=(0.1, *sure[1:])) for each in found]
    assert rows_of(plan._rows_to_choose(alike, H100, 20)[1][1]) == ["1"], "an error that both share"
    monkeypatch.setattr(Estimate, "slower", lambda e, first: (0.0, 0.1) if e is first else (0.5, 0.25))
    assert rows_of(plan._rows_to_choose(found, H100, 20)[1][1]) == ["1", "2"], "two errors are not yet more"


@pytest.mark.parametrize(
    ("flags", "sizes", "words"),
    [
        ([], {"tp": 2, "cp": 1, "pp": 1, "ep": 1, "dp": 2}, "--tp 2 --pp 1"),
        (["--memory", "40", "--node", "2"], {"tp": 1, "pp": 4, "dp": 1}, "--memory 40 --node 2 --tp 1 --pp 4"),
        (["--unfused", "--cpu"], {"tp": 1, "cp": 2, "ep": 2, "etp": 1}, "--unfused --cpu --tp 1 --cp 2 --ep 2 --etp 1"),
        (["--memory", "0.5"], {"cp": 4, "cp_inner": 2}, "--memory 0.5 --cp 4 --cp-inner 2"),
    ],
)
def test_a_row_has_a_command_that_plans_it_alone(flags, sizes, words):
    args = plan._parse([BUILD, "--world", "4", *flags, "--given", "a b"])
    e = Estimate(sizes, ("--zero", "3"), 1, Seconds(1.0))
    (line,) = plan._commands(args, build_mlp, 7, e, 8)
    about, _, command = line.partition(": ")
    assert "7" in about
    assert command == f"mpcore plan {BUILD} --world 4 --machine h100 {words} --zero 3 --given 'a b' --explain 1"
    args.explain = 1
    assert plan._commands(args, build_mlp, 7, e, 8) == []


@pytest.mark.parametrize(
    ("node", "launch"),
    [
        (8, "torchrun --nproc-per-node 4"),
        (4, "torchrun --nproc-per-node 4"),
        (2, "srun -n 4 --ntasks-per-node 2 --gpus-per-node 2 python"),
    ],
)
def test_a_model_with_a_trainer_has_a_command_that_trains(node, launch):
    args = plan._parse([BUILD, "--world", "4", "--given", "7"])
    e = Estimate({"tp": 2, "dp": 2}, ("--zero", "3"), 1, Seconds(1.0))
    told: list[Any] = []
    outline: Any = None
    build = Model(outline, lambda flags: told.append(flags) or " ".join(["-m train", *flags]))
    _, line = plan._commands(args, build, 3, e, node)
    assert line.partition(": ")[2] == f"{launch} -m train --tp 2 --dp 2 --zero 3 --given 7"
    assert told == [["--tp", "2", "--dp", "2", "--zero", "3", "--given", "7"]]
    assert len(plan._commands(args, Model(outline, lambda flags: ""), 3, e, node)) == 1
    assert len(plan._commands(args, Model(outline), 3, e, node)) == 1
    args.explain = 3
    assert plan._commands(args, build, 3, e, node) == [line]


def test_another_machine_is_searched_and_shown_after_the_first(asked, capsys, monkeypatch):
    refused = Estimate({"tp": 4}, (), refused="no")
    inner = plan.search
    monkeypatch.setattr(plan, "search", lambda *of: [*inner(*of), refused])
    lines = run(capsys, "--what-if", "memory=1e12", "--what-if", "bandwidth=2x", "--unfused")
    assert len(asked) == 2
    other = what_if(H100, ["memory=1e12", "bandwidth=2x"])
    assert asked[1]["machine"] == other
    assert asked[1]["unfused"] is True
    assert asked[1]["layouts"] == [(e.sizes, e.arguments) for e in [*FOUND, LARGE]], "those that were not refused"
    text = table([*FOUND, LARGE, refused], other, 5, legend=False).splitlines()
    assert lines[-len(text) :] == text
    assert "memory=1e12, bandwidth=2x" in lines[-len(text) - 1]
    monkeypatch.setattr(plan, "search", lambda *of: inner(*of)[:0] + [estimate(1.0 + i, 1) for i in range(9)])
    lines = run(capsys, "--what-if", "memory=1e12")
    assert lines[-1].startswith(".. and 4 "), "five rows"
    assert run(capsys, "--what-if", "memory=1e12", "--top", "2")[-1].startswith(".. and 7 ")


def test_a_row_is_explained_in_place_of_the_table(asked, capsys):
    for row in (1, 4):
        lines = run(capsys, "--explain", str(row), "--given", "7")
        assert re.findall(r"\d+", lines[1]) == [str(row), "4"]
        assert "\n".join(lines[2:]) == explain(FOUND[row - 1], H100, ["--given", "7"])
    for row in (0, 5, -1):
        with pytest.raises(ValueError, match=f"--explain {row} is no row from 1 to 4"):
            run(capsys, "--explain", str(row))


def test_the_layouts_are_drawn_to_a_file_in_a_folder_that_is_there(asked, capsys, monkeypatch, tmp_path):
    drawn: list[Any] = []
    monkeypatch.setattr(plan, "draw", lambda *of: drawn.append(of))
    for suffix in (".png", ".svg", ".pdf"):
        run(capsys, "--out", str(tmp_path / f"x{suffix}"))
        assert drawn.pop() == ([*FOUND, LARGE], H100, tmp_path / f"x{suffix}")
    for wrong in (tmp_path / "x.jpg", tmp_path / "none" / "x.png"):
        with pytest.raises(ValueError, match="in a folder that is there"):
            run(capsys, "--out", str(wrong))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([], "no layout fits"),
        ([LARGE], "no layout fits"),
        ([LARGE, Estimate({}, (), refused="no")], "no layout fits"),
        ([Estimate({}, (), refused="why"), Estimate({}, (), refused="no")], "no layout could be counted: why"),
    ],
)
def test_a_search_without_a_layout_that_fits_fails_behind_its_table(found, message, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(plan, "search", lambda *_: found)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match=message):
        main([BUILD, "--world", "4", "--out", str(tmp_path / "x.png")])
    out = capsys.readouterr().out
    assert out.rstrip("\n").endswith(table(found, H100))
    assert "fastest" not in out
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before


def test_sigterm_has_its_handler_again_also_when_the_search_raises(monkeypatch):
    def fails(*_: Any) -> Any:
        raise RuntimeError("inside")

    monkeypatch.setattr(plan, "search", fails)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError, match="inside"):
        main([BUILD, "--world", "4"])
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("words", [[], [BUILD], ["--world", "4"]])
def test_a_target_and_a_world_are_needed(words, capsys):
    with pytest.raises(SystemExit) as status:
        main(words)
    assert status.value.code == 2
    assert "a target and --world are needed" in capsys.readouterr().err


def test_a_world_that_no_mesh_has_is_refused(capsys):
    with pytest.raises(ValueError, match="no mesh of these sizes has 4 ranks, with tp up to 2"):
        main([BUILD, "--world", "4", "--tp", "3", "--node", "2"])


@pytest.mark.parametrize(("text", "sizes"), [("1", [1]), ("2,4,8", [2, 4, 8])])
def test_sizes_are_numbers_between_commas(text, sizes):
    assert parsers.plan().parse_args(["--tp", text]).tp == sizes
    for wrong in ("0", "2,0", "-1,4"):
        with pytest.raises(SystemExit):
            parsers.plan().parse_args([f"--tp={wrong}"])


# --- rates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ("tau=3", {"tau": 3.0}), ("tau=0", {"tau": 0.0}), ("peak=2x", {"peak": 2 * H100.peak}), ("node=4", {"node": 4}),
        ("bandwidth=0.5x", {"bandwidth": H100.bandwidth / 2}), ("node=2x", {"node": 16}),
        ("memory=1e9", {"memory": 1e9}),
    ],
)  # fmt: skip
def test_a_rate_is_set_or_multiplied(change, want):
    found = what_if(H100, [change])
    assert found == replace(H100, **want)
    assert isinstance(found.node, int)
    assert what_if(H100, []) == H100
    assert what_if(H100, ["tau=3", "tau=2x"]).tau == 6


@pytest.mark.parametrize("change", ["tau=-1", "tau=inf", "tau=nan", "tau=", "tau", "tau=x", "tau=2y", "tau=-2x"])
def test_a_change_of_another_form_is_refused(change):
    with pytest.raises(ValueError, match=f"{re.escape(change)} isn't of the form tau=2x or tau=NUMBER"):
        what_if(H100, [change])


@pytest.mark.parametrize("name", ["speed", "name", "sources", ""])
def test_a_rate_that_there_is_not_is_refused(name):
    with pytest.raises(ValueError, match=f"{name!r} is none of peak"):
        what_if(H100, [f"{name}=2x"])


# --- the size of the model --------------------------------------------------------------------------------------------


def test_the_parameters_are_those_of_the_first_layout_that_is_not_refused():
    sizes = {"tp": 2, "cp": 1, "pp": 2, "ep": 1, "dp": 1}
    text = f"{2 * D * D:,} parameters"
    assert text in _size_of_model(build_mlp, [], [(sizes, ())]), "made on one rank"
    assert text in _size_of_model(build_mlp, [], [(sizes, ("--refuse",)), (sizes, ())])
    assert _size_of_model(build_mlp, ["--refuse"], [(sizes, ()), (sizes, ())]) == ""
    assert _size_of_model(build_mlp, [], []) == ""
    seen: list[Any] = []

    def outline(mesh: Mesh, arguments: list[str]) -> LayoutSpec:
        seen.append((mesh.tp.size, mesh.pp.size, arguments))
        nothing: Any = None
        return LayoutSpec("1f1b", 2, 4, None, [], nothing, nothing, parameters=int(arguments[-1]))

    assert "1,234 parameters" in _size_of_model(Model(outline), ["--a"], [(sizes, ("1234",))])
    assert seen == [(2, 2, ["--a", "1234"])]
    assert _size_of_model(Model(outline), [], [(sizes, ("0",))]) == "", "unknown"


# --- progress ---------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch: Any) -> None:
        self.now = 100.0
        monkeypatch.setattr(plan.time, "monotonic", lambda: self.now)


def told(capsys: Any) -> str:
    return capsys.readouterr().err


@pytest.fixture
def terminal(monkeypatch) -> Any:
    return lambda shown: monkeypatch.setattr(sys.stderr, "isatty", lambda: shown, raising=False)


def test_progress_is_a_bar_on_a_terminal(monkeypatch, capsys, terminal):
    clock, progress = Clock(monkeypatch), Progress(6)
    terminal(True)
    clock.now += 4
    progress(2, [LARGE])
    line = told(capsys)
    assert line.startswith("\r[" + "#" * 10 + " " * 20 + "]")
    assert re.findall(r"\d+", line) == ["2", "6", "8"], "two took 4 s, so four take 8 s"
    assert not line.endswith("\n")
    progress(6, [LARGE])
    line = told(capsys)
    assert line.startswith("\r[" + "#" * 30 + "]")
    assert line.endswith("\n")


def test_progress_is_a_line_now_and_then_elsewhere(monkeypatch, capsys, terminal):
    clock, progress = Clock(monkeypatch), Progress(100)
    terminal(False)
    for after, says in ((9, False), (1, False), (1, True), (10, False), (1, True)):
        clock.now += after
        progress(10, [LARGE])
        line = told(capsys)
        assert bool(line) == says, clock.now
        assert line.count("\n") == says
        assert "\r" not in line


# --- the commands that share a line -----------------------------------------------------------------------------------


def test_the_words_of_a_target_are_handed_on():
    args = parse(parsers.memory, ["a:b", "--tp", "2", "--x", "1", "--rank", "3", "--cp-inner", "2"])
    assert sizes_of(args) == {"tp": 2, "cp": 1, "pp": 1, "ep": 1, "dp": 1, "etp": None, "cp_inner": 2}
    assert (args.target, args.rank, args.arguments, args.cpu, args.plot) == ("a:b", 3, ["--x", "1"], False, None)
    words = ["a:b", "--etp", "4", "--pp", "5", "--ep", "6", "--dp", "7", "--cp", "8"]
    assert sizes_of(parse(parsers.ledger, words)) == {
        "tp": 1, "cp": 8, "pp": 5, "ep": 6, "dp": 7, "etp": 4, "cp_inner": None,
    }  # fmt: skip
    assert parse(parsers.ledger, ["a:b"]).rank == 0
    assert not hasattr(parse(parsers.ledger, ["a:b"]), "plot"), "a ledger has no picture"
    with pytest.raises(SystemExit):
        parse(parsers.memory, [])
    with pytest.raises(SystemExit):
        parse(parsers.memory, ["a:b", "--tp", "two"])


def test_memory_draws_the_ranks_of_one_column_of_the_pipeline(monkeypatch, capsys):
    made: list[Any] = []

    class Spy:
        def __init__(self, build: Any, gpu: bool) -> None:
            made.append((build, gpu))

        def rank(self, arguments: list[str], rank: int, **sizes: Any) -> Any:
            made.append((arguments, rank, sizes))
            return plan.Counter(build_mlp).rank([], 0)

    drawn: list[Any] = []
    monkeypatch.setattr(commands, "Counter", Spy)
    monkeypatch.setattr(commands, "draw_memory", lambda ranks, path: drawn.append((len(ranks), path)))
    sizes = ["--tp", "2", "--cp", "2", "--dp", "3", "--pp", "2"]
    assert commands.main(["memory", BUILD, "--rank", "17", *sizes, "--plot", "x.svg", "--w", "1"]) == 0
    each = {"tp": 2, "cp": 2, "dp": 3, "pp": 2, "ep": 1, "etp": None, "cp_inner": None}
    assert made == [(build_mlp, True), (["--w", "1"], 17, each), (["--w", "1"], 5, each), (["--w", "1"], 17, each)]
    assert drawn == [(2, "x.svg")]
    assert "parameters" in capsys.readouterr().out
    commands.main(["memory", BUILD, "--cpu"])
    assert made[4][1] is False
    assert len(made) == 6, "no picture"
    capsys.readouterr()
    commands.main(["ledger", BUILD])
    assert capsys.readouterr().out.startswith("axis")


def test_a_ledger_shows_the_theory_of_its_work(monkeypatch, capsys):
    found = DryRunCounts(theory={("tp", "all_gather"): 12})
    found.ledger.add("tp", "all_gather", 12)
    monkeypatch.setattr(commands, "Counter", lambda *_: SimpleNamespace(rank=lambda *_, **__: found))
    assert commands.main(["ledger", BUILD]) == 0
    assert capsys.readouterr().out == found.ledger.table(found.theory) + "\n"


def test_other_words_end_with_the_usage(monkeypatch, capsys):
    for words in ([], ["sums"], ["--help"]):
        with pytest.raises(SystemExit) as status:
            commands.main(words)
        assert str(status.value).startswith("usage: python -m mpcore.tools.analysis")
    monkeypatch.setattr(sys, "argv", ["x", "plan", "--fit", "8"])
    assert commands.main() == 0
    assert capsys.readouterr().out.startswith("8 parameters")
    assert commands.main(["memory", "nowhere:build"]) == 2
    assert capsys.readouterr().err.startswith("mpcore memory: error: ")
