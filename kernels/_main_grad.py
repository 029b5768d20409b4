"""Gradient accumulation into `main_grad`: a kernel adds its weight gradient there and returns none to autograd.

A parameter may have the attribute `main_grad`, float32 of its shape, and `grad_added_to_main_grad`, which says whether
a kernel added a gradient. A kernel that sums its weight gradient over programs adds the sum to `main_grad` in the same
launch and returns no gradient to autograd, so `.grad` stays None and no gradient counts twice. The references leave the
gradient to autograd; the owner of the attribute then moves what autograd accumulated.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ._torch import engine_will_execute


def remember_main_grad(*parameters: Tensor | None) -> tuple[Tensor | None, ...] | None:
    """In forward, return the parameters if each has a main gradient to add to, else `None`."""
    for p in parameters:
        if p is not None and getattr(p, "main_grad", None) is None:
            return None
    return None if torch.compiler.is_compiling() else parameters  # a compiled graph mutates nothing


def will_accumulate(parameter: Tensor) -> bool | None:
    """In backward, return whether this pass accumulates a gradient of the parameter.

    `None`: `torch.autograd.grad` returns the gradient instead, or the parameter is frozen. A backward in two passes
    asks in both.
    """
    try:
        return engine_will_execute(get_gradient_edge(parameter).node)
    except RuntimeError:
        return None


def take_main_grad(parameters: tuple[Tensor | None, ...] | None) -> tuple[Tensor | None, ...] | None:
    """In backward, return the main gradients to add to, or `None` if autograd needs the gradients itself.

    Autograd needs them if `torch.autograd.grad` returns them. A backward in two passes calls this in both, and the
    first accumulates no gradient of a parameter.
    """
    if parameters is None:
        return None
    given = [p for p in parameters if p is not None]
    if not all(map(will_accumulate, given)):
        return None
    for p in given:
        main = p.main_grad  # pyright: ignore[reportAttributeAccessIssue]
        if main.shape != p.shape or main.dtype != torch.float32 or main.device != p.device or not main.is_contiguous():
            raise ValueError(
                f"main_grad is {main.dtype} {tuple(main.shape)} on {main.device}; for a parameter {tuple(p.shape)} it "
                f"must be contiguous float32 of that shape on {p.device}"
            )
        p.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
    return tuple(None if p is None else p.main_grad for p in parameters)  # pyright: ignore[reportAttributeAccessIssue]
