"""The units of torch's `fully_shard`: their parameters, their gradients, and recovery from a backward that raised.

A unit is a module that `fully_shard` was called on. Its state has parameter groups: parameters that are gathered and
reduced together. The first unit whose forward runs becomes the root; the units below it share one context with it.

Checked with torch 2.11 and 2.13. Before 2.13:
    - a unit has at most one parameter group, under another name;
    - a unit reduces only parameters that got a gradient, so ranks that use different parameters would hang.

This file doesn't import FSDP, which takes half a second: if FSDP was never imported, no model has units.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpcore._torch import autograd

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def add_unit(model: nn.Module, unit: Any) -> None:
    """Count a unit among the model's units although it is none of its submodules.

    Several models may share such a unit.
    """
    vars(model)["more_units"] = *vars(model).get("more_units", ()), unit


def join_units(joined: nn.Module, stages: Iterable[nn.Module]) -> None:
    """Count the units of stages among those of the module that joins them, and holds no stage itself."""
    held = set(units(joined))
    for unit in dict.fromkeys(unit for stage in stages for unit in units(stage)):
        if unit not in held:
            add_unit(joined, unit)


def is_unit(module: nn.Module) -> bool:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def units(model: nn.Module) -> list[FSDPModule]:
    """Return the units of a model: those among its submodules, and those of `add_unit`."""
    found: list[Any] = [module for module in (*model.modules(), *vars(model).get("more_units", ())) if is_unit(module)]
    return found


def ranks_of_units(units: Iterable[FSDPModule], layer: nn.Module | None = None) -> set[int]:
    """Return the ranks over which units shard or replicate parameters: all of them, or those of one layer."""
    held = [p for unit in units for p in parameters_of(unit)]
    meshes = {p.mesh_info.mesh for p in held if layer in (None, p._module_info.module)}
    groups = [group for mesh in meshes for group in mesh.get_all_groups()]
    return {rank for group in groups for rank in torch.distributed.get_process_group_ranks(group)}


def renew_parameters(model: nn.Module) -> None:
    """Let the units of a model use the parameters that its modules hold now, after they were replaced."""
    for unit in units(model):
        for p in parameters_of(unit):
            p.reset_sharded_param()


def parameters_of(unit: FSDPModule) -> list[Any]:
    """Return torch's records of the parameters that a unit gathers."""
    return [p for group in _groups(_state(unit)) for p in group.fsdp_params]


def make_root(unit: FSDPModule) -> None:
    """Make a unit the root of the units below it, unless it has a root already."""
    unit._get_fsdp_state()._lazy_init()


def was_gathered(unit: FSDPModule) -> bool:
    """Return whether the unit's parameters were gathered before, so that the memory to gather them into exists."""
    return all(whole_parameter(p) is not None for p in parameters_of(unit))


def backward_failed(unit: FSDPModule) -> bool:
    """Return whether a backward through this unit raised: its end is still expected, but no backward is running."""
    return _has_failed(_state(unit)._state_ctx)


def unreduced_parameter(units: Iterable[FSDPModule]) -> str | None:
    """Return the name of a parameter whose gradient is not yet reduced over data, or None."""
    for context in _contexts(units):
        for group in _groups_of(context):
            for p in group.fsdp_params:
                whole_grad = getattr(whole_parameter(p), "grad", None)
                held = group._partial_reduce_output, p.unsharded_accumulated_grad, whole_grad
                if any(grad is not None for grad in held):
                    return p._param_fqn
    return None


def drop_gradients(units: Iterable[FSDPModule], which: Callable[[Tensor], bool]) -> None:
    """Drop gradients, reduced or not, and end a forward or a backward that raised.

    Args:
        units: the units of a model.
        which: returns, for a sharded parameter, whether to drop its gradient.
    """
    take_order(units)  # and forget it: a rank may have raised before the others
    for context in _contexts(units):
        groups = _groups_of(context)
        failed = _has_failed(context) or context.iter_forward_root is not None
        if failed:
            for group in groups:
                group._training_state = type(group._training_state).POST_BACKWARD  # so that no gradient is reduced now
            context.is_last_backward, context.iter_forward_root = True, None
            context.all_states[0]._root_post_backward_final_callback()
        for group in groups:
            if failed:
                group.reshard()
            mine = [p for p in group.fsdp_params if which(p.sharded_param)]
            if mine:
                group._partial_reduce_output = None
            for p in mine:
                p.unsharded_accumulated_grad = p.sharded_param.grad = None  # the model may hold gathered parameters
                whole = whole_parameter(p)
                if whole is not None and whole.grad is not None:
                    whole.grad = None
                p.is_unused = False


def records(units: Iterable[FSDPModule]) -> Iterator[tuple[nn.Parameter, Any]]:
    """Yield each sharded parameter and torch's record of it, for units whose forward ran."""
    for context in _contexts(units):
        for group in _groups_of(context):
            for p in group.fsdp_params:
                yield p.sharded_param, p


def trains(unit: FSDPModule) -> bool:
    """Return whether a parameter that this unit gathers requires a gradient."""
    return any(p.sharded_param.requires_grad for p in parameters_of(unit))


def exchange_gradient(record: Any, grad: Tensor | None) -> Tensor | None:
    """Set the gradient that will be reduced over data, and return the previous one."""
    whole, before = whole_parameter(record), record.unsharded_accumulated_grad
    if whole is not None:
        before = whole.grad if before is None else before
        whole.grad = None
    record.unsharded_accumulated_grad = grad
    return before


def end_backward(root: FSDPModule) -> None:
    """Reduce gradients and reshard, as `fully_shard` does after a backward, if its hooks did not run.

    torch's `PipelineStage.perform_reduce_grad` does the same.
    """
    state = _state(root)
    for group in _groups_of(state._state_ctx):
        group.post_backward()
    state._root_post_backward_final_callback()


def reduce_unused(unit: FSDPModule) -> None:
    """Reduce zeros for parameters without a gradient, so that all ranks start the same collectives.

    `take_unused` tells which gradients are such zeros on this rank.
    """
    since_2_13 = getattr(unit, "set_reduce_scatter_unused_params", None)
    if since_2_13 is not None:
        since_2_13(True)
    for group in _groups(_state(unit)):

        def post_backward(*_: Any, group: Any = group) -> None:
            if group.reduce_grads:
                _note(unit, group, "reduced")
            found = [(p, whole) for p in group.fsdp_params if (whole := getattr(p, _WHOLE, None)) is not None]
            if not (found or group.reduce_grads):
                return  # no forward has gathered it, so it has no gradient to keep
            gathered = found if group.reduce_grads else []
            summed = any(p.unsharded_accumulated_grad is not None for p, _ in gathered)  # in the dtype to reduce
            for p, whole in gathered:
                if summed and whole.grad is not None and p.unsharded_accumulated_grad is None:
                    p.to_accumulated_grad_if_needed()  # its first gradient of the step
                is_missing = whole.grad is None and p.unsharded_accumulated_grad is None
                is_first = p.sharded_param.grad is None and group._partial_reduce_output is None
                p.is_unused = is_missing and (is_first or p.is_unused)
                if is_missing and whole.requires_grad and summed:
                    p.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=p.reduce_dtype)
                elif is_missing and whole.requires_grad and since_2_13 is None:
                    whole.grad = torch.zeros_like(whole)
            type(group).post_backward(group)

        group.post_backward = post_backward
        for p in group.fsdp_params:
            p.is_unused = False


def note_gathers(unit: FSDPModule) -> None:
    """Note each gather of a unit for `take_order`, as `reduce_unused` notes each reduction."""
    for group in _groups(_state(unit)):

        def unshard(*args: Any, group: Any = group, **how: Any) -> None:
            before = group._all_gather_result
            type(group).unshard(group, *args, **how)
            if group._all_gather_result not in (before, None):
                _note(unit, group, "gathered")

        group.unshard = unshard


def _note(unit: FSDPModule, group: Any, what: str) -> None:
    context = _state(unit)._state_ctx
    order = f"{vars(context).get('order', 0)} {what} {group.fsdp_params[0]._param_fqn}"
    context.order = zlib.crc32(order.encode())


def take_order(units: Iterable[FSDPModule]) -> list[int]:
    """Return, for each root, a number of the order of its gathers and reductions since the last call."""
    return [vars(context).pop("order", 0) for context in _contexts(units)]


def take_unused(units: Iterable[FSDPModule]) -> set[nn.Parameter]:
    """Return the sharded parameters that had no gradient on this rank since the last call, but zeros in its place."""
    unused = [p for _, p in records(units) if getattr(p, "is_unused", False)]
    for p in unused:
        p.is_unused = False
    return {p.sharded_param for p in unused}


def _state(unit: FSDPModule) -> Any:
    return unit._get_fsdp_state()


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):  # since torch 2.13; torch names no version
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _contexts(units: Iterable[FSDPModule]) -> Iterator[Any]:
    found = {id(context): context for context in (_state(unit)._state_ctx for unit in units)}
    return (context for context in found.values() if context.all_states)


def _groups_of(context: Any) -> list[Any]:
    return [group for state in context.all_states for group in _groups(state)]


def _has_failed(context: Any) -> bool:
    return context.post_backward_final_callback_queued and not autograd.in_backward()


_WHOLE = "_unsharded_param"  # torch sets it at the first gather


def whole_parameter(p: Any) -> nn.Parameter | None:
    """Return the gathered parameter, or None before the first gather. Its memory may be freed at the moment."""
    return getattr(p, _WHOLE, None)
