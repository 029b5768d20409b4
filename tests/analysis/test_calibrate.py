"""Fits, against least squares on logarithms written out; sensitivities, against small changes of each scalar."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.planner import fit as calibrate
from bench.planner.fit import (
    USUAL,
    Result,
    Run,
    count_rows,
    fit,
    identified,
    leave_one_out,
    predict,
    scalars_of,
    uncertainty,
    with_scalars,
)
from bench.planner.rows import read_row
from mpcore.pipeline.schedules import build_schedule
from mpcore.tools.analysis.counts import Count
from mpcore.tools.analysis.layout import Layout
from mpcore.tools.analysis.machine import Machine
from mpcore.tools.analysis.operators import OperatorCounts
from mpcore.tools.analysis.rate_errors import NAMES, NOISE, SPREADS, sensitivities
from mpcore.tools.analysis.work import MicroBatchMemory, MicroBatchWork, PassWork, StepMemory
from tests.test_plan import build as build_mlp  # noqa: F401  (a row names it)

MACHINE = Machine(
    "test", peak=100.0, hbm=50.0, memory=1e9, peak_32=10.0, node_bandwidth=10.0, node_latency=0.0, e_gemm=0.6,
    e_attention=0.5, e_hbm=0.4, x_tp=0.8, x_dp=0.3, tau=0.2, cluster=1.1,
)  # fmt: skip
M = 8


def run(products: int, moved: int, sent: int, data: int, *, attention: int = 0, pp: int = 1, **row: Any) -> Run:
    """A layout of `pp` equal stages: products, other operators, bytes over tp, and over dp once a step."""
    tally = OperatorCounts(
        {"bfloat16": products}, attention=attention, all_pairs=2 * attention, scores=attention, bytes=moved
    )
    part = PassWork(tally, {("tp", "all_gather"): Count(1, sent)})
    kept = MicroBatchMemory(rounds=[MicroBatchWork(part, part)] * 3)
    held = StepMemory(parameters=40, optimizer=60, gradients=30, sent={("dp", "reduce_scatter"): Count(1, data)})
    plan = build_schedule("gpipe", pp, M)
    layout = Layout({"tp": 2, "dp": 2, "pp": pp}, (), M, plan, None, (kept,) * pp, (3,) * pp, ([1, 6, 1],) * pp,  # type: ignore[arg-type]
                    (held,) * pp, {"tp": (0, 1), "dp": (0, 2)})  # fmt: skip
    return Run(replace(read_row({"seconds": 1.0}), **row), layout)


RUNS = [run(9000, 100, 10, 10), run(90, 9000, 10, 10), run(90, 10, 900, 50), run(30, 10, 10, 9000), run(3, 1, 1, 1),
        run(500, 400, 30, 900, pp=3), run(4000, 900, 90, 200, attention=300, pp=2)]  # fmt: skip


def timed(runs: list[Run], machine: Machine, **row: Any) -> list[Run]:
    return [Run(replace(each.row, seconds=predict(each, machine).step, **row), each.layout) for each in runs]


@pytest.mark.parametrize("i", range(len(RUNS)))
def test_the_jacobian_is_the_change_of_a_step_with_each_scalar(i):
    """d log step / d log scalar, by differences."""
    found = sensitivities(RUNS[i].layout, MACHINE)
    for k, name in enumerate(NAMES):
        steps = [
            predict(RUNS[i], replace(MACHINE, **{name: getattr(MACHINE, name) * math.exp(e)})).step
            for e in (1e-5, -1e-5)
        ]
        slope = (math.log(steps[0]) - math.log(steps[1])) / 2e-5
        assert found[k] == pytest.approx(slope, rel=1e-4, abs=1e-8), name


def test_attention_that_is_written_out_is_predicted_so():
    slow = Run(replace(RUNS[6].row, unfused=True), RUNS[6].layout)
    assert predict(slow, MACHINE).operators > predict(RUNS[6], MACHINE).operators


def objective(runs: list[Run], machine: Machine, theta: Tensor) -> float:
    """Half of minus the logarithm of the posterior, with Huber's loss."""
    here, total = with_scalars(machine, theta), 0.0
    for each in runs:
        assert each.row.seconds is not None
        r = abs(math.log(each.row.seconds) - math.log(predict(each, here).step)) / NOISE
        total += r * r / 2 if r < USUAL else USUAL * r - USUAL**2 / 2
    prior = (theta - scalars_of(machine)) / torch.tensor(list(SPREADS.values()), dtype=torch.float64)
    return total + float(prior.square().sum()) / 2


@pytest.mark.parametrize("outlier", [1.0, 1.4])
def test_the_fit_is_the_best_of_its_neighbourhood(outlier):
    """No small step of any scalar lowers the penalised error; an outlier counts by its size alone."""
    true = with_scalars(MACHINE, scalars_of(MACHINE) + torch.tensor([0.1, 0.2, -0.3, 0.4, 0.5, 0.0]).double())
    runs = timed(RUNS, true)
    runs[0] = Run(replace(runs[0].row, seconds=outlier * (runs[0].row.seconds or 0)), runs[0].layout)
    found = fit(runs, MACHINE)
    theta = scalars_of(found)
    best = objective(runs, MACHINE, theta)
    for k in range(6):
        for step in (0.004, -0.004):
            moved = theta.clone()
            moved[k] += step
            assert objective(runs, MACHINE, moved) > best - 1e-4, (k, step)


def test_shares_of_a_peak_are_at_most_one():
    fast = timed([run(9000, 9000, 1, 1)] * 5, replace(MACHINE, e_gemm=3.0, e_hbm=3.0))
    found = fit(fast, replace(MACHINE, e_gemm=0.99, e_hbm=0.99))
    assert (found.e_gemm, found.e_hbm) == (pytest.approx(1), pytest.approx(1))


def test_without_runs_the_fit_is_the_prior():
    found = fit([], MACHINE)
    assert scalars_of(found).tolist() == pytest.approx(scalars_of(MACHINE).tolist())
    assert found.errors == pytest.approx(SPREADS)
    assert identified(found) == ()
    assert {found.sources[name] for name in NAMES} == {"fitted: 0 runs"}


def test_the_covariance_is_that_of_least_squares_with_priors():
    runs = timed(RUNS, MACHINE)
    oom = Run(replace(RUNS[0].row, seconds=None), RUNS[0].layout)
    found = fit([*runs, oom], replace(MACHINE, sources={"peak": "x", "tau": "y"}))
    J = torch.tensor([sensitivities(each.layout, MACHINE) for each in runs]).double()
    information = J.T @ J / NOISE**2 + torch.tensor([s**-2 for s in SPREADS.values()]).double().diag()
    covariance = torch.linalg.inv(information)
    for k, name in enumerate(NAMES):
        assert found.errors[name] == pytest.approx(math.sqrt(float(covariance[k, k])), rel=1e-3)
        assert (name in identified(found)) == (found.errors[name] < SPREADS[name] / 2)
    assert found.sources == {"peak": "x"} | dict.fromkeys(NAMES, "fitted: 7 runs")
    assert (found.e_attention, found.peak) == (0.5, 100.0), "the others are not fitted"


def test_a_machine_without_a_fit_is_as_uncertain_as_its_priors():
    J = sensitivities(RUNS[1].layout, MACHINE)
    spreads = list(SPREADS.values())
    want = math.sqrt(sum((j * s) ** 2 for j, s in zip(J, spreads, strict=True)) + NOISE**2)
    assert uncertainty(RUNS[1], MACHINE) == pytest.approx(want)
    known = replace(MACHINE, errors={"e_hbm": 0.01, "hbm": 9.0})
    spreads[1] = 0.01
    want = math.sqrt(sum((j * s) ** 2 for j, s in zip(J, spreads, strict=True)) + NOISE**2)
    assert uncertainty(RUNS[1], known) == pytest.approx(want)


def test_each_run_is_predicted_by_the_fit_on_all_others():
    runs = timed(RUNS[:4], with_scalars(MACHINE, scalars_of(MACHINE) + 0.1))
    oom = Run(replace(RUNS[4].row, seconds=None), RUNS[4].layout)
    results = leave_one_out([*runs, oom], MACHINE)
    assert [result.row for result in results] == [each.row for each in runs]
    for i, (each, result) in enumerate(zip(runs, results, strict=True)):
        others = fit([*runs[:i], *runs[i + 1 :]], MACHINE)
        assert result.seconds == each.row.seconds
        assert result.fitted == pytest.approx(predict(each, fit(runs, MACHINE)).step)
        assert result.left_out == pytest.approx(predict(each, others).step)
    assert Result(RUNS[0].row, 4.0, 9.0, 5.0).error == 0.25


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_are_counted_with_one_counter_a_target(monkeypatch):
    made: list[Any] = []

    class Spy:
        def __init__(self, build: Any, gpu: bool, share: bool) -> None:
            made.append((build.__name__, gpu, share))

        def layout(self, arguments: tuple[str, ...], **sizes: int) -> Layout:
            if "--refuse" in arguments:
                raise ValueError("why")
            return replace(RUNS[0].layout, arguments=arguments, sizes=sizes)

    monkeypatch.setattr(calibrate, "Counter", Spy)
    target = "tests.test_plan:build"
    rows = [read_row({"target": target, "tp": tp, "x": tp, "seconds": 1, "gradient_bytes": 2 * tp}) for tp in (1, 2)]
    told: list[tuple[int, int]] = []
    runs = count_rows(rows, lambda done, of: told.append((done, of)))
    assert told == [(1, 2), (2, 2)]
    assert [each.row for each in runs] == rows
    assert [(each.layout.arguments, each.layout.sizes["tp"]) for each in runs] == [(("--x", "1"), 1), (("--x", "2"), 2)]
    assert [each.layout.held[0].gradients for each in runs] == [15, 30]
    other = read_row({"target": "tests.test_plan:work_of_mlp", "seconds": 1})
    count_rows([other, *rows], stands_for_gpu=False)
    assert made == [("build", True, True), ("work_of_mlp", False, True), ("build", False, True)]
    with pytest.raises(ValueError, match="mine: why"):
        count_rows([read_row({"target": target, "name": "mine", "refuse": True, "seconds": 1})])
    with pytest.raises(ValueError, match="mine: nowhere can't be imported"):
        count_rows([read_row({"target": "nowhere:build", "name": "mine", "seconds": 1})])
