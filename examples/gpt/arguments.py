"""The command line of `examples.gpt.pretrain`: the flags, and the checks before anything is built."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from pathlib import Path

import torch

from examples.gpt.config import GPTConfig, MoEConfig
from examples.gpt.hf import open_checkpoint, read_config, tokenizer_of_checkpoint, tokenizer_of_hf
from examples.gpt.model import GPT
from examples.gpt.presets import PRESETS
from examples.gpt.tokenizer import Tokenizer, load_tokenizer
from mpcore import Mesh
from mpcore.command_line import Parser
from mpcore.interop.hugging_face import LENGTH, Carried, carried_by_checkpoint, carried_by_hf, read_json
from mpcore.layers.attention.context import check_heads
from mpcore.layers.attention.sequence import KINDS, check_kind
from mpcore.layers.moe.dispatch import DISPATCHES
from mpcore.layers.moe.router import AUX_LOSSES
from mpcore.mesh import read_launch
from mpcore.optim.schedules import SCHEDULES
from mpcore.parallel.precision import convert_to_fp8
from mpcore.parallel.recompute import KINDS as RECOMPUTE_KINDS
from mpcore.pipeline.partition import parameter_costs, partition
from mpcore.pipeline.prove import prove
from mpcore.pipeline.schedules import NAMES, Schedule, find_schedule

DTYPES = {n: getattr(torch, n) for n in ("float64", "float32", "bfloat16", "float16")}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Every flag has a default."""
    parser = Parser(
        prog="python -m examples.gpt.pretrain", description="Pretrain a GPT on any mesh.",
        examples=[
            "python -m examples.gpt.pretrain --steps 10",
            "torchrun --nproc-per-node 4 -m examples.gpt.pretrain --tp 2 --pp 2 --sequence-parallel",
        ],
    )  # fmt: skip
    add = parser.add_argument_group("mesh").add_argument
    for axis, text in {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}.items():
        add(f"--{axis}", type=int, default=1, help=f"{text} parallel size (default 1)")
    add("--dp", type=int, help="data parallel size (default: what the others leave of the world)")
    add("--etp", type=int, help="tensor parallel size inside each expert (default: tp)")
    add(
        "--zero",
        type=int,
        choices=(0, 1, 2, 3),
        default=1,
        help="over data shard nothing, optimizer state, gradients too, parameters too (default 1)",
    )
    add("--replicate", type=int, default=1, help="groups of data ranks, such as nodes, that hold replicas (default 1)")
    add("--sequence-parallel", action="store_true", help="cut activations along the sequence between tp regions")
    add("--cp-kind", choices=KINDS, default="zigzag", help="how --cp cuts sequences and attends (default zigzag)")
    add("--cp-inner", type=int, help="ranks of a sub-group of --cp-kind two-level (default: as a node allows)")
    add("--schedule", default="1f1b", metavar="NAME|PATH.csv", help=f"of --pp: {', '.join(NAMES)} (default 1f1b)")
    add("--virtual-stages", type=int, help="stages on each pipeline rank (default: what the schedule takes)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where each process has a GPU")
    add("--trace", action="store_true", help="draw what each pipeline rank did in the last step, and its plan")
    add = parser.add_argument_group("local updates").add_argument
    add("--workers", type=int, default=1, help="train so many models, each on a mesh as above, and merge them (DiLoCo)")
    add("--local-steps", type=int, help="steps that workers take on their own between two merges (default 50)")
    add("--outer-lr", type=float, help="of the merge; with 1 and momentum 0 it averages: Local SGD (default 0.7)")
    add("--outer-momentum", type=float, help="Nesterov momentum of the merge (default 0.9)")
    add("--fragments", type=int, help="merge so many parts of the model in turn (default 1)")
    add = parser.add_argument_group("model").add_argument
    add("--preset", choices=sorted(PRESETS), help="shape that the flags below change (default tiny)")
    add("--layers", type=int, help="blocks (default: the preset's, as of those below; tiny has 4)")
    add("--d-model", type=int, help="width (tiny: 128)")
    add("--heads", type=int, help="attention heads (tiny: 4)")
    add("--kv-heads", type=int, help="heads of keys and values (tiny: as many as heads)")
    add("--d-ff", type=int, help="hidden width of the MLP (tiny: 8/3 of the width, up to a multiple of 64)")
    add("--dropout", type=float, help="share of activations that training drops (tiny: 0)")
    add("--tie-embeddings", action="store_true", default=None, help="head and embedding share one table")
    add(
        "--init-std",
        type=float,
        help="standard deviation of first weights; of output projections it is divided by sqrt(2 layers) (tiny: 0.02)",
    )
    add = parser.add_argument_group("mixture of experts").add_argument
    add("--experts", type=int, help="experts in the place of each MLP; 0: none (default: the preset's)")
    add("--top-k", type=int, help="experts each token goes through")
    add("--shared-experts", type=int, help="experts' width that every token goes through besides")
    add("--expert-d-ff", type=int, help="hidden width of each expert (default: the dense MLP's)")
    add("--routed-scale", type=float, help="factor of the experts' weights; top-k: as large as a dense MLP (default 1)")
    add("--moe-every", type=int, help="every how many-th block has experts, the others a dense MLP")
    add("--balance", choices=("aux", "bias", "none"), help="of the experts' loads: by a loss, by a bias, not at all")
    add("--aux-loss", choices=AUX_LOSSES, help="scope of the loss of --balance aux (default sequence)")
    add("--aux-coefficient", type=float, help="factor of that loss (default 0.01)")
    add("--router-z-loss", type=float, help="factor of the squared log-sum-exp of the router's logits (default 0)")
    add("--bias-rate", type=float, help="step of the bias of --balance bias (default 0.001)")
    add("--router-jitter", type=float, help="noise on the router's input in training (default 0)")
    add(
        "--capacity-factor", type=float, help="what is over factor x mean load of a sequence is dropped (default: none)"
    )
    add("--dispatch", choices=DISPATCHES, help="how tokens reach experts on other ranks: all_to_all sends less")
    add = parser.add_argument_group("data").add_argument
    add(
        "--data",
        nargs="+",
        metavar="[WEIGHT] PREFIX",
        help="PREFIX of .bin and .idx, as examples.gpt.prepare writes (default: Python's standard library); of "
        "several, such as 0.7 web 0.3 code, samples in these shares, or without weights by their sizes",
    )
    add("--tokenizer", help="'byte' or a tokenizer.json (default byte)")
    add("--end-of-document", metavar="TOKEN", help="token of tokenizer.json that ends a document")
    add(
        "--document-masking",
        action="store_true",
        help="tokens attend within their own document, and positions begin anew in each; --end-of-document ends one",
    )
    add(
        "--eval-data",
        nargs="+",
        default=[],
        metavar="NAME=PREFIX",
        help="corpora that are only measured, each by its name, besides the held-out part of --data",
    )
    add("--seq-len", type=int, help="tokens a sample (default: the preset's)")
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, default=200, help="of the whole run (default 200)")
    add("--global-batch", type=int, default=16, help="samples a step, over all ranks of all workers (16)")
    add(
        "--rampup-batch-size",
        type=int,
        nargs=3,
        metavar=("START", "INCREMENT", "SAMPLES"),
        help="begin with START samples a step, and add INCREMENT at equal distances up to --global-batch, which is "
        "reached after SAMPLES (default: --global-batch from the first step on)",
    )
    add("--micro-batch", type=int, default=2, help="samples a forward, on one rank (default 2)")
    add("--lr", type=float, default=3e-3, help="highest learning rate (default 0.003)")
    add("--min-lr", type=float, help="lowest learning rate after warm-up (default: a tenth of --lr)")
    add("--warmup", type=int, default=20, help="steps of linear warm-up (default 20)")
    add("--lr-schedule", choices=SCHEDULES, default="cosine", help="the way down to --min-lr (default cosine)")
    add("--betas", type=float, nargs=2, default=(0.9, 0.95), help="of Adam's two moments (default 0.9 0.95)")
    add(
        "--optimizer",
        choices=("adamw", "adamw-bf16", "muon"),
        default="adamw",
        help="adamw-bf16: moments in bfloat16, rounded at random; muon: for the blocks' matrices (default adamw)",
    )
    add("--weight-decay", type=float, default=0.1, help="of matrices and tables (default 0.1)")
    add("--clip", type=float, default=1.0, help="bound on the gradient norm (default 1); 0 or less: none")
    add(
        "--recompute",
        default="none",
        metavar="{none,selective,full,budget=0.5}",
        help="activations computed again in backward: norms, activations and attention cores, whole blocks, or as "
        "much as keeps a share of the bytes (default none)",
    )
    add(
        "--offload",
        nargs="+",
        choices=("none", "optimizer", "activations", "parameters"),
        default=["none"],
        help="what lies in the host's memory until it is needed; several may be given (default none)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="of weights, dropout and the order of the data, not of what is held out (default 0)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="bfloat16: weights, activations and messages in bfloat16, masters and sums of gradients in fp32; float16: "
        "fp32 weights, matrix products in float16",
    )
    add("--autocast", action="store_true", help="with --dtype bfloat16: fp32 weights, matrix products in bfloat16")
    add(
        "--residual-dtype",
        choices=("float32",),
        help="keep the residual stream and pipeline messages in fp32 (default: in --dtype; with autocast in fp32)",
    )
    add(
        "--fp8",
        action="store_true",
        help="the blocks' linear layers, but experts, multiply eight-bit floats, scaled in blocks of 128; all else "
        "stays in --dtype",
    )
    add(
        "--compile",
        nargs="?",
        const="inductor",
        metavar="BACKEND",
        help="training steps run each block as torch.compile makes it, which takes a while at first (default backend: "
        "inductor); a schedule that splits backward computes a compiled block's twice",
    )
    add("--eval-every", type=int, default=50, help="steps between evaluations; 0: none (default 50)")
    add("--eval-samples", type=int, default=32, help="held-out samples an evaluation (default 32)")
    add(
        "--out",
        default="runs/pretrain",
        help="folder for metrics.jsonl, config.json, loss.png, checkpoints; each of several workers has a folder in it "
        "(default runs/pretrain)",
    )
    add = parser.add_argument_group("checkpoints").add_argument
    add("--save-every", type=int, default=0, help="steps between checkpoints in OUT/checkpoints; 0: none (default)")
    add("--keep", type=int, help="how many of the last checkpoints stay (default: all)")
    add("--async-save", action="store_true", help="write in the background while training goes on")
    add(
        "--resume",
        default="none",
        metavar="{auto,PATH,none}",
        help="go on from a checkpoint of any layout; auto: from the newest in OUT that is whole (default none)",
    )
    add(
        "--init-from-hf",
        metavar="DIR",
        help="begin with a Hugging Face model: its shape, its weights and, where none is named, its tokenizer.json; "
        "without --seq-len, samples are as long as its max_position_embeddings",
    )
    add(
        "--init-from",
        metavar="PATH",
        help="begin with the weights of a checkpoint of any layout: its shape and, where none is named, its tokenizer; "
        "optimizer, data and step begin anew",
    )
    add(
        "--exit-step",
        type=int,
        help="save and leave, as on SIGTERM and SIGUSR1, when so many steps of the whole run are done",
    )
    add = parser.add_argument_group("faults").add_argument
    add("--timeout", type=float, default=600, help="seconds without progress: a hang, to be explained (default 600)")
    add("--max-skips", type=int, default=20, help="steps in a row that may be skipped for NaN or infinity (20)")
    add("--check-replicas", type=int, default=100, metavar="N", help="compare replicas every N steps; 0: never (100)")
    add("--check-speed", type=int, default=50, metavar="N", help="look for slow ranks every N steps; 0: never (50)")
    return parser.parse_args(argv)


def flag(name: str) -> str:
    """Return the flag of a name in the parsed arguments."""
    return f"--{name.replace('_', '-')}"


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


def inner_size(args: argparse.Namespace) -> int | None:
    """Return the size of a sub-group of cp: --cp-inner, or the largest that lies in a node and leaves two groups."""
    if args.cp_inner is not None:
        if args.cp_kind != "two-level":
            raise ValueError(f"--cp-inner {args.cp_inner} is of --cp-kind two-level, not of {args.cp_kind}")
        if args.cp_inner < 1 or args.cp % args.cp_inner:
            raise ValueError(f"--cp-inner {args.cp_inner} does not divide --cp {args.cp}: sub-groups have one size")
        return args.cp_inner
    if args.cp_kind != "two-level":
        return None
    node = read_launch(os.environ).local_size // args.tp
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
    from_0 = ("save_every", "max_skips", "check_replicas", "check_speed", "eval_every", "eval_samples", "warmup")
    from_1 = ("steps", "global_batch", "micro_batch", "keep", "exit_step")
    for least, names in enumerate((from_0, from_1)):
        for name in names:
            if getattr(args, name) is not None and getattr(args, name) < least:
                raise ValueError(f"{flag(name)} {getattr(args, name)} is smaller than {least}")
    for name in ("lr", "weight_decay", "init_std"):
        if getattr(args, name) is not None and not 0 <= getattr(args, name) < math.inf:
            raise ValueError(f"{flag(name)} {getattr(args, name)} is no number from 0")
    if args.min_lr is not None and not 0 <= args.min_lr <= args.lr:
        raise ValueError(f"--min-lr {args.min_lr} is not from 0 to --lr {args.lr}")
    if not all(0 <= beta < 1 for beta in args.betas):
        raise ValueError(f"--betas {' '.join(map(str, args.betas))}: each is a number from 0 to below 1")
    if math.isnan(args.clip):
        raise ValueError(f"--clip {args.clip} is no number; 0 bounds nothing")
    recompute_kind(args.recompute)
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
    each = mesh.workers.size * mesh.dp.size * args.micro_batch
    if args.global_batch % each:
        workers, times = ("workers x ", f"{mesh.workers.size} x ") if mesh.workers.size > 1 else ("", "")
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


def merge_options(args: argparse.Namespace) -> dict:
    """Return the arguments of `DiLoCo`.

    Raises:
        ValueError: if one is out of range, or a flag is given and there is only one worker.
    """
    flags = {"local_steps": "every", "outer_lr": "lr", "outer_momentum": "momentum", "fragments": "fragments"}
    given = {name: getattr(args, name) for name in flags if getattr(args, name) is not None}
    if given and args.workers == 1:
        raise ValueError(f"{', '.join(map(flag, given))} with one worker: --workers says how many merge")
    options = {"every": 50, "lr": 0.7, "momentum": 0.9, "fragments": 1}
    options |= {flags[name]: value for name, value in given.items()}
    if options["every"] < 1 or not 1 <= options["fragments"] <= options["every"]:
        raise ValueError(
            f"--fragments {options['fragments']} is not from 1 to the --local-steps {options['every']} between merges"
        )
    if not 0 < options["lr"] < math.inf or not 0 <= options["momentum"] < 1:
        raise ValueError(
            f"--outer-lr {options['lr']} is not above 0, or --outer-momentum {options['momentum']} is not from 0 to "
            "below 1"
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
    whole = GPT(config, device="meta")
    *blocks, head = parameter_costs([*whole.blocks.values(), whole.head])
    return plan, partition(blocks, plan.stages, last=head)
