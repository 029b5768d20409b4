"""Read what the flags of `examples.gpt.pretrain` name, and refuse what doesn't fit, before anything is built."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from functools import lru_cache
from pathlib import Path

import torch

from examples.gpt.arguments import flag
from examples.gpt.config import GPTConfig, MoEConfig
from examples.gpt.hf import open_checkpoint, read_config, tokenizer_of_checkpoint, tokenizer_of_hf
from examples.gpt.model import GPT
from examples.gpt.presets import PRESETS
from examples.gpt.tokenizer import Tokenizer, load_tokenizer
from mpcore import Mesh
from mpcore.interop.hugging_face import LENGTH, Carried, carried_by_checkpoint, carried_by_hf, read_json
from mpcore.layers.attention.context import check_heads
from mpcore.layers.attention.sequence import check_kind
from mpcore.layers.moe.router import AUX_LOSSES
from mpcore.mesh import read_launch
from mpcore.parallel.precision import convert_to_fp8
from mpcore.parallel.recompute import KINDS as RECOMPUTE_KINDS
from mpcore.pipeline.partition import parameter_costs, partition
from mpcore.pipeline.prove import prove
from mpcore.pipeline.schedules import Schedule, find_schedule


def find_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """Return the tokenizer that a flag names, or that of the model to begin with, or bytes.

    Raises:
        ValueError: if it can't be read, or the model to begin with has no tokenizer and perhaps needs one.
    """
    named = args.tokenizer
    if named is None and args.init_from_hf:
        named = tokenizer_of_hf(args.init_from_hf)
    elif named is None and args.init_from:
        named = tokenizer_of_checkpoint(args.init_from)
    return load_tokenizer(named or "byte", args.end_of_document)


def find_carried(args: argparse.Namespace, tokenizer: Tokenizer) -> Carried:
    """Return the files and facts that are saved beside the run's checkpoints.

    They come from the model to begin with if the run has its tokenizer. Otherwise they are the run's tokenizer and its
    end of a document. The sequence length of the model to begin with is kept if it is larger than the run's.
    """
    carried, config = Carried(), None
    end = tokenizer.end_of_document, getattr(tokenizer, "end_of_document_name", None)
    if args.init_from_hf:
        folder = Path(args.init_from_hf)
        carried, config = carried_by_hf(folder, read_json(folder / "config.json")), read_config(folder)
    elif args.init_from:
        carried, config = carried_by_checkpoint(args.init_from), open_checkpoint(args.init_from)[2]
    length = max(config.seq_len, carried.config.get(LENGTH, 0)) if config is not None else 0
    if args.tokenizer is not None:
        content = None if args.tokenizer == "byte" else Path(args.tokenizer).read_bytes()
        carried = carried.with_tokenizer(content, *end)
    elif not args.init_from_hf:
        carried = carried.with_tokenizer(carried.files.get("tokenizer.json"), *end)
    if config is not None and length > (args.seq_len or config.seq_len):
        carried = dataclasses.replace(carried, config={**carried.config, LENGTH: length})
    return carried


def inner_size(args: argparse.Namespace, each: int | None = None) -> int | None:
    """Return the size of a sub-group of cp: --cp-inner, or the largest that lies in a node and leaves two groups.

    A node has `each` ranks; None: as many as this one.
    """
    if args.cp_inner is not None:
        if args.cp_kind != "two-level":
            raise ValueError(f"--cp-inner {args.cp_inner} is of --cp-kind two-level, not of {args.cp_kind}")
        if args.cp % args.cp_inner:
            raise ValueError(f"--cp-inner {args.cp_inner} does not divide --cp {args.cp}: sub-groups have one size")
        return args.cp_inner
    if args.cp_kind != "two-level":
        return None
    node = (each or read_launch(os.environ).local_size) // args.tp
    return max((d for d in range(1, args.cp) if args.cp % d == 0 and d <= node), default=1)


def model_config(args: argparse.Namespace, vocab_size: int) -> GPTConfig:
    """Return the configuration of the preset, or of the model to begin with, with the changes of the flags.

    Raises:
        ValueError: if the model to begin with can't be read, or contradicts the flags.
    """
    names = ("layers", "d_model", "heads", "kv_heads", "d_ff", "dropout", "tie_embeddings", "init_std", "seq_len")
    changes = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    begin = args.init_from_hf or args.init_from
    if args.init_from_hf and args.init_from:
        raise ValueError(f"--init-from-hf {args.init_from_hf} and --init-from {args.init_from}: a run begins with one")
    if begin and args.preset:
        raise ValueError(f"--preset {args.preset} and a model to begin with: the shape is that of {begin}")
    if begin:
        config = read_config(begin) if args.init_from_hf else open_checkpoint(begin)[2]
        free = ("dropout",) if config.positions == "learned" else ("dropout", "seq_len")
        for name, value in changes.items():
            there = config.heads if name == "kv_heads" and config.kv_heads is None else getattr(config, name)
            if name not in free and value != there:
                there = "default" if there is None else there
                raise ValueError(f"{flag(name)} {value} is not the {there} of {begin}")
        if vocab_size > config.vocab_size:
            raise ValueError(f"the tokenizer has {vocab_size} tokens, more than the {config.vocab_size} of {begin}")
        return dataclasses.replace(config, moe=moe_config(args, config.moe), **changes)
    preset = PRESETS[args.preset or "tiny"]
    return dataclasses.replace(preset, vocab_size=vocab_size, moe=moe_config(args, preset.moe), **changes)


def moe_config(args: argparse.Namespace, preset: MoEConfig | None) -> MoEConfig | None:
    """Return the preset's mixture of experts with the changes of the flags."""
    flags = {"top_k": "top_k", "shared_experts": "shared_experts", "expert_d_ff": "d_ff", "moe_every": "every",
             "routed_scale": "routed_scale",
             "aux_loss": "aux_loss", "aux_coefficient": "aux_coefficient", "router_z_loss": "z_loss",
             "bias_rate": "bias_rate", "router_jitter": "jitter", "capacity_factor": "capacity_factor",
             "dispatch": "dispatch"}  # fmt: skip
    changes = {field: getattr(args, name) for name, field in flags.items() if getattr(args, name) is not None}
    if args.experts == 0 or (args.experts is None and preset is None):
        given = [flag(name) for name in (*flags, "balance") if getattr(args, name) is not None]
        if given:
            raise ValueError(f"{', '.join(given)} without experts: --experts says how many")
        return None
    if args.experts is not None:
        changes["experts"] = args.experts
    if args.balance in ("bias", "none"):
        if args.aux_loss or args.aux_coefficient:
            raise ValueError(f"--aux-loss and --aux-coefficient are of --balance aux, not of {args.balance}")
        changes["aux_loss"] = None
    base = preset or MoEConfig()
    if args.balance == "aux":
        changes.setdefault("aux_loss", base.aux_loss or AUX_LOSSES[0])
    if args.balance == "bias":
        changes.setdefault("bias_rate", base.bias_rate or 0.001)
    elif args.balance is not None:
        if args.bias_rate:
            raise ValueError(f"--bias-rate {args.bias_rate} is of --balance bias, not of {args.balance}")
        changes["bias_rate"] = 0.0
        if base.bias_rate > 0:
            changes["bias"] = True  # the learned bias still takes part in the choice of experts
    return dataclasses.replace(base, **changes)


def check(args: argparse.Namespace, config: GPTConfig, mesh: Mesh) -> int:
    """Refuse sizes that don't fit each other, before anything is built.

    Returns:
        The number of micro-batches a step has on each rank.
    """
    if args.min_lr is not None and args.min_lr > args.lr:
        raise ValueError(f"--min-lr {args.min_lr} is not from 0 to --lr {args.lr}")
    recompute_kind(args.recompute)
    profiled_steps(args.profile)
    if args.twin and config.moe is not None and config.moe.aux_loss == "micro_batch":
        raise ValueError(
            f"--twin {args.twin} deals the samples out in another order, which changes --aux-loss micro_batch by more "
            f"than rounding: take sequence or global"
        )
    if args.no_save and args.save_every:
        raise ValueError(f"--no-save and --save-every {args.save_every}: give one of them")
    if args.compile is not None and args.compile not in torch.compiler.list_backends(()):
        known = ", ".join(torch.compiler.list_backends())
        raise ValueError(f"--compile {args.compile} is none of torch's backends, such as {known}")
    if "none" in args.offload and len(set(args.offload)) > 1:
        raise ValueError(f"--offload {' '.join(args.offload)}: none and others")
    if "optimizer" in args.offload and args.optimizer == "muon":
        raise ValueError("--offload optimizer goes with --optimizer adamw or adamw-bf16: muon's step needs the device")
    if "parameters" in args.offload and args.zero and mesh.data.size > 1:
        raise ValueError(
            f"--offload parameters goes with --zero 0: --zero {args.zero} shards them over the {mesh.data.size} data "
            f"ranks"
        )
    if config.moe is None:
        if mesh.ep.size > 1 or mesh.etp.size != mesh.tp.size:
            raise ValueError(
                f"--ep {mesh.ep.size} and --etp {mesh.etp.size} are of experts, and there are none: --experts says how "
                "many"
            )
    else:
        GPT(config, mesh, device="meta", blocks=range(config.layers))  # refuses what doesn't fit the experts
    if args.fp8:
        convert_to_fp8(GPT(config, mesh, device="meta", blocks=range(1)).blocks)  # refuses what tp cuts within a block
    preset = None if args.init_from_hf or args.init_from else PRESETS[args.preset or "tiny"]
    if preset is not None and preset.positions == "learned" and config.seq_len > preset.seq_len:
        raise ValueError(f"--seq-len {config.seq_len} is longer than the {preset.seq_len} positions of {args.preset}")
    if config.heads < mesh.tp.size:
        raise ValueError(f"--heads {config.heads} is smaller than the tp size {mesh.tp.size}")
    if config.layers < mesh.pp.size:
        raise ValueError(f"--layers {config.layers} is smaller than the pp size {mesh.pp.size}")
    check_kind(args.cp_kind, mesh.cp)
    check_heads(args.cp_kind, mesh.cp, config.heads // mesh.tp.size)
    cuts = [axis for axis in (mesh.cp, mesh.tp) if axis.size > 1 and (axis is mesh.cp or args.sequence_parallel)]
    unit = math.prod(axis.size for axis in cuts)
    if config.seq_len % unit:
        sizes = " x ".join(f"{axis.name} size {axis.size}" for axis in cuts)
        near = max(config.seq_len // unit, 1) * unit
        raise ValueError(f"--seq-len {config.seq_len} is not a multiple of the {sizes} that cut it: {near} is")
    merge_options(args)
    if args.bitwise:  # a forward is of one leaf of the batch
        if args.global_batch % args.bitwise:
            raise ValueError(
                f"--global-batch {args.global_batch} is not a multiple of --bitwise {args.bitwise}: "
                f"{-(-args.global_batch // args.bitwise) * args.bitwise} is"
            )
        args.micro_batch = args.global_batch // args.bitwise
    each = mesh.worlds.size * mesh.dp.size * args.micro_batch
    if args.global_batch % each:
        workers, times = ("workers x ", f"{mesh.worlds.size} x ") if mesh.worlds.size > 1 else ("", "")
        raise ValueError(
            f"--global-batch {args.global_batch} is not a multiple of {workers}dp x micro-batch = {times}"
            f"{mesh.dp.size} x {args.micro_batch} = {each}: {-(-args.global_batch // each) * each} is"
        )
    micro_batches = args.global_batch // each
    if args.schedule == "1f1b" and micro_batches < mesh.pp.size:
        raise ValueError(
            f"{micro_batches} micro-batches (--global-batch {args.global_batch} / {each}) are fewer than the pp size "
            f"{mesh.pp.size}: --global-batch {each * mesh.pp.size} is enough"
        )
    return micro_batches


def check_replicate(args: argparse.Namespace, mesh: Mesh) -> None:
    """Refuse replicas that the data ranks can't hold, as `shard_data_parallel` does later.

    Raises:
        ValueError: with the sizes that fit.
    """
    n, data, edp = args.replicate, mesh.data.size, mesh.edp.size
    if n != 1 and (args.zero == 0 or data % n or edp % n or n == data):
        experts = f" and the {edp} of the experts" if edp != data else ""
        raise ValueError(
            f"--replicate {n} with --zero {args.zero} on {data} data ranks leaves nothing to shard, or unequal groups: "
            f"take --zero 1 to 3, and a number below {data} that divides it{experts}"
        )


def merge_options(args: argparse.Namespace) -> dict:
    """Return the arguments of `DiLoCo`.

    Raises:
        ValueError: if there are more fragments than steps, or a flag is given and there is only one worker.
    """
    flags = {"local_steps": "every", "outer_lr": "lr", "outer_momentum": "momentum", "fragments": "fragments"}
    given = {name: getattr(args, name) for name in flags if getattr(args, name) is not None}
    if given and args.workers == 1:
        raise ValueError(f"{', '.join(map(flag, given))} with one worker: --workers says how many merge")
    options = {"every": 50, "lr": 0.7, "momentum": 0.9, "fragments": 1}
    options |= {flags[name]: value for name, value in given.items()}
    if options["fragments"] > options["every"]:
        raise ValueError(
            f"--fragments {options['fragments']} is not from 1 to the --local-steps {options['every']} between merges"
        )
    return options


def recompute_kind(value: str) -> tuple[str, float | None]:
    """Read `--recompute`: the kind, and the share of a budget."""
    kind, equals, share = value.partition("=")
    if kind in RECOMPUTE_KINDS and not equals:
        return kind, None
    try:
        if kind == "budget":
            return kind, float(share)
    except ValueError:
        pass
    raise ValueError(f"--recompute {value!r} is none of {', '.join(RECOMPUTE_KINDS)} and budget=SHARE")


def profiled_steps(value: str | None) -> range:
    """Read `--profile`: the steps from the first to the last, counted from 0."""
    if value is None:
        return range(0)
    first, _, last = value.partition(":")
    if first.isdecimal() and last.isdecimal() and int(first) <= int(last):
        return range(int(first), int(last) + 1)
    raise ValueError(f"--profile {value} is not FIRST:LAST, such as 10:12")


def plan_stages(
    args: argparse.Namespace, config: GPTConfig, pp: int, micro_batches: int
) -> tuple[Schedule, list[range]]:
    """Return the proved schedule, and the blocks of each stage, balanced by cost with the head included."""
    plan = find_schedule(args.schedule, pp, micro_batches, args.virtual_stages)
    prove(plan)
    if "parameters" in args.offload and plan.splits_backward:
        raise ValueError(
            f"--offload parameters with --schedule {args.schedule}: it splits backward, whose second half doesn't say "
            f"which block it is at; 1f1b and interleaved don't"
        )
    return plan, stage_blocks(config, plan.stages)


@lru_cache(maxsize=256)
def stage_blocks(config: GPTConfig, stages: int) -> list[range]:
    """Return the blocks of each stage, balanced by cost with the head included."""
    whole = GPT(config, device="meta")
    *blocks, head = parameter_costs([*whole.blocks.values(), whole.head])
    return partition(blocks, stages, last=head)
