"""The parts of a step's seconds, each from its own counts and rates, added by hand; and the errors of rates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from mpcore.pipeline.schedules import build_schedule
from mpcore.tools.analysis.counts import Count
from mpcore.tools.analysis.layout import Layout
from mpcore.tools.analysis.machine import Machine
from mpcore.tools.analysis.operators import OperatorCounts
from mpcore.tools.analysis.seconds import INSIDE, NAMES, SPREADS, errors_of, estimate, sensitivities
from mpcore.tools.analysis.work import MicroBatchMemory, MicroBatchWork, PassWork, StepMemory

M = 6  # micro-batches
RATES = Machine(
    "test", peak=1000.0, hbm=100.0, memory=1.0, peak_32=50.0, peak_vector=20.0, node=8, e_gemm=0.5, e_attention=0.25,
    e_hbm=0.5, node_bandwidth=10.0, node_latency=2.0, bandwidth=1.0, latency=100.0, x_tp=0.75, x_dp=0.5, tau=0.03,
    cluster=1.25,
)  # fmt: skip


def part(scale: int, sent: dict[tuple[str, str], Count] | None = None) -> PassWork:
    """Of products in two dtypes, attention, and other operators."""
    tally = OperatorCounts(
        {"bfloat16": 5000 * scale, "float32": 100 * scale}, attention=1000 * scale, all_pairs=2000 * scale,
        scores=7 * scale, unaligned=400 * scale, bytes=600 * scale,
    )  # fmt: skip
    return PassWork(tally, sent or {})


def layout(
    *stages: tuple[PassWork, PassWork], held: tuple[StepMemory, ...], blocks: tuple[int, ...], **more: Any
) -> Layout:
    made = tuple(MicroBatchMemory(rounds=[MicroBatchWork(f, b)] * 3) for f, b in stages)
    plan = build_schedule("gpipe", len(held), M)
    sizes = {"tp": 2, "cp": 1, "pp": len(held), "ep": 1, "dp": 2}
    told: dict[str, Any] = {"axes": {"tp": (0, 1), "dp": (0, 2), "odd": (0, 3)}} | more
    return Layout(sizes, M, plan, None, made, blocks, ((1, M - 2, 1),) * len(made), held, **told)  # type: ignore[arg-type]


def test_every_part_has_the_rate_of_its_own_unit():
    sent = {("tp", "all_reduce"): Count(3, 40), ("dp", "all_gather"): Count(1, 20), ("pp", "send"): Count(1, 99)}
    held = StepMemory(
        parameters=300, buffers=7, gradients=50, optimizer=1200, sent={("odd", "all_reduce"): Count(2, 60)}
    )
    found = estimate(layout((part(1, sent), part(2)), held=(held,), blocks=(4,)), RATES)
    assert found.products == pytest.approx(M * 3 * (5000 / 500 + 100 / 25), rel=1e-12)
    assert found.attention == pytest.approx(M * 3 * 1000 / 250, rel=1e-12)
    assert found.operators == pytest.approx(M * 3 * 600 / 50, rel=1e-12)
    assert found.host == pytest.approx(M * 4 * 0.03, rel=1e-12)
    ring = 2 * (3 * 1 * 2.0 + 40 / 2 / 10)
    gather, late = 1 * 1 * 2.0 + 20 / 2 / 10, 2 * (2 * 1 * 2.0 + 60 / 2 / 10)
    assert found.exposed == {
        "tp": pytest.approx(0.75 * M * ring, rel=1e-12), "dp": pytest.approx(0.5 * M * gather, rel=1e-12),
        "odd": pytest.approx(0.5 * late, rel=1e-12),
    }  # fmt: skip
    assert found.hidden == {
        axis: pytest.approx(x * found.exposed[axis]) for axis, x in (("tp", 1 / 3), ("dp", 1), ("odd", 1))
    }
    assert found.optimizer == pytest.approx((2 * (300 + 1200) + 50) / 50, rel=1e-12)
    assert found.bubble == pytest.approx(0, abs=1e-9)
    before = found.step - found.cluster
    assert found.cluster == pytest.approx(0.25 * before, rel=1e-12)
    assert list(found.parts()) == [
        "products", "attention", "operators", "tp sent", "dp sent", "odd sent", "bubble", "host", "optimizer",
        "cluster",
    ]  # fmt: skip
    assert found.step == pytest.approx(sum(found.parts().values()), rel=1e-12)


def test_attention_that_is_written_out_moves_its_scores_and_computes_all_pairs():
    one = layout((part(1), part(2)), held=(StepMemory(),), blocks=(4,))
    found = estimate(one, RATES, unfused=True)
    assert found.operators == pytest.approx(M * 3 * (600 + 9 * 7) / 50, rel=1e-12)
    slow = 400 / (20 * 0.5)
    assert found.attention == pytest.approx(M * 3 * ((2000 - 400) / 250 + slow), rel=1e-12)
    assert estimate(one, replace(RATES, peak_vector=0.0), True).attention == pytest.approx(M * 3 * 2000 / 250)


def test_the_seconds_of_one_axis_add_up_and_axes_inside_a_micro_batch_are_never_data_axes():
    counts = {(axis, kind): Count(1, 20) for axis in (*INSIDE, "data") for kind in ("all_gather", "reduce_scatter")}
    axes = dict.fromkeys((*INSIDE, "data"), (0, 1))
    found = estimate(layout((part(1, counts), part(1)), held=(StepMemory(sent=counts),), blocks=(1,), axes=axes), RATES)
    each = 2 * (2.0 + 20 / 2 / 10)
    assert found.exposed == {
        **{axis: pytest.approx(0.75 * M * each, rel=1e-12) for axis in INSIDE},
        "data": pytest.approx(0.5 * (M + 1) * each, rel=1e-12),
    }  # fmt: skip
    assert set(INSIDE) == {"tp", "cp", "cp_outer", "cp_inner", "ep", "etp"}


@pytest.mark.parametrize(("flops", "hidden"), [(2000, 4.0), (10**6, 22 * 3 / 4)])
def test_products_hide_messages_of_forward_and_rings_of_backward(flops, hidden):
    """Three quarters of a ring's 22 s travel beside products, of 500 a second. x_tp has backward's all-reduces."""
    ring = {("tp", "all_to_all"): Count(10, 20, beside=15, flops=flops)}
    late = {("tp", "all_reduce"): Count(3, 40, beside=40, flops=flops)}
    passes = replace(part(1, ring), operators=stage(4, 0)[0].operators), stage(0, 4)[1]
    exact = replace(RATES, x_tp=0.75, tau=0.0)
    found = estimate(layout(passes, held=(StepMemory(),), blocks=(1,)), exact)
    assert found.exposed == {"tp": pytest.approx(0.75 * M * (22 - hidden))}
    assert found.hidden == {"tp": pytest.approx(M * 22 - found.exposed["tp"])}
    again = estimate(layout((stage(4, 0)[0], replace(passes[1], sent=late)), held=(StepMemory(),), blocks=(1,)), exact)
    assert again.exposed == {"tp": pytest.approx(0.75 * M * 2 * (3 * 2.0 + 40 / 2 / 10))}


def stage(forward: int, backward: int) -> tuple[PassWork, PassWork]:
    """Of seconds of products alone."""
    return PassWork(OperatorCounts({"bfloat16": 500 * forward})), PassWork(OperatorCounts({"bfloat16": 500 * backward}))


def test_the_slowest_rank_is_shown_and_the_bubble_is_what_it_waits_for_others():
    """gpipe, stages of 1 + 2 and 2 + 4 seconds: stage 1 begins 1 s late, and stage 0's last backward takes 2 s."""
    ranks = (StepMemory(parameters=50, sent={("dp", "all_gather"): Count(1, 40)}), StepMemory(optimizer=100))
    exact = replace(RATES, tau=0.0, cluster=1.0, x_dp=1.0, node_latency=0.0)
    found = estimate(layout(stage(1, 2), stage(2, 4), held=ranks, blocks=(1, 1)), exact)
    assert found.products == pytest.approx(M * 6)
    assert found.bubble == pytest.approx(1 + 2)
    assert found.optimizer == pytest.approx(2 * 100 / 50), "of the slowest rank"
    assert found.exposed == {"dp": pytest.approx(40 / 2 / 10)}, "of the rank that sends most"
    other = estimate(layout(stage(2, 4), stage(1, 2), held=ranks, blocks=(1, 1)), exact)
    assert (other.products, other.bubble) == (pytest.approx(M * 6), pytest.approx(1 + 2))
    assert other.optimizer == pytest.approx(2 * 50 / 50)
    assert estimate(layout(stage(2, 4), held=ranks[:1], blocks=(1,)), exact).bubble == 0


@pytest.mark.parametrize(("received", "sent_back", "node", "seconds"), [
    (60, 20, 8, 2.0 + 60 / 10), (20, 60, 8, 2.0 + 60 / 10), (60, 20, 4, 100.0 + 60 / 1), (0, 0, 8, 2.0),
])  # fmt: skip
def test_a_message_takes_the_link_between_neighbours_along_pp(received, sent_back, node, seconds):
    """4 ranks a stage: neighbours are 0 and 4. There and back once, and each message delays one that waits."""
    made = layout(stage(1, 2), stage(1, 2), held=(StepMemory(), StepMemory()), blocks=(1, 1))
    later = (made.stages[0], replace(made.stages[1], received=received, sent_back=sent_back))
    exact = replace(RATES, tau=0.0, node=node)
    assert estimate(replace(made, stages=later), exact).bubble == pytest.approx((1 + 2) + 2 * seconds)


@pytest.mark.parametrize("m", [8, 20])
def test_micro_batches_beyond_those_of_the_short_schedule_take_as_long_as_the_last_of_it(m):
    """1f1b: (m + stages - 1) (forward + backward)."""
    made = layout(stage(1, 2), stage(1, 2), held=(StepMemory(), StepMemory()), blocks=(1, 1))
    plans = {n: build_schedule("1f1b", 2, n) for n in (6, 8)}
    made = replace(made, micro_batches=m, short=plans[8], shorter=None if m == 8 else plans[6])
    found = estimate(made, replace(RATES, tau=0.0, node_latency=0.0))
    assert found.products == pytest.approx(m * 3)
    assert found.bubble == pytest.approx(3)


def test_a_split_backward_takes_half_of_its_seconds_in_each_half():
    """The bubble of ZB-H1 is (p - 1) (F + I - W), Qi et al. 2024, table 2; that of 1f1b (p - 1) (F + B)."""
    made = layout(stage(2, 4), stage(2, 4), held=(StepMemory(), StepMemory()), blocks=(1, 1))
    found = estimate(replace(made, short=build_schedule("zb", 2, M)), replace(RATES, tau=0.0, node_latency=0.0))
    assert found.bubble == pytest.approx((2 - 1) * (2 + 2 - 2))


# --- the errors of rates ----------------------------------------------------------------------------------------------


SMALL = Machine(
    "test", peak=100.0, hbm=50.0, memory=1e9, peak_32=10.0, node_bandwidth=10.0, node_latency=0.0, e_gemm=0.6,
    e_attention=0.5, e_hbm=0.4, x_tp=0.8, x_dp=0.3, tau=0.2, cluster=1.1,
)  # fmt: skip


def even(products: float, moved: float, sent: float, data: float, *, attention: int = 0, pp: int = 1) -> Layout:
    """A layout of `pp` equal stages: products, other operators, bytes over tp, and over dp once a step."""
    counts = OperatorCounts(
        {"bfloat16": int(products)}, attention=attention, all_pairs=2 * attention, scores=attention, bytes=int(moved)
    )
    part = PassWork(counts, {("tp", "all_gather"): Count(1, int(sent))})
    held = StepMemory(parameters=40, optimizer=60, gradients=30, sent={("dp", "reduce_scatter"): Count(1, int(data))})
    return layout(*[(part, part)] * pp, held=(held,) * pp, blocks=(3,) * pp)


LAYOUTS = [even(9000, 100, 10, 10), even(90, 9000, 10, 10), even(90, 10, 900, 50), even(30, 10, 10, 9000),
           even(3, 1, 1, 1), even(500, 400, 30, 900, pp=3), even(4000, 900, 90, 200, attention=300, pp=2)]  # fmt: skip


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
