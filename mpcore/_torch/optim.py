"""The hooks of an optimizer's step. Checked with torch 2.11 and 2.13: no difference."""

from __future__ import annotations

import torch


def call_pre_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call the functions that were registered with this optimizer's `register_step_pre_hook`."""
    for hook in optimizer._optimizer_step_pre_hooks.values():
        hook(optimizer, (), {})


def call_post_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call the functions that were registered with this optimizer's `register_step_post_hook`."""
    for hook in optimizer._optimizer_step_post_hooks.values():
        hook(optimizer, (), {})


def drop_hooks(optimizer: torch.optim.Optimizer) -> None:
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = {}, {}  # type: ignore[assignment]
