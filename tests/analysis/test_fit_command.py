"""What `python -m bench.planner` prints, by its numbers."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.planner import fit as fit_command
from bench.planner.fit import (
    Result,
    Run,
    fit,
    groups_of,
    leave_one_out,
    main,
    mean_and_most,
    memory_lines,
    predict,
    read_all,
    results_table,
    scalars_table,
)
from bench.planner.rows import read_row, read_rows
from mpcore.tools.analysis.machine import load_machine
from mpcore.tools.analysis.rate_errors import NAMES, NOISE
from mpcore.tools.analysis.work import StepMemory
from tests.analysis.test_calibrate import MACHINE, RUNS, timed
from tests.analysis.test_rows import write_run

ROW = read_row({"seconds": 2.0})


def numbers(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"[-+]?\d+\.?\d*", text)]


def result(name: str, seconds: float, fitted: float, left_out: float) -> Result:
    return Result(replace(ROW, name=name), seconds, fitted, left_out)


RESULTS = [result("a", 2.0, 2.5, 3.0), result("longer", 4.0, 4.0, 3.0), result("c", 1.0, 1.0, 1.1)]


def test_errors_are_averaged_by_their_size():
    mean, most = mean_and_most(RESULTS)
    assert (mean, most) == (pytest.approx((0.5 + 0.25 + 0.1) / 3), 0.5)
    assert mean_and_most(RESULTS[1:2]) == (0.25, 0.25)


def test_the_table_of_results_has_a_line_for_each_row():
    _, *lines, last = results_table(RESULTS).splitlines()
    assert [line.split()[0] for line in lines] == ["a", "longer", "c"]
    assert [numbers(line) for line in lines] == [[2, 2.5, 3, 50], [4, 4, 3, -25], [1, 1, 1.1, 10]]
    assert len({len(line) for line in lines}) == 1
    assert numbers(last) == [28.3, 50]


def test_the_table_of_scalars_marks_those_that_the_prior_says():
    errors = {"e_gemm": 0.05, "e_hbm": 0.2, "x_tp": 0.3, "x_dp": 0.4, "tau": 0.4, "cluster": 0.06}
    found = replace(MACHINE, errors=errors)
    _, *lines = scalars_table(found).splitlines()
    assert [line.split()[0] for line in lines] == list(NAMES)
    want = [(0.6, 5), (0.4, 20), (0.8, 30), (0.3, 40), (0.2, 40), (1.1, 6)]
    assert [tuple(numbers(line.partition(":")[0].partition("not")[0])[-2:]) for line in lines] == want
    assert ["prior" in line for line in lines] == [name not in ("e_gemm", "tau") for name in NAMES]


def sized(name: str, memory: int, seconds: float | None) -> Run:
    layout = replace(RUNS[0].layout, held=(StepMemory(parameters=memory),))
    return Run(replace(ROW, name=name, seconds=seconds), layout)


def test_rows_that_ran_out_of_memory_are_compared_with_those_planned_so():
    machine = replace(MACHINE, memory=1000.0, reserve=100.0)
    runs = [sized("fits", 900, 1.0), sized("alarm", 901, 1.0), sized("seen", 950, None), sized("missed", 10, None),
            sized("also", 990, 1.0), sized("more", 2000, None)]  # fmt: skip
    first, second = memory_lines(runs, machine)
    assert first.endswith("alarm, also, which ran")
    assert numbers(second) == [2, 3, 2, 3]
    assert memory_lines(runs[:1], machine) == []
    assert [numbers(line) for line in memory_lines(runs[3:4], machine)] == [[0, 1, 0, 0]]


def test_rows_that_were_not_fitted_are_predicted_with_their_errors():
    found = replace(MACHINE, memory=20.0, errors=dict.fromkeys(NAMES, 0.0))
    runs = timed(RUNS[:3], MACHINE)
    runs = [Run(replace(each.row, name=name, seconds=(each.row.seconds or 0) * factor), each.layout)
            for each, name, factor in zip(runs, "abc", (1.0, 2.0, 0.8), strict=True)]  # fmt: skip
    head, *lines, mean, large = fit_command.tested(found, [*runs, sized("oom", 10**10, None)]).splitlines()[:-1]
    assert "not fitted" in head
    steps = [predict(each, found).step for each in runs]
    for line, each, step, error in zip(lines, runs, steps, (0.0, -50.0, 25.0), strict=True):
        assert line.split(":")[0].strip() == each.row.name
        assert numbers(line.partition(":")[2]) == pytest.approx(
            [each.row.seconds, step, round(100 * NOISE), error, 0], abs=6e-4
        )
    assert numbers(mean) == [25, 50]
    assert "a, b, c" in large, "130 bytes are more than 20"
    assert fit_command.tested(found, [sized("oom", 10, None)]).count("\n") == 1, "no error without times"
    assert " 40 GB" in fit_command.tested(found, [sized("x", 40 * 10**9, 1.0)])


# --- the command ------------------------------------------------------------------------------------------------------


def test_rows_are_grouped_by_their_set_and_profile():
    named = (("a", "x", "h100"), ("b", "y", "h100"), ("c", "x", "h200"), ("d", "x", "h100"))
    rows = [replace(ROW, name=name, set=of, machine=machine) for name, of, machine in named]
    a, b, c, d = rows
    assert groups_of(rows, None) == {("x", "h100"): [a, d], ("y", "h100"): [b], ("x", "h200"): [c]}
    assert groups_of(rows, "m") == {("x", "m"): [a, c, d], ("y", "m"): [b]}
    with pytest.raises(ValueError, match="e: no machine"):
        groups_of([replace(ROW, name="e")], None)


def test_rows_are_read_from_files_and_from_folders(tmp_path):
    write_run(tmp_path, [{"loss": 1, "seconds": 1}] * 3, {"run": {}})
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"name": "a", "seconds": 2}]))
    found = read_all([str(path), str(tmp_path)])
    assert [row.name for row in found] == ["a", tmp_path.name]
    path.write_text(json.dumps([{"name": "a"}]))
    with pytest.raises(ValueError, match="give one of the columns"):
        read_all([str(path)])


@pytest.fixture
def counted(monkeypatch) -> list[tuple[list[str], bool]]:
    """Rows are counted as RUNS, in order of their names r0, r1, .."""
    asked: list[tuple[list[str], bool]] = []

    def count(rows: Any, each: Any, gpu: bool) -> list[Run]:
        asked.append(([row.name for row in rows], gpu))
        return [Run(row, RUNS[int(row.name[1:])].layout) for row in rows]

    monkeypatch.setattr(fit_command, "count_rows", count)
    return asked


def write(path: Path, of: str, *names: int) -> str:
    steps = [each.row.seconds for each in timed(RUNS, replace(load_machine("h100"), e_gemm=0.5))]
    rows = [{"name": f"r{i}", "set": of, "machine": "h100", "seconds": steps[i]} for i in names]
    path.write_text(json.dumps(rows))
    return str(path)


def test_the_command_fits_each_group_and_writes_the_profile(tmp_path, counted, capsys):
    path = write(tmp_path / "a.json", "x", 0, 1, 2)
    main([path, "--out", str(tmp_path / "mine.json")])
    out = capsys.readouterr().out
    machine = load_machine("h100")
    runs = [Run(row, RUNS[i].layout) for i, row in enumerate(read_rows(path))]
    found = fit(runs, machine)
    parts = ["x, 3 rows, from the profile h100", scalars_table(found), results_table(leave_one_out(runs, machine))]
    assert "\n".join(parts) in out
    assert counted == [(["r0", "r1", "r2"], True)]
    written = load_machine(tmp_path / "mine.json")
    assert written == found
    assert json.loads((tmp_path / "mine.json").read_text())["about"] == "h100, fitted to 3 runs"
    assert out.splitlines()[-1].endswith("mine.json")
    main([path, "--cpu", "--machine", "h200"])
    assert counted[-1][1] is False
    assert capsys.readouterr().out.startswith("x, 3 rows, from the profile h200")


def test_the_command_tests_rows_of_the_same_set_if_there_are_any(tmp_path, counted, capsys):
    path = write(tmp_path / "a.json", "x", 0, 1)
    both = [write(tmp_path / "b.json", "x", 3), write(tmp_path / "c.json", "y", 4)]
    main([path, "--test", both[0], "--test", both[1]])
    assert counted == [(["r0", "r1"], True), (["r3"], True)]
    main([path, "--test", both[1], "--cpu"])
    assert counted[2:] == [(["r0", "r1"], False), (["r4"], False)]
    machine = load_machine("h100")
    found = fit([Run(row, RUNS[i].layout) for i, row in enumerate(read_rows(path))], machine)
    (row,) = read_rows(both[1])
    assert fit_command.tested(found, [Run(row, RUNS[4].layout)]) in capsys.readouterr().out


def test_sets_are_chosen_by_name(tmp_path, counted, capsys):
    paths = [write(tmp_path / f"{of}.json", of, i) for i, of in enumerate("xyz")]
    main([*paths, "--set", "x", "--set", "z"])
    assert counted == [(["r0"], True), (["r2"], True)]
    capsys.readouterr()
    with pytest.raises(ValueError, match="no row is of --set a, b"):
        main([*paths, "--set", "a", "--set", "b"])


def test_rows_that_all_ran_out_of_memory_have_no_table_of_errors(tmp_path, counted, capsys):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"name": "r0", "machine": "h100", "seconds": "oom"}]))
    main([str(path)])
    out = capsys.readouterr().out
    assert "mean" not in out
    assert "0 of 1" in out


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_told_on_a_terminal_alone(terminal, monkeypatch):
    said: list[str] = []
    stream: Any = SimpleNamespace(isatty=lambda: terminal, write=said.append, flush=lambda: None)
    monkeypatch.setattr(sys, "stderr", stream)
    fit_command._tell(1, 2)
    fit_command._tell(2, 2)
    text = "".join(said)
    assert numbers(text) == ([1, 2, 2, 2] if terminal else [])
    assert text.endswith("\n") == terminal
    assert text.count("\n") == text.count("\r") - 1 if terminal else not text
