"""The optimizer and the learning rate that the flags ask for."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mpcore import Mesh
from mpcore.optim.adamw import AdamW
from mpcore.optim.muon import Muon
from mpcore.optim.schedules import SCHEDULES


def lr_schedule(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that the learning rate depends on, by name. A checkpoint stores them."""
    given = {name: getattr(args, name) for name in ("lr_schedule", "lr", "min_lr", "warmup")}
    return {**given, "lr_decay_steps": args.lr_decay_steps or args.steps}


def learning_rate(schedule: Mapping[str, Any], step: int) -> float:
    """Return the learning rate of a step.

    Args:
        schedule: what `lr_schedule` returns.
        step: the number of optimizer steps done.
    """
    lr, min_lr = schedule["lr"], schedule["min_lr"]
    floor = {} if min_lr is None or lr == 0 else {"floor": min_lr / lr}
    rate = SCHEDULES[schedule["lr_schedule"]]
    return rate(step, steps=schedule["lr_decay_steps"], warmup=schedule["warmup"], lr=lr, **floor)


def long_warmup(args: argparse.Namespace) -> str:
    """Return a warning if the warm-up is not shorter than the schedule, otherwise ""."""
    length, name = lr_schedule(args)["lr_decay_steps"], "--lr-decay-steps" if args.lr_decay_steps else "--steps"
    if args.warmup < length:
        return ""
    return (
        f"--warmup {args.warmup} is not below {name} {length}: the learning rate rises until step {args.warmup}, then "
        "drops to --min-lr in one step. Pass a smaller --warmup"
    )


def build_optimizer(args: argparse.Namespace, model: nn.Module, mesh: Mesh, heads: Sequence[nn.Module]) -> AdamW:
    """Build the optimizer of --optimizer. Muon leaves the `heads` to AdamW."""
    options: dict = {"lr": args.lr, "betas": tuple(args.betas), "weight_decay": args.weight_decay, "seed": args.seed}
    if args.optimizer == "muon":
        ns_dtype = torch.bfloat16 if args.dtype == "bfloat16" else None
        return Muon(model, mesh=mesh, exclude=heads, ns_dtype=ns_dtype, **options)
    return AdamW(model, state_dtype=torch.bfloat16 if args.optimizer == "adamw-bf16" else None, **options)
