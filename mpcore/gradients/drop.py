"""Give up a step: drop its gradients, also after a backward that raised."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpcore.sharding.local import param_groups, units

if TYPE_CHECKING:
    pass
from mpcore.gradients.accumulate import zero_gradients


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
    for context in _contexts(model):
        groups = _groups(context)
        failed = _backward_failed(context)
        if failed:
            for group in groups:
                group._training_state = type(group._training_state).POST_BACKWARD  # so that nothing is summed now
            context.is_last_backward, context.iter_forward_root = True, None
            context.all_states[0]._root_post_backward_final_callback()
        for group in groups:
            if failed:
                group.reshard()
            mine = [p for p in group.fsdp_params if chosen is None or id(p.sharded_param) in chosen]
            if mine:
                group._partial_reduce_output = None
            for p in mine:
                p.unsharded_accumulated_grad = p.sharded_param.grad = None  # the model's may be gathered ones
                whole = getattr(p, "_unsharded_param", None)
                if whole is not None and whole.grad is not None:
                    whole.grad = None
    zero_gradients(model.parameters() if chosen is None else chosen.values())


def _contexts(model: nn.Module) -> list[Any]:
    """What the units of a stage share, of each stage that ran."""
    found = {id(context): context for unit in units(model) for context in (unit._get_fsdp_state()._state_ctx,)}
    return [context for context in found.values() if context.all_states]


def _groups(context: Any) -> list[Any]:
    return [group for state in context.all_states for group in param_groups(state)]


def _backward_failed(context: Any) -> bool:
    """Whether the end of a backward is awaited that is no longer running."""
    return context.post_backward_final_callback_queued and torch._C._current_graph_task_id() == -1


def check_backward(unit: Any) -> None:
    """Refuse to go on after a backward that raised: `fully_shard` would never sum again.

    Raises:
        ValueError: with the way out.
    """
    if _backward_failed(unit._get_fsdp_state()._state_ctx):
        raise ValueError(
            "a backward raised, so gradients are neither whole nor summed: give the step up with "
            "mpcore.drop_gradients(model), on every rank, before the next forward"
        )


def check_summed(model: nn.Module) -> None:
    for context in _contexts(model):
        for group in _groups(context):
            partial = group._partial_reduce_output
            for p in group.fsdp_params:
                whole = getattr(getattr(p, "_unsharded_param", None), "grad", None)
                if any(grad is not None for grad in (partial, p.unsharded_accumulated_grad, whole)):
                    raise ValueError(f"the gradient of {p._param_fqn} is not summed over data: {UNSUMMED}")


UNSUMMED = (
    "the last micro-batch had no backward or one that raised, sync_gradients(model, last=True) wasn't said before its "
    "forward, or the model's output hides its tensors (return tensors, dicts, tuples, dataclasses). To give the step "
    "up: mpcore.drop_gradients(model)"
)
