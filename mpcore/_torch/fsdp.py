"""The units of torch's `fully_shard`: their parameters, their gradients, and backwards that failed.

A unit is a module that `fully_shard` was called on. Its state has parameter groups: the parameters that are gathered
and reduced together. The first unit whose forward runs becomes the root; the units below it share one context with it.

Read in torch 2.11 and 2.13. Before 2.13:
    - a unit has at most one parameter group, under another name;
    - a unit reduces only parameters that got a gradient, so ranks that use different ones would wait for each other.

Nothing here imports FSDP, which takes half a second: where nobody imported it, no model has units.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from mpcore._torch import autograd

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

_beside: WeakKeyDictionary[nn.Module, WeakSet[nn.Module]] = WeakKeyDictionary()


def add_unit(model: nn.Module, unit: nn.Module) -> None:
    """Count a unit that is none of the model's submodules among its units: one that several models share."""
    _beside.setdefault(model, WeakSet()).add(unit)


def units(model: nn.Module) -> list[FSDPModule]:
    """List the units of a model: those of its submodules, and those of `add_unit`."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    kind: type[FSDPModule] = fsdp.FSDPModule
    return [module for module in (*model.modules(), *_beside.get(model, ())) if isinstance(module, kind)]


def make_root(unit: FSDPModule) -> None:
    """Make a unit the root of those below it, unless it has one already."""
    _state(unit)._lazy_init()


def was_gathered(unit: FSDPModule) -> bool:
    """Tell whether the unit's parameters were gathered before, so that the memory to gather them in exists."""
    return all(whole_parameter(p) is not None for group in _groups(_state(unit)) for p in group.fsdp_params)


def backward_failed(unit: FSDPModule) -> bool:
    """Tell whether a backward through this unit raised: its end is still awaited, and no backward is running."""
    return _has_failed(_state(unit)._state_ctx)


def unreduced_parameter(units: Iterable[FSDPModule]) -> str | None:
    """Return the name of a parameter with a gradient that is not reduced over data yet, or None."""
    for context in _contexts(units):
        for group in _groups_of(context):
            for p in group.fsdp_params:
                whole = whole_parameter(p)
                held = (
                    group._partial_reduce_output,
                    p.unsharded_accumulated_grad,
                    None if whole is None else whole.grad,
                )
                if any(grad is not None for grad in held):
                    return p._param_fqn
    return None


def drop_gradients(units: Iterable[FSDPModule], which: Callable[[Tensor], bool]) -> None:
    """Drop gradients that are reduced, and those that are not yet; end a backward that raised.

    Args:
        units: of a model.
        which: of a sharded parameter: whether to drop its gradient.
    """
    for context in _contexts(units):
        groups = _groups_of(context)
        failed = _has_failed(context)
        if failed:
            for group in groups:
                group._training_state = type(group._training_state).POST_BACKWARD  # so that nothing is reduced now
            context.is_last_backward, context.iter_forward_root = True, None
            context.all_states[0]._root_post_backward_final_callback()
        for group in groups:
            if failed:
                group.reshard()
            mine = [p for p in group.fsdp_params if which(p.sharded_param)]
            if mine:
                group._partial_reduce_output = None
            for p in mine:
                p.unsharded_accumulated_grad = p.sharded_param.grad = None  # the model's may be gathered ones
                whole = whole_parameter(p)
                if whole is not None and whole.grad is not None:
                    whole.grad = None


def records(units: Iterable[FSDPModule]) -> Iterator[tuple[nn.Parameter, Any]]:
    """Yield each sharded parameter with torch's record of it, of units whose forward ran."""
    for context in _contexts(units):
        for group in _groups_of(context):
            for p in group.fsdp_params:
                yield p.sharded_param, p


def exchange_gradient(record: Any, grad: Tensor | None) -> Tensor | None:
    """Set the gradient that is to be reduced over data, and return the one before."""
    whole, before = whole_parameter(record), record.unsharded_accumulated_grad
    if whole is not None:
        before = whole.grad if before is None else before
        whole.grad = None
    record.unsharded_accumulated_grad = grad
    return before


def end_backward(root: FSDPModule) -> None:
    """Do what `fully_shard` does after a backward, where its hooks did not run: reduce gradients, shard again.

    As `PipelineStage.perform_reduce_grad` of torch does it.
    """
    state = _state(root)
    for group in _groups_of(state._state_ctx):
        group.post_backward()
    state._root_post_backward_final_callback()


def reduce_unused(unit: FSDPModule) -> None:
    """Reduce zeros for parameters without a gradient, so that all ranks start the same collectives."""
    since_2_13 = getattr(unit, "set_reduce_scatter_unused_params", None)
    if since_2_13 is not None:
        since_2_13(True)
        return
    for group in _groups(_state(unit)):

        def post_backward(*_: Any, group: Any = group) -> None:
            for p in group.fsdp_params if group.reduce_grads else ():
                whole = whole_parameter(p)
                if whole is None or whole.grad is not None or p.unsharded_accumulated_grad is not None:
                    continue
                if whole.requires_grad:
                    whole.grad = torch.zeros_like(whole)
            type(group).post_backward(group)

        group.post_backward = post_backward


def _state(unit: FSDPModule) -> Any:
    return unit._get_fsdp_state()


def _groups(state: Any) -> list[Any]:
    """The parameter groups of a unit."""
    if hasattr(state, "_fsdp_param_groups"):  # since torch 2.13; torch names no version
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _contexts(units: Iterable[FSDPModule]) -> Iterator[Any]:
    """The context that the units below one root share, for each root whose forward ran."""
    found = {id(context): context for context in (_state(unit)._state_ctx for unit in units)}
    return (context for context in found.values() if context.all_states)


def _groups_of(context: Any) -> list[Any]:
    return [group for state in context.all_states for group in _groups(state)]


def _has_failed(context: Any) -> bool:
    return context.post_backward_final_callback_queued and not autograd.in_backward()


def whole_parameter(p: Any) -> nn.Parameter | None:
    """Return the gathered parameter, in memory that may be freed now; None before the first gather."""
    return getattr(p, "_unsharded_param", None)  # torch sets it at the first gather
