"""Tell the planners of mpcore what one rank of a pretraining run would hold and send.

mpcore ledger examples.gpt.plan:build --tp 8 --pp 4 --dp 32 --preset llama3-70b --global-batch 1024
mpcore memory examples.gpt.plan:build --tp 8 --pp 4 --dp 32 --preset llama3-70b --global-batch 1024
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from examples.gpt.arguments import MODEL_FIELDS, RENAMED, TABLES, Fields, flag, parse
from examples.gpt.config import PRESETS, GPTConfig
from examples.gpt.model import build_stages, count_parameters, parameter_shares
from examples.gpt.policies import build_optimizer, hidden, keywords, policies, recompute_kind, residual_dtype
from examples.gpt.setup import check, model_config, stage_blocks
from mpcore import Mesh
from mpcore.experimental import overlap_experts, overlap_halves
from mpcore.layers.linear import ColumnParallelLinear
from mpcore.layers.mlp import GATED
from mpcore.layers.overlap import overlap_stages
from mpcore.pipeline.partition import split_sizes
from mpcore.pipeline.schedules import V_SHAPED, Schedule, check_schedule, default_virtual_stages, find_schedule
from mpcore.sharding.local import is_dtensor
from mpcore.tools.analysis.work import HOLD_ALL, Choice, LayoutSpec, Model, Work
from mpcore.tools.command_line import Parser
from mpcore.tools.diloco import OUTER_SLOTS
from mpcore.training import lay_out


def outline(mesh: Mesh, arguments: list[str]) -> LayoutSpec:
    """Tell what a run with these flags of `examples.gpt.pretrain`, and of `OWN`, would build on a mesh.

    The preset gives the vocabulary, unless --vocab-size does.
    """
    own, rest = OWN.parse_known_args(with_set(arguments))
    args = argparse.Namespace(**vars(parse(rest)), regather=own.regather)
    check_mesh(args, mesh)
    config = model_config(args, PRESETS[args.preset or "tiny"].vocab_size)
    config = config if own.vocab_size is None else dataclasses.replace(config, vocab_size=own.vocab_size)
    if args.global_batch % args.workers:
        raise ValueError(f"--global-batch {args.global_batch} is not a multiple of --workers {args.workers}")
    args.global_batch //= args.workers  # the mesh is one worker's
    micro_batches, pp = check(args, config, mesh), mesh.pp.size
    V = args.virtual_stages or default_virtual_stages(args.schedule)
    if args.schedule.endswith(".csv"):
        V = find_schedule(args.schedule, pp, micro_batches, args.virtual_stages).stages // pp
    else:
        check_schedule(args.schedule, pp, micro_batches, V)
    blocks = even_blocks(config.layers, pp * V) if own.even_stages else stage_blocks(config, pp * V)
    if own.stage_blocks is not None:
        if own.even_stages:
            raise ValueError(f"--stage-blocks {own.stage_blocks} and --even-stages: give one of them")
        blocks = given_blocks(own.stage_blocks, config.layers, pp * V)
    return LayoutSpec(
        args.schedule, pp, micro_batches, args.virtual_stages, blocks,
        kind=config.kind,
        work=partial(work, args, config, mesh),
        linear=recompute_kind(args.recompute)[1] is None and args.recompute_every == 1
        and not (config.shares_embedding and args.schedule in V_SHAPED),
        sharded=args.zero > 0,
        few=max(args.zero, 1) if mesh.data.size > 1 else 1,
        key=(str(config), *((name, str(value)) for name, value in vars(args).items() if name not in UNSHARED)),
        parameters=count_parameters(config),
        least=least_bytes(args, config, mesh, micro_batches, sum(len(stage) for stage in blocks[::pp])),
    )  # fmt: skip


def trainer(arguments: list[str]) -> str:
    """Return what stands behind `python` in the command that trains with these flags.

    Raises:
        ValueError: if one of `OWN`, except --vocab-size, is among them.
    """
    own, rest = OWN.parse_known_args(with_set(arguments))
    if others := [f"--{name.replace('_', '-')}" for name, value in vars(own).items() if value and name != "vocab_size"]:
        raise ValueError(f"examples.gpt.pretrain has no {', '.join(others)}")
    args = parse(rest)
    tokens = own.vocab_size or PRESETS[args.preset or "tiny"].vocab_size
    note = f"  # --tokenizer and --data give the {tokens:,} tokens of the vocabulary"
    return f"-m examples.gpt.pretrain {shlex.join(rest)}{note if args.tokenizer is None and tokens != 257 else ''}"


def with_set(words: Sequence[str]) -> list[str]:
    """Write the fields that rows and `--vary` give as flags with `--set`."""
    fields = {*vars(Fields()), *MODEL_FIELDS} - {"vocab_size"}
    found: list[list[str]] = []
    for word in words:
        if not word.startswith("--") and found:
            found[-1].append(word)
            continue
        flag, equals, value = word.partition("=")
        name = flag[2:].replace("-", "_")
        name = RENAMED.get(name, name)
        is_field = name in fields or name.partition(".")[0] in TABLES
        found.append(["", name, *([value] if equals else [])] if is_field else [word])
    return [
        word for first, *rest in found
        for word in (["--set", f"{rest[0]}={','.join(rest[1:]) or 'true'}"] if not first else [first, *rest])
    ]  # fmt: skip


build = Model(outline, trainer)
DEFAULTS = vars(parse([]))
UNSHARED = ("global_batch", "schedule", "virtual_stages")  # what counts of a stage don't depend on
OWN = Parser(prog="examples.gpt.plan:build", add_help=False)
OWN.add_argument("--vocab-size", type=int, help="tokens of the vocabulary (default: the preset's)")
OWN.add_argument("--stage-blocks", metavar="N,N,..", help="the number of blocks of each stage")
OWN.add_argument("--regather", action="store_true", help="with sequence parallel, keep shards for backward: see Linear")
OWN.add_argument("--even-stages", action="store_true", help="as many blocks on each stage, whatever the head costs")


def check_mesh(args: argparse.Namespace, mesh: Mesh) -> None:
    """Refuse flags that contradict the planner's mesh, or that aren't counted."""
    levels = mesh.cp.levels
    there = {name: getattr(mesh, name).size for name in ("tp", "cp", "pp", "ep", "dp", "etp")}
    there["cp_inner"] = None if levels is None else levels[1].size
    for name, size in there.items():
        given = getattr(args, name)
        if given not in (size, DEFAULTS[name]):
            raise ValueError(
                f"{flag(name)} {given} among the run's flags, on a mesh that has {size}: the mesh is the planner's"
            )
    if set(args.offload) != {"none"}:
        raise ValueError(f"--offload {' '.join(args.offload)} is not counted here: what fits without it fits with it")
    if args.compile is not None:
        raise ValueError("--compile is not counted here: what it keeps for backward is known once it has run")


def least_bytes(args: argparse.Namespace, config: GPTConfig, mesh: Mesh, micro_batches: int, first: int) -> int:
    """Return a lower bound of the bytes of the fullest rank: what ranks hold on average between steps and at their end,
    and what pipeline rank 0, with so many blocks, holds when it begins to wait for the first backward."""
    in_blocks, experts, ends, _ = parameter_shares(config)
    half = args.dtype == "bfloat16" and not args.autocast  # float16 too keeps float32 weights
    n = mesh.data.size // args.replicate
    state = 8 if args.optimizer == "adamw" else 4  # Adam's moments
    whole = args.zero == 0 or n == 1
    kept = 8 + state + 2 * half if whole else (8 + state) / max(n, mesh.edp.size)  # with masters and gradients
    waiting = 0 if whole else 4 * (args.zero < 2)  # gradients that aren't reduced yet
    average = (in_blocks + ends) / mesh.tp.size / mesh.pp.size + experts / mesh.ep.size / mesh.etp.size / mesh.pp.size
    least = average * (kept + waiting)
    if (
        config.moe is None
        and config.latent is None
        and not config.layers_spec
        and args.schedule in ("1f1b", "interleaved", *HOLD_ALL)
    ):
        tp, cp = mesh.tp.size, mesh.cp.size
        width = 1 if args.fp8 else 2 if args.dtype in ("bfloat16", "float16") else 4
        gathered = 0 if whole else 2 * (args.zero < 3)
        saved = config.d_model / (tp if args.sequence_parallel else 1)  # of a token: the input
        if recompute_kind(args.recompute)[0] in ("none", "selective"):  # and what products gave, but for the last
            heads = config.heads + 2 * (config.kv_heads or config.heads)
            saved += (heads * config.head_width + (1 + (config.activation in GATED)) * config.hidden) / tp
        held = micro_batches if args.schedule in HOLD_ALL else min(micro_batches, mesh.pp.size)
        tokens = held * args.micro_batch * config.seq_len / cp
        mine = first * in_blocks / config.layers / tp
        again = waiting if micro_batches > mesh.pp.size and args.schedule not in HOLD_ALL else 0  # F behind B
        reduced = kept if whole else state / n + 4 / n  # without gradients
        least = max(least, mine * (reduced + gathered + again) + first * tokens * saved * width)
    return int(least)


def even_blocks(layers: int, stages: int) -> list[range]:
    """Return as many blocks for each stage."""
    if layers % stages:
        raise ValueError(f"--even-stages: {layers} layers are not a multiple of {stages} stages")
    return split_sizes([layers // stages] * stages, layers)


def given_blocks(text: str, layers: int, stages: int) -> list[range]:
    """Return so many blocks for each stage."""
    counts = [int(count) for count in text.split(",")]
    if len(counts) != stages:
        raise ValueError(f"--stage-blocks {text} are {len(counts)} stages, not {stages}")
    return split_sizes(counts, layers)


def work(
    args: argparse.Namespace, config: GPTConfig, mesh: Mesh, plan: Schedule,
    blocks: Sequence[range], choice: Choice,
) -> Work:  # fmt: skip
    """Build stages of this rank with some of their blocks."""
    dtype = torch.float64 if args.dtype == "float64" else torch.float32
    options: dict[str, Any] = {"sequence_parallel": args.sequence_parallel, "device": "meta", "dtype": dtype}
    options |= {"residual_dtype": residual_dtype(args), "context": args.cp_kind}
    ranks = [plan.rank_of[stage] for stage in range(plan.stages)]
    built = zip(plan.stages_of(mesh.pp.rank), build_stages(config, mesh, blocks, ranks, **options), strict=True)
    stages = [stage for index, stage in built if index in choice]
    for stage, kept in zip(stages, choice.values(), strict=True):
        for name in set(stage.blocks) - {str(i) for i in kept}:
            del stage.blocks[name]
    layers = [block for stage in stages for block in stage.blocks.values()]
    if args.overlap_experts:
        overlap_experts(stages, mesh.pp)
    if args.overlap_halves:
        overlap_halves(stages, mesh.pp)
    if args.overlap:
        overlap_stages(stages, mesh, args.overlap)
    told, model = policies(args, stages), nn.ModuleList(stages)
    _, merging = told.pop("offload"), told.pop("observers")
    lay_out(stages, mesh, layers, seed=args.seed, initialize=False, **told)
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear):
            module.regather = args.regather
    ids = (args.micro_batch, config.seq_len // mesh.cp.size)

    def inputs(i: int) -> tuple[tuple, dict[str, Any]]:
        x = torch.empty(ids, dtype=torch.int64) if stages[i].first else hidden(stages[i], args)
        return (x,), keywords(stages[i], args)

    def loss(logits: Tensor) -> Tensor:
        target = ids if not config.mtp else (ids[0], 1 + config.mtp, ids[1])
        return stages[-1].loss(logits, torch.empty(target, dtype=torch.int64))

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        alike = len({is_dtensor(p) for p in parameters}) == 1  # one operator for all is quicker to count
        made = torch.optim.AdamW(parameters, fused=alike, foreach=False)
        more = [slot for each in merging if not each.are_jobs for slot in OUTER_SLOTS[: 1 + bool(each.momentum)]]
        groups = build_optimizer(args, model, mesh, stages).param_groups
        matrices = {p for group in groups if group.get("muon") for p in group["params"]}  # without a second moment
        trained = [p for p in model.parameters() if p.requires_grad]

        def resize(*_: Any) -> None:
            for p, own in zip(parameters, trained, strict=True):
                kept = {slot: x for slot, x in made.state[p].items() if slot != "exp_avg_sq" or own not in matrices}
                half = {slot: x.bfloat16() for slot, x in kept.items() if x.dim() and args.optimizer == "adamw-bf16"}
                made.state[p] = {**kept, **half, **{slot: torch.zeros_like(p) for slot in more}}

        made.register_step_post_hook(resize)
        return made

    return Work(stages, plan, inputs, loss, optimizer, autocast=told["precision"].autocast_dtype)
