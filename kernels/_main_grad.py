"""Gradients that a kernel adds to a parameter's `main_grad` instead of handing them to autograd.

A parameter may have the attribute `main_grad`, float32 of its shape, and `grad_added_to_main_grad`, which says whether
anything was added. A kernel that sums its weight gradient over programs adds the sum there in the same launch, and
gives autograd nothing, so that `.grad` stays None and nothing is added twice. References leave it to autograd; whoever
set the attribute then moves what autograd accumulated.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


def remember_main_grad(*parameters: Tensor | None) -> tuple[Tensor | None, ...] | None:
    """In forward: the parameters, if each of them has a main gradient to add to; else None."""
    for p in parameters:
        if p is not None and getattr(p, "main_grad", None) is None:
            return None
    return None if torch.compiler.is_compiling() else parameters  # compiled, autograd's way: it mutates nothing


def will_accumulate(parameter: Tensor) -> bool | None:
    """In backward: whether this pass accumulates a gradient of the parameter; a backward in two passes asks in both.

    None: `torch.autograd.grad` wants it, to return and not to accumulate it, or nobody does, for it is frozen.
    """
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:
        return None


def take_main_grad(parameters: tuple[Tensor | None, ...] | None) -> tuple[Tensor | None, ...] | None:
    """In backward: what to add to, if this pass accumulates gradients of the parameters; None: autograd wants them.

    `torch.autograd.grad` wants them to return, and a backward in two passes comes here once for the input alone.
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
