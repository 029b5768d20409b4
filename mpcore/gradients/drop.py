"""Abandon a step: drop its gradients, also after a backward that raised."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mpcore._torch import fsdp
from mpcore.gradients.accumulate import zero_gradients
from mpcore.gradients.overlap import drop_begun
from mpcore.sharding.declarations import ModelTree, tree_of


@torch.no_grad()
def drop_gradients(model: nn.Module | ModelTree, parameters: Iterable[Tensor] | None = None) -> None:
    """Drop the gradients of a step, including those that `shard_data_parallel` has not summed yet.

    To abandon a step, call it on all ranks: after a backward that raised, or before the step's last micro-batch.
    `zero_grad` of the model, of mpcore's optimizers and of those given to `guard_optimizer` calls it. `zero_grad` of
    other optimizers drops only summed gradients.

    Args:
        model: the model, or this rank's pipeline stage. If several stages were joined, call it for each stage.
        parameters: the parameters whose gradients to drop; None: all of the model's.

    Example:
        >>> model = mpcore.ColumnParallelLinear(4, 4)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> mpcore.gradients.drop_gradients(model)
        >>> model.weight.grad is None
        True
    """
    tree = tree_of(model)
    chosen = None if parameters is None else dict.fromkeys(parameters)
    drop_begun(tree.parameters if chosen is None else chosen)
    fsdp.drop_gradients(tree.units, lambda p: chosen is None or p in chosen)
    zero_gradients(tree.parameters if chosen is None else chosen)
