"""Give up a step: drop its gradients, also after a backward that raised."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpcore._torch import fsdp
from mpcore.gradients.accumulate import zero_gradients
from mpcore.sharding.declarations import ModelTree, tree_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


@torch.no_grad()
def drop_gradients(model: nn.Module | ModelTree, parameters: Iterable[Tensor] | None = None) -> None:
    """Forget the gradients of a step, also those that `shard_data_parallel` has not summed yet.

    To give up a step, call it on all ranks: after a backward that raised, or before the step's last micro-batch.
    `zero_grad` of the model and of `mpcore.optim` call it; that of torch's optimizers sees only summed gradients.

    Args:
        model: the model, or this rank's stage of it; where stages are joined, each of them.
        parameters: whose gradients are forgotten; None: all of the model's.
    """
    tree = tree_of(model)
    chosen = None if parameters is None else dict.fromkeys(parameters)
    fsdp.drop_gradients(tree.units, lambda p: chosen is None or p in chosen)
    zero_gradients(tree.parameters if chosen is None else chosen)


def check_backward(unit: FSDPModule) -> None:
    """Refuse to go on after a backward that raised: `fully_shard` would never sum again."""
    if fsdp.backward_failed(unit):
        raise ValueError(
            "a backward raised, so gradients are neither whole nor summed: give the step up with "
            "mpcore.drop_gradients(model), on every rank, before the next forward"
        )


def check_summed(model: nn.Module | ModelTree) -> None:
    """Refuse gradients that `fully_shard` has not reduced over data yet."""
    name = fsdp.unreduced_parameter(tree_of(model).units)
    if name is not None:
        raise ValueError(f"the gradient of {name} is not summed over data: {UNSUMMED}")


UNSUMMED = (
    "the last micro-batch had no backward or one that raised, sync_gradients(model, last=True) wasn't said before its "
    "forward, or the model's output hides its tensors (return tensors, dicts, tuples, dataclasses). To give the step "
    "up: mpcore.drop_gradients(model)"
)
