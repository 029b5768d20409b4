"""Main gradients: where a parameter's gradient is accumulated in float32. This module alone writes their state.

A parameter may have `main_grad`, float32 of its shape, and `grad_added_to_main_grad`, as Megatron-LM names them. Other
kernels may add to `main_grad` too, and then set `grad_added_to_main_grad` to True. A kernel that sums its weight
gradient over programs adds the sum there and gives autograd nothing; references leave it to autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ._dispatch import operator
from ._torch import engine_will_execute, is_on_gpu


class GradientState(IntEnum):
    """What a gradient holds: nothing, terms of this rank (equal to True), or the sum over ranks, done or running."""

    EMPTY = 0
    LOCAL = 1
    SUMMED = 2
    SUMMING = 3


def main_grad(parameter: Tensor | None) -> Tensor | None:
    """Return the tensor that gradients of the parameter are added to, if any."""
    return getattr(parameter, "main_grad", None)


def holds_main_grad(parameter: Tensor) -> bool:
    """Return whether anything was added to the main gradient of the parameter since it was emptied."""
    return bool(getattr(parameter, "grad_added_to_main_grad", False))


def main_grad_state(parameter: Tensor) -> GradientState:
    """Return what the main gradient of the parameter holds; EMPTY where it has none."""
    return GradientState(getattr(parameter, "grad_added_to_main_grad", GradientState.EMPTY))


def attach_main_grad(parameter: Tensor, buffer: Tensor) -> None:
    """Have gradients of the parameter added to `buffer`, whose values count for nothing."""
    parameter.main_grad = buffer  # pyright: ignore[reportAttributeAccessIssue]
    mark_main_grad(parameter, GradientState.EMPTY)


def mark_main_grad(parameter: Tensor, state: GradientState) -> None:
    """Note what the main gradient of the parameter holds now."""
    parameter.grad_added_to_main_grad = state  # pyright: ignore[reportAttributeAccessIssue]


def remember_main_grad(*parameters: Tensor | None) -> tuple[Tensor | None, ...] | None:
    """In forward, return the parameters if each has a main gradient to add to, else `None`."""
    for p in parameters:
        if p is not None and main_grad(p) is None:
            return None
    return None if torch.compiler.is_compiling() else parameters  # a compiled graph mutates nothing


def will_accumulate(parameter: Tensor) -> bool | None:
    """In backward, return whether this pass, of the two that a backward may have, accumulates the parameter's gradient.

    `None`: `torch.autograd.grad` returns the gradient instead, or the parameter is frozen.
    """
    try:
        return engine_will_execute(get_gradient_edge(parameter).node)
    except RuntimeError:
        return None


def take_main_grad(parameters: tuple[Tensor | None, ...] | None) -> tuple[Tensor | None, ...] | None:
    """In backward, return the main gradients to add to, or `None` if autograd needs the gradients itself."""
    given = [p for p in parameters or () if p is not None]
    if parameters is None or not all(map(will_accumulate, given)):
        return None
    mains = tuple(map(main_grad, parameters))
    for p, main in zip(parameters, mains, strict=True):
        if p is None or main is None:
            continue
        if main.shape != p.shape or main.dtype != torch.float32 or main.device != p.device or not main.is_contiguous():
            raise ValueError(
                f"main_grad is {main.dtype} {tuple(main.shape)} on {main.device}; for a parameter {tuple(p.shape)} it "
                f"must be contiguous float32 of that shape on {p.device}"
            )
        mark_main_grad(p, GradientState.LOCAL)
    return mains


def add_or_return(parameter: Tensor | None, gradient: Callable[..., Tensor], *of: Tensor) -> Tensor | None:
    """Return the gradient for autograd; or add it to the parameter's main gradient and return None."""
    main = main_grad(parameter)
    wanted = None if parameter is None or main is None else will_accumulate(parameter)
    if parameter is None or main is None or wanted is None:
        return gradient(None, *of)
    if wanted:  # a zero-bubble pipeline runs backward in two passes: add in the pass that wants this gradient
        gradient(main, *of)
        mark_main_grad(parameter, GradientState.LOCAL)
    return None


def add_product(total: Tensor | None, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `total` + x y, in place, in `dtype`: no product is rounded to a narrower one. None stands for zeros."""
    wide = is_on_gpu(x) and torch.version.hip is None  # elsewhere there is no product of another dtype
    if total is None and (wide or x.dtype == dtype):
        return torch.mm(x, y) if x.dtype == dtype else torch.mm(x, y, out_dtype=dtype)
    if total is None:
        total = x.new_zeros(x.shape[0], y.shape[1], dtype=dtype)
    if x.dtype == dtype:
        return torch.addmm(total, x, y, out=total)
    if wide:
        _add_product_op(total, x, y)
        return total
    y = y.to(dtype)
    for part, rows in zip(total.split(4096), x.split(4096), strict=True):  # some at a time are widened
        torch.addmm(part, rows.to(dtype), y, out=part)
    return total


# torch 2.13 can't count the FLOPs of this sum, and torch 2.11 can't trace it; an operator of mpcore's has both
@operator(
    "add_product(Tensor(a!) total, Tensor x, Tensor y) -> ()", flops=lambda total, x, y, **_: 2 * x[0] * x[1] * y[1]
)
def _add_product_op(total: Tensor, x: Tensor, y: Tensor) -> Iterator[None]:
    yield
    torch.addmm(total, x, y, out_dtype=total.dtype, out=total)
