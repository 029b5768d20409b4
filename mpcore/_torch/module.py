"""The hooks of a module. Read in torch 2.11 and 2.13, which agree."""

from __future__ import annotations

from torch import nn


def has_hooks(module: nn.Module) -> bool:
    """Tell whether anybody registered a hook of forward or backward on a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
