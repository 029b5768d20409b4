"""What `python -m bench.planner` prints, by its numbers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.planner import fit as fit_command
from bench.planner.fit import (
    Result,
    Run,
    fit,
    groups_of,
    main,
    mean_and_most,
    memory_lines,
    read_all,
)
from bench.planner.rows import read_row, read_rows
from mpcore.tools.analysis.machine import load_machine
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
    found = fit([Run(row, RUNS[i].layout) for i, row in enumerate(read_rows(path))], load_machine("h100"))
    assert "x, 3 rows, from the profile h100" in capsys.readouterr().out
    assert counted == [(["r0", "r1", "r2"], True)]
    written = load_machine(tmp_path / "mine.json")
    assert written == found
    assert json.loads((tmp_path / "mine.json").read_text())["about"] == "h100, fitted to 3 runs"
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
