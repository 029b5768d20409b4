"""Read and check what the flags name: data, tokenizer, model and schedule, before anything is built."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from examples.gpt.arguments import flag, parse
from examples.gpt.config import LINEAR, PRESETS, GPTConfig, LatentConfig, LinearConfig, MoEConfig
from examples.gpt.dashboards import check_installed
from examples.gpt.hf import open_checkpoint, tokenizer_of_checkpoint
from examples.gpt.model import GPT
from examples.gpt.policies import Ramp, policies, read_ramp
from examples.gpt.prepare import default_corpus
from examples.gpt.samples import Corpora, Samples, open_eval_sets, parse_sources, read_without
from examples.gpt.tokenizer import Tokenizer, load_tokenizer
from mpcore import Mesh
from mpcore.checkpoint import Manifest, inspect
from mpcore.interop.hugging_face import LENGTH, ExtraFiles, carried_by_checkpoint
from mpcore.layers.attention.context import check_heads
from mpcore.layers.attention.sequence import check_kind
from mpcore.mesh import check_same, raising_together, read_launch
from mpcore.parallel.precision import convert_to_fp8
from mpcore.pipeline.partition import parameter_costs, partition
from mpcore.pipeline.prove import prove
from mpcore.pipeline.schedules import Schedule, find_schedule
from mpcore.tools.fault_tolerance.versions import code_versions
from mpcore.training.policies import check_policies


@dataclass(frozen=True)
class Setup:
    """The parts of a run that exist before its model.

    Attributes:
        carried: the files that are saved beside each checkpoint.
        corpus: the facts of the data, by flag.
        train, held_out: the samples; without evaluation `held_out` is None.
        eval_sets: the samples of each validation set, by its name.
        ramp: the samples of each step.
        micro_batches: their number in a step of the whole batch, on each rank.
        plan, blocks: the pipeline schedule, and the blocks of each stage.
    """

    tokenizer: Tokenizer
    carried: ExtraFiles
    config: GPTConfig
    corpus: dict[str, Any]
    train: Samples
    held_out: Samples | None
    eval_sets: dict[str, Samples]
    ramp: Ramp
    micro_batches: int
    plan: Schedule
    blocks: list[range]


def read_model(args: argparse.Namespace, mesh: Mesh, config: GPTConfig | None = None) -> dict[str, Any]:
    """Return the fields of `Setup` that don't depend on the data; `config` replaces the model that the flags name.

    Raises:
        ValueError: if something can't be read, or doesn't fit the others or the mesh.
    """
    check_installed(args.log_to)
    tokenizer = find_tokenizer(args)
    carried = find_carried(args, tokenizer)
    refused = other_dtype(args.init_from, inspect(args.init_from), args.dtype) if args.init_from else None
    if refused is not None:
        raise refused
    config = config or model_config(args, tokenizer.vocab_size)
    micro_batches = check(args, config, mesh)
    plan, blocks = plan_stages(args, config, mesh.pp.size, micro_batches)
    ramp = read_ramp(args, args.global_batch // micro_batches)
    for size in ramp.sizes:
        find_schedule(args.schedule, mesh.pp.size, size * micro_batches // args.global_batch, args.virtual_stages)
    return {"tokenizer": tokenizer, "carried": carried, "config": config, "ramp": ramp,
            "micro_batches": micro_batches, "plan": plan, "blocks": blocks}  # fmt: skip


def open_data(args: argparse.Namespace, tokenizer: Tokenizer) -> tuple[Corpora, dict[str, Corpora]]:
    """Open the corpora of `--data`, and those of eval_data by name."""
    prefixes, weights = parse_sources(args.data or [default_corpus(tokenizer=tokenizer)])
    without = read_without(args.without_documents, prefixes)
    return Corpora(prefixes, weights, without, args.held_out), open_eval_sets(args.eval_data, prefixes)


def set_up(args: argparse.Namespace, mesh: Mesh, config: GPTConfig | None = None) -> Setup:
    """Read and check the files and sizes that the flags name; `config` replaces the model that they name.

    Raises:
        ValueError: on every rank, if something can't be read, doesn't fit, or differs between ranks.
    """
    check_same("code", code_versions(Path(__file__).parent))
    with raising_together((ValueError, OSError)):
        model = read_model(args, mesh, config)
        data, eval_data = open_data(args, model["tokenizer"])
        for corpora in (data, *eval_data.values()):
            corpora.check_tokens(model["config"].vocab_size, mesh.job.rank, mesh.job.size)
        train, held_out = data.split(model["config"].seq_len, seed=args.seed, evaluate=args.eval_every > 0)
        sets = {name: corpora.whole(model["config"].seq_len) for name, corpora in eval_data.items()}
        made = Setup(corpus=data.about, train=train, held_out=held_out, eval_sets=sets, **model)
    check_same("configuration", {**{flag(name): value for name, value in vars(args).items()}, **made.corpus})
    for corpora in (data, *eval_data.values()):
        check_same("data", corpora.files)
    return made


def about(setup: Setup, optimizer: str) -> dict[str, Any]:
    """Return what must not change between a checkpoint and the run that resumes from it."""
    return {
        "model": json.loads(json.dumps(dataclasses.asdict(setup.config))),  # lists, as a checkpoint has them
        "corpus": setup.corpus,
        "optimizer": optimizer,
        "tokenizer": setup.tokenizer.fingerprint,
    }


def find_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """Return the tokenizer that a flag names, or that of the checkpoint to begin with, or bytes.

    Raises:
        ValueError: if it can't be read, or the checkpoint to begin with has no tokenizer and perhaps needs one.
    """
    named = args.tokenizer or (tokenizer_of_checkpoint(args.init_from) if args.init_from else "byte")
    return load_tokenizer(named, args.end_of_document)


def find_carried(args: argparse.Namespace, tokenizer: Tokenizer) -> ExtraFiles:
    """Return the files and facts that are saved beside the run's checkpoints.

    They come from the checkpoint to begin with if the run has its tokenizer. Otherwise they are the run's tokenizer and
    its end of a document. The sequence length of that checkpoint is kept if it is larger than the run's.
    """
    carried, length, own = ExtraFiles(), 0, args.seq_len or 0
    if args.init_from:
        carried, config = carried_by_checkpoint(args.init_from), open_checkpoint(args.init_from)[2]
        length = max(config.seq_len, carried.config.get(LENGTH, 0))
        own = own or config.seq_len
    content = carried.files.get("tokenizer.json")
    if args.tokenizer is not None:
        content = None if args.tokenizer == "byte" else Path(args.tokenizer).read_bytes()
    carried = carried.with_tokenizer(
        content, tokenizer.end_of_document, getattr(tokenizer, "end_of_document_name", None)
    )
    if length > own:
        carried = dataclasses.replace(carried, config={**carried.config, LENGTH: length})
    return carried


def mesh_arguments(args: argparse.Namespace, each: int | None = None) -> dict[str, Any]:
    """Return the arguments of `build_mesh`.

    A sub-group of cp is cp_inner, or the largest that lies in a node and leaves two groups. A node has `each` ranks;
    None: as many as this one.
    """
    sizes = {axis: getattr(args, axis) for axis in ("tp", "cp", "pp", "ep", "dp", "etp")}
    inner, two = args.cp_inner, args.cp_kind == "two-level"
    if inner is not None and not two:
        raise ValueError(f"cp_inner {inner} is of --cp-kind two-level, not of {args.cp_kind}")
    if inner is not None and args.cp % inner:
        raise ValueError(f"cp_inner {inner} does not divide --cp {args.cp}: sub-groups have one size")
    if two and inner is None:
        node = (each or read_launch(os.environ).local_size) // args.tp
        inner = max((d for d in range(1, args.cp) if args.cp % d == 0 and d <= node), default=1)
    return {**sizes, "worlds": args.workers, "device_type": args.device, "cp_inner": inner}


def model_config(args: argparse.Namespace, vocab_size: int) -> GPTConfig:
    """Return the configuration of the preset, or of the checkpoint to begin with, with the changes of flags and fields.

    Raises:
        ValueError: if the checkpoint can't be read, or contradicts the flags, or as `refuse_idle`.
    """
    names = ("layers", "d_model", "heads", "kv_heads", "d_ff", "dropout", "seq_len")
    changes = {name: getattr(args, name) for name in names if getattr(args, name) is not None} | args.model
    begin = args.init_from
    if begin and args.preset:
        raise ValueError(f"--preset {args.preset} and a model to begin with: the shape is that of {begin}")
    if begin:
        base = open_checkpoint(begin)[2]
        free = {"dropout", "attention_dropout", "init_std"} | ({"seq_len"} if base.positions != "learned" else set())
        for name, value in changes.items():
            there = base.heads if name == "kv_heads" and base.kv_heads is None else getattr(base, name)
            value = tuple(value) if isinstance(value, list) else value
            if name not in free and value != there:
                there = "default" if there is None else there
                raise ValueError(f"{flag(name)} {value} is not the {there} of {begin}")
    else:
        base = dataclasses.replace(PRESETS[args.preset or "tiny"], vocab_size=vocab_size)
    experts = args.moe | ({} if args.experts is None else {"experts": args.experts})
    if args.experts == 0 or (base.moe is None and "experts" not in experts):
        if args.moe:
            raise ValueError(
                f"{', '.join(f'moe.{name}' for name in args.moe)} without experts: --experts says how many"
            )
        moe = None
    else:
        moe = dataclasses.replace(base.moe or MoEConfig(), **experts)
        if base.moe is not None and base.moe.bias_rate > 0 and moe.bias is None and not moe.bias_rate:
            moe = dataclasses.replace(moe, bias=True)  # the learned bias still takes part in the choice of experts
    latent = dataclasses.replace(base.latent or LatentConfig(), **args.latent) if args.latent else base.latent
    linear = dataclasses.replace(base.linear or LinearConfig(), **args.linear) if args.linear else base.linear
    config = dataclasses.replace(base, moe=moe, latent=latent, linear=linear, **changes)
    if vocab_size > config.vocab_size:
        of = begin or "the model: vocab_size"
        raise ValueError(f"the tokenizer has {vocab_size} tokens, more than the {config.vocab_size} of {of}")
    refuse_idle(args, config)
    return config


def check(args: argparse.Namespace, config: GPTConfig, mesh: Mesh) -> int:
    """Refuse sizes that don't fit each other, before anything is built.

    Returns:
        The number of micro-batches a step has on each rank.
    """
    if args.min_lr is not None and args.min_lr > args.lr:
        raise ValueError(f"min_lr {args.min_lr} is not from 0 to --lr {args.lr}")
    chosen = policies(args, [])
    check_policies(mesh, False, **{name: chosen[name] for name in ("data", "offload", "compile")})
    if args.embedding_lr_scale != 1 and args.optimizer == "muon":
        raise ValueError(f"embedding_lr_scale {args.embedding_lr_scale} can't go with --optimizer muon: take adamw")
    if "none" in args.offload and len(set(args.offload)) > 1:
        raise ValueError(f"--offload {' '.join(args.offload)}: none and others")
    if "optimizer" in args.offload and args.optimizer == "muon":
        raise ValueError("--offload optimizer goes with --optimizer adamw or adamw-bf16: muon's step needs the device")
    if config.moe is None and (mesh.ep.size > 1 or mesh.etp.size != mesh.tp.size):
        raise ValueError(
            f"--ep {mesh.ep.size} and --etp {mesh.etp.size} are of experts, and there are none: --experts says how many"
        )
    if config.moe is not None or args.model or args.latent or args.linear or config.layers_spec:
        GPT(config, mesh, device="meta", blocks=range(config.layers))  # refuses what doesn't fit
    if args.fp8:
        some = range(len(config.layers_spec or "x"))
        convert_to_fp8(GPT(config, mesh, device="meta", blocks=some).blocks)  # refuses what tp cuts within a block
    preset = None if args.init_from else PRESETS[args.preset or "tiny"]
    if preset is not None and preset.positions == "learned" and config.seq_len > preset.seq_len:
        raise ValueError(f"--seq-len {config.seq_len} is longer than the {preset.seq_len} positions of {args.preset}")
    if config.heads < mesh.tp.size:
        raise ValueError(f"--heads {config.heads} is smaller than the tp size {mesh.tp.size}")
    check_kind(args.cp_kind, mesh.cp)
    check_heads(args.cp_kind, mesh.cp, config.heads // mesh.tp.size)
    cuts = [axis for axis in (mesh.cp, mesh.tp) if axis.size > 1 and (axis is mesh.cp or args.sequence_parallel)]
    unit = math.prod(axis.size for axis in cuts)
    if config.seq_len % unit:
        sizes = " x ".join(f"{axis.name} size {axis.size}" for axis in cuts)
        near = max(config.seq_len // unit, 1) * unit
        raise ValueError(f"--seq-len {config.seq_len} is not a multiple of the {sizes} that cut it: {near} is")
    if args.bitwise and args.global_batch != args.bitwise * args.micro_batch:  # a forward is of one leaf of the batch
        raise ValueError(
            f"--global-batch {args.global_batch} is not bitwise {args.bitwise} x --micro-batch {args.micro_batch}: "
            f"{-(-args.global_batch // args.bitwise) * args.bitwise} is a multiple, without --micro-batch"
        )
    each = mesh.worlds.size * mesh.dp.size * args.micro_batch
    if args.global_batch % each:
        workers, times = ("workers x ", f"{mesh.worlds.size} x ") if mesh.worlds.size > 1 else ("", "")
        raise ValueError(
            f"--global-batch {args.global_batch} is not a multiple of {workers}dp x micro-batch = {times}"
            f"{mesh.dp.size} x {args.micro_batch} = {each}: {-(-args.global_batch // each) * each} is"
        )
    return args.global_batch // each


def refuse_idle(args: argparse.Namespace, config: GPTConfig) -> None:
    """Raise ValueError for a setting that another one leaves without effect, unless it has its default."""
    kinds, moe = [config.kind(i) for i in range(config.layers)], config.moe or MoEConfig()
    bases, biases = {kind.rope_base for kind in kinds}, (config.qkv_bias, config.output_bias, config.mlp_bias)
    rows = [  # whether settings have no effect, their names, and the reason
        (bases == {None}, "rope_scaling rope_fraction", "no block with RoPE"),
        (config.rope_base not in bases, "rope_base", f"RoPE of the bases {bases}"),
        (not config.mtp, "mtp_weight", "mtp 0"),
        (None not in biases, "bias", f"qkv_bias, output_bias and mlp_bias {biases}"),
        (all(kind.mixer in LINEAR for kind in kinds), "qkv_bias output_bias", "no block with attention"),
        (moe.aux_loss is None, "moe.aux_coefficient", "moe.aux_loss none"),
        (moe.groups == 1, "moe.top_groups", "moe.groups 1"),
        (moe.top_groups in (None, moe.groups), "moe.groups", f"moe.top_groups {moe.top_groups}: all groups"),
        (bool(args.init_from), "init_std", "--init-from: the weights are there"),
        (not args.eval_every, "eval_samples eval_data", "--eval-every 0"),
        (args.no_save, "keep async_save save_every", "no_save"),
        (args.recompute == "none", "recompute_every", "--recompute none"),
        (args.dtype != "float16", "first_loss_scale", f"--dtype {args.dtype}"),
        (args.dtype == "float64", "residual_dtype", "--dtype float64"),
        (args.steps <= profiled_steps(args.profile).start, "profile", f"--steps {args.steps}"),
        (args.workers == 1 and not (args.listen or args.join), "local_steps outer_lr outer_momentum nesterov fragments",
         "one worker: --workers says how many merge"),
        (not (args.listen or args.join), "wait staleness dynamic_steps token worker_timeout replicas update_dtype "
         "overlap_exchange", "neither --listen nor --join"),
    ]  # fmt: skip
    values = {**vars(args), **args.model, **{f"moe.{name}": value for name, value in args.moe.items()}}
    usual = {f.name: f.default for f in dataclasses.fields(GPTConfig)} | vars(parse([]))
    usual |= {f"moe.{name}": value for name, value in vars(MoEConfig()).items()}
    for is_idle, names, reason in rows:
        for name in names.split() if is_idle else ():
            if (value := values.get(name, usual[name])) not in (None, usual[name]):
                raise ValueError(f"{flag(name)} {value} has no effect with {reason}")


def profiled_steps(value: str | None) -> range:
    """Read the field `profile`: the steps from the first to the last, counted from 0."""
    if value is None:
        return range(0)
    first, _, last = value.partition(":")
    if first.isdecimal() and last.isdecimal() and int(first) <= int(last):
        return range(int(first), int(last) + 1)
    raise ValueError(f"profile {value} is not FIRST:LAST, such as 10:12")


def plan_stages(
    args: argparse.Namespace, config: GPTConfig, pp: int, micro_batches: int
) -> tuple[Schedule, list[range]]:
    """Return the proved schedule, and the blocks of each stage, balanced by cost with the head included."""
    plan = find_schedule(args.schedule, pp, micro_batches, args.virtual_stages)
    prove(plan)
    return plan, stage_blocks(config, plan.stages)


@lru_cache(maxsize=256)
def stage_blocks(config: GPTConfig, stages: int) -> list[range]:
    """Return the blocks of each stage, balanced by cost with the head included."""
    whole = GPT(config, device="meta")
    further = [whole.mtp] if config.mtp else []
    *blocks, head = parameter_costs([*whole.blocks.values(), nn.ModuleList([whole.head, *further])])
    return partition(blocks, stages, last=head)


def other_dtype(path: Path | str, manifest: Manifest, dtype: str) -> ValueError | None:
    """Return why a checkpoint's dtype doesn't fit: weights are float64 with --dtype float64, else float32."""
    found = {entry.dtype for name, entry in manifest.tensors.items() if name.startswith("model/")}
    if dtype == "float64" and "F64" not in found and "F32" in found:
        return ValueError(f"{path} has float32 weights: --dtype float32 goes on from it, not float64")
    if dtype != "float64" and "F64" in found:
        return ValueError(f"{path} has float64 weights: --dtype float64 goes on from it, not {dtype}")
    return None
