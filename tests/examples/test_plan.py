"""What the example tells the planners of a layout, against formulas written out here."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from typing import Any

import pytest
import torch

from examples.gpt.arguments import parse
from examples.gpt.config import PRESETS, GPTConfig, LatentConfig, MoEConfig
from examples.gpt.model import GPT
from examples.gpt.plan import check_mesh, even_blocks, given_blocks, least_bytes, outline, theory, work
from mpcore import build_mesh
from mpcore.layers.linear import ColumnParallelLinear
from mpcore.pipeline.schedules import find_schedule
from mpcore.tools.analysis.dry_run import pretend
from tests.examples.test_checks import mesh_of

CONFIG = GPTConfig(vocab_size=1000, seq_len=64, layers=8, d_model=32, heads=4, kv_heads=2, d_ff=96)


def flags(text: str, **others: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(parse(text.split())), "regather": False, **others})


# --- blocks of stages -------------------------------------------------------------------------------------------------


def test_blocks_are_dealt_out_evenly_or_as_given():
    assert even_blocks(6, 3) == [range(2), range(2, 4), range(4, 6)]
    assert even_blocks(4, 1) == [range(4)]
    with pytest.raises(ValueError, match="--even-stages: 7 layers are not a multiple of 3 stages"):
        even_blocks(7, 3)
    assert given_blocks("3,1,2", 6, 3) == [range(3), range(3, 4), range(4, 6)]
    for text, told in (("3,3", "6 blocks of 2 stages"), ("1,2,2", "5 blocks of 3 stages"), ("3,0,3", "6 blocks of 3")):
        with pytest.raises(ValueError, match=f"--stage-blocks {text} are {told}.*, not 6 of 3"):
            given_blocks(text, 6, 3)


# --- flags against the planner's mesh ---------------------------------------------------------------------------------


def test_flags_of_the_mesh_are_the_planners_or_their_defaults():
    mesh = mesh_of(("tp", 4), ("cp", 2), ("pp", 2), ("dp", 2), ("ep", 2), ("etp", 2))
    check_mesh(parse([]), mesh)
    sizes = {"tp": 4, "cp": 2, "pp": 2, "dp": 2, "ep": 2, "etp": 2}
    for name, size in sizes.items():
        check_mesh(parse([f"--{name}", str(size)]), mesh)
        message = f"--{name} 8 among the run's flags, on a mesh that has {size}: the mesh is the planner's"
        with pytest.raises(ValueError, match=re.escape(message)):
            check_mesh(parse([f"--{name}", "8"]), mesh)
    with pytest.raises(ValueError, match="cp_inner 2 among the run's flags, on a mesh that has None"):
        check_mesh(parse(["--set", "cp_inner=2"]), mesh)
    check_mesh(parse(["--offload", "none", "none"]), mesh)
    with pytest.raises(ValueError, match="--offload optimizer is not counted here"):
        check_mesh(parse(["--offload", "optimizer"]), mesh)
    with pytest.raises(ValueError, match="--compile is not counted here"):
        check_mesh(parse(["--compile"]), mesh)


# --- the lower bound --------------------------------------------------------------------------------------------------


def bound(text: str, config: GPTConfig = CONFIG, micro_batches: int = 8, first: int = 2, **sizes: int) -> int:
    return least_bytes(flags(text), config, mesh_of(*sizes.items()), micro_batches, first)


D, F, V, L, T = 32, 96, 1000, 8, 64
BLOCK = D * (4 + 2 * 2) * 8 + D * D + 3 * D * F + 2 * D  # q, k, v of 8 wide heads, output, MLP with a gate, two norms
ENDS = 2 * V * D + D  # embedding, head, norm
WIDE = (4 + 2 * 2) * 8 + 3 * F  # what a token's products give: q, k, v, and gate, up, their product


@pytest.mark.parametrize(
    ("text", "sizes", "state"),
    [
        ("--zero 0", {}, 16),  # float32: parameter, gradient and two moments
        ("--zero 0 --dtype bfloat16", {}, 18),  # and a 16-bit copy that is multiplied
        ("--zero 0 --dtype bfloat16 --set autocast=true", {}, 16),
        ("--zero 0 --dtype float16", {}, 16),
        ("--zero 0 --optimizer adamw-bf16", {}, 12),
        ("--zero 0 --optimizer muon", {}, 12),
        ("--zero 3", {}, 16),  # one data rank holds all
        ("--zero 0", {"dp": 4}, 16),
        ("--zero 3", {"dp": 4}, 16 / 4),
        ("--zero 2", {"dp": 4}, 16 / 4),
        ("--zero 1", {"dp": 4}, 16 / 4 + 4),  # whole gradients wait for their reduction
        ("--zero 3 --dtype bfloat16", {"dp": 4}, 16 / 4),
        ("--zero 3 --set replicate=2", {"dp": 4}, 16 / 4),  # max(n, edp): each group of 2 shards, edp is 4
        ("--zero 3 --set replicate=4", {"dp": 4}, 16),
        ("--zero 3 --optimizer muon", {"dp": 4}, 12 / 4),
        ("--zero 3", {"dp": 2, "cp": 2}, 16 / 4),
        ("--zero 0", {"tp": 2}, 16 / 2),
        ("--zero 0", {"pp": 2}, 16 / 2),
        ("--zero 0", {"pp": 4, "tp": 4}, 16 / 16),
    ],
)
def test_state_is_shared_by_the_ranks_that_shard_it(text, sizes, state):
    """With experts or latents only the state between steps counts; here activations are made too small to matter."""
    latent = dataclasses.replace(CONFIG, kv_heads=None, latent=LatentConfig())
    parameters = sum(p.numel() for p in GPT(latent, device="meta").parameters())
    assert bound(text, latent, **sizes) == int(parameters * state)


def test_experts_are_shared_by_the_ranks_of_their_own():
    moe = dataclasses.replace(CONFIG, moe=MoEConfig(experts=4, d_ff=16))
    experts = L * 4 * 3 * D * 16
    others = sum(p.numel() for p in GPT(moe, device="meta").parameters()) - experts
    for sizes, of_experts, of_others in (
        ({}, 1, 1),
        ({"dp": 2, "ep": 2}, 2, 1),
        ({"tp": 2}, 2, 2),
        ({"tp": 2, "etp": 1, "dp": 1}, 1, 2),
        ({"pp": 2}, 2, 2),
        ({"dp": 4, "ep": 4, "pp": 2, "tp": 2}, 16, 4),
    ):
        assert bound("--zero 0", moe, **sizes) == int(16 * (experts / of_experts + others / of_others)), sizes
    sharded = bound("--zero 3", moe, dp=4, ep=2)
    assert sharded == int(16 / 4 * (experts / 2 + others)), "over the data ranks, which are more than those of experts"


@pytest.mark.parametrize(
    ("text", "sizes", "micro_batches", "held", "width", "saved"),
    [
        ("--zero 0", {}, 8, 1, 4, D + WIDE - F),
        ("--zero 0 --recompute selective", {}, 8, 1, 4, D + WIDE - F),
        ("--zero 0 --recompute full", {}, 8, 1, 4, D),
        ("--zero 0 --recompute budget=0.5", {}, 8, 1, 4, D),
        ("--zero 0", {"pp": 4}, 8, 4, 4, D + WIDE - F),
        ("--zero 0", {"pp": 4}, 2, 2, 4, D + WIDE - F),
        ("--zero 0 --schedule gpipe", {"pp": 4}, 8, 8, 4, D + WIDE - F),
        ("--zero 0 --schedule interleaved", {"pp": 4}, 8, 4, 4, D + WIDE - F),
        ("--zero 0 --dtype bfloat16", {}, 8, 1, 2, D + WIDE - F),
        ("--zero 0 --dtype float16", {}, 8, 1, 2, D + WIDE - F),
        ("--zero 0 --dtype bfloat16 --fp8", {}, 8, 1, 1, D + WIDE - F),
        ("--zero 0", {"cp": 2}, 8, 1, 4, (D + WIDE - F) / 2),
        ("--zero 0", {"tp": 2}, 8, 1, 4, D + (WIDE - F) / 2),
        ("--zero 0 --sequence-parallel", {"tp": 2}, 8, 1, 4, (D + WIDE - F) / 2),
        ("--zero 0 --micro-batch 5", {}, 8, 1, 4, 5 / 2 * (D + WIDE - F)),
    ],
)
def test_what_waits_for_backward_is_held_beside_the_state(text, sizes, micro_batches, held, width, saved):
    """A model with samples so long that activations outweigh all else."""
    long = dataclasses.replace(CONFIG, seq_len=10**6)
    first = 8 // sizes.get("pp", 1)
    mine = first * BLOCK / sizes.get("tp", 1)
    state = 18 if "bfloat16" in text else 16
    want = mine * state + first * held * 2 * 10**6 * saved * width
    assert bound(text, long, micro_batches, first, **sizes) == pytest.approx(want, rel=1e-9)


def test_of_a_dense_mlp_without_a_gate_two_products_count():
    plain = dataclasses.replace(CONFIG, seq_len=10**6, activation="gelu", kv_heads=None)
    saved = D + 3 * 4 * 8 + F
    block = D * 3 * 4 * 8 + D * D + 2 * D * F + 2 * D
    assert bound("--zero 0", plain, 1, 8) == pytest.approx(8 * block * 16 + 8 * 2 * 10**6 * saved * 4, rel=1e-9)


@pytest.mark.parametrize(
    ("text", "micro_batches", "state"),
    [
        ("--zero 1", 1, 8 / 4 + 4 / 4 + 2),  # moments and masters in shards, gathered parameters
        ("--zero 1", 2, 8 / 4 + 4 / 4 + 2),
        ("--zero 2", 1, 8 / 4 + 4 / 4 + 2),
        ("--zero 3", 1, 8 / 4 + 4 / 4),
        ("--zero 3 --optimizer muon", 1, 4 / 4 + 4 / 4),
        ("--zero 3 --set replicate=2", 1, 8 / 2 + 4 / 2),
    ],
)
def test_shards_wait_beside_activations(text, micro_batches, state):
    long = dataclasses.replace(CONFIG, seq_len=10**6)
    want = 8 * BLOCK * state + 8 * 2 * 10**6 * (D + WIDE - F) * 4
    again = 4 * 8 * BLOCK if "--zero 1" in text and micro_batches > 1 else 0  # gradients of the micro-batch before
    assert bound(text, long, micro_batches, 8, dp=4) == pytest.approx(want + again, rel=1e-9)


def test_other_models_and_schedules_have_the_state_alone():
    long = dataclasses.replace(CONFIG, seq_len=10**6)
    for text, config in (
        ("--schedule zb", long),
        ("--schedule zbv", long),
        ("", dataclasses.replace(long, moe=MoEConfig())),
        ("", dataclasses.replace(long, kv_heads=None, latent=LatentConfig())),
    ):
        assert bound(f"--zero 0 {text}", config) < 1e8 < bound("--zero 0", long)


# --- bytes over tp ----------------------------------------------------------------------------------------------------


def sent(text: str, config: GPTConfig = CONFIG, stages: tuple = (0,), blocks: list[range] | None = None,
         micro_batches: int = 8, regather: bool = False, **sizes: int) -> dict[tuple[str, str], int]:  # fmt: skip
    blocks = blocks or [range(8)]
    return theory(flags(text, regather=regather), config, mesh_of(*sizes.items()), micro_batches, blocks, stages)


S = 2 * T * D * 4  # bytes of a micro-batch of hidden states in float32
STATS = 2 * T * 4 * 4  # four numbers a token


def test_a_step_sends_four_reductions_a_block_and_one_at_each_end():
    gathers = {("tp", "all_gather"): 8 * 2 * STATS}
    assert sent("", tp=2) == {("tp", "all_reduce"): 8 * (8 * 4 * S + 2 * S), **gathers}
    assert sent("--dtype float64", tp=2) == {
        ("tp", "all_reduce"): 8 * (8 * 4 + 2) * 2 * S, ("tp", "all_gather"): 8 * 2 * 2 * STATS
    }  # fmt: skip
    for half in ("bfloat16", "float16"):
        assert sent(f"--dtype {half}", tp=2) == {("tp", "all_reduce"): 8 * (8 * 4 + 2) * S // 2, **gathers}
    assert sent("", tp=4)[("tp", "all_gather")] == 8 * 4 * STATS
    assert sent("", tp=2, cp=2) == {key: size // 2 for key, size in sent("", tp=2).items()}
    assert sent("--micro-batch 6", tp=2) == {key: 3 * size for key, size in sent("", tp=2).items()}
    assert sent("", micro_batches=3, tp=2) == {key: 3 * size // 8 for key, size in sent("", tp=2).items()}


def test_a_step_with_sequence_parallel_gathers_and_scatters_as_much():
    scattered = {("tp", "reduce_scatter"): 8 * (8 * 4 + 2) * S}
    gathered = 8 * ((8 * 4 + 2) * S + 2 * STATS)
    assert sent("--sequence-parallel", tp=2) == {**scattered, ("tp", "all_gather"): gathered}
    again = sent("--sequence-parallel", regather=True, tp=2)  # two more a block, and one of the head
    assert again == {**scattered, ("tp", "all_gather"): gathered + 8 * (8 * 2 + 1) * S}


def test_recomputation_repeats_the_forward_and_a_stage_has_its_own_blocks():
    full = sent("--recompute full", tp=2)
    assert full[("tp", "all_reduce")] == 8 * (8 * 5 + 2) * S, "but for the last reduction of a block"
    assert sent("--recompute selective", tp=2) == sent("", tp=2)
    dropped = dataclasses.replace(CONFIG, dropout=0.1)
    assert sent("--recompute full", dropped, tp=2)[("tp", "all_reduce")] == 8 * (8 * 6 + 2) * S
    blocks = [range(3), range(3, 5), range(5, 8)]
    first, middle, last = (sent("", stages=(i,), blocks=blocks, tp=2) for i in range(3))
    assert first == {("tp", "all_reduce"): 8 * (3 * 4 + 1) * S, ("tp", "all_gather"): 0}
    assert middle == {("tp", "all_reduce"): 8 * 2 * 4 * S, ("tp", "all_gather"): 0}
    assert last == {("tp", "all_reduce"): 8 * (3 * 4 + 1) * S, ("tp", "all_gather"): 8 * 2 * STATS}
    both = sent("", stages=(0, 2), blocks=blocks, tp=2)
    assert both == {key: first[key] + last[key] for key in first}


def test_of_latents_a_block_sends_them_in_the_place_of_its_input():
    for rank, queries in ((48, 48), (None, D)):
        config = dataclasses.replace(CONFIG, kv_heads=None, latent=LatentConfig(q_lora_rank=rank))
        less = S - 2 * T * 4 * (queries + 32 + 16)
        assert sent("", config, tp=2)[("tp", "all_reduce")] == 8 * (8 * (4 * S - less) + 2 * S)


@pytest.mark.parametrize(
    ("text", "changes", "sizes"),
    [
        ("--recompute budget=0.5", {}, {"tp": 2}),
        ("--recompute full --schedule zb", {}, {"tp": 2}),
        ("--recompute full --schedule zbv", {}, {"tp": 2}),
        ("--recompute full --schedule dualpipev", {}, {"tp": 2}),
        ("--recompute full --schedule my.csv", {}, {"tp": 2}),
        ("", {}, {}),
        ("", {"moe": MoEConfig()}, {"tp": 2}),
    ],
)
def test_where_no_formula_holds_none_is_given(text, changes, sizes):
    assert sent(text, dataclasses.replace(CONFIG, **changes), **sizes) == {}
    assert sent("--recompute full", tp=2)
    assert sent("--schedule zb", tp=2)


# --- the outline of a layout ------------------------------------------------------------------------------------------


def outlined(text: str, **sizes: int):
    return outline(mesh_of(*sizes.items()), text.split())


def test_an_outline_has_what_the_flags_say():
    found = outlined("")
    assert (found.schedule, found.ranks, found.micro_batches, found.virtual_stages) == ("1f1b", 1, 8, None)
    assert (list(found.blocks), found.linear, found.sharded, found.few) == ([range(4)], True, True, 1)
    assert found.parameters == sum(p.numel() for p in GPT(PRESETS["tiny"], device="meta").parameters())
    assert found.least == least_bytes(flags(""), PRESETS["tiny"], mesh_of(), 8, 4)
    assert [found.kind(i) for i in range(4)] == [False] * 4
    mixed = outlined("--experts 4 --set moe.every=2")
    assert [mixed.kind(i) for i in range(4)] == [False, True, False, True]
    assert outlined("--vocab-size 1000").parameters == found.parameters + 2 * 743 * 128
    assert outlined("--preset gpt2 --global-batch 2").parameters == 124_439_808


@pytest.mark.parametrize(
    ("text", "sizes", "facts"),
    [
        ("--zero 0", {"dp": 2}, {"sharded": False, "few": 1}),
        ("--zero 1", {"dp": 2}, {"sharded": True, "few": 1}),
        ("--zero 2", {"dp": 2}, {"sharded": True, "few": 2}),
        ("--zero 3", {"dp": 2}, {"sharded": True, "few": 3}),
        ("--zero 3", {}, {"sharded": True, "few": 1}),
        ("--recompute budget=0.5", {}, {"linear": False}),
        ("--recompute full", {}, {"linear": True}),
        ("--set tie_embeddings=true", {}, {"linear": True}),
        ("--set tie_embeddings=true --schedule zbv", {"pp": 2}, {"linear": False}),
        ("--schedule zbv", {"pp": 2}, {"linear": True}),
        ("--even-stages", {"pp": 2}, {"blocks": [range(2), range(2, 4)]}),
        ("--vocab-size 99999", {"pp": 2}, {"blocks": [range(3), range(3, 4)]}),
        ("--vocab-size 99999 --even-stages", {"pp": 2}, {"blocks": [range(2), range(2, 4)]}),
        ("--stage-blocks 1,3", {"pp": 2}, {"blocks": [range(1), range(1, 4)]}),
        ("--schedule interleaved --even-stages", {"pp": 2}, {"blocks": [range(i, i + 1) for i in range(4)]}),
        ("--schedule interleaved --layers 8 --virtual-stages 4 --stage-blocks 1,1,1,1,1,1,1,1", {"pp": 2},
         {"blocks": [range(i, i + 1) for i in range(8)], "virtual_stages": 4}),
        ("--global-batch 32", {"dp": 2}, {"micro_batches": 8}),
        ("--global-batch 32 --workers 2", {"dp": 2}, {"micro_batches": 4}),
    ],
)  # fmt: skip
def test_an_outline_follows_the_flags(text, sizes, facts):
    found = outlined(text, **sizes)
    assert {name: getattr(found, name) for name in facts} == facts


def test_counts_are_shared_where_only_the_batch_or_the_schedule_differ():
    same = [outlined(text, pp=2).key for text in ("", "--global-batch 32", "--schedule zb", "--schedule gpipe")]
    assert len(set(same)) == 1
    others = ("--micro-batch 1", "--regather", "--vocab-size 300", "--recompute full", "--layers 8")
    assert len({outlined(text, pp=2).key for text in ("", *others)}) == 1 + len(others)


def test_an_outline_refuses_what_it_does_not_count():
    for text, message in (
        ("--global-batch 15 --workers 2", "--global-batch 15 is not a multiple of --workers 2"),
        ("--workers 0", "--workers 0 is smaller than 1"),
        ("--compile", "--compile is not counted here"),
        ("--schedule interleaved --virtual-stages 1 --layer 3", None),
        ("--global-batch 9", "--global-batch 9 is not a multiple"),
    ):
        with pytest.raises((ValueError, SystemExit), match=message):
            outlined(text)
    with pytest.raises(ValueError, match="1f1b"):
        outlined("--virtual-stages 2", pp=2)


# --- the work of a rank -----------------------------------------------------------------------------------------------


def worked(text: str, choice: dict[int, list[int]], config: GPTConfig = CONFIG, regather: bool = False, **sizes: int):
    args = flags(text, regather=regather)
    with pretend(math.prod(sizes.values())):
        mesh = build_mesh(**{"dp": 1, **sizes}, device_type="cpu")
        plan = find_schedule(args.schedule, mesh.pp.size, 8, args.virtual_stages)
        return work(args, config, mesh, plan, even_blocks(8, plan.stages), choice)


def test_the_work_of_a_rank_has_the_stages_and_blocks_that_are_chosen():
    made = worked("", {0: [0, 1, 5]})
    (stage,) = made.stages
    assert list(stage.blocks) == ["0", "1", "5"]
    assert (stage.first, stage.last) == (True, True)
    made = worked("--schedule interleaved", {2: [4]}, pp=2)
    (stage,) = made.stages
    assert (list(stage.blocks), stage.first, stage.last) == (["4"], False, False)
    two = worked("--schedule interleaved", {0: [0, 1], 2: [5]}, pp=2).stages
    assert [list(stage.blocks) for stage in two] == [["0", "1"], ["5"]]
    assert all(p.device.type == "meta" for stage in two for p in stage.parameters())


@pytest.mark.parametrize(
    ("text", "weights", "hidden", "autocast"),
    [
        ("", torch.float32, torch.float32, None),
        ("--dtype float64", torch.float64, torch.float64, None),
        ("--dtype bfloat16", torch.bfloat16, torch.bfloat16, None),
        ("--dtype bfloat16 --set residual_dtype=float32", torch.bfloat16, torch.float32, None),
        ("--dtype bfloat16 --set autocast=true", torch.float32, torch.float32, torch.bfloat16),
        ("--dtype float16", torch.float32, torch.float32, torch.float16),
    ],
)
def test_the_work_of_a_rank_has_the_dtypes_of_the_run(text, weights, hidden, autocast):
    made = worked(text, {0: [2]}, pp=2)
    assert {p.dtype for stage in made.stages for p in stage.parameters()} == {weights}
    assert made.autocast == autocast
    assert made.stages[0].residual_dtype == hidden
    (x,), given = made.inputs(0)
    assert (x.shape, x.dtype) == ((2, T), torch.int64)
    assert {name: (tuple(y.shape), y.dtype) for name, y in given.items()} == {"samples": ((2,), torch.int64)}


def test_the_work_of_a_later_stage_takes_hidden_states():
    for sizes, text, shape in (
        ({}, "", (2, T, D)),
        ({"cp": 2}, "--cp-kind ring", (2, T // 2, D)),
        ({"tp": 2}, "", (2, T, D)),
        ({"tp": 2}, "--sequence-parallel --micro-batch 3", (3, T // 2, D)),
    ):
        made = worked(f"--schedule interleaved {text}", {2: [4]}, pp=2, **sizes)
        (x,), _ = made.inputs(0)
        assert (tuple(x.shape), x.dtype) == (shape, torch.float32)
        assert made.stages[0].context == ("ring" if "ring" in text else "zigzag")
        assert made.stages[0].sequence_parallel == ("--sequence-parallel" in text)
    (x,), _ = worked("", {0: [0]}, cp=2).inputs(0)
    assert x.shape == (2, T // 2)


def test_layers_gather_their_input_again_only_if_they_are_told_to():
    for regather in (False, True):
        (stage,) = worked("--sequence-parallel", {0: [0]}, regather=regather, tp=2).stages
        found = {m.regather for m in stage.modules() if isinstance(m, ColumnParallelLinear)}
        assert found == {regather}


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("", set()),
        ("--workers 2", {"outer_parameter", "outer_momentum"}),
        ("--workers 2 --set outer_momentum=0", {"outer_parameter"}),
    ],
)
def test_workers_keep_what_merges_need(text, slots):
    made = worked(text, {0: [0]})
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = made.optimizer([p])
    assert type(optimizer) is torch.optim.AdamW
    assert (optimizer.defaults["fused"], optimizer.defaults["foreach"]) == (True, False)
    p.grad = torch.ones(3)
    optimizer.step()
    found = set(optimizer.state[p]) - {"step", "exp_avg", "exp_avg_sq"}
    assert len(found) == len(slots)
    assert all(optimizer.state[p][slot].tolist() == [0, 0, 0] for slot in found)
    assert math.isfinite(float(p.sum()))
