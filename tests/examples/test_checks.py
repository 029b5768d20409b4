"""What the flags of a run are refused for, and how near to it they may come."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from typing import Any

import pytest

from examples.gpt.arguments import parse
from examples.gpt.checks import (
    check,
    check_replicate,
    inner_size,
    merge_options,
    model_config,
    moe_config,
    plan_stages,
    profiled_steps,
    recompute_kind,
    stage_blocks,
)
from examples.gpt.config import GPTConfig, MoEConfig
from examples.gpt.presets import PRESETS
from mpcore import Mesh, build_mesh
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


def test_a_run_without_flags_takes_eight_micro_batches():
    assert checked("")[0] == 8


@pytest.mark.parametrize(
    ("flags", "sizes", "micro_batches"),
    [
        ("--min-lr 0.003", {}, 8),
        ("--min-lr 0", {}, 8),
        ("--recompute budget=0.5", {}, 8),
        ("--profile 3:3", {}, 8),
        ("--twin 1 --experts 4", {}, 8),
        ("--experts 4 --aux-loss micro_batch", {}, 8),
        ("--twin 1 --experts 4 --balance none", {}, 8),
        ("--twin 1", {}, 8),
        ("--no-save", {}, 8),
        ("--save-every 2", {}, 8),
        ("--compile eager", {}, 8),
        ("--compile", {}, 8),
        ("--offload none none", {}, 8),
        ("--offload optimizer activations", {}, 8),
        ("--offload activations --optimizer muon", {}, 8),
        ("--offload parameters --zero 0", {"dp": 2}, 4),
        ("--offload parameters --zero 3", {"tp": 2}, 8),
        ("--offload optimizer --zero 3", {"dp": 2}, 4),
        ("--ep 2 --experts 4", {"dp": 2, "ep": 2}, 4),
        ("--experts 4", {"dp": 2, "etp": 1}, 4),
        ("--d-model 256 --d-ff 256 --fp8", {"tp": 2}, 8),
        ("--preset gpt2 --seq-len 1024", {}, 8),
        ("--preset gpt2 --seq-len 5", {}, 8),
        ("--preset tiny --seq-len 9999", {}, 8),
        ("", {"tp": 4}, 8),
        ("--global-batch 8", {"pp": 4}, 4),
        ("--global-batch 2 --schedule gpipe", {"pp": 2}, 1),
        ("--cp-kind alltoall", {"cp": 4}, 8),
        ("--cp-kind alltoall", {"cp": 2, "tp": 2}, 8),
        ("--cp-kind two-level --cp-inner 2", {"cp": 4, "cp_inner": 2}, 8),
        ("--seq-len 1 --sequence-parallel", {}, 8),
        ("--seq-len 7", {"tp": 2}, 8),
        ("--seq-len 12", {"cp": 3}, 8),
        ("--seq-len 8 --sequence-parallel", {"cp": 2, "tp": 2}, 8),
        ("--global-batch 24", {"dp": 4}, 3),
        ("--global-batch 24", {"dp": 2, "worlds": 3}, 2),
        ("--global-batch 12 --micro-batch 3", {}, 4),
        ("--workers 2 --local-steps 3 --fragments 3", {"worlds": 2}, 4),
    ],
)
def test_what_goes_together_is_taken(flags, sizes, micro_batches):
    assert checked(flags, **sizes)[0] == micro_batches


@pytest.mark.parametrize(
    ("flags", "sizes", "message"),
    [
        ("--steps 0", {}, "--steps 0 is smaller than 1"),
        ("--min-lr 0.004", {}, "--min-lr 0.004 is not from 0 to --lr 0.003"),
        ("--recompute some", {}, "--recompute 'some' is none of none, selective, full and budget=SHARE"),
        ("--profile 4:3", {}, "--profile 4:3 is not FIRST:LAST, such as 10:12"),
        ("--twin 2 --experts 4 --aux-loss micro_batch", {}, "--twin 2 deals the samples out in another order, which"),
        ("--no-save --save-every 2", {}, "--no-save and --save-every 2: give one of them"),
        ("--compile nothing", {}, "--compile nothing is none of torch's backends, such as"),
        ("--offload none optimizer", {}, "--offload none optimizer: none and others"),
        ("--offload optimizer --optimizer muon", {}, "--offload optimizer goes with --optimizer adamw or adamw-bf16"),
        ("--offload parameters --zero 1", {"dp": 2},
         "--offload parameters goes with --zero 0: --zero 1 shards them over the 2 data ranks"),
        ("--offload parameters --zero 2", {"cp": 3}, "--zero 2 shards them over the 3 data ranks"),
        ("", {"dp": 2, "ep": 2}, "--ep 2 and --etp 1 are of experts, and there are none: --experts says how many"),
        ("", {"tp": 2, "etp": 1, "dp": 1}, "--ep 1 and --etp 1 are of experts, and there are none"),
        ("--experts 3", {"dp": 2, "ep": 2}, "3 experts"),
        ("--fp8", {"tp": 4}, "128"),
        ("--preset gpt2 --seq-len 1025", {}, "--seq-len 1025 is longer than the 1024 positions of gpt2"),
        ("", {"tp": 5}, "--heads 4 is smaller than the tp size 5"),
        ("", {"pp": 5}, "--layers 4 is smaller than the pp size 5"),
        ("--cp-kind two-level", {"cp": 4}, "'two-level' needs the cp axis of size 4 as outer x inner"),
        ("--cp-kind alltoall", {"cp": 4, "tp": 2}, "'alltoall' can't cut 2 heads over the cp size 4"),
        ("--seq-len 7 --sequence-parallel", {"tp": 2},
         "--seq-len 7 is not a multiple of the tp size 2 that cut it: 6 is"),
        ("--seq-len 2", {"cp": 3}, "--seq-len 2 is not a multiple of the cp size 3 that cut it: 3 is"),
        ("--seq-len 11", {"cp": 3, "tp": 2}, "--seq-len 11 is not a multiple of the cp size 3 that cut it: 9 is"),
        ("--seq-len 10 --sequence-parallel", {"cp": 2, "tp": 2},
         "--seq-len 10 is not a multiple of the cp size 2 x tp size 2 that cut it: 8 is"),
        ("--local-steps 3", {}, "--local-steps with one worker: --workers says how many merge"),
        ("--bitwise 4 --global-batch 6", {}, "--global-batch 6 is not a multiple of --bitwise 4: 8 is"),
        ("--global-batch 9", {}, "--global-batch 9 is not a multiple of dp x micro-batch = 1 x 2 = 2: 10 is"),
        ("--global-batch 9 --micro-batch 3", {"dp": 2}, "is not a multiple of dp x micro-batch = 2 x 3 = 6: 12 is"),
        ("--global-batch 6 --workers 2", {"dp": 2, "worlds": 2},
         "--global-batch 6 is not a multiple of workers x dp x micro-batch = 2 x 2 x 2 = 8: 8 is"),
        ("--global-batch 6", {"pp": 4},
         "3 micro-batches (--global-batch 6 / 2) are fewer than the pp size 4: --global-batch 8 is enough"),
        ("--global-batch 8", {"pp": 4, "dp": 2},
         "2 micro-batches (--global-batch 8 / 4) are fewer than the pp size 4: --global-batch 16 is enough"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_with_both_numbers(flags, sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        checked(flags, **sizes)


def test_a_bitwise_step_has_one_micro_batch_a_leaf():
    micro_batches, args = checked("--bitwise 4 --global-batch 8 --micro-batch 7")
    assert (micro_batches, args.micro_batch) == (4, 2)
    micro_batches, args = checked("--bitwise 4 --global-batch 8", dp=2)
    assert (micro_batches, args.micro_batch) == (2, 2)


def test_a_model_to_begin_with_has_positions_of_its_own():
    """Only a preset's learned positions bound the samples here: `model_config` checks those of another model."""
    args = parse(["--init-from", "there", "--preset", "gpt2", "--seq-len", "2048"])
    config = dataclasses.replace(PRESETS["gpt2"], seq_len=2048, layers=1)
    assert check(args, config, mesh_of()) == 8


# --- parts of flags ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "sizes", "fits"),
    [
        ("--replicate 1 --zero 0", {"dp": 1}, True),
        ("--replicate 2", {"dp": 8}, True),
        ("--replicate 4 --zero 3", {"dp": 8}, True),
        ("--replicate 2", {"dp": 2, "cp": 2}, True),
        ("--replicate 2 --zero 0", {"dp": 8}, False),
        ("--replicate 3", {"dp": 8}, False),
        ("--replicate 8", {"dp": 8}, False),
        ("--replicate 2", {"dp": 2}, False),
        ("--replicate 4", {"dp": 8, "ep": 4}, False),
        ("--replicate 2", {"dp": 8, "ep": 4}, True),
    ],
)
def test_replicas_divide_the_data_ranks_and_leave_something_to_shard(flags, sizes, fits):
    args, mesh = parse(flags.split()), mesh_of(*sizes.items())
    if fits:
        check_replicate(args, mesh)
        return
    data = sizes["dp"] * sizes.get("cp", 1)
    experts = f" and the {data // sizes['ep']} of the experts" if "ep" in sizes else ""
    message = f"--replicate {args.replicate} with --zero {args.zero} on {data} data ranks leaves nothing to shard, "
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        check_replicate(args, mesh)
    assert str(error.value).endswith(f"take --zero 1 to 3, and a number below {data} that divides it{experts}")


def test_merges_have_defaults_and_the_flags_change_them():
    assert merge_options(parse([])) == {"every": 50, "lr": 0.7, "momentum": 0.9, "fragments": 1}
    flags = "--workers 2 --local-steps 6 --outer-lr 0.5 --outer-momentum 0.25 --fragments 3"
    assert merge_options(parse(flags.split())) == {"every": 6, "lr": 0.5, "momentum": 0.25, "fragments": 3}
    assert merge_options(parse(["--workers", "2", "--local-steps", "6", "--fragments", "6"]))["fragments"] == 6
    with pytest.raises(ValueError, match=r"^--fragments 7 is not from 1 to the --local-steps 6 between merges$"):
        merge_options(parse(["--workers", "2", "--local-steps", "6", "--fragments", "7"]))
    with pytest.raises(ValueError, match=r"^--fragments 51 is not from 1 to the --local-steps 50 between merges$"):
        merge_options(parse(["--workers", "2", "--fragments", "51"]))
    with pytest.raises(ValueError, match=r"^--local-steps, --outer-lr, --outer-momentum, --fragments with one worker"):
        merge_options(parse(["--local-steps", "6", "--outer-lr", "1", "--outer-momentum", "0", "--fragments", "1"]))


def test_recomputation_and_profiles_are_read():
    kinds = [recompute_kind(word) for word in ("none", "selective", "full", "budget=0.25")]
    assert kinds == [("none", None), ("selective", None), ("full", None), ("budget", 0.25)]
    for word in ("budget", "budget=", "budget=x", "full=1", "none=", "=0.5", ""):
        with pytest.raises(ValueError, match=f"^--recompute '{word}' is none of"):
            recompute_kind(word)
    assert profiled_steps(None) == range(0)
    assert [profiled_steps(word) for word in ("3:5", "0:0", "7:7")] == [range(3, 6), range(1), range(7, 8)]
    for word in ("3", "5:3", "3:", ":3", "a:3", "3:a", "-1:3", "3-5"):
        with pytest.raises(ValueError, match=f"^--profile {word} is not FIRST:LAST, such as 10:12$"):
            profiled_steps(word)


@pytest.mark.parametrize(
    ("flags", "each", "inner"),
    [
        ("--cp 8", 8, None),
        ("--cp 8 --cp-kind two-level", 8, 4),
        ("--cp 8 --cp-kind two-level", 2, 2),
        ("--cp 8 --cp-kind two-level", 1, 1),
        ("--cp 8 --cp-kind two-level --tp 4", 8, 2),
        ("--cp 6 --cp-kind two-level", 4, 3),
        ("--cp 6 --cp-kind two-level", 2, 2),
        ("--cp 1 --cp-kind two-level", 8, 1),
        ("--cp 2 --cp-kind two-level", 8, 1),
        ("--cp 8 --cp-kind two-level --cp-inner 8", 2, 8),
        ("--cp 8 --cp-kind two-level --cp-inner 1", 2, 1),
        ("--cp 8 --cp-inner 2", 8, "--cp-inner 2 is of --cp-kind two-level, not of zigzag"),
        ("--cp 8 --cp-kind two-level --cp-inner 3", 8, "--cp-inner 3 does not divide --cp 8: sub-groups have one size"),
    ],
)
def test_a_sub_group_of_cp_lies_in_a_node(flags, each, inner):
    if isinstance(inner, str):
        with pytest.raises(ValueError, match=re.escape(inner)):
            inner_size(parse(flags.split()), each)
    else:
        assert inner_size(parse(flags.split()), each) == inner


def test_a_node_has_as_many_ranks_as_this_one_has():
    with pytest.MonkeyPatch.context() as patch:
        launch = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "x",
                  "MASTER_PORT": "1"}  # fmt: skip
        for name, value in launch.items():
            patch.setenv(name, value)
        assert inner_size(parse(["--cp", "8", "--cp-kind", "two-level"])) == 2


# --- the model --------------------------------------------------------------------------------------------------------


def test_flags_change_the_preset():
    flags = "--layers 3 --d-model 96 --heads 6 --kv-heads 2 --d-ff 100 --dropout 0.1 --tie-embeddings --init-std 0.5 "
    flags += "--seq-len 64"
    changed = {"layers": 3, "d_model": 96, "heads": 6, "kv_heads": 2, "d_ff": 100, "dropout": 0.1,
               "tie_embeddings": True, "init_std": 0.5, "seq_len": 64, "vocab_size": 300}  # fmt: skip
    assert model_config(parse(flags.split()), 300) == dataclasses.replace(GPTConfig(), **changed)
    assert model_config(parse([]), 257) == GPTConfig()
    big = model_config(parse(["--preset", "llama3-70b"]), 5)
    assert big == dataclasses.replace(PRESETS["llama3-70b"], vocab_size=5)
    assert model_config(parse(["--preset", "tiny-moe"]), 257) == PRESETS["tiny-moe"]
    for one in ("--init-from-hf", "--init-from"):
        with pytest.raises(ValueError, match=r"^--preset gpt2 and a model to begin with: the shape is that of there$"):
            model_config(parse([one, "there", "--preset", "gpt2"]), 257)


def test_flags_change_the_mixture_of_experts():
    flags = "--experts 6 --top-k 3 --shared-experts 1 --expert-d-ff 64 --routed-scale 2.5 --moe-every 2 --aux-loss " \
            "global --aux-coefficient 0.1 --router-z-loss 0.2 --router-jitter 0.3 --capacity-factor 1.5 --dispatch " \
            "all_to_all"  # fmt: skip
    changed = {"experts": 6, "top_k": 3, "shared_experts": 1, "d_ff": 64, "routed_scale": 2.5, "every": 2,
               "aux_loss": "global", "aux_coefficient": 0.1, "z_loss": 0.2, "jitter": 0.3, "capacity_factor": 1.5,
               "dispatch": "all_to_all"}  # fmt: skip
    assert moe_config(parse(flags.split()), None) == dataclasses.replace(MoEConfig(), **changed)
    assert moe_config(parse([]), MoEConfig(experts=5)) == MoEConfig(experts=5)


LEARNED = MoEConfig(experts=4, aux_loss=None, bias_rate=0.5)


@pytest.mark.parametrize(
    ("flags", "preset", "changed"),
    [
        ("", None, None),
        ("--experts 0", MoEConfig(), None),
        ("--experts 0", None, None),
        ("--experts 3", None, {"experts": 3}),
        ("--experts 3", MoEConfig(top_k=1), {"experts": 3}),
        ("--top-k 1", MoEConfig(), {"top_k": 1}),
        ("--balance aux", MoEConfig(), {"aux_loss": "sequence"}),
        ("--balance aux", MoEConfig(aux_loss="global"), {"aux_loss": "global"}),
        ("--balance aux", MoEConfig(aux_loss=None), {"aux_loss": "sequence"}),
        ("--balance aux --aux-loss micro_batch", MoEConfig(), {"aux_loss": "micro_batch"}),
        ("--balance aux", LEARNED, {"aux_loss": "sequence", "bias_rate": 0.0, "bias": True}),
        ("--balance bias", MoEConfig(), {"aux_loss": None, "bias_rate": 0.001}),
        ("--balance bias", LEARNED, {"bias_rate": 0.5}),
        ("--balance bias --bias-rate 0.25", LEARNED, {"bias_rate": 0.25}),
        ("--balance none", MoEConfig(), {"aux_loss": None}),
        ("--balance none", LEARNED, {"aux_loss": None, "bias_rate": 0.0, "bias": True}),
        ("--bias-rate 0.25", LEARNED, {"bias_rate": 0.25}),
    ],
)
def test_experts_are_balanced_by_a_loss_a_bias_or_not_at_all(flags, preset, changed):
    want = None if changed is None else dataclasses.replace(preset or MoEConfig(), **changed)
    assert moe_config(parse(flags.split()), preset) == want


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--experts 0 --top-k 2", "--top-k without experts: --experts says how many"),
        ("--balance aux", "--balance without experts: --experts says how many"),
        ("--dispatch all_gather --bias-rate 0", "--bias-rate, --dispatch without experts"),
        (
            "--experts 4 --balance bias --aux-loss global",
            "--aux-loss and --aux-coefficient are of --balance aux, not of",
        ),
        ("--experts 4 --balance none --aux-coefficient 0.1", "--aux-loss and --aux-coefficient are of --balance aux"),
        ("--experts 4 --balance none --bias-rate 0.1", "--bias-rate 0.1 is of --balance bias, not of none"),
        ("--experts 4 --balance aux --bias-rate 0.1", "--bias-rate 0.1 is of --balance bias, not of aux"),
    ],
)
def test_flags_of_experts_that_contradict_each_other_are_refused(flags, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        moe_config(parse(flags.split()), None)


# --- the pipeline -----------------------------------------------------------------------------------------------------


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


def test_parameters_in_the_hosts_memory_need_a_whole_backward():
    config = dataclasses.replace(GPTConfig(), layers=8)
    for schedule in ("1f1b", "interleaved"):
        plan_stages(parse(["--schedule", schedule, "--offload", "parameters"]), config, 2, 4)
    plan_stages(parse(["--schedule", "zb", "--offload", "optimizer"]), config, 2, 4)
    with pytest.raises(ValueError, match=r"^--offload parameters with --schedule zb: it splits backward, whose second"):
        plan_stages(parse(["--schedule", "zb", "--offload", "parameters"]), config, 2, 4)
