"""The error of a predicted step: sensitivities against small changes of each rate, and the errors of all together."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mpcore.pipeline.schedules import build_schedule
from mpcore.tools.analysis.layout import Layout
from mpcore.tools.analysis.machine import Machine
from mpcore.tools.analysis.operators import OperatorCounts
from mpcore.tools.analysis.seconds import NAMES, SPREADS, errors_of, estimate, sensitivities
from mpcore.tools.analysis.work import Count, MicroBatchMemory, MicroBatchWork, PassWork, StepMemory

SMALL = Machine(
    "test", peak=100.0, hbm=50.0, memory=1e9, peak_32=10.0, node_bandwidth=10.0, node_latency=0.0, e_gemm=0.6,
    e_attention=0.5, e_hbm=0.4, x_tp=0.8, x_dp=0.3, tau=0.2, cluster=1.1,
)  # fmt: skip
M = 8


def layout(products: float, moved: float, sent: float, data: float, *, attention: int = 0, pp: int = 1) -> Layout:
    """A layout of `pp` equal stages: products, other operators, bytes over tp, and over dp once a step."""
    counts = OperatorCounts(
        {"bfloat16": int(products)}, attention=attention, all_pairs=2 * attention, scores=attention, bytes=int(moved)
    )
    part = PassWork(counts, {("tp", "all_gather"): Count(1, int(sent))})
    kept = MicroBatchMemory(rounds=[MicroBatchWork(part, part)] * 3)
    held = StepMemory(parameters=40, optimizer=60, gradients=30, sent={("dp", "reduce_scatter"): Count(1, int(data))})
    sizes, plan = {"tp": 2, "dp": 8, "pp": pp}, build_schedule("gpipe", pp, M)
    return Layout(sizes, M, plan, None, (kept,) * pp, (3,) * pp, ([1, 6, 1],) * pp, (held,) * pp,  # type: ignore[arg-type]
                  {"tp": (0, 1), "dp": (0, 8)})  # fmt: skip


LAYOUTS = [layout(9000, 100, 10, 10), layout(90, 9000, 10, 10), layout(90, 10, 900, 50), layout(30, 10, 10, 9000),
           layout(3, 1, 1, 1), layout(500, 400, 30, 900, pp=3),
           layout(4000, 900, 90, 200, attention=300, pp=2)]  # fmt: skip


@pytest.mark.parametrize("i", range(len(LAYOUTS)))
def test_the_jacobian_is_the_change_of_a_step_with_each_rate(i):
    """d log step / d log rate, by differences."""
    found = sensitivities(LAYOUTS[i], SMALL)
    for k, name in enumerate(NAMES):
        up, down = (
            estimate(LAYOUTS[i], replace(SMALL, **{name: getattr(SMALL, name) * math.exp(e)})).step
            for e in (1e-5, -1e-5)
        )
        assert found[k] == pytest.approx((math.log(up) - math.log(down)) / 2e-5, rel=1e-4, abs=1e-8), name


def test_a_rate_without_a_known_error_has_that_of_its_prior():
    J = sensitivities(LAYOUTS[1], SMALL)
    for known in ({}, {"e_hbm": 0.01}):
        spreads = (SPREADS | known).values()
        want = [j * s for j, s in zip(J, spreads, strict=True)]
        assert errors_of(LAYOUTS[1], replace(SMALL, errors=known)) == pytest.approx(want)
