"""Fits that find known scalars, sensitivities against small changes of each, and the errors of published rows."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from bench.planner import fit as planner
from bench.planner.fit import Run, fit, leave_one_out, predict, scalars_of, with_gradients, with_scalars
from bench.planner.rows import read_row, read_rows
from mpcore.pipeline.schedules import build_schedule
from mpcore.tools.analysis.layout import Layout
from mpcore.tools.analysis.machine import Machine, load_machine
from mpcore.tools.analysis.operators import OperatorCounts
from mpcore.tools.analysis.seconds import NAMES, NOISE, SPREADS, sensitivities
from mpcore.tools.analysis.work import Count, MicroBatchMemory, MicroBatchWork, PassWork, StepMemory
from tests.analysis.test_rows import PUBLISHED

SMALL = Machine(
    "test", peak=100.0, hbm=50.0, memory=1e9, peak_32=10.0, node_bandwidth=10.0, node_latency=0.0, e_gemm=0.6,
    e_attention=0.5, e_hbm=0.4, x_tp=0.8, x_dp=0.3, tau=0.2, cluster=1.1,
)  # fmt: skip
M = 8


def run(products: float, moved: float, sent: float, data: float, *, attention: int = 0, pp: int = 1) -> Run:
    """A layout of `pp` equal stages: products, other operators, bytes over tp, and over dp once a step."""
    counts = OperatorCounts(
        {"bfloat16": int(products)}, attention=attention, all_pairs=2 * attention, scores=attention, bytes=int(moved)
    )
    part = PassWork(counts, {("tp", "all_gather"): Count(1, int(sent))})
    kept = MicroBatchMemory(rounds=[MicroBatchWork(part, part)] * 3)
    held = StepMemory(parameters=40, optimizer=60, gradients=30, sent={("dp", "reduce_scatter"): Count(1, int(data))})
    sizes, plan = {"tp": 2, "dp": 8, "pp": pp}, build_schedule("gpipe", pp, M)
    layout = Layout(sizes, M, plan, None, (kept,) * pp, (3,) * pp, ([1, 6, 1],) * pp, (held,) * pp,  # type: ignore[arg-type]
                    {"tp": (0, 1), "dp": (0, 8)})  # fmt: skip
    return Run(read_row({"seconds": 1.0}), layout)


def timed(runs: list[Run], machine: Machine) -> list[Run]:
    """The runs, as long as the machine takes."""
    return [Run(replace(each.row, seconds=predict(each, machine)), each.layout) for each in runs]


RUNS = [run(9000, 100, 10, 10), run(90, 9000, 10, 10), run(90, 10, 900, 50), run(30, 10, 10, 9000), run(3, 1, 1, 1),
        run(500, 400, 30, 900, pp=3), run(4000, 900, 90, 200, attention=300, pp=2)]  # fmt: skip
LARGE = [run(*each) for each in (  # each scalar matters somewhere
    (2e14, 1e10, 1e8, 1e8), (1e12, 2e11, 1e8, 1e8), (1e12, 1e9, 6e10, 1e8), (1e12, 1e9, 1e8, 9e10),
    (1e10, 1e7, 1e6, 1e6), (1e14, 1e11, 3e10, 3e10), (3e13, 9e10, 1e9, 1e10), (2e14, 3e10, 1e10, 1e9),
)]  # fmt: skip


@pytest.mark.parametrize("i", range(len(RUNS)))
def test_the_jacobian_is_the_change_of_a_step_with_each_scalar(i):
    """d log step / d log scalar, by differences."""
    found = sensitivities(RUNS[i].layout, SMALL)
    for k, name in enumerate(NAMES):
        up, down = (
            predict(RUNS[i], replace(SMALL, **{name: getattr(SMALL, name) * math.exp(e)})) for e in (1e-5, -1e-5)
        )
        assert found[k] == pytest.approx((math.log(up) - math.log(down)) / 2e-5, rel=1e-4, abs=1e-8), name


def test_the_fit_finds_scalars_that_runs_identify():
    start = load_machine("h100")
    true = with_scalars(start, scalars_of(start) + scalars_of(start).new_tensor([0.2, -0.3, 0.4, 1.0, 1.5, 0.0]))
    runs = timed(LARGE, true)
    found = fit(runs, start)
    for name in ("e_gemm", "e_hbm", "x_tp", "x_dp", "tau"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.15), name
        assert name in planner.identified(found)
    assert "cluster" not in planner.identified(found), "it multiplies all that e_gemm divides"
    assert all(abs(predict(each, found) / each.row.seconds - 1) < 0.03 for each in runs)
    assert found.sources["tau"] == "fitted: 8 runs"


def test_shares_of_a_peak_are_at_most_one():
    fast = timed([run(9000, 9000, 1, 1)] * 5, replace(SMALL, e_gemm=3.0, e_hbm=3.0))
    found = fit(fast, replace(SMALL, e_gemm=0.99, e_hbm=0.99))
    assert (found.e_gemm, found.e_hbm) == (pytest.approx(1), pytest.approx(1))


def test_one_run_on_a_slow_node_hardly_moves_the_fit():
    """Least squares would move another run's time by 16 %."""
    start = load_machine("h100")
    runs = timed(LARGE, start)
    assert fit(runs, start).e_gemm == pytest.approx(start.e_gemm, rel=1e-3)
    slow = fit(
        [Run(replace(runs[0].row, seconds=1.5 * (runs[0].row.seconds or 0.0)), runs[0].layout), *runs[1:]], start
    )
    for each in runs[1:]:
        assert predict(each, slow) == pytest.approx(each.row.seconds, rel=0.03)


def test_a_machine_without_a_fit_is_as_uncertain_as_its_priors():
    J = sensitivities(RUNS[1].layout, SMALL)
    for known in ({}, {"e_hbm": 0.01}):
        spreads = (SPREADS | known).values()
        want = math.sqrt(sum((j * s) ** 2 for j, s in zip(J, spreads, strict=True)) + NOISE**2)
        assert planner.uncertainty(RUNS[1], replace(SMALL, errors=known)) == pytest.approx(want)


def test_gradients_of_two_bytes_need_less_memory():
    kept, held = MicroBatchMemory(unsummed=400), StepMemory(parameters=50, gradients=100)
    layout = replace(LARGE[0].layout, stages=(kept,), held=(held,))
    assert layout.fullest[1] == 50 + 100 + 400
    assert with_gradients(layout, 2).fullest[1] == 50 + 50 + 200


def test_the_command_fits_writes_and_tests(tmp_path, capsys):
    tiny = {"layers": 1, "hidden": 32, "seq_len": 16, "batch": 4, "micro_batch": 1, "machine": "h100"}
    rows = [{**tiny, "name": f"tp {tp}", "gpus": 2, "tp": tp, "seconds": 0.1 * tp} for tp in (1, 2)]
    (tmp_path / "rows.json").write_text(json.dumps([*rows, {**rows[0], "name": "large", "seconds": "oom"}]))
    path = str(tmp_path / "rows.json")
    planner.main([path, "--out", str(tmp_path / "mine.json"), "--test", path])
    text = capsys.readouterr().out
    assert "mean absolute error of rows left out" in text
    assert "out of memory: 0 of 1 were planned so, 0 of 2 that ran too" in text
    assert "rows that were not fitted" in text
    assert load_machine(tmp_path / "mine.json").sources["tau"] == "fitted: 2 runs"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "profile"), [("SC'21", "a100-80"), ("DGXC", "h100"), ("MCore", "h100")])
def test_published_rows_are_predicted_when_they_are_left_out(name, profile):
    runs = planner.count_rows([row for row in read_rows(PUBLISHED) if row.set == name])
    mean, most = planner.mean_and_most(leave_one_out(runs, load_machine(profile)))
    assert mean < 0.05
    assert most < 0.12
    if name == "SC'21":
        assert max(each.layout.fullest[1] for each in runs) < 80e9
