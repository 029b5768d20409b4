"""Accumulate gradients in float32, and read, zero or drop them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpcore.sharding.declarations import declarations
from mpcore.sharding.local import is_dtensor

if TYPE_CHECKING:
    pass
from mpcore.gradients.steps import check_current, check_steps


def main_gradients(model: nn.Module) -> nn.Module:
    """Have gradients accumulated in float32, whatever the parameters and the products are computed in.

    Each parameter gets `main_grad`, float32 of its local shape (float64 for float64), and `.grad` stays None. The
    weight gradient of the parallel linears is a product with a float32 result, added there in backward; all other
    gradients are added as autograd finishes them. `reduce_gradients`, `grad_norm`, `clip_gradients` and the optimizers
    of `mpcore.optim` read it by `gradient_of`; begin each step with `zero_gradients` (or their `zero_grad`). Torch's
    optimizers, which read `.grad` alone, refuse to step where it isn't there. Hooks of a
    parameter find `main_grad`, and no `.grad`.
    `DistributedDataParallel` sums `.grad` alone, so it can't be used with them: `reduce_gradients(model, mesh)` can.

    Args:
        model: the model, or this rank's stage of it, not sharded over data: `fully_shard` has an accumulation of its
            own, in its `reduce_dtype`.

    Returns:
        The model.

    Raises:
        ValueError: if a parameter is sharded over data, or the model is wrapped in `DistributedDataParallel`.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("DistributedDataParallel sums no main gradients: take its module and reduce_gradients")
    for name, parameter, _ in declarations(model):
        if is_dtensor(parameter):
            raise ValueError(f"{name} is sharded over data: its gradients accumulate in fully_shard's reduce_dtype")
    check_steps()
    for parameter in model.parameters():
        if parameter.requires_grad and getattr(parameter, "main_grad", None) is None:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            parameter.main_grad = torch.zeros_like(parameter, dtype=wide)  # type: ignore[attr-defined]
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(accumulate)
    return model


@torch.no_grad()
def gradient_of(parameter: Tensor) -> Tensor | None:
    """The gradient of a parameter: its main gradient if it has one that was added to, else `.grad`.

    Raises:
        ValueError: for one that data parallelism replaced: it would never have one.
    """
    check_current(parameter)
    main = getattr(parameter, "main_grad", None)
    if main is None:
        return parameter.grad
    accumulate(parameter)
    return main if parameter.grad_added_to_main_grad else None  # type: ignore[attr-defined]


@torch.no_grad()
def accumulate(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None
        parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]


@torch.no_grad()
def zero_gradients(parameters: Iterable[Tensor]) -> None:
    """Forget all gradients, main gradients included."""
    for parameter in parameters:
        parameter.grad = None
        if getattr(parameter, "main_grad", None) is not None:
            parameter.main_grad.zero_()  # type: ignore[attr-defined]
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
