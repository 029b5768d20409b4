"""The optimizer and the learning rate that the flags ask for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import nn

from mpcore import Mesh
from mpcore.optim.adamw import AdamW
from mpcore.optim.muon import Muon
from mpcore.optim.schedules import SCHEDULES


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Return the learning rate of a step."""
    floor = {} if args.min_lr is None or args.lr == 0 else {"floor": args.min_lr / args.lr}
    return SCHEDULES[args.lr_schedule](step, steps=args.steps, warmup=args.warmup, lr=args.lr, **floor)


def build_optimizer(args: argparse.Namespace, model: nn.Module, mesh: Mesh, heads: Sequence[nn.Module]) -> AdamW:
    """Build the optimizer of --optimizer. Muon leaves the `heads` to AdamW."""
    options: dict = {"lr": args.lr, "betas": tuple(args.betas), "weight_decay": args.weight_decay, "seed": args.seed}
    if args.optimizer == "muon":
        ns_dtype = torch.bfloat16 if args.dtype == "bfloat16" else None
        return Muon(model, mesh=mesh, exclude=heads, ns_dtype=ns_dtype, **options)
    return AdamW(model, state_dtype=torch.bfloat16 if args.optimizer == "adamw-bf16" else None, **options)
