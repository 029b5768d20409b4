"""Rows that are read or refused, fits that find known scalars, and the errors of published rows."""

from __future__ import annotations

import csv
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
from bench.planner.rows import flops_of, read_row, read_rows, read_run
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


def test_a_row_is_the_same_from_json_and_from_csv(tmp_path):
    row = {**ROW, "sequence_parallel": True, "zero": 0, "stages_per_rank": 2, "set": "mine"}
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    with open(tmp_path / "rows.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, [*row, "cp"])
        writer.writeheader()
        writer.writerow(row)
    (one,), (other,) = (read_rows(tmp_path / name) for name in ("rows.json", "rows.csv"))
    assert one == other
    assert one.sizes == {"tp": 2, "cp": 1, "pp": 1, "ep": 1, "dp": 4}
    text = " ".join(one.arguments)
    assert text.startswith("--layers 4 --d-model 32 --global-batch 8 --sequence-parallel --zero 0")
    assert text.endswith("--virtual-stages 2 --schedule interleaved")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": "fast"}, "8B.*: seconds is 'fast', no number above 0"),
        ({"seconds": -1}, "seconds is -1, no number above 0"),
        ({"seconds": None}, "give one of the columns seconds and tflops, not 0"),
        ({"tflops": 100}, "give one of the columns seconds and tflops, not 2"),
        ({"seconds": None, "tflops": 100}, "tflops need the columns seq_len, vocab_size"),
        ({"gpus": 7}, "7 gpus are not a multiple of tp x pp x cp = 2"),
        ({"dp": 8}, "8 gpus are not tp x pp x cp x dp = 16"), ({"tp": "two"}, "tp is 'two', no integer from 1"),
        ({"tp": 1.5}, "tp is 1.5, no integer from 1"), ({"global_batch": 16}, "gives global_batch a second time"),
        ({"attention": "flash"}, "attention 'flash' is none of fused, unfused"),
    ],
)  # fmt: skip
def test_a_wrong_row_names_its_column(changes, message, tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([ROW, {**ROW, **changes}]))
    with pytest.raises(ValueError, match=rf"rows.json, row 2.*{message.removeprefix('8B.*: ')}"):
        read_rows(path)


def test_files_that_hold_no_rows_are_refused(tmp_path):
    for content, message in (("{", "can't be read"), ("[]", "no list of at least one row"), ("[1]", "is a int")):
        (tmp_path / "rows.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            read_rows(tmp_path / "rows.json")
    (tmp_path / "rows.json").write_text(json.dumps([ROW]))
    with pytest.raises(ValueError, match="no machine; give --machine"):
        main([str(tmp_path / "rows.json")])
    bad = {**ROW, "machine": "h100", "hidden": 33}
    (tmp_path / "rows.json").write_text(json.dumps([bad]))
    with pytest.raises(ValueError, match="8B: d_model 33 is not a multiple of heads 4"):
        main([str(tmp_path / "rows.json")])


def test_tflops_are_seconds_by_megatrons_formula():
    """A trillion parameters: 163 TFLOP/s a GPU on 3,072 (Narayanan et al. 2021, table 1)."""
    shape = {"layers": 128, "d_model": 25600, "seq_len": 2048, "vocab_size": 51200, "global_batch": 3072}
    assert flops_of(shape, "recomputed") == pytest.approx(5.139e19, rel=1e-3)
    row = read_row({**shape, "gpus": 3072, "tp": 8, "pp": 64, "recompute": "full", "tflops": 163})
    assert row.seconds == pytest.approx(102.6, rel=1e-3)


def test_a_run_is_a_row(tmp_path):
    steps = [{"loss": 1.0, "seconds": s} for s in (9.0, 8.0, 1.0, 2.0, 3.0)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    (tmp_path / "config.json").write_text(json.dumps({"run": {"tp": 2, "dp": 2, "layers": 4, "lr": 0.1, "zero": 1}}))
    row = read_run(tmp_path)
    assert (row.seconds, row.sizes["dp"], row.arguments) == (2.0, 2, ("--zero", "1", "--layers", "4"))
    (tmp_path / "metrics.jsonl").write_text(json.dumps(steps[0]))
    with pytest.raises(ValueError, match="no step with seconds after the first 2"):
        read_run(tmp_path)


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
