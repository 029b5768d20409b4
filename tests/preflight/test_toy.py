"""The toy of a preflight: each size by the rule that it keeps, worked out by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from examples.gpt.arguments import parse
from examples.gpt.config import GPTConfig, LatentConfig, LinearConfig, MoEConfig
from mpcore.pipeline.schedules import find_schedule
from mpcore.tools.preflight.toy import Toy, shrink, shrink_experts, shrink_model

ONE = {"tp": 1, "cp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": 1}


def toys(flags: str = "", micro_batches: int = 8, config: GPTConfig | None = None, **sizes: int) -> list[Toy]:
    """The toys of a run with these flags, on a mesh of these sizes; etp is tp unless it is given."""
    full = {**ONE, "etp": sizes.get("tp", 1), **sizes}
    args = parse(flags.split())
    plan = find_schedule(args.schedule, full["pp"], micro_batches, args.virtual_stages) if "csv" not in flags else None
    plan = plan or find_schedule("1f1b", full["pp"], micro_batches, None)
    return shrink(args, config or GPTConfig(), full, micro_batches, plan, Path("/toys"), "examples.gpt.pretrain")


@pytest.mark.parametrize(("sizes", "flags", "names"), [
    ({}, "", ["one rank"]), ({"tp": 5}, "", ["tp 3 x etp 3"]), ({"tp": 8, "dp": 8}, "", ["tp 2 x dp 2 x etp 2"]),
    ({"dp": 7, "pp": 2}, "", ["pp 2 x dp 3"]), ({"tp": 3, "pp": 3}, "", ["tp 3 x etp 3", "pp 3"]),
    ({"tp": 4, "cp": 2, "pp": 4, "dp": 4}, "", ["tp 2 x cp 2 x pp 2 x etp 2", "tp 2 x pp 2 x dp 2 x etp 2",
     "cp 2 x dp 2"]), ({"pp": 3, "dp": 3}, "", ["pp 3", "dp 3"]),
    ({"tp": 3, "pp": 2, "dp": 2}, "", ["tp 3 x pp 2 x etp 3", "pp 2 x dp 2", "tp 3 x dp 2 x etp 3"]),
    ({"tp": 2, "pp": 2}, "--workers 3", ["tp 2 x pp 2 x etp 2 x worlds 2"]),
    ({"dp": 8, "tp": 2}, "--set replicate=2", ["tp 2 x dp 4 x etp 2"]), ({"dp": 8}, "--set replicate=8", ["dp 2"]),
    ({"dp": 8, "tp": 2}, "--set replicate=2 --workers 2", ["tp 2 x dp 2 x etp 2 x worlds 2"]),
])  # fmt: skip
def test_an_even_size_is_two_and_an_odd_one_three(sizes, flags, names):
    found = toys(flags, **sizes)
    assert sorted(toy.name for toy in found) == sorted(names)
    for toy in found:
        assert toy.ranks == math.prod(toy.sizes.get(axis, 1) for axis in ("tp", "cp", "pp", "dp", "worlds")) <= 8


def test_each_axis_is_in_a_toy_and_each_two_that_fit():
    for sizes in itertools.product((1, 2, 3), repeat=4):
        full = dict(zip(("tp", "cp", "pp", "dp"), sizes, strict=True))
        found = [{axis for axis in full if toy.sizes[axis] > 1} for toy in toys("", 6, **full)]
        for one, two in itertools.combinations_with_replacement([axis for axis in full if full[axis] > 1], 2):
            if one == two or full[one] * full[two] <= 8:
                assert any({one, two} <= axes for axes in found), (full, found)


@pytest.mark.parametrize(("sizes", "experts"), [
    ({"tp": 4, "dp": 4}, (1, 2)), ({"tp": 4, "dp": 4, "ep": 4}, (2, 2)),
    ({"tp": 4, "dp": 4, "ep": 4, "etp": 1}, (2, 1)), ({"tp": 4, "dp": 4, "ep": 8, "etp": 2}, (2, 2)),
    ({"tp": 3, "ep": 3, "etp": 1}, (3, 1)), ({"tp": 3, "etp": 2}, (1, 1)), ({"dp": 3, "ep": 3}, (3, 1)),
    ({"dp": 2, "ep": 3}, (2, 1)), ({"dp": 3, "ep": 2}, (3, 1)), ({"cp": 2, "ep": 2}, (2, 1)),
    ({"cp": 2, "dp": 3, "ep": 3}, (3, 1)), ({"pp": 2, "ep": 2}, (1, 1)), ({"tp": 2, "etp": 2, "ep": 2}, (1, 2)),
])  # fmt: skip
def test_experts_lie_on_the_ranks_that_the_toy_has(sizes, experts):
    moe = GPTConfig(moe=MoEConfig())
    toy = toys("", config=moe, **sizes)[0]
    assert (toy.sizes["ep"], toy.sizes["etp"]) == experts
    assert toy.args.etp == (None if experts[1] == toy.sizes["tp"] else experts[1])
    assert (toy.args.ep, toy.args.tp) == (experts[0], toy.sizes["tp"])


# What every toy has: float64 on the CPU, four steps on a corpus of its own, and nothing that the run would write.
ALWAYS: dict[str, Any] = {
    "dtype": "float64", "device": "cpu", "steps": 4, "warmup": 1, "data": ["/toys/corpus"], "eval_data": [],
    "tokenizer": "byte", "eval_every": 1, "eval_samples": 3, "out": "/toys/out", "timeout": 60.0, "check_replicas": 1,
    "check_speed": 0, "global_batch": 4, "dp": 1,
}  # fmt: skip
LOUD = (
    "--set autocast=true --set residual_dtype=float32 --compile --set trace=true --set profile=1:2 "
    "--set log_to=wandb --set eval_data=a=b --data c "
    "--tokenizer t --set end_of_document=e --eval-every 9 --init-from x --resume auto --save-every 3 "
    "--set keep=2 --set exit_step=4 --set timeout=5 --set check_replicas=7 --set check_speed=7 --device cuda "
    "--dtype bfloat16 --steps 99"
)


def test_a_toy_has_the_flags_of_the_run_but_these():
    (toy,) = toys(f"{LOUD} --lr 0.5 --optimizer muon --set clip=2 --zero 3 --seed 5 --dropout 0.1")
    same = {"lr": 0.5, "optimizer": "muon", "clip": 2.0, "zero": 3, "seed": 5, "dropout": 0.1}
    assert vars(toy.args) == vars(parse([])) | ALWAYS | same
    fp8 = toys("--fp8")[0]
    assert (fp8.args.fp8, fp8.config.d_model, fp8.config.d_ff) == (False, 2 * 16, 6 * 32)
    assert toys("--preset llama3-8b")[0].args.preset is None


@pytest.mark.parametrize(("flags", "micro_batches", "sizes", "changed"), [
    ("", 8, {"dp": 4}, {"dp": 2, "global_batch": 8}),
    ("--micro-batch 1", 8, {"dp": 4}, {"dp": 2, "micro_batch": 1, "global_batch": 4}),
    ("--micro-batch 5", 8, {}, {"micro_batch": 2, "global_batch": 4}), ("", 1, {}, {"global_batch": 2}),
    ("", 9, {"pp": 4}, {"pp": 2, "global_batch": 10}), ("", 10, {"pp": 3}, {"pp": 3, "global_batch": 14}),
    ("--schedule interleaved --virtual-stages 4", 8, {"pp": 4}, {"pp": 2, "global_batch": 8,
     "schedule": "interleaved", "virtual_stages": 2}),
    ("--schedule zbv", 8, {"pp": 4}, {"pp": 2, "global_batch": 8, "schedule": "zbv", "virtual_stages": None}),
    ("--schedule my.csv", 8, {"pp": 4}, {"pp": 2, "global_batch": 8, "schedule": "1f1b"}),
    ("--set replicate=2", 8, {"dp": 8}, {"dp": 4, "replicate": 2, "global_batch": 16}),
    ("--set replicate=8", 8, {"dp": 8}, {"dp": 2, "replicate": 1, "global_batch": 8}),
    ("--set replicate=4", 8, {"dp": 2, "cp": 4}, {"dp": 2, "cp": 2, "replicate": 2, "global_batch": 8}),
    ("--workers 4", 8, {}, {"workers": 2, "eval_samples": 6, "global_batch": 8, "local_steps": 2, "fragments": None}),
    ("--workers 2 --set fragments=5 --local-steps 9", 8, {}, {"workers": 2, "eval_samples": 6, "global_batch": 8,
     "local_steps": 2, "fragments": 2}),
    ("--set rampup_batch_size=2,2,9", 8, {}, {"rampup_batch_size": [4, 4, 8], "global_batch": 8}),
    ("--offload parameters --zero 1", 8, {"dp": 2}, {"dp": 2, "global_batch": 8, "offload": ["none"]}),
    ("--offload parameters --zero 1", 8, {"tp": 2}, {"tp": 2, "offload": ["parameters"]}),
    ("--offload parameters optimizer --zero 2", 8, {"dp": 2}, {"dp": 2, "global_batch": 8, "offload": ["optimizer"],
     "zero": 2}),
    ("--cp-kind two-level --set cp_inner=2", 8, {"cp": 4}, {"cp": 2, "cp_kind": "two-level", "cp_inner": 1}),
    ("--cp-kind two-level --set cp_inner=1", 8, {}, {}),
])  # fmt: skip
def test_a_toy_is_small_and_divides_as_the_run_does(flags, micro_batches, sizes, changed):
    (toy,) = toys(flags, micro_batches, **sizes)
    assert vars(toy.args) == vars(parse([])) | ALWAYS | changed
    assert "cp_inner" not in toy.sizes or toy.sizes["cp_inner"] == toy.args.cp_inner == 1
    assert ("cp_inner" in toy.sizes) == (toy.args.cp_kind == "two-level")
    assert ("worlds" in toy.sizes) == (toy.args.workers > 1)


def shrunk(flags: str = "", stages: int = 1, full_stages: int = 1, sizes: tuple = (1, 1), small: tuple = (1, 1),
           **changes: Any) -> GPTConfig:  # fmt: skip
    """The toy of a model with these changes; `sizes` and `small` are tp and cp."""
    full, few = ({**ONE, "tp": tp, "cp": cp} for tp, cp in (sizes, small))
    args = parse(flags.split())
    return shrink_model(dataclasses.replace(GPTConfig(), **changes), full, few, stages, full_stages, args)


TOY = GPTConfig(vocab_size=258, seq_len=6, layers=2, heads=2, d_model=16, d_ff=48)


@pytest.mark.parametrize(("given", "changed"), [
    ({}, {}),
    ({"dropout": 0.1, "tie_embeddings": True, "norm": "layer", "positions": "learned", "bias": True}, {"dropout": 0.1,
     "tie_embeddings": True, "norm": "layer", "positions": "learned", "bias": True}),
    ({"vocab_size": 1000, "seq_len": 4096, "layers": 80, "d_ff": 4096, "d_model": 1024, "heads": 16}, {}),
    ({"heads": 1}, {"heads": 1, "d_model": 8}),
    ({"heads": 8, "d_model": 128, "kv_heads": 2}, {"heads": 4, "kv_heads": 2, "d_model": 32}),
    ({"kv_heads": 4}, {"kv_heads": 2}), ({"head_dim": 32}, {"head_dim": 8}),
    ({"head_dim": 48}, {"head_dim": 8, "d_model": 32}), ({"seq_len": 255}, {"seq_len": 5}),
    ({"seq_len": 256, "window": 256}, {"window": 6}), ({"seq_len": 256, "window": 300}, {"window": 6}),
    ({"seq_len": 256, "window": 255}, {"window": 2}),
    ({"seq_len": 255, "window": 10}, {"seq_len": 5, "window": 1}),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"rope_scaling": {"rope_type": "linear",
     "factor": 2.0}}),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}},
     {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 6}}),
    ({"rope_fraction": 0.25}, {"rope_fraction": 0.25}), ({"rope_fraction": 0.125}, {"rope_fraction": 0.5}),
    ({"latent": LatentConfig()}, {"latent": LatentConfig(16, 16, 8, 8, 8)}),
    ({"latent": LatentConfig(q_lora_rank=None)}, {"latent": LatentConfig(16, None, 8, 8, 8)}),
    ({"layers_spec": ("delta", "kimi", "window=3"), "linear": LinearConfig(32, 128, 16)},
     {"layers_spec": ("delta", "kimi", "window=3"), "linear": LinearConfig(2, 8, 1), "layers": 3}),
])  # fmt: skip
def test_a_model_on_one_rank_is_shrunk_to_its_least(given, changed):
    assert shrunk(**given) == dataclasses.replace(TOY, **changed)


@pytest.mark.parametrize(("given", "sizes", "small", "heads"), [
    ({"heads": 4}, (4, 1), (2, 1), (2, 2)), ({"heads": 8, "kv_heads": 2}, (4, 1), (2, 1), (4, 1)),
    ({"heads": 6, "kv_heads": 3, "head_dim": 8}, (4, 1), (2, 1), (3, 1)), ({"heads": 4}, (2, 1), (2, 1), (4, 4)),
    ({"heads": 8, "kv_heads": 4}, (2, 1), (2, 1), (8, 4)), ({"heads": 2, "kv_heads": 1}, (2, 1), (2, 1), (2, 1)),
    ({"heads": 5, "head_dim": 8}, (2, 1), (2, 1), (3, 3)),
    ({"heads": 6, "kv_heads": 2, "head_dim": 8}, (3, 1), (3, 1), (6, 2)),
    ({"flags": "--cp-kind alltoall", "heads": 4}, (1, 3), (1, 3), (3, 3)),
    ({"flags": "--cp-kind ring", "heads": 4}, (1, 3), (1, 3), (2, 2)),
    ({"flags": "--cp-kind alltoall", "heads": 8}, (2, 4), (2, 2), (4, 4)),
])  # fmt: skip
def test_heads_divide_over_tp_as_those_of_the_run(given, sizes, small, heads):
    given = dict(given)
    found = shrunk(given.pop("flags", ""), sizes=sizes, small=small, **given)
    assert (found.heads, found.kv_heads or found.heads) == heads
    assert found.head_width == 8


@pytest.mark.parametrize(("flags", "sizes", "small", "given", "length"), [
    ("", (1, 4), (1, 2), 256, 12), ("", (1, 4), (1, 2), 12, 14), ("", (1, 3), (1, 3), 258, 18),
    ("", (1, 3), (1, 3), 255, 15), ("", (4, 1), (2, 1), 4, 6), ("--sequence-parallel", (4, 1), (2, 1), 256, 12),
    ("--sequence-parallel", (4, 1), (2, 1), 4, 14), ("--sequence-parallel", (4, 4), (2, 2), 256, 24),
    ("--sequence-parallel", (4, 4), (2, 2), 48, 28), ("--sequence-parallel", (3, 3), (3, 3), 27, 45),
])  # fmt: skip
def test_a_sample_has_an_even_or_odd_number_of_parts_as_that_of_the_run(flags, sizes, small, given, length):
    assert shrunk(flags, sizes=sizes, small=small, seq_len=given).seq_len == length


@pytest.mark.parametrize(("stages", "full", "given", "layers"), [
    (2, 4, {"layers": 8}, 2), (2, 4, {"layers": 9}, 3), (4, 8, {"layers": 16}, 4), (4, 8, {"layers": 9}, 5),
    (1, 1, {"layers": 9}, 2), (2, 4, {"layers": 8, "moe": MoEConfig(every=2, dense=1)}, 4),
    (2, 4, {"layers": 9, "moe": MoEConfig(every=2, dense=1)}, 3),
    (3, 3, {"layers": 9, "moe": MoEConfig(every=2, dense=5)}, 3), (2, 2, {"layers": 8, "moe": MoEConfig(every=2)}, 2),
    (1, 1, {"layers": 8, "moe": MoEConfig(every=4, dense=2)}, 3),
])  # fmt: skip
def test_layers_fill_the_stages_as_those_of_the_run(stages, full, given, layers):
    assert shrunk(stages=stages, full_stages=full, **given).layers == layers


def test_tables_and_mlps_divide_over_tp_or_not():
    two: dict[str, Any] = {"sizes": (2, 1), "small": (2, 1)}
    assert [shrunk(**two, vocab_size=v).vocab_size for v in (256, 257)] == [258, 257]
    assert [shrunk(**two, d_ff=d).d_ff for d in (384, 385)] == [48, 49]
    assert shrunk("--fp8", **two, d_ff=385).d_ff == 193
    assert shrunk("--fp8").d_model == 32
    wide = shrunk("--fp8", head_dim=64)
    assert (wide.head_dim, wide.d_model) == (16, 64)
    assert shrunk("--fp8", latent=LatentConfig()).latent == LatentConfig(32, 32, 16, 16, 16)
    assert shrunk("--fp8", moe=MoEConfig()).moe == MoEConfig(experts=4, d_ff=96)
    assert shrunk(moe=MoEConfig(experts=64, d_ff=512)).moe == MoEConfig(experts=4, d_ff=48)


@pytest.mark.parametrize(("given", "ep", "changed"), [
    ({}, 1, {"experts": 4}), ({"experts": 64, "top_k": 1}, 2, {"experts": 4, "top_k": 1}),
    ({"experts": 64, "top_k": 6}, 3, {"experts": 6, "top_k": 2}),
    ({"experts": 64, "groups": 8, "top_groups": 3}, 3, {"experts": 6, "groups": 2, "top_groups": 2}),
    ({"experts": 64, "groups": 8, "top_groups": 1}, 1, {"experts": 4, "groups": 2, "top_groups": 1}),
    ({"experts": 6, "top_k": 6}, 3, {"experts": 6, "top_k": 6}),
    ({"experts": 6, "top_k": 7}, 1, {"experts": 4, "top_k": 4}),
    ({"every": 1, "dense": 0, "shared_experts": 0}, 1, {"experts": 4}),
    ({"every": 5, "dense": 2, "shared_experts": 3}, 1, {"experts": 4, "every": 2, "dense": 1, "shared_experts": 1}),
])  # fmt: skip
def test_a_few_experts_are_chosen_as_many_are(given, ep, changed):
    found = shrink_experts(MoEConfig(**given), {"ep": 8}, {"ep": ep}, 16)
    assert found == dataclasses.replace(MoEConfig(**given), d_ff=48, **changed)


def test_the_same_run_on_one_rank_has_no_layout():
    (toy,) = toys("--zero 3 --set replicate=2 --cp-kind two-level --schedule interleaved --virtual-stages 2 "
                  "--sequence-parallel --offload optimizer --recompute full --etp 1 --dp 8 --set cp_inner=2",
                  cp=4, pp=2, dp=2)  # fmt: skip
    alone = toy.alone(seed=3)
    assert (alone.sizes, alone.ranks, alone.config) == ({}, 1, toy.config)
    plain = {"zero": 0, "replicate": 1, "cp_kind": "ring", "cp_inner": None, "schedule": "1f1b",
             "virtual_stages": None, "sequence_parallel": False, "offload": ["none"], "recompute": "none",
             "micro_batch": 1, "tp": 1, "cp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": None, "seed": 3}  # fmt: skip
    assert vars(alone.args) == vars(toy.args) | plain
    merged = toys("--workers 2", tp=2)[0].alone()
    assert (merged.sizes, merged.ranks, merged.name) == ({"worlds": 2}, 2, "worlds 2")
    assert toy.args.zero == 3, "a copy was changed"
