"""What the flags ask of mpcore: the policies of `prepare`, the optimizer, the learning rate, the samples of a step."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from examples.gpt.arguments import DTYPES, flag
from examples.gpt.config import GPTConfig
from examples.gpt.model import GPT
from mpcore import Compile, Mesh, Offload, Precision, Recompute, Run, Zero
from mpcore.experimental import LocalUpdates
from mpcore.optim.adamw import AdamW
from mpcore.optim.groups import decay_groups
from mpcore.optim.muon import Muon
from mpcore.optim.schedules import SCHEDULES
from mpcore.parallel.recompute import KINDS


def precision(args: argparse.Namespace) -> Precision:
    """Return the precision that --dtype, --fp8 and autocast ask for."""
    return Precision(args.dtype, args.fp8, args.first_loss_scale, args.autocast)


def zero(args: argparse.Namespace) -> Zero:
    """Return what --zero shards, and in which dtypes it communicates."""
    gathered = None if args.param_dtype is None else DTYPES[args.param_dtype]
    return Zero(args.zero, args.replicate, gathered, DTYPES[args.reduce_dtype])


def residual_dtype(args: argparse.Namespace) -> torch.dtype:
    """Return the dtype of the residual stream, and so of pipeline messages."""
    if args.dtype == "float64":
        return torch.float64
    return precision(args).param_dtype or torch.float32 if args.residual_dtype is None else torch.float32


def policies(args: argparse.Namespace, stages: Sequence[GPT]) -> dict[str, Any]:
    """Return the policies of `prepare` that the flags ask for. Dropout draws from no generator of torch."""
    kind, budget = recompute_kind(args.recompute)
    if budget is None:
        recompute = Recompute(kind, args.recompute_every, preserve_rng_state=False)
    else:
        calls = {block: call for stage in stages for block, call in block_calls(stage, args).items()}
        recompute = Recompute(
            every=args.recompute_every, budget=budget, example=calls.__getitem__, preserve_rng_state=False
        )
    return {
        "data": zero(args),
        "precision": precision(args),
        "recompute": recompute,
        "offload": Offload(**{what: what in args.offload for what in ("optimizer", "activations", "parameters")}),
        "compile": None if args.compile is None else Compile(args.compile),
        "observers": [merge_options(args)] if args.workers > 1 or args.listen or args.join else [],
    }


def local_updates(run: Run, are_jobs: bool = False) -> LocalUpdates | None:
    """Return the observer of a run that merges the workers of this job, or this job with others; None if none does."""
    merging = (each for each in run.observers if isinstance(each, LocalUpdates))
    return next((each for each in merging if each.are_jobs == are_jobs), None)


OF_WORKERS = ("optimizer", "betas", "eps", "embedding_lr_scale", "weight_decay", "clip", "rampup_batch_size",
              "document_masking")  # fmt: skip


def worker_settings(args: argparse.Namespace, config: GPTConfig) -> dict[str, str]:
    """Return what workers that are jobs must share, by flag."""
    fields = {**asdict(config), **{name: getattr(args, name) for name in OF_WORKERS}}
    experts = {f"moe.{name}": x for name, x in (fields.pop("moe") or {}).items() if name != "dispatch"}
    return {flag(name): str(x) for name, x in {**fields, **experts, **lr_schedule(args)}.items()}


def block_calls(stage: GPT, args: argparse.Namespace) -> dict[nn.Module, tuple[tuple[Tensor], dict[str, Any]]]:
    """Return the arguments of each block of a stage, on "meta"."""
    x = hidden(stage, args, "meta").requires_grad_()
    positions = stage.positions(stage.config.seq_len, x.device)
    given = {name: value for name, value in keywords(stage, args, "meta").items() if name != "later"}
    calls = stage.calls(stage.config.seq_len, positions, x.dtype, x.device, **given)
    return {block: ((x,), arguments) for block, arguments in calls}


def hidden(stage: GPT, args: argparse.Namespace, device: str = "cpu") -> Tensor:
    """Return empty hidden states of a micro-batch on this rank, as a block takes and returns them."""
    length = stage.config.seq_len // stage.cp.size // (stage.tp.size if stage.sequence_parallel else 1)
    shape = args.micro_batch, length, stage.config.d_model
    return torch.empty(shape, dtype=residual_dtype(args), device=device)


def keywords(stage: GPT, args: argparse.Namespace, device: str = "cpu") -> dict[str, Tensor]:
    """Return the keyword arguments of a stage."""
    samples = torch.empty(args.micro_batch, dtype=torch.int64, device=device)
    found = {"samples": samples}
    if stage.config.moe is not None:
        found["loss_factor"] = torch.empty_like(samples, dtype=torch.float64)
    if depth := stage.config.mtp:
        found["later"] = samples.new_empty(args.micro_batch, depth, stage.config.seq_len // stage.cp.size)
    if args.document_masking:
        found["documents"] = samples.new_empty(args.micro_batch, stage.config.seq_len, dtype=torch.int32)
    return found


def lr_schedule(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that the learning rate depends on, by name. A checkpoint stores them."""
    steps, warmup = args.lr_decay_steps or args.steps, 20 if args.warmup is None else args.warmup
    warmup = warmup if args.warmup_share is None else round(args.warmup_share * steps)
    warmup = warmup if args.warmup_samples is None else round(args.warmup_samples / args.global_batch)
    given = {name: getattr(args, name) for name in ("lr_schedule", "lr", "min_lr")}
    return {**given, "warmup": warmup, "lr_decay_steps": steps}


def learning_rate(schedule: Mapping[str, Any], step: int) -> float:
    """Return the learning rate after so many steps of the schedule that `lr_schedule` returned."""
    lr, min_lr = schedule["lr"], schedule["min_lr"]
    floor = {} if min_lr is None or lr == 0 else {"floor": min_lr / lr}
    rate = SCHEDULES[schedule["lr_schedule"]]
    return rate(step, steps=schedule["lr_decay_steps"], warmup=schedule["warmup"], lr=lr, **floor)


def long_warmup(args: argparse.Namespace) -> str:
    """Return a warning if the warm-up is not shorter than the schedule, otherwise ""."""
    schedule, name = lr_schedule(args), "--lr-decay-steps" if args.lr_decay_steps else "--steps"
    length, warmup = schedule["lr_decay_steps"], schedule["warmup"]
    if warmup < length:
        return ""
    return (
        f"--warmup {warmup} is not below {name} {length}: the learning rate rises until step {warmup}, then "
        "drops to min_lr in one step. Pass a smaller --warmup"
    )


def build_optimizer(args: argparse.Namespace, model: nn.Module, mesh: Mesh, stages: Sequence[GPT]) -> AdamW:
    """Build the optimizer of --optimizer. Muon leaves the token embeddings and heads of the stages to AdamW."""
    ends = [each for stage in stages for name, each in stage.named_children() if name in ("embedding", "head")]
    options: dict = {"lr": args.lr, "betas": tuple(args.betas), "weight_decay": args.weight_decay, "seed": args.seed}
    options["eps"], scale = args.eps, args.embedding_lr_scale
    if args.optimizer == "muon":
        ns_dtype = torch.bfloat16 if args.dtype == "bfloat16" else None
        return Muon(model, mesh=mesh, exclude=ends, ns_dtype=ns_dtype, **options)
    if scale != 1:
        tables = decay_groups(nn.ModuleList(ends), args.weight_decay)[0]
        options["groups"] = [*decay_groups(model, args.weight_decay, ends), {**tables, "lr_scale": scale}]
    return AdamW(model, state_dtype=torch.bfloat16 if args.optimizer == "adamw-bf16" else None, **options)


@dataclass(frozen=True)
class Ramp:
    """Sizes of steps.

    Attributes:
        start, final: samples of the first step, and of each step after the ramp.
        stages: how many times the size grows.
        samples: the ramp's length.
    """

    start: int
    final: int
    stages: int = 0
    samples: int = 1

    def size(self, sample: int) -> int:
        """Return the samples of the step whose first sample has this global index."""
        return self._stage_size(self._stage(sample))

    def after(self, sample: int, steps: int) -> int:
        """Return the global index of the first sample `steps` steps after the one that begins with `sample`."""
        while steps:
            stage = self._stage(sample)
            size = self._stage_size(stage)
            end = -(-(stage + 1) * self.samples // max(self.stages, 1))  # where the next stage begins
            taken = steps if stage == self.stages else min(steps, -(-(end - sample) // size))
            sample, steps = sample + taken * size, steps - taken
        return sample

    @property
    def sizes(self) -> list[int]:
        """All sizes, rising."""
        return [self._stage_size(stage) for stage in range(self.stages + 1)]

    def _stage(self, sample: int) -> int:
        return min(sample * self.stages // self.samples, self.stages)

    def _stage_size(self, stage: int) -> int:
        return self.start + (self.final - self.start) // max(self.stages, 1) * stage


def read_ramp(args: argparse.Namespace, each: int) -> Ramp:
    """Read rampup_batch_size and --global-batch; `each`: samples that all ranks take at once.

    Raises:
        ValueError: if there is no such ramp, with the numbers that contradict each other.
    """
    final = args.global_batch
    if args.rampup_batch_size is None:
        return Ramp(final, final)
    start, increment, samples = args.rampup_batch_size
    told = f"rampup_batch_size {start} {increment} {samples}"
    if start >= final:
        raise ValueError(f"{told}: the start {start} is not below --global-batch {final}, where the ramp ends")
    if (final - start) % increment:
        raise ValueError(
            f"{told}: from {start} to --global-batch {final} are {final - start} samples, no multiple of the increment "
            f"{increment}"
        )
    for what, size in (("start", start), ("increment", increment)):
        if size % each:
            raise ValueError(
                f"{told}: the {what} {size} is not a multiple of workers x dp x micro-batch = {each}: "
                f"{-(-size // each) * each} is"
            )
    if args.workers > 1:
        raise ValueError(f"{told} with --workers {args.workers}: workers take steps of one size")
    if args.schedule.endswith(".csv"):
        raise ValueError(f"{told} with --schedule {args.schedule}: a file is for one number of micro-batches")
    return Ramp(start, final, (final - start) // increment, samples)


def merge_options(args: argparse.Namespace) -> LocalUpdates:
    """Return how workers merge.

    Raises:
        ValueError: if there are more fragments than steps.
    """
    names = {"local_steps": "every", "outer_lr": "lr", "outer_momentum": "momentum", "fragments": "fragments"}
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    are_jobs = bool(args.listen or args.join)
    options: dict[str, Any] = {"every": 50, "nesterov": args.nesterov}
    if are_jobs:
        names |= {"listen": "listen", "join": "join", "wait": "wait", "steps": "steps", "staleness": "staleness",
                  "token": "token", "dynamic_steps": "dynamic", "worker_timeout": "timeout", "replicas": "replicas",
                  "update_dtype": "update_dtype", "overlap_exchange": "overlap", "out": "folder"}  # fmt: skip
        given |= {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return LocalUpdates(**options | {names[name]: value for name, value in given.items()})


def recompute_kind(value: str) -> tuple[str, float | None]:
    """Read `--recompute`: the kind, and the share of a budget."""
    kind, equals, share = value.partition("=")
    if kind in KINDS and not equals:
        return kind, None
    try:
        if kind == "budget":
            return kind, float(share)
    except ValueError:
        pass
    raise ValueError(f"--recompute {value!r} is none of {', '.join(KINDS)} and budget=SHARE")
