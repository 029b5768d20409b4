"""What the planner counts and adds up, against formulas by hand."""

from __future__ import annotations

import itertools
import json
import math
import re
import signal
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from examples.gpt import plan as gpt_plan
from examples.gpt.config import GPTConfig
from examples.gpt.plan import build as build_gpt
from examples.gpt.plan import check_mesh, given_blocks, least_bytes, parse
from mpcore import Axis, ColumnParallelLinear, Mesh, RowParallelLinear
from mpcore._torch.fake import fake_tensors
from mpcore.kernels.attention import attention
from mpcore.parallel.data import shard_data_parallel
from mpcore.pipeline.makespan import resolve
from mpcore.pipeline.prove import Times, prove
from mpcore.pipeline.schedules import NAMES, build_schedule
from mpcore.tools.analysis import plan
from mpcore.tools.analysis.__main__ import main as analysis
from mpcore.tools.analysis.dry_run import Work, dry_run
from mpcore.tools.analysis.layout import Counter
from mpcore.tools.analysis.machine import NUMBERS, Machine, load_machine, save_machine
from mpcore.tools.analysis.operators import OperatorCounts, Operators
from mpcore.tools.analysis.peak import peak
from mpcore.tools.analysis.plan import Progress, main, what_if
from mpcore.tools.analysis.rate_errors import NAMES as SCALARS
from mpcore.tools.analysis.rate_errors import NOISE, errors_of
from mpcore.tools.analysis.report import LEGEND, draw, explain, table
from mpcore.tools.analysis.search import Estimate, choices, frontier, meshes, search, useful
from mpcore.tools.analysis.seconds import Seconds, _attention, _makespan, estimate
from mpcore.tools.analysis.state import state_bytes
from mpcore.tools.analysis.work import MicroBatchMemory, make_work
from mpcore.tools.parsers import PROFILES, profile_names
from mpcore.training.policies import Zero

B, D, M = 8, 64, 4  # samples of a micro-batch, width, micro-batches
BUILD = "tests.test_plan:build"
RECORDS = Path(__file__).parent.parent / "bench" / "planner"
PRODUCT = 2 * B * D * D
NOTHING = {"hbm": 1e30, "e_gemm": 1.0, "tau": 0.0, "node_latency": 0.0, "latency": 0.0}
FREE = {**NOTHING, "node_bandwidth": 1e30, "bandwidth": 1e30}  # only products take time


def machine(peak: float = 1e12, **changes: float) -> Machine:
    """Rates by which one thing alone takes time."""
    return Machine("test", peak, **({"memory": 80e9, "peak_32": peak} | FREE | changes))  # type: ignore[arg-type]


class MLP(nn.Module):
    """Two products, and one all-reduce in forward."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(D, D, bias=False, tp=mesh.tp, device="meta")
        self.down = RowParallelLinear(D, D, bias=False, tp=mesh.tp, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] -> [B, D]."""
        return self.down(self.up(x))


def build(mesh: Mesh, arguments: list[str]) -> Work:
    """A stage is one MLP; `--schedule NAME`, `--refuse`, `--micro-batch N` times B."""
    if "--refuse" in arguments:
        raise ValueError(f"refused on {mesh.tp.size}")
    name = arguments[arguments.index("--schedule") + 1] if "--schedule" in arguments else "gpipe"
    rows = B * (int(arguments[arguments.index("--micro-batch") + 1]) if "--micro-batch" in arguments else 1)
    schedule = build_schedule(name, mesh.pp.size, M)
    stages: list[nn.Module] = [
        nn.Sequential(OrderedDict({str(i): MLP(mesh)})) for i in schedule.stages_of(mesh.pp.rank)
    ]
    shard_data_parallel(stages, mesh, zero=0)
    return Work(stages, schedule, lambda i: ((torch.empty(rows, D),), {}), Tensor.sum)


def one(rates: Machine, *arguments: str, **sizes: int) -> Seconds:
    full = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "dp": 1} | sizes
    return estimate(Counter(build).layout(arguments, **full), rates)


def test_products_take_their_operations_at_the_rate():
    """The input of all needs no gradient: two products forward, three backward."""
    found = one(machine())
    assert found.products == pytest.approx(M * 5 * PRODUCT / 1e12, rel=1e-12)
    assert found.step == pytest.approx(found.products, rel=1e-9)
    assert one(machine(), tp=4).products == pytest.approx(found.products / 4, rel=1e-12)
    assert one(machine(e_gemm=0.5), dp=4).products == pytest.approx(2 * found.products, rel=1e-12)
    late = one(machine(tau=1.0, cluster=1.5))
    assert (late.host, late.cluster) == (pytest.approx(M), pytest.approx((M + found.products) / 2))


def test_the_bubble_is_that_of_the_schedule_with_the_stages_own_times():
    """Stage 0: 2 + 3 products, stage 1: 2 + 4. gpipe: stage 1 starts after stage 0's first forward, and stage 0's last
    backward comes after all of its own."""
    found, unit = one(machine(), pp=2), PRODUCT / 1e12
    assert found.products == pytest.approx(M * 6 * unit, rel=1e-12)
    assert found.bubble == pytest.approx((2 + 3) * unit, rel=1e-12)


@pytest.mark.parametrize(("node", "rate"), [(8, 3e9), (2, 2e9), (1, 1e9)], ids=["node", "two ports", "one port"])
def test_messages_take_a_ring_of_the_slowest_link(node, rate):
    rates = machine(1e30, node=node, node_bandwidth=3e9, bandwidth=1e9, x_tp=1.0, x_dp=0.25)
    over_tp = one(rates, tp=4)  # the sum behind the second product; the input has no gradient to sum
    assert over_tp.exposed["tp"] == pytest.approx(M * 2 * (4 * B * D) * 3 / 4 / rate, rel=1e-12)
    over_dp = one(rates, dp=4)  # a gradient, and for each of two parameters whether there is one
    assert over_dp.exposed == {"dp": pytest.approx(0.25 * 2 * 4 * (2 * D * D + 2) * 3 / 4 / rate, rel=1e-12)}


def test_kinds_of_collectives_have_rates_of_their_own():
    usual, slow = machine(1e30, x_tp=1.0), machine(1e30, x_tp=1.0, reduce_scatter=3.0)
    for kind, factor in {"reduce_scatter": 3, "all_gather": 1, "all_reduce": 1, "send": 1}.items():
        took = [rates.seconds(kind, 1000, 2, range(4)) for rates in (usual, slow)]
        assert took[1] == pytest.approx(factor * took[0], rel=1e-12), kind


def test_a_message_between_stages_delays_the_one_that_waits():
    """A tensor there and a gradient back."""
    slower = one(machine(node_bandwidth=1e9), pp=2).bubble - one(machine(), pp=2).bubble
    assert slower == pytest.approx(2 * 4 * B * D / 1e9, rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_the_fast_makespan_is_that_of_the_proof(name):
    plan = build_schedule(name, 3, 9)
    stages = tuple(1.0 + 0.1 * i for i in range(plan.stages))
    want = prove(plan, Times(1.0, 0.9, 0.8, message=0.05, stages=stages)).makespan
    times = {kind: [t * s for s in stages] for kind, t in (("F", 1.0), ("I", 0.9), ("W", 0.8), ("B", 1.7))}
    assert resolve(plan).makespan(times, 0.05) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(("name", "V"), [("1f1b", 1), ("interleaved", 3), ("zb", 1), ("zbv", 2), ("dualpipev", 2)])
def test_many_micro_batches_take_the_slope_of_few(name, V):
    times = {"F": [1.0] * 4 * V, "B": [2.0] * 4 * V, "I": [1.0] * 4 * V, "W": [1.0] * 4 * V}
    plans = {m: build_schedule(name, 4, m, V) for m in (12, 16, 40)}
    layout: Any = SimpleNamespace(short=plans[16], shorter=plans[12], micro_batches=40)
    assert _makespan(layout, times["F"], times["B"], 0.0) == pytest.approx(resolve(plans[40]).makespan(times), rel=1e-9)


def test_flops_of_all_ranks_are_those_of_one_process():
    """A GPT's products on paper; the attention's five in backward (Dao 2023, arXiv:2307.08691, section 3)."""
    flags = ["--layers", "2", "--d-model", "32", "--heads", "4", "--d-ff", "48"]
    flags += ["--seq-len", "16", "--global-batch", "8"]

    def total(*more: str, **sizes: int) -> tuple[int, int]:
        world = torch.tensor(list(sizes.values())).prod().item() if sizes else 1
        found = [dry_run(build_gpt, [*flags, *more], rank, **sizes) for rank in range(int(world))]
        kept = [(f.plan.micro_batches, k) for f in found for k in f.stages]
        return sum(m * k.forward_flops for m, k in kept), sum(m * k.backward_flops for m, k in kept)

    alone = total()
    tokens, V = 8 * 16, 257
    products = 2 * tokens * (2 * (4 * 32 * 32 + 3 * 32 * 48) + 32 * V)
    attention = 2 * 2 * 2 * 8 * 16 * 16 * 32
    assert alone == (products + attention, 2 * products + 5 * attention // 2)
    assert total(tp=2, pp=2) == alone
    again = total("--recompute", "full")
    assert again[0] == alone[0]
    assert again[1] > alone[1] + products // 2


def _counted(attend: Callable, shape: tuple[int, ...], gpu: bool) -> tuple[OperatorCounts, OperatorCounts]:
    """Return the operations that the forward and the backward of self-attention compute."""
    with fake_tensors(stands_for_gpu=gpu):
        q, k, v = (torch.empty(shape, requires_grad=True) for _ in range(3))
        with Operators() as operators:
            y = attend(q, k, v)
            forward, operators.tally = operators.tally, OperatorCounts()
            y.sum().backward()
    return forward, operators.tally


@pytest.mark.parametrize("causal", [False, True])
def test_attention_counts_as_much_as_its_products_written_out(causal):
    """Backward computes the product of q and k again. A causal mask leaves T (T + 1) / 2 pairs in each head."""
    B, H, T, K = 2, 3, 8, 4
    written = _counted(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, (B, H, T, K), False)
    forward, backward = (tally.flops for tally in written)
    theirs = _counted(partial(F.scaled_dot_product_attention, is_causal=causal), (B, H, T, K), False)
    ours = _counted(lambda *qkv: attention(*qkv, causal=causal)[0], (B, T, H, K), True)
    pairs = B * H * T * T
    seen = int(torch.ones(B, H, T, T).tril().sum()) if causal else pairs
    for found in (theirs, ours):
        for tally, want in zip(found, (forward, backward + forward // 2), strict=True):
            assert (tally.all_pairs, tally.scores, tally.attention) == (want, pairs, want * seen // pairs)
            assert not tally.products


def test_a_gpu_launches_fewer_kernels_and_keeps_less():
    flags = ["--layers", "1", "--d-model", "64", "--heads", "4", "--seq-len", "32", "--dtype", "bfloat16"]
    cpu, gpu = (dry_run(build_gpt, flags, 0, stands_for_gpu).stages[0] for stands_for_gpu in (False, True))
    assert gpu.forward_flops == cpu.forward_flops
    assert gpu.activations < 0.7 * cpu.activations
    launches = [kept.middle.forward.operators.launches for kept in (gpu, cpu)]
    assert launches[0] < 0.5 * launches[1]
    seen = gpu.middle.forward.operators
    assert seen.attention == seen.all_pairs * 33 // 64, "T (T + 1) / 2 of T^2 pairs"


@pytest.mark.parametrize(("width", "dtype", "slow"), [(12, "bfloat16", 1), (16, "bfloat16", 0), (12, "float32", 0)])
def test_heads_of_no_multiple_of_16_bytes_are_slow_where_attention_is_written_out(width, dtype, slow):
    """Of the same operations: matrix units don't take them in 16 bits, unless a fused kernel pads them."""
    flags = ["--layers", "1", "--d-model", str(4 * width), "--heads", "4", "--seq-len", "32", "--dtype", dtype]
    layout = Counter(build_gpt).layout([*flags, "--global-batch", "8"])
    tally = layout.stages[0].middle.forward.operators
    assert tally.unaligned == slow * tally.all_pairs > -1
    usual, vector = machine(e_attention=0.5), machine(e_attention=0.5, peak_vector=1e11, e_gemm=0.8)
    for unfused in (True, False):
        took = [estimate(layout, rates, unfused).attention for rates in (usual, vector)]
        ratio = 0.5e12 / 0.8e11 if slow and unfused else 1.0
        assert took[1] == pytest.approx(ratio * took[0], rel=1e-12)


def test_attention_takes_its_operations_at_the_rate_of_the_units_that_run_it():
    tally = OperatorCounts(attention=300, all_pairs=600, unaligned=150)
    assert _attention(tally, machine(100.0, e_attention=0.5), unfused=False) == 300 / 50
    assert _attention(tally, machine(100.0, e_attention=0.5), unfused=True) == 600 / 50
    slow = machine(100.0, e_attention=0.5, e_gemm=0.75, peak_vector=20.0)
    assert _attention(tally, slow, unfused=False) == 300 / 50
    assert _attention(tally, slow, unfused=True) == 450 / 50 + 150 / 15
    assert _attention(replace(tally, unaligned=0), slow, unfused=True) == 600 / 50


def test_regather_keeps_shards_of_the_sequence_and_gathers_them_again():
    flags = ["--layers", "2", "--d-model", "128", "--seq-len", "32", "--global-batch", "4", "--micro-batch", "2"]
    flags += ["--sequence-parallel", "--dtype", "bfloat16"]
    usual, less = (dry_run(build_gpt, [*flags, *more], 0, True, tp=2) for more in ([], ["--regather"]))
    for found in (usual, less):
        assert found.theory
        assert {key: found.ledger.counts[key].bytes for key in found.theory} == found.theory
    saved = usual.stages[0].activations - less.stages[0].activations
    assert saved == 5 * (2 * 32 * 128 * 2) // 2, "of two products a block, and of the head, half of the whole"


def test_what_workers_cannot_share_is_refused():
    with pytest.raises(ValueError, match="--global-batch 8 is not a multiple of --workers 3"):
        dry_run(build_gpt, ["--global-batch", "8", "--workers", "3"], 0)


LAYOUTS = [({"tp": t, "cp": 1, "pp": p, "ep": 1, "dp": 4 // t // p}, ()) for t, p in ((1, 1), (2, 1), (4, 1), (1, 2))]


def test_the_fastest_that_fits_comes_first():
    layouts = [*LAYOUTS, *((LAYOUTS[i][0], ("--refuse",)) for i in (0, 0, 1))]
    counter = Counter(build)
    found = search(counter, machine(), [], layouts)
    assert [e.refused for e in found] == [*[""] * 4, "refused on 1", "refused on 1", "refused on 2"]
    assert [e.step for e in found[:4]] == sorted(e.step for e in found[:4])
    least, *_, most = sorted(e.memory for e in found[:4])
    assert least < most
    assert frontier(found, machine())[0] == found[0]
    small = machine(memory=most + 9, reserve=10)
    some = search(counter, small, [], layouts)
    assert some[3].memory == most
    assert some[3].seconds is None
    text = table(some, small)
    assert "1 don't fit; the smallest of them needs" in text
    assert "2 refused: refused on 1\n1 refused: refused on 2" in text


def test_small_models_are_shown_in_small_units():
    for memory, seconds, head, numbers in (
        (3 * 2**20, 0.002, ["MiB", "step, ms"], ["3.0", "2.000"]),
        (3 * 2**30, 2.0, ["GiB", "step, s"], ["3.0", "2.000"]),
    ):
        e = Estimate({"tp": 1}, (), memory=memory, seconds=Seconds(host=seconds))
        first, row, legend, *_ = table([e], machine()).splitlines()
        assert re.findall(r"[GM]iB|step, \w+", first) == head
        assert row.split()[2:4] == numbers
        assert legend.startswith(f"{head[0]}: of the fullest rank")
        step, host, *_ = explain(e, machine()).splitlines()
        unit = head[1].split()[1]
        assert step.startswith(f"2.000 {unit} per step")
        assert host.split()[1:3] == ["2.000", unit]


def test_a_mesh_that_is_too_small_is_not_tried_with_larger_micro_batches():
    tried = []

    def counted(mesh: Mesh, arguments: list[str]) -> Work:
        tried.append(arguments[-1])
        return build(mesh, arguments)

    layouts = [(LAYOUTS[0][0], ("--micro-batch", n)) for n in "124"]
    found = search(Counter(counted), machine(memory=1.0), [], layouts)
    assert set(tried) == {"1"}
    assert [e.arguments[-1] for e in found] == ["1", "2", "4"], "all count as layouts that don't fit"
    assert [e.memory for e in found] == 3 * [found[0].memory]
    assert table(found, machine(memory=1.0)).startswith("3 don't fit; ")


def test_flags_that_change_nothing_on_a_mesh_are_not_tried():
    sizes = [{"tp": 1, "cp": 1, "pp": 1, "ep": 1, "dp": dp} for dp in (1, 2)]
    sizes += [{**sizes[0], "cp": 2}, {**sizes[0], "tp": 2}, {**sizes[0], "pp": 2}]
    every = list(choices(["zero=1,3", "schedule=1f1b,interleaved", "sequence-parallel=on,off", "recompute=full"]))
    found = useful((s, own) for s in sizes for own in every)
    zero, schedule = (("--zero", "1"), ("--zero", "3")), (("--schedule", "1f1b"), ("--schedule", "interleaved"))
    last = ("--recompute", "full")
    kept = [[(*last,)], [(*z, *last) for z in zero], [(*z, *last) for z in zero],
            [("--sequence-parallel", *last), last], [(*s, *last) for s in schedule]]  # fmt: skip
    assert found == [(s, own) for s, each in zip(sizes, kept, strict=True) for own in each]


def test_a_lower_bound_is_no_need():
    for bound, text in ((True, "needs at least 2.0 GiB of"), (False, "needs 2.0 GiB of")):
        assert text in table([Estimate(LAYOUTS[0][0], (), 2 << 30, bound=bound)], machine(memory=1e9))


def work_of_mlp(mesh: Mesh, arguments: list[str]) -> Work:
    model = MLP(mesh)
    zero = Zero(int(arguments[1])) if arguments else Zero(0)
    options = {"micro_batches": M, "data": zero}
    return make_work(model, mesh, inputs=(torch.empty(B, D),), loss=Tensor.sum, blocks=[model], **options)


def test_one_call_makes_the_work_of_a_whole_model():
    for sizes in ({"tp": 2}, {"dp": 2}):
        found, by_hand = dry_run(work_of_mlp, **sizes), dry_run(build, ["--schedule", "1f1b"], **sizes)
        assert found.ledger.counts == by_hand.ledger.counts != {}
        assert found == replace(by_hand, ledger=found.ledger)
    assert dry_run(work_of_mlp, ["--zero", "3"], dp=2).parameters == 2 * D * D * 4 / 2
    with pytest.raises(ValueError, match="make_work has one pipeline stage, and the mesh has 2: give --pp 1, or"):
        dry_run(work_of_mlp, pp=2)
    with pytest.raises(ValueError, match=r"shape \(0, 64\), without samples: .* dp x micro-batches = 1 x 1"):
        make_work(MLP(Mesh()), Mesh(), inputs=(torch.empty(0, D),), loss=Tensor.sum, blocks=[])


def test_a_search_that_is_interrupted_returns_what_it_has():
    def stop(done: int, found: object) -> None:
        if done == 2:
            raise KeyboardInterrupt

    assert len(search(Counter(build), machine(), [], LAYOUTS, each=stop)) == 2


def test_a_command_that_is_told_to_stop_prints_the_table_of_what_it_has(monkeypatch, capsys):
    monkeypatch.setattr(Progress, "__call__", lambda *_: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    main([BUILD, "--world", "4", "--top", "1"])
    assert signal.getsignal(signal.SIGTERM) == before
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  1")]
    assert len(rows) == 1


def test_meshes_are_all_factorisations():
    found = [tuple(m.values()) for m in meshes(8, 4)]
    assert len(set(found)) == len(found)
    every = {
        (tp, 1, pp, 1, 8 // tp // pp) for tp, pp in itertools.product((1, 2, 4), (1, 2, 4, 8)) if 8 % (tp * pp) == 0
    }
    assert set(found) == every
    assert [m["dp"] for m in meshes(12, 8, tp=[2, 5], pp=[3], cp=[2])] == [1]
    assert list(meshes(8, 8, tp=[2], pp=[2], dp=[4])) == []
    inner = [{**m} for m in meshes(8, 8, tp=[2], pp=[1], cp=[4], ep=[2, 4], etp=[1, 2], cp_inner=[2, 3])]
    assert [(m["ep"], m["etp"], m["cp_inner"]) for m in inner] == [(2, 1, 2), (2, 2, 2), (4, 1, 2), (4, 2, 2)]
    assert {m["ep"] for m in meshes(8, 8, tp=[1], pp=[1], ep=[1, 4, 16])} == {1, 4}


def test_choices_are_all_combinations():
    assert list(choices([])) == [()]
    assert list(choices(["zero=1,3", "sequence-parallel=off,on"])) == [
        ("--zero", "1"),
        ("--zero", "1", "--sequence-parallel"),
        ("--zero", "3"),
        ("--zero", "3", "--sequence-parallel"),
    ]
    for wrong in ("zero", "zero=", "=1", "zero=1,,3"):
        with pytest.raises(ValueError, match="isn't of the form"):
            list(choices([wrong]))


def test_the_command_prints_what_fits_and_draws_it(tmp_path, capsys):
    vary = ["--vary", "schedule=gpipe,1f1b", "--vary", "nothing=1,2", "--tp", "1,2"]
    more = ["--what-if", "bandwidth=2x", "--what-if", "memory=141e9", "--out", str(tmp_path / "plan.png")]
    main([BUILD, "--world", "4", *vary, *more])
    lines = capsys.readouterr().out.splitlines()
    head = "4 ranks of h100, 8 per node: 74.5 GiB each, of which 2.8 are a reserve"
    assert lines[0] == f"{head}; a model of {2 * D * D:,} parameters", "of the whole, not of a rank's shard"
    assert lines[1].split()[:4] == ["row", "tp", "pp", "dp"]
    end = next(i for i, line in enumerate(lines) if line.startswith("no other layout"))
    first = LEGEND.replace("UNIT", "MiB").splitlines()
    assert lines[end - len(first) : end] == first
    rows = lines[2 : end - len(first)]
    want = {(str(tp), str(pp), str(4 // tp // pp)) for tp in (1, 2) for pp in (1, 2, 4) if tp * pp <= 4}
    assert {tuple(line.split()[1:4]) for line in rows} == want
    flags = [line[line.index("--") :] for line in rows if line.split()[1:4] == ["1", "2", "2"]]
    assert sorted(flags) == ["--schedule 1f1b --nothing 1", "--schedule gpipe --nothing 1"], (
        "what changes nothing is left out"
    )
    alone = [line[line.index("--") :] for line in rows if line.split()[2] == "1"]
    assert set(alone) == {"--nothing 1"}, "there is no schedule on one pipeline rank"
    text = "\n".join(lines)
    assert "what if bandwidth=2x, memory=141e9:" in text
    assert (tmp_path / "plan.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--world", "4", "--memory", "1e-9"], "no layout fits"),
        (["--world", "4", "--tp", "3"], "no mesh of these sizes has 4 ranks"),
        (["--world", "4", "--refuse"], "no layout could be counted: "),
        (["--world", "4", "--vary", "zero"], "isn't of the form"),
        (["--world", "4", "--tp", "0"], "argument --tp: 0 is no size of an axis"),
        (
            ["--world", "4", "--vary", "ep=1,2"],
            "--vary ep=1,2: the axes of the mesh are the planner's own flags: --ep 1,2",
        ),
        (["--world", "4", "--out", "plan.json"], "--out plan.json is no .png or .svg or .pdf in a folder that is"),
        (["--world", "4", "--out", "/nowhere/plan.png"], "in a folder that is there"),
        (["--world", "4", "--machine", "b200"], "the profile b200 is none of a100-80, h100, h200"),
        (["--world", "1", "--what-if", "speed=2x"], "--what-if speed=2x: 'speed' is none of peak"),
        (["--world", "1", "--explain", "2"], "--explain 2 is no row from 1 to 1"),
        (["--world", "1", "--explain", "0"], "--explain 0 is no row from 1 to 1"),
        (["--world", "4", "--memory", "1e-9", "--explain", "1"], "no layout fits"),
        ([], "a target and --world are needed"),
    ],
)
def test_where_nothing_fits_it_says_so_and_fails(flags, message, capsys):
    with pytest.raises((ValueError, SystemExit)) as error:
        main([BUILD, *flags])
    assert message in f"{error.value} {capsys.readouterr().err}"


def test_a_row_is_explained_and_trained_by_the_commands_below_the_table(capsys):
    """The first command plans row 1 alone. A trainer has the flags that it knows, or there is no command."""
    small = [
        "--layers",
        "1",
        "--d-model",
        "16",
        "--heads",
        "2",
        "--d-ff",
        "16",
        "--seq-len",
        "16",
        "--micro-batch",
        "1",
    ]
    flags = ["--world", "4", "--memory", "40", "--vary", "zero=1", "--tp", "2", "--pp", "1", *small]
    main(["examples.gpt.plan:build", *flags])
    head, _, row, *_, explained, trained = capsys.readouterr().out.splitlines()
    words = explained.removeprefix("explain row 1: mpcore plan ").split()
    assert words[:9] == ["examples.gpt.plan:build", "--world", "4", "--machine", "h100", "--memory", "40", "--tp", "2"]
    main(words)
    again, place, step, *parts, shown = capsys.readouterr().out.splitlines()
    assert (again, place, shown) == (head, "row 1 of 1:", trained)
    assert re.findall(r"[\d.]+", step)[0] == row.split()[5]
    shares = [float(line.split("%")[0].split()[-1]) for line in parts if "%" in line]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    run = trained.removeprefix("train as row 1: torchrun --nproc-per-node 4 -m examples.gpt.pretrain ").split()
    assert (parse(run).tp, parse(run).dp, parse(run).zero, parse(run).d_model) == (2, 2, 1, 16)
    main(["examples.gpt.plan:build", *flags, "--vocab-size", "512"])
    assert capsys.readouterr().out.endswith(
        f"{trained}  # --tokenizer and --data give the 512 tokens of the vocabulary\n"
    )
    main(["examples.gpt.plan:build", *flags, "--vocab-size", "512", "--tokenizer", "tokens.json"])
    assert capsys.readouterr().out.endswith(" --tokenizer tokens.json\n")
    main(["examples.gpt.plan:build", *flags, "--even-stages", "--explain", "1"])
    assert capsys.readouterr().out.endswith("no command trains row 1: examples.gpt.pretrain has no --even-stages\n")
    main([BUILD, "--world", "16", "--pp", "1"])
    assert "train" not in capsys.readouterr().out
    main(["examples.gpt.plan:build", "--world", "16", "--tp", "1", "--pp", "1", *small, "--explain", "1"])
    assert "train as row 1: srun -n 16 --ntasks-per-node 8 --gpus-per-node 8 python -m" in capsys.readouterr().out


def test_the_error_of_a_difference_leaves_out_what_both_steps_share():
    """Against steps that are computed with each rate changed by its error."""
    rates = replace(load_machine("a100-80"), errors=dict.fromkeys(SCALARS, 0.01))
    counter = Counter(build_gpt, share=True)
    flags = ["--preset", "tiny", "--global-batch", "16", "--micro-batch", "2"]
    layouts = [counter.layout(flags, **sizes) for sizes in ({"tp": 2, "dp": 2}, {"tp": 1, "dp": 4})]

    def steps(changed: Machine) -> list[float]:
        return [estimate(layout, changed).step for layout in layouts]

    usual, apart = steps(rates), 0.0
    for name in SCALARS:
        a, b = steps(replace(rates, **{name: getattr(rates, name) * math.exp(0.01)}))
        apart += math.log(a / usual[0] / (b / usual[1])) ** 2
    first, second = (Estimate({}, (), seconds=estimate(x, rates), errors=errors_of(x, rates)) for x in layouts)
    later, error = first.slower(second)
    assert later == pytest.approx(usual[0] / usual[1] - 1)
    assert (error * usual[1] / usual[0]) ** 2 == pytest.approx(apart + 2 * NOISE**2, rel=1e-3)
    assert apart > 1e-6, "the two layouts depend on different rates"
    assert first.slower(first) == (0, pytest.approx(math.sqrt(2) * NOISE)), "two runs of one layout vary"


def test_rows_that_may_be_as_fast_are_named(monkeypatch, capsys):
    """Row 3 is as sure as row 2, and slower by more than two standard errors; row 4 is less sure."""
    errors = [(0.1, 0.0), (0.1, 0.0), (0.1, 0.0), (0.1, 0.1)]
    found = [
        Estimate({"tp": 1, "dp": i}, (), memory=i, seconds=Seconds(host=1 + i / 20), errors=e)
        for i, e in enumerate(errors, start=1)
    ]
    monkeypatch.setattr(plan, "search", lambda *_: found)
    main([BUILD, "--world", "4"])
    text = capsys.readouterr().out
    assert (
        "perhaps as fast as row 1, by two standard errors: rows 1, 2, 4\nchoose row 1: of those that leave 5% of"
        in text
    )
    main([BUILD, "--world", "4", "--top", "1"])
    text = capsys.readouterr().out
    assert "rows 1, and 2 more (--top 4 prints them)\n" in text
    assert "no other layout is both faster and smaller than these: row 1\n" in text


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(1, 0.9), (1, 0.9)], "1: of those that leave 5% of the memory free, it has the fewest axes above 1"),
        ([(1, 0.96), (1, 0.9)], "2: of those"),
        ([(3, 0.9), (1, 0.96), (2, 0.9), (2, 0.5)], "3: of those"),  # the uppermost of two with two axes
        ([(2, 0.9), (2, 0.9), (1, 0.9, 2.0)], "1: of those"),  # row 3 is slower
        (
            [(2, 0.96), (1, 0.97)],
            "2: it has the fewest axes above 1, but leaves 3% of the memory free; plans are 5% off",
        ),
    ],
)
def test_a_row_with_memory_to_spare_and_few_axes_is_chosen(monkeypatch, capsys, rows, said):
    memory, reserve = (getattr(load_machine("h100"), name) for name in ("memory", "reserve"))
    found = []
    for axes, used, *seconds in rows:
        sizes = dict(zip(("tp", "pp", "dp"), [2] * axes + [1] * (3 - axes), strict=True))
        held = int(used * memory - reserve)
        found.append(Estimate(sizes, (), memory=held, seconds=Seconds(host=(seconds or [1.0])[0]), errors=(0.1,)))
    monkeypatch.setattr(plan, "search", lambda *_: found)
    main([BUILD, "--world", "8"])
    text = capsys.readouterr().out
    assert f"\nchoose row {said}" in text
    assert f"\nexplain row {said[0]}: " in text


def test_one_command_line_runs_all_commands(capsys):
    for words in (["plan", "nowhere:build", "--world", "4"], ["memory", "nowhere:build"], ["ledger", "nowhere:build"]):
        assert analysis(words) == 2
        assert capsys.readouterr().err.startswith(f"mpcore {words[0]}: error: nowhere can't be imported")
    with pytest.raises(SystemExit, match=r"usage: python -m mpcore.tools.analysis {memory,ledger,plan}"):
        analysis(["sums"])


def test_a_layout_is_drawn_at_its_memory_and_its_seconds(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.extend(figure.axes))
    at = [(1, 7, 2.0), (2, 7.5, 2.5), (1, 5, 3.0), (1, 4.99, 3.01), (2, 6, 4.0)]  # tp, GiB, seconds
    found = [Estimate({"tp": tp}, (), int(memory * 2**30), Seconds(s)) for tp, memory, s in at]
    draw(found, machine(), tmp_path / "x.png")
    rows = [line.split()[0] for line in table(found, machine(), legend=False).splitlines()[1:]]
    assert [text.get_text() for text in drawn[0].texts] == [rows[0], rows[2], rows[3]], "the numbers of the table"
    one, *others = [text.get_window_extent() for text in drawn[0].texts]
    assert not one.count_overlaps(others)
    assert not others[0].count_overlaps(others[1:])
    points = [tuple(xy) for dots in drawn[0].collections for xy in dots.get_offsets().tolist()]
    assert points == [(int(m * 2**30) / 2**30, s) for size in (1, 2) for tp, m, s in at if tp == size]
    assert drawn[0].lines[0].get_xydata() == pytest.approx(np.array([[7, 2], [5, 3], [4.99, 3.01]])), "no other beats"


def test_the_inner_size_among_the_flags_is_that_of_the_mesh():
    mesh = Mesh(cp=Axis(8, levels=(Axis(2), Axis(4))))
    check_mesh(parse(["--set", "cp_inner=4"]), mesh)
    with pytest.raises(ValueError, match="cp_inner 2 among the run's flags, on a mesh that has 4"):
        check_mesh(parse(["--set", "cp_inner=2"]), mesh)


def test_a_lower_bound_counts_what_waits_for_backward_in_the_width_it_is_kept_in():
    """[tokens, features] of a block: float32, 16 bits where products are, or FP8."""
    config = GPTConfig(vocab_size=16, seq_len=1, layers=1, d_model=16, heads=1)

    def waiting(flags: str) -> int:
        args = parse(["--recompute", "full", "--micro-batch", "1", *flags.split()])
        long, short = (least_bytes(args, replace(config, seq_len=n), Mesh(), 1, 1) for n in (8192, 4096))
        return long - short

    width = {"float32": 4, "float16": 2, "bfloat16": 2, "bfloat16 --set autocast=true": 2, "bfloat16 --fp8": 1}
    assert {flags: waiting(f"--dtype {flags}") for flags in width} == {k: n * 4096 * 16 for k, n in width.items()}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "bfloat16 --set autocast=true", "bfloat16 --fp8"])
def test_what_is_counted_is_no_less_than_the_lower_bound(dtype, monkeypatch):
    """A layout is ruled out by the bound alone. Weights in bfloat16 have masters; float16 is autocast."""
    bounds: list[int] = []
    monkeypatch.setattr(gpt_plan, "least_bytes", lambda *of: bounds.append(least_bytes(*of)) or bounds[-1])
    flags = "--layers 4 --d-model 64 --heads 4 --seq-len 64 --global-batch 8 --micro-batch 1 --recompute full --dtype "
    most = dry_run(build_gpt, [*flags.split(), *dtype.split()], 0, True, tp=1, cp=1, pp=1, ep=1, dp=1).most
    assert 0.85 * most < bounds[-1] <= most


def test_a_picture_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        draw([], machine(), tmp_path / "plan.png")


def test_the_state_of_65_billion_parameters():
    """ZeRO, figure 1, in its bytes: 2 of weights, 2 of gradients, 12 of the optimizer."""
    each = [tuple(x / 65e9 for x in state_bytes(65e9, stage, 64, gradients=2)) for stage in range(4)]
    assert each == [(2, 2, 12), (2, 2, 12 / 64), (2, 2 / 64, 12 / 64), (2 / 64, 2 / 64, 12 / 64)]
    assert state_bytes(65e9, 1, 64)[1] == 4 * 65e9
    with pytest.raises(ValueError, match="ZeRO stage 4 is none of 0, 1, 2, 3"):
        state_bytes(1, 4, 1)


@pytest.mark.parametrize("name", [*profile_names(), RECORDS / "jean-zay.json", RECORDS / "this-cpu.json"])
def test_each_value_of_a_profile_has_a_source(name, tmp_path):
    found = load_machine(name)
    content = json.loads((PROFILES / f"{name}.json" if isinstance(name, str) else name).read_text())
    assert set(content["values"]) == set(NUMBERS)
    assert all(entry["source"] for entry in content["values"].values())
    save_machine(found, tmp_path / "again.json")
    assert load_machine(tmp_path / "again.json") == found


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"speed": {"value": 1, "source": "measured: x"}}, "unknown field speed"),
        ({"peak": {"value": "fast", "source": "measured: x"}}, "peak is 'fast', no number"),
        ({"peak": {"value": 1, "source": "hearsay"}}, "the source of peak begins with none of"),
        ({"peak": {"value": 1, "source": "measured: x"}}, "lacks hbm, memory"),
        ({"peak": 1}, "is not of the form"),
    ],
)
def test_a_wrong_profile_is_named(values, message, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"values": values}))
    with pytest.raises(ValueError, match=message):
        load_machine(path)


def test_what_if_changes_rates():
    changed = what_if(machine(), ["memory=141e9", "hbm=2x"])
    assert (changed.memory, changed.hbm) == (141e9, 2e30)
    with pytest.raises(ValueError, match="isn't of the form memory=2x or memory=NUMBER"):
        what_if(machine(), ["memory=much"])


MIXTURE = ["--experts", "4", "--set", "moe.top_k=2", "--layers", "1", "--d-model", "16", "--heads", "4", "--d-ff", "16"]
MIXTURE += ["--seq-len", "16", "--global-batch", "8", "--micro-batch", "1"]


def test_what_a_line_says_is_the_mesh_that_was_planned(capsys):
    """Also of etp and of two levels of cp; a mesh among the run's flags is refused, whichever planner takes it."""
    flags = [*MIXTURE, "--cp-kind", "two-level", "--zero", "0"]
    sizes = {"tp": 2, "cp": 4, "pp": 1, "ep": 2, "dp": 1}
    command = ["examples.gpt.plan:build", "--world", "8", "--tp", "2", "--cp", "4", "--pp", "1", "--ep", "2"]
    main([*command, "--etp", "1", "--cp-inner", "2", *flags])
    first, head, line = capsys.readouterr().out.splitlines()[:3]
    parameters = (
        2 * 257 * 16 + 4 * 16 * 16 + 4 * 3 * 16 * 16 + 4 * 16 + 3 * 16
    )  # ends, attention, experts, router, norms
    assert first.endswith(f"of which 2.8 are a reserve; a model of {parameters:,} parameters")
    assert head.split()[:8] == ["row", "tp", "pp", "cp", "ep", "dp", "etp", "cp_inner"]
    assert line.split()[:8] == ["1", "2", "1", "4", "2", "1", "1", "2"]
    found = dry_run(build_gpt, flags, 0, True, **sizes, etp=1, cp_inner=2)
    for axis in ("cp_outer", "cp_inner", "ep"):
        assert found.ledger.volumes()[axis] > 0
        assert len(found.ledger.ranks(axis)) == 2, "also where another axis has the same ranks"
    analysis(["memory", *command[:1], "--tp", "2", "--cp", "4", "--ep", "2", "--etp", "1", "--cp-inner", "2", *flags])
    assert re.search(rf"^total +{found.most / 2**20:.3f} MiB  at the peak", capsys.readouterr().out, re.MULTILINE)
    for name, size in (("tp", 4), ("etp", 1), ("cp_inner", 4)):
        flag = f"--{name.replace('_', '-')}"
        with pytest.raises(
            ValueError,
            match=f"{name if name == 'cp_inner' else flag} {size} among the run's flags, on a mesh that has ",
        ):
            dry_run(build_gpt, [*flags, flag, str(size)], 0, **sizes, cp_inner=2)


def test_parameters_are_gathered_once_a_stage():
    """All of the forwards of GPipe come first: each holds its activations, and the first gathers the parameters."""
    kept = MicroBatchMemory(activations=10, gathered=7, forward_more=7)
    assert [peak(build_schedule("gpipe", 1, m), 0, [kept]) for m in (1, 3)] == [(17, 17), (37, 37)]


def test_an_estimate_that_does_not_fit_has_no_step():
    assert Estimate({}, ()).step == float("inf")


def test_the_blocks_of_each_stage_may_be_given():
    assert given_blocks("1,3,2", 6, 3) == [range(1), range(1, 4), range(4, 6)]
    with pytest.raises(ValueError, match="--stage-blocks 1,3 are 4 blocks of 2 stages, not 6 of 3"):
        given_blocks("1,3", 6, 3)


def test_a_step_begins_without_gradients():
    """bfs runs every forward first: the gradients of the lower stage are made long after the peak."""
    kept = [MicroBatchMemory(activations=10, forward_more=10, backward_more=5, made=made) for made in (7, 4)]
    plan = build_schedule("bfs", 1, 3, 2)
    assert peak(plan, 0, kept) == (60, 60 + 5 - 7)
    later = [replace(kept[0], backward_more=40), kept[1]]
    assert peak(plan, 0, later) == (60, 30 + 40), "when the upper stage is done"
