"""The hooks of an optimizer's step, and operators on lists. Checked with torch 2.11 and 2.13: no difference."""

from __future__ import annotations

import torch
from torch import Tensor


def call_hooks(optimizer: torch.optim.Optimizer, when: str) -> None:
    """Call what was registered with this optimizer's `register_step_pre_hook` ("pre"), or `.._post_hook` ("post")."""
    for hook in getattr(optimizer, f"_optimizer_step_{when}_hooks").values():
        hook(optimizer, (), {})


def drop_hooks(optimizer: torch.optim.Optimizer) -> None:
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = {}, {}  # type: ignore[assignment]


def scale_each(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one dtype and device in place by a scalar tensor, with one kernel for many."""
    torch._foreach_mul_(tensors, factor)
