"""Give up a step: drop its gradients, also after a backward that raised."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpcore._torch import fsdp
from mpcore.gradients.accumulate import zero_gradients

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


@torch.no_grad()
def drop_gradients(model: nn.Module, parameters: Iterable[Tensor] | None = None) -> None:
    """Forget the gradients of a step that is given up, those too that `shard_data_parallel` has not summed yet.

    Call it, on all ranks, where a backward raised and was caught, or where the step ends before its last micro-batch.
    `zero_grad` of the model and of `mpcore.optim` does it; that of torch's optimizers sees only what was summed.

    Args:
        model: the model, or this rank's stage of it; where stages are joined, each of them.
        parameters: those whose gradients are forgotten; None: all of the model's.
    """
    chosen = None if parameters is None else {id(p): p for p in parameters}
    fsdp.drop_gradients(model, lambda p: chosen is None or id(p) in chosen)
    zero_gradients(model.parameters() if chosen is None else chosen.values())


def check_backward(unit: FSDPModule) -> None:
    """Refuse to go on after a backward that raised: `fully_shard` would never sum again.

    Raises:
        ValueError: with the way out.
    """
    if fsdp.backward_failed(unit):
        raise ValueError(
            "a backward raised, so gradients are neither whole nor summed: give the step up with "
            "mpcore.drop_gradients(model), on every rank, before the next forward"
        )


def check_summed(model: nn.Module) -> None:
    """Refuse gradients that `fully_shard` has not reduced over data yet.

    Raises:
        ValueError: with the name of a parameter, and the way out.
    """
    name = fsdp.unreduced_parameter(model)
    if name is not None:
        raise ValueError(f"the gradient of {name} is not summed over data: {UNSUMMED}")


UNSUMMED = (
    "the last micro-batch had no backward or one that raised, sync_gradients(model, last=True) wasn't said before its "
    "forward, or the model's output hides its tensors (return tensors, dicts, tuples, dataclasses). To give the step "
    "up: mpcore.drop_gradients(model)"
)
