"""Gather the state dict of the unsharded model, and load one into any layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from mpcore.sharding.declarations import declarations, persistent_buffers, plain_name
from mpcore.sharding.declare import Sharding
from mpcore.sharding.local import data_run, is_dtensor, local_tensor, reshard


def check_present(name: str, x: Tensor) -> None:
    """Refuse a parameter without memory here: torch would read and write past the end of what there is.

    Raises:
        ValueError: naming it, and the way out.
    """
    x = local_tensor(x)
    if x.numel() and not x.untyped_storage().nbytes():
        raise ValueError(
            f"{name} has {x.numel()} elements and 0 bytes of memory here: its block is offloaded; do this within "
            f"`with offload.here():`, of what offload_parameters returned"
        )


def full_tensor(x: Tensor, sharding: Sharding) -> Tensor:
    """Gather the logical tensor of a parameter or gradient, also from shards of data parallelism: a collective."""
    x = x.full_tensor() if is_dtensor(x) else x
    return sharding.assemble(x.detach())


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Gather the state dict of the unsharded model on every rank: a collective on all ranks.

    It has every parameter in its logical shape, tied ones under all their names, and this rank's persistent buffers. In
    a pipeline it has this rank's stage. All tensors are copies. Names have no prefixes of `torch.compile` and
    `checkpoint_wrapper`.

    Raises:
        ValueError: before anything is sent, naming a parameter that is offloaded.

    Example:
        >>> model = mpcore.ColumnParallelLinear(4, 8)
        >>> mpcore.full_state_dict(model)["weight"].shape  # the same for every tp
        torch.Size([8, 4])
    """
    held = list(declarations(model))
    for name, parameter, _ in held:
        check_present(name, parameter)
    state = {}
    for name, parameter, sharding in held:
        full = full_tensor(parameter, sharding)
        own = full.data_ptr() == local_tensor(parameter).data_ptr()  # what no other rank holds a part of
        state[name] = full.clone() if own else full
    state |= {name: buffer.detach().clone() for name, _, _, buffer in persistent_buffers(model)}
    return state | {name: state[first] for first, *others in all_names(model) for name in others}


def all_names(model: nn.Module) -> Iterable[list[str]]:
    """All names of each tensor in the state dict, the first one first."""
    names: dict[int, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, x in itertools.chain(module._parameters.items(), module._buffers.items()):
            if x is not None and leaf not in module._non_persistent_buffers_set:
                names.setdefault(id(x), []).append(plain_name(f"{prefix}.{leaf}".lstrip(".")))
    return names.values()


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the state dict of the unsharded model: each rank copies its shards, and persistent buffers.

    There is no communication: every rank passes the whole tensors.

    Args:
        model: the model, or this rank's stage of it, before or after `shard_data_parallel`. Parameters that a forward
            left gathered are resharded first.
        state: whole tensors by full name. A tied parameter may have any of its names; other tensors are ignored.

    Raises:
        ValueError: before any value is copied, naming the tensor, if one is missing, has another shape, is offloaded,
            or is still gathered by a stage that was sharded separately.

    Example:
        >>> model = mpcore.ColumnParallelLinear(4, 8)
        >>> mpcore.load_full_state_dict(model, torch.nn.Linear(4, 8).state_dict())
    """
    reshard(model)  # what is gathered is a copy, dropped before the next step
    held, buffers = list(declarations(model)), {}
    for name, _, _, buffer in persistent_buffers(model):
        buffers.setdefault(id(buffer), (name, buffer))
    for name, parameter, sharding in held:
        check_present(name, parameter)
        over = sharding.data
        pending = [axis.key for axis in sharding.partial]
        if over is not None and over.size > 1 and not is_dtensor(parameter) and over.key not in pending:
            raise ValueError(f"{name} is a gathered copy of {over.size} ranks' shards: reshard the stages first")
    given = {name: state[one] for name, *others in all_names(model) for one in (*others, name) if one in state}
    shapes = {name: sharding.shape for name, _, sharding in held}
    for name, shape in (shapes | {name: tuple(buffer.shape) for name, buffer in buffers.values()}).items():
        if name not in given:
            raise ValueError(f"the state dict of {len(state)} tensors has no {name!r}")
        if tuple(given[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(given[name].shape)}, the model needs {shape}")
    for name, parameter, sharding in held:
        copy_part(parameter, sharding, given[name])
    for name, buffer in buffers.values():
        buffer.copy_(given[name])


@torch.no_grad()
def copy_part(parameter: Tensor, sharding: Sharding, full: Tensor) -> None:
    """Copy this rank's part of a logical tensor into a parameter, sharded over data or not. No communication."""
    part = sharding.take(full)
    if is_dtensor(parameter):
        start, end = data_run(parameter)
        part = part[start:end]
    local_tensor(parameter).copy_(part)
