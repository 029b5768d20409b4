"""Refuse an optimizer step that would be silently wrong."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from mpcore.sharding.local import is_dtensor

if TYPE_CHECKING:
    pass


@cache
def check_steps() -> None:
    """Have every optimizer refuse, before it steps, parameters that it would step wrongly, or not at all.

    What tp or ep cuts is known from the first `reduce_gradients` on.
    """
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: Optimizer, *_: Any) -> None:
    kind, ours = type(optimizer).__name__, hasattr(optimizer, "reads_main_gradients")
    for group in optimizer.param_groups:
        for p in group["params"]:
            check_current(p)
            if not ours and p.grad is None and getattr(p, "grad_added_to_main_grad", False):
                raise ValueError(
                    f"the gradient of a parameter of shape {tuple(p.shape)} is in main_grad, and {kind} reads .grad "
                    f"alone, which is None: take an optimizer of mpcore.optim, or leave main_gradients out"
                )
            if isinstance(optimizer, OF_WHOLE_TENSORS) and getattr(p, "is_cut", False):
                raise ValueError(
                    f"{kind} computes each element from its whole tensor, and a parameter of shape {tuple(p.shape)} is "
                    f"this rank's part of one: take mpcore.AdamW or mpcore.Muon, or what steps each element by itself"
                )
        if ours:
            continue
        stepped = [p for p in group["params"] if p.grad is not None]
        cut = [p for p in stepped if is_dtensor(p)]
        plain = [p for p in stepped if not is_dtensor(p) and p.numel() != 1]  # torch takes one number for a replica
        if cut and plain and _steps_together(group, stepped):
            raise ValueError(
                f"{kind} steps all of a group at once, and of this one {len(cut)} parameters are sharded over data and "
                f"{len(plain)} are not, as one of shape {tuple(plain[0].shape)}: foreach=False, a group for each kind, "
                f"or mpcore.AdamW"
            )


# Of torch's optimizers those that don't step each element by itself.
OF_WHOLE_TENSORS = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon)


def _steps_together(group: dict[str, Any], parameters: list[Tensor]) -> bool:
    """Whether torch's optimizers take their foreach or fused path, which on a GPU is the default."""
    said = group.get("foreach"), group.get("fused")
    return any(said) or ("foreach" in group and said == (None, None) and parameters[0].is_cuda)


def check_current(parameter: Tensor) -> None:
    """Refuse a parameter that data parallelism replaced."""
    if hasattr(parameter, "replaced_by_shards"):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is no longer the model's, whose shards replaced it: make "
            f"the optimizer after shard_data_parallel"
        )
