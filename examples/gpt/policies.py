"""The flags of a run as the policies of `mpcore.prepare`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from examples.gpt.checks import merge_options, recompute_kind
from examples.gpt.model import GPT
from mpcore import Compile, Offload, Precision, Recompute, Run, Zero
from mpcore.experimental import LocalUpdates


def precision(args: argparse.Namespace) -> Precision:
    """Return the precision that --dtype, --autocast and --fp8 ask for."""
    return Precision(args.dtype, fp8=args.fp8, autocast=args.autocast)


def residual_dtype(args: argparse.Namespace) -> torch.dtype:
    """Return the dtype of the residual stream, and so of pipeline messages."""
    if args.dtype == "float64":
        return torch.float64
    return precision(args).param_dtype or torch.float32 if args.residual_dtype is None else torch.float32


def policies(args: argparse.Namespace, stages: Sequence[GPT]) -> dict[str, Any]:
    """Return the policies of `prepare` that the flags ask for."""
    kind, budget = recompute_kind(args.recompute)
    if budget is None:
        recompute = Recompute(kind, preserve_rng_state=False)  # the layers' dropout draws from no generator of torch
    else:
        calls = {block: call for stage in stages for block, call in block_calls(stage, args).items()}
        recompute = Recompute(budget=budget, example=calls.__getitem__, preserve_rng_state=False)
    return {
        "data": Zero(args.zero, args.replicate),
        "precision": precision(args),
        "recompute": recompute,
        "offload": Offload(**{what: what in args.offload for what in ("optimizer", "activations", "parameters")}),
        "compile": None if args.compile is None else Compile(args.compile),
        "observers": [LocalUpdates(**merge_options(args))] if args.workers > 1 else [],
    }


def local_updates(run: Run) -> LocalUpdates | None:
    """Return the observer of a run that merges the workers; None if there is one worker."""
    return next((observer for observer in run.observers if observer.joins_worlds), None)  # type: ignore[return-value]


def block_calls(stage: GPT, args: argparse.Namespace) -> dict[nn.Module, tuple[tuple[Tensor], dict[str, Any]]]:
    """Return the arguments of each block of a stage, on "meta"."""
    x = hidden(stage, args, "meta").requires_grad_()
    positions = stage.positions(stage.config.seq_len, x.device)
    calls = stage.calls(stage.config.seq_len, positions, x.dtype, x.device, **keywords(stage, args, "meta"))
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
    if args.document_masking:
        found["documents"] = samples.new_empty(args.micro_batch, stage.config.seq_len, dtype=torch.int32)
    return found
