"""Fits, against least squares on logarithms written out; sensitivities, against small changes of each scalar."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from bench.planner.fit import Run, fit, predict, uncertainty
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


def test_shares_of_a_peak_are_at_most_one():
    fast = timed([run(9000, 9000, 1, 1)] * 5, replace(MACHINE, e_gemm=3.0, e_hbm=3.0))
    found = fit(fast, replace(MACHINE, e_gemm=0.99, e_hbm=0.99))
    assert (found.e_gemm, found.e_hbm) == (pytest.approx(1), pytest.approx(1))


def test_a_machine_without_a_fit_is_as_uncertain_as_its_priors():
    J = sensitivities(RUNS[1].layout, MACHINE)
    spreads = list(SPREADS.values())
    want = math.sqrt(sum((j * s) ** 2 for j, s in zip(J, spreads, strict=True)) + NOISE**2)
    assert uncertainty(RUNS[1], MACHINE) == pytest.approx(want)
    known = replace(MACHINE, errors={"e_hbm": 0.01, "hbm": 9.0})
    spreads[1] = 0.01
    want = math.sqrt(sum((j * s) ** 2 for j, s in zip(J, spreads, strict=True)) + NOISE**2)
    assert uncertainty(RUNS[1], known) == pytest.approx(want)


# --- rows -------------------------------------------------------------------------------------------------------------
