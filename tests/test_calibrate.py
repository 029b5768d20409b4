"""Rows that are read or refused, fits that find known scalars, and the errors of published rows."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bench.planner.fit import (
    Run,
    fit,
    identified,
    leave_one_out,
    main,
    mean_and_most,
    predict,
    scalars_of,
    with_scalars,
)
from bench.planner.rows import read_row, read_rows
from mpcore.pipeline.schedules import build_schedule
from mpcore.tools.analysis.layout import Layout
from mpcore.tools.analysis.machine import Machine, load_machine
from mpcore.tools.analysis.operators import OperatorCounts
from mpcore.tools.analysis.seconds import estimate
from mpcore.tools.analysis.work import Count, MicroBatchMemory, MicroBatchWork, PassWork, StepMemory

PUBLISHED = Path(__file__).parent.parent / "bench" / "planner" / "published.json"
ROW = {"name": "8B", "gpus": 8, "tp": 2, "layers": 4, "hidden": 32, "batch": 8, "seconds": 1.5}


def made(flops: float, size: int, sent: int, data: int, seconds: float | None = None) -> Run:
    """A layout of 16 ranks on paper."""
    part = PassWork(OperatorCounts({"bfloat16": int(flops)}, bytes=size), {("tp", "all_gather"): Count(1, sent)})
    kept = MicroBatchMemory(rounds=[MicroBatchWork(part, part)] * 3)
    held = StepMemory(sent={("dp", "reduce_scatter"): Count(1, data)})
    axes = {"tp": (0, 1), "dp": (0, 8)}
    layout = Layout(
        {"tp": 2, "dp": 8}, (), 8, build_schedule("gpipe", 1, 8), None, (kept,), (4,), ([1, 6, 1],), (held,), axes
    )
    return Run(read_row({**ROW, "seconds": seconds or 1.0}), layout)


def timed(run: Run, machine: Machine) -> Run:
    """The run, as long as the machine takes."""
    return Run(replace(run.row, seconds=estimate(run.layout, machine).step), run.layout)


def candidates() -> list[Run]:
    """Layouts in which each scalar matters somewhere."""
    grid = [(2e14, 1e10, 1e8, 1e8), (1e12, 2e11, 1e8, 1e8), (1e12, 1e9, 6e10, 1e8), (1e12, 1e9, 1e8, 9e10)]
    grid += [(1e10, 1e7, 1e6, 1e6), (1e14, 1e11, 3e10, 3e10), (3e13, 9e10, 1e9, 1e10), (2e14, 3e10, 1e10, 1e9)]
    return [made(flops, int(size), int(sent), int(data)) for flops, size, sent, data in grid]


def test_the_fit_finds_scalars_that_runs_identify():
    start = load_machine("h100")
    true = with_scalars(start, scalars_of(start) + scalars_of(start).new_tensor([0.2, -0.3, 0.4, 1.0, 1.5, 0.0]))
    runs = [timed(run, true) for run in candidates()]
    found = fit(runs, start)
    for name in ("e_gemm", "e_hbm", "x_tp", "x_dp", "tau"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.15), name
        assert name in identified(found)
    assert "cluster" not in identified(found), "it multiplies all that e_gemm divides"
    assert all(abs(result.fitted / result.seconds - 1) < 0.03 for result in leave_one_out(runs, start))
    assert found.sources["tau"] == "fitted: 8 runs"


def test_one_run_on_a_slow_node_hardly_moves_the_fit():
    """Least squares would move another run's time by 16 %."""
    start = load_machine("h100")
    runs = [timed(run, start) for run in candidates()]
    slow = [Run(replace(runs[0].row, seconds=1.5 * (runs[0].row.seconds or 0.0)), runs[0].layout), *runs[1:]]
    assert fit(runs, start).e_gemm == pytest.approx(start.e_gemm, rel=1e-3)
    for run in runs[1:]:
        assert predict(run, fit(slow, start)).step == pytest.approx(run.row.seconds, rel=0.03)


def test_gradients_of_two_bytes_need_less_memory():
    kept, held = MicroBatchMemory(unsummed=400), StepMemory(parameters=50, gradients=100)
    layout = replace(candidates()[0].layout, stages=(kept,), held=(held,))
    assert layout.fullest[1] == 50 + 100 + 400
    assert layout.with_gradients(2).fullest[1] == 50 + 50 + 200


def test_the_command_fits_writes_and_tests(tmp_path, capsys):
    tiny = {"layers": 1, "hidden": 32, "seq_len": 16, "batch": 4, "micro_batch": 1, "machine": "h100"}
    rows = [{**tiny, "name": f"tp {tp}", "gpus": 2, "tp": tp, "seconds": 0.1 * tp} for tp in (1, 2)]
    (tmp_path / "rows.json").write_text(json.dumps([*rows, {**rows[0], "name": "large", "seconds": "oom"}]))
    path = str(tmp_path / "rows.json")
    main([path, "--out", str(tmp_path / "mine.json"), "--test", path])
    text = capsys.readouterr().out
    assert "mean absolute error of rows left out" in text
    assert "out of memory: 0 of 1 were planned so, 0 of 2 that ran too" in text
    assert "rows that were not fitted:" in text
    assert load_machine(tmp_path / "mine.json").sources["tau"] == "fitted: 2 runs"


def test_the_published_rows_are_read():
    rows = read_rows(PUBLISHED)
    assert list(Counter(row.set for row in rows).values()) == [5, 4, 4]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "profile"), [("SC'21", "a100-80"), ("DGXC", "h100"), ("MCore", "h100")])
def test_published_rows_are_predicted_when_they_are_left_out(name, profile):
    from bench.planner.fit import count_rows

    runs = count_rows([row for row in read_rows(PUBLISHED) if row.set == name])
    mean, most = mean_and_most(leave_one_out(runs, load_machine(profile)))
    assert mean < 0.05
    assert most < 0.12
    if name == "SC'21":
        assert max(run.layout.fullest[1] for run in runs) < 80e9
