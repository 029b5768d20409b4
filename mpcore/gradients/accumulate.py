"""Accumulate gradients in float32, and read, zero or drop them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mpcore.kernels._main_grad import (
    GradientState,
    attach_main_grad,
    holds_main_grad,
    main_grad,
    main_grad_state,
    mark_main_grad,
)
from mpcore.sharding.declarations import declarations
from mpcore.sharding.local import is_dtensor


def main_gradients(model: nn.Module, parameters: Iterable[nn.Parameter] | None = None) -> nn.Module:
    """Accumulate gradients in float32 (float64 for float64) for parameters of any dtype.

    Each parameter gets `main_grad`, and `.grad` stays None, also for hooks. `reduce_gradients`, `grad_norm`,
    `clip_gradients` and the optimizers of `mpcore.optim` read `main_grad` with `gradient_of`.

    Args:
        model: the model, or this rank's pipeline stage, changed in place and returned. It must not be sharded over
            data: `fully_shard` accumulates in its own dtype.
        parameters: the model's parameters to accumulate this way; None: all.

    Raises:
        ValueError: if a parameter is sharded over data, or the model is wrapped in `DistributedDataParallel`.

    Note:
        - Begin each step with `zero_gradients`, or with `zero_grad` of an mpcore optimizer.
        - torch's optimizers read only `.grad`: `guard_optimizer` makes them raise an error instead of a wrong step.
        - `DistributedDataParallel` reads only `.grad` too: use `reduce_gradients(model, mesh)` instead.

    Example:
        >>> model = mpcore.gradients.main_gradients(mpcore.ColumnParallelLinear(4, 4, dtype=torch.bfloat16))
        >>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        >>> model.weight.main_grad.dtype
        torch.float32
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("DistributedDataParallel sums no main gradients: take its module and reduce_gradients")
    chosen = set(model.parameters() if parameters is None else parameters)
    for name, parameter, _ in declarations(model):
        if parameter in chosen and is_dtensor(parameter):
            raise ValueError(f"{name} is sharded over data: its gradients accumulate in fully_shard's reduce_dtype")
    for parameter in model.parameters():
        if parameter in chosen and parameter.requires_grad and main_grad(parameter) is None:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            attach_main_grad(parameter, torch.zeros_like(parameter, dtype=wide))
            parameter.register_post_accumulate_grad_hook(accumulate)
    return model


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return a parameter's gradient: its main gradient if something was added to it, otherwise `.grad`. None: none.

    Raises:
        ValueError: if data parallelism replaced the parameter, because it would never get a gradient.
    """
    if "is_replaced" in vars(parameter):
        check_current(parameter)
    main = main_grad(parameter)
    if main is None:
        return parameter.grad
    accumulate(parameter)
    return main if holds_main_grad(parameter) else None


@torch.no_grad()
def accumulate(parameter: Tensor) -> None:
    """Add `.grad` to the parameter's main gradient, if it has one, and set `.grad` to None."""
    main = main_grad(parameter)
    if parameter.grad is not None and main is not None:
        main.add_(parameter.grad)
        parameter.grad = None
        mark_main_grad(parameter, GradientState.LOCAL)


@torch.no_grad()
def zero_gradients(parameters: Iterable[Tensor]) -> None:
    """Drop all gradients: set `.grad` to None, and fill main gradients with zeros.

    Args:
        parameters: the parameters, for example `model.parameters()`.

    Example:
        >>> model = mpcore.ColumnParallelLinear(4, 4)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> mpcore.gradients.zero_gradients(model.parameters())
        >>> model.weight.grad is None
        True
    """
    for parameter in parameters:
        parameter.grad = None
        main = main_grad(parameter)
        if main is not None:
            main.zero_()
            mark_main_grad(parameter, GradientState.EMPTY)


# --- the record of a gradient: attributes of its parameter, which a copy of the parameter doesn't have -------------
#
# Where: `main_grad` if there is one, otherwise `.grad`, and `running_sum` (`StartedAllReduce`) while it is all-reduced.
# What it holds: `grad_added_to_main_grad`, which Megatron's kernels write too, or a mark on `.grad`.


def mark_reduced(parameter: Tensor) -> None:
    """Mark the parameter's current gradient as complete, for example after you all-reduced it yourself."""
    if holds_main_grad(parameter):
        mark_main_grad(parameter, GradientState.SUMMED)
    elif parameter.grad is not None:
        vars(parameter.grad)["gradient_state"] = GradientState.SUMMED


def gradient_state(parameter: Tensor) -> GradientState:
    """Return what the parameter's gradient holds, wherever it lies."""
    if "running_sum" in vars(parameter):
        return GradientState.SUMMING
    if parameter.grad is not None:
        known = {} if main_grad(parameter) is not None else vars(parameter.grad)  # a main gradient waits for `.grad`
        return known.get("gradient_state", GradientState.LOCAL)
    return GradientState.EMPTY if main_grad(parameter) is None else main_grad_state(parameter)


def is_reduced(parameter: Tensor) -> bool:
    """Return whether nothing was accumulated since `mark_reduced`, neither in `.grad` nor in the main gradient."""
    return gradient_state(parameter) in (GradientState.EMPTY, GradientState.SUMMED)


def mark_replaced(parameters: Iterable[Tensor]) -> None:
    """Record that other parameters replaced these; an optimizer created before may still hold them."""
    for parameter in parameters:
        vars(parameter)["is_replaced"] = True


def check_current(*parameters: Tensor) -> None:
    """Raise ValueError for parameters that data parallelism replaced."""
    for parameter in parameters:
        if "is_replaced" in vars(parameter):
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is no longer the model's, whose shards replaced it: "
                f"make the optimizer after shard_data_parallel"
            )
