"""What the flags of a run are refused for, and how near to it they may come."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from examples.gpt.arguments import parse
from examples.gpt.checkpoints import differing
from examples.gpt.config import GPTConfig
from examples.gpt.policies import merge_options, recompute_kind
from examples.gpt.setup import about, check, mesh_arguments, model_config, plan_stages, profiled_steps, stage_blocks
from mpcore import Mesh, build_mesh
from mpcore.experimental import LocalUpdates
from mpcore.tools.analysis.dry_run import pretend


@cache
def mesh_of(*sizes: tuple[str, int]) -> Mesh:
    """The first rank's mesh of a job that doesn't run."""
    sized = dict(sizes)
    world = sized.get("worlds", 1)
    for axis in ("tp", "cp", "pp", "dp"):
        world *= sized.get(axis, 1)
    with pretend(world):
        return build_mesh(**{"dp": 1, **sized}, device_type="cpu")


def checked(flags: str, config: GPTConfig | None = None, **sizes: int) -> tuple[int, Any]:
    """The micro-batches of a step, and the flags."""
    args = parse(flags.split())
    return check(args, config or model_config(args, 257), mesh_of(*sizes.items())), args


@pytest.mark.parametrize(("flags", "sizes", "micro_batches"), [
    ("--set min_lr=0.003", {}, 8), ("--set min_lr=0", {}, 8), ("--recompute budget=0.5", {}, 8),
    ("--ep 2 --experts 4", {"dp": 2, "ep": 2}, 4), ("--experts 4", {"dp": 2, "etp": 1}, 4),
    ("--d-model 256 --d-ff 256 --fp8", {"tp": 2}, 8), ("--preset gpt2 --seq-len 1024", {}, 8),
    ("--global-batch 8", {"pp": 4}, 4), ("--global-batch 2 --schedule gpipe", {"pp": 2}, 1),
    ("--seq-len 1 --sequence-parallel", {}, 8),
    ("--seq-len 7", {"tp": 2}, 8), ("--seq-len 12", {"cp": 3}, 8),
    ("--seq-len 8 --sequence-parallel", {"cp": 2, "tp": 2}, 8), ("--global-batch 24", {"dp": 4}, 3),
    ("--global-batch 24", {"dp": 2, "worlds": 3}, 2), ("--global-batch 12 --micro-batch 3", {}, 4),
    ("--workers 2 --local-steps 3 --set fragments=3", {"worlds": 2}, 4),
])  # fmt: skip
def test_what_goes_together_is_taken(flags, sizes, micro_batches):
    assert checked(flags, **sizes)[0] == micro_batches


@pytest.mark.parametrize(
    ("flags", "sizes", "message"),
    [
        ("--steps 0", {}, "--steps 0 is smaller than 1"),
        ("--set min_lr=0.004", {}, "min_lr 0.004 is not from 0 to --lr 0.003"),
        ("--recompute some", {}, "--recompute 'some' is none of none, selective, full and budget=SHARE"),
        ("--set profile=4:3", {}, "profile 4:3 is not FIRST:LAST, such as 10:12"),
        ("--set embedding_lr_scale=2 --optimizer muon", {}, "embedding_lr_scale 2.0 can't go with --optimizer muon"),
        ("--set attention_dropout=0.1", {"cp": 2}, "attention_dropout 0.1 can't go with cp 2: take cp 1"),
        ("--warmup 2 --set warmup_share=0.1", {}, "--warmup 2 and warmup_share 0.1: give one of them"),
        ("--set warmup_samples=9 rampup_batch_size=1,1,6", {}, "warmup_samples 9 and rampup_batch_size [1, 1, 6]"),
        ("--compile nothing", {}, "compile backend 'nothing' is none of torch's"),
        ("--offload none optimizer", {}, "--offload none optimizer: none and others"),
        ("--offload optimizer --optimizer muon", {}, "--offload optimizer goes with --optimizer adamw or adamw-bf16"),
        ("--offload parameters --zero 2", {"cp": 3}, "Offload(parameters=True) with Zero(stage=2) on 3 data-parallel"),
        ("--set replicate=2 --zero 0", {"dp": 8}, "replicate 2 with zero 0 on 8 data ranks leaves nothing to shard"),
        ("", {"dp": 2, "ep": 2}, "--ep 2 and --etp 1 are of experts, and there are none: --experts says how many"),
        ("", {"tp": 2, "etp": 1, "dp": 1}, "--ep 1 and --etp 1 are of experts, and there are none"),
        ("--experts 3", {"dp": 2, "ep": 2}, "3 experts"),
        ("--set moe.top_k=2", {}, "moe.top_k without experts: --experts says how many"),
        ("--experts 0 --set moe.top_k=2", {}, "moe.top_k without experts: --experts says how many"),
        ("--fp8", {"tp": 4}, "128"),
        ("--preset gpt2 --seq-len 1025", {}, "--seq-len 1025 is longer than the 1024 positions of gpt2"),
        ("", {"tp": 5}, "--heads 4 is smaller than the tp size 5"),
        ("--cp-kind two-level", {"cp": 4}, "'two-level' needs the cp axis of size 4 as outer x inner"),
        ("--cp-kind alltoall", {"cp": 4, "tp": 2}, "'alltoall' can't cut 2 heads over the cp size 4"),
        ("--seq-len 7 --sequence-parallel", {"tp": 2},
         "--seq-len 7 is not a multiple of the tp size 2 that cut it: 6 is"),
        ("--seq-len 2", {"cp": 3}, "--seq-len 2 is not a multiple of the cp size 3 that cut it: 3 is"),
        ("--seq-len 11", {"cp": 3, "tp": 2}, "--seq-len 11 is not a multiple of the cp size 3 that cut it: 9 is"),
        ("--seq-len 10 --sequence-parallel", {"cp": 2, "tp": 2},
         "--seq-len 10 is not a multiple of the cp size 2 x tp size 2 that cut it: 8 is"),
        ("--set bitwise=4 --global-batch 6", {}, "--global-batch 6 is not bitwise 4 x --micro-batch 1: 8 is a"),
        ("--set bitwise=4 --global-batch 8 --micro-batch 7", {}, "--global-batch 8 is not bitwise 4 x --micro-batch 7"),
        ("--global-batch 9", {}, "--global-batch 9 is not a multiple of dp x micro-batch = 1 x 2 = 2: 10 is"),
        ("--global-batch 9 --micro-batch 3", {"dp": 2}, "is not a multiple of dp x micro-batch = 2 x 3 = 6: 12 is"),
        ("--global-batch 6 --workers 2", {"dp": 2, "worlds": 2},
         "--global-batch 6 is not a multiple of workers x dp x micro-batch = 2 x 2 x 2 = 8: 8 is"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_with_both_numbers(flags, sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        checked(flags, **sizes)


@pytest.mark.parametrize("flags", [
    "--set mtp_weight=0.5", "--set rope_base=5e5 positions=learned", "--set rope_fraction=0.5 layers_spec=full+no-rope",
    "--set bias=true qkv_bias=true output_bias=false mlp_bias=false", "--set output_bias=true layers_spec=mamba",
    "--set moe.aux_coefficient=0.5 moe.aux_loss=none --experts 4", "--wait all",
    "--set moe.top_groups=1 --experts 4", "--set moe.groups=2 --experts 4", "--set keep=2 no_save=true",
    "--set eval_samples=3 --eval-every 0", "--set eval_data=a=b --eval-every 0",
    "--save-every 2 --set no_save=true", "--set recompute_every=2", "--set first_loss_scale=4", "--local-steps 3",
    "--set residual_dtype=float32 --dtype float64", "--set profile=9:10 --steps 9", "--set nesterov=false",
])  # fmt: skip
def test_a_setting_without_effect_is_refused_by_name(flags):
    name = re.split("[ =]", flags.removeprefix("--set "))[0]
    with pytest.raises(ValueError, match=f"^{name} .* has no effect with"):
        checked(flags)


def test_a_bitwise_step_has_one_micro_batch_a_leaf():
    micro_batches, args = checked("--set bitwise=4 --global-batch 8", dp=2)
    assert (micro_batches, args.micro_batch) == (2, 2)


def test_merges_have_defaults_and_the_flags_change_them():
    assert merge_options(parse([])) == LocalUpdates(every=50)
    flags = "--workers 2 --local-steps 6 --set outer_lr=0.5 outer_momentum=0.25 fragments=3 nesterov=false"
    assert merge_options(parse(flags.split())) == LocalUpdates(6, 0.5, 0.25, False, 3)
    for local, more, every in (("6", "fragments=7", 6), (None, "fragments=51", 50)):
        with pytest.raises(ValueError, match=rf"^fragments {more[10:]} is not from 1 to the {every} steps"):
            merge_options(parse(["--workers", "2", *(["--local-steps", local] if local else []), "--set", more]))


def test_a_checkpoint_of_listed_layers_is_of_this_run():
    config = model_config(parse(["--set", "layers_spec=window=4,full"]), 257)
    setup: Any = SimpleNamespace(config=config, corpus={}, tokenizer=SimpleNamespace(fingerprint=""))
    here = about(setup, "adamw")
    assert differing(json.loads(json.dumps(here)), here) == []


def test_recomputation_and_profiles_are_read():
    kinds = [recompute_kind(word) for word in ("none", "selective", "full", "budget=0.25")]
    assert kinds == [("none", None), ("selective", None), ("full", None), ("budget", 0.25)]
    for word in ("budget", "budget=", "budget=x", "full=1", "none=", "=0.5", ""):
        with pytest.raises(ValueError, match=f"^--recompute '{word}' is none of"):
            recompute_kind(word)
    assert profiled_steps(None) == range(0)
    assert [profiled_steps(word) for word in ("3:5", "0:0", "7:7")] == [range(3, 6), range(1), range(7, 8)]
    for word in ("3", "5:3", "3:", ":3", "a:3", "3:a", "-1:3", "3-5"):
        with pytest.raises(ValueError, match=f"^profile {word} is not FIRST:LAST, such as 10:12$"):
            profiled_steps(word)


@pytest.mark.parametrize(("flags", "each", "inner"), [
    ("--cp 8", 8, None), ("--cp 8 --cp-kind two-level", 8, 4), ("--cp 8 --cp-kind two-level", 2, 2),
    ("--cp 8 --cp-kind two-level", 1, 1), ("--cp 8 --cp-kind two-level --tp 4", 8, 2),
    ("--cp 6 --cp-kind two-level", 4, 3), ("--cp 6 --cp-kind two-level", 2, 2), ("--cp 1 --cp-kind two-level", 8, 1),
    ("--cp 2 --cp-kind two-level", 8, 1), ("--cp 8 --cp-kind two-level --set cp_inner=8", 2, 8),
    ("--cp 8 --cp-kind two-level --set cp_inner=1", 2, 1),
    ("--cp 8 --set cp_inner=2", 8, "cp_inner 2 is of --cp-kind two-level, not of zigzag"),
    ("--cp 8 --cp-kind two-level --set cp_inner=3", 8, "cp_inner 3 does not divide --cp 8: sub-groups have one size"),
])  # fmt: skip
def test_a_sub_group_of_cp_lies_in_a_node(flags, each, inner):
    if isinstance(inner, str):
        with pytest.raises(ValueError, match=re.escape(inner)):
            mesh_arguments(parse(flags.split()), each)["cp_inner"]
    else:
        assert mesh_arguments(parse(flags.split()), each)["cp_inner"] == inner


def test_the_head_counts_where_blocks_are_dealt_out():
    """A block of width 128 has 12 d^2 of matrices and more; the head of 257 tokens is a sixth of it."""
    small, large = (dataclasses.replace(GPTConfig(), layers=8, vocab_size=v) for v in (257, 50257))
    assert stage_blocks(small, 2) == [range(4), range(4, 8)]
    assert stage_blocks(large, 2) == [range(7), range(7, 8)]
    plan, blocks = plan_stages(parse(["--schedule", "interleaved"]), small, 2, 4)
    assert (plan.name, plan.stages, len(plan.ranks), plan.micro_batches) == ("interleaved", 4, 2, 4)
    assert blocks == [range(i, i + 2) for i in (0, 2, 4, 6)]
    plan, _ = plan_stages(parse(["--schedule", "interleaved", "--virtual-stages", "4"]), small, 2, 4)
    assert plan.stages == 8
