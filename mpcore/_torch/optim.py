"""The hooks of an optimizer's step. Read in torch 2.11 and 2.13, which agree."""

from __future__ import annotations

import torch


def call_pre_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call what `register_step_pre_hook` of this optimizer was given."""
    for hook in optimizer._optimizer_step_pre_hooks.values():
        hook(optimizer, (), {})


def call_post_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call what `register_step_post_hook` of this optimizer was given."""
    for hook in optimizer._optimizer_step_post_hooks.values():
        hook(optimizer, (), {})


def drop_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer call no step hooks of its own."""
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = {}, {}  # type: ignore[assignment]
