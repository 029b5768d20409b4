"""The hooks of a module. Checked with torch 2.11 and 2.13: no difference."""

from __future__ import annotations

from torch import nn


def has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
