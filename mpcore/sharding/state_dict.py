"""Gather the full state dict of a sharded model, and load a full state dict into any layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from mpcore.mesh.agreement import check_same
from mpcore.sharding.declarations import declarations, persistent_buffers, plain_name
from mpcore.sharding.declare import Sharding
from mpcore.sharding.local import data_run, is_dtensor, local_tensor, reshard


def check_present(name: str, x: Tensor) -> None:
    """Refuse a parameter without memory on the device: torch would read and write outside of its storage."""
    x = local_tensor(x)
    if x.numel() and not x.untyped_storage().nbytes():
        raise ValueError(
            f"{name} has {x.numel()} elements and 0 bytes of memory here: its block is offloaded; do this within "
            f"`with offload.here():`, of what offload_parameters returned"
        )


def full_tensor(x: Tensor, sharding: Sharding) -> Tensor:
    """All-gather the logical tensor of a parameter or gradient, over tp and over data. All ranks must call it.

    Args:
        x: this rank's parameter or gradient, a DTensor or a plain tensor.
        sharding: the parameter's declaration.

    Returns:
        A tensor of shape `sharding.shape`. If nothing is sharded, the tensor shares the memory of `x`.
    """
    x = x.full_tensor() if is_dtensor(x) else x
    return sharding.assemble(x.detach())


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Gather the state dict of the unsharded model on every rank. All ranks must call it.

    Args:
        model: the model, or this rank's pipeline stage of it.

    Returns:
        A copy of every parameter in its logical shape (a tied parameter under each of its names), and of this rank's
        persistent buffers. A pipeline stage returns only its own tensors. The parts of names that `torch.compile` and
        `checkpoint_wrapper` add are removed. Each tensor has the dtype of the parameter: with precision="bfloat16"
        shards of ZeRO are float32 masters, other parameters are bfloat16. A checkpoint holds all masters.

    Raises:
        ValueError: if a parameter is offloaded, before any communication. The message names the parameter.

    Example:
        >>> model = mpcore.ColumnParallelLinear(4, 8)
        >>> mpcore.full_state_dict(model)["weight"].shape  # the same for every tp
        torch.Size([8, 4])
    """
    reshard(model)  # a forward may have left copies, in another dtype
    held = list(declarations(model))
    for name, parameter, _ in held:
        check_present(name, parameter)
    axes = [axis for _, _, of in held for axis in (*(shard.axis for shard in of.shards), of.data) if axis is not None]
    for axis in {axis.key: axis for axis in axes if axis.size > 1}.values():  # name a rank that doesn't call it
        check_same("call of full_state_dict", "", axis)
    state = {}
    for name, parameter, sharding in held:
        full = full_tensor(parameter, sharding)
        own = full.data_ptr() == local_tensor(parameter).data_ptr()  # not gathered: still the parameter's memory
        state[name] = full.clone() if own else full
    state |= {name: buffer.detach().clone() for name, _, _, buffer in persistent_buffers(model)}
    return state | {name: state[first] for first, *others in all_names(model) for name in others}


def all_names(model: nn.Module) -> Iterable[list[str]]:
    """Yield all names of each tensor in the state dict, the first name first."""
    names: dict[int, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, x in itertools.chain(module._parameters.items(), module._buffers.items()):
            if x is not None and leaf not in module._non_persistent_buffers_set:
                names.setdefault(id(x), []).append(plain_name(f"{prefix}.{leaf}".lstrip(".")))
    return names.values()


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the state dict of the unsharded model: each rank copies its shards, and persistent buffers.

    There is no communication: every rank passes the full tensors.

    Args:
        model: the model, or this rank's stage of it, before or after `shard_data_parallel`. Parameters that a forward
            left gathered are resharded first.
        state: the full tensors, by full name. A tied parameter may have any of its names. Entries that the model
            doesn't have are ignored.

    Raises:
        ValueError: before any value is copied, if a tensor is missing, has another shape, is offloaded, is still
            gathered by a stage that was sharded separately, or is tied and has two values. The message names it.

    Example:
        >>> model = mpcore.ColumnParallelLinear(4, 8)
        >>> mpcore.load_full_state_dict(model, torch.nn.Linear(4, 8).state_dict())
    """
    reshard(model)  # a value copied into a gathered parameter would be lost at the next step
    held, every = list(declarations(model)), {names[0]: names for names in all_names(model)}
    buffers = {name: buffer for name, _, _, buffer in persistent_buffers(model) if name in every}  # tied ones once
    for name, parameter, sharding in held:
        check_present(name, parameter)
        over = sharding.data
        pending = [axis.key for axis in sharding.partial]
        if over is not None and over.size > 1 and not is_dtensor(parameter) and over.key not in pending:
            raise ValueError(f"{name} is a gathered copy of {over.size} ranks' shards: reshard the stages first")
    given: dict[str, Tensor] = {}
    for first, names in every.items():
        if there := [state[name] for name in names if name in state]:
            given[first] = there[0]
        if not all(torch.equal(other, there[0]) for other in there[1:]):
            both = " and ".join(names)
            raise ValueError(f"{both} differ in the state dict, and are one tensor in the model: untie it, or pass one")
    shapes = {name: sharding.shape for name, _, sharding in held}
    for name, shape in (shapes | {name: tuple(buffer.shape) for name, buffer in buffers.items()}).items():
        if name not in given:
            known = {*itertools.chain(*every.values())}
            others = ", ".join(itertools.islice((each for each in state if each not in known), 3))
            others = f"; it has names that the model hasn't: {others}" if others else ""
            raise ValueError(f"the state dict of {len(state)} tensors has no {name!r}{others}")
        if tuple(given[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(given[name].shape)}, the model needs {shape}")
    for name, parameter, sharding in held:
        copy_part(parameter, sharding, given[name])
    for name, buffer in buffers.items():
        buffer.copy_(given[name])


def refuse_full_tensors(model: nn.Module, state: Mapping[str, Tensor], prefix: str, *_: object) -> None:
    """Raise ValueError if `load_state_dict` gets the logical tensor of a sharded parameter: a pre-hook of a module."""
    for name, parameter, sharding in declarations(model):
        x, here = state.get(prefix + name), tuple(local_tensor(parameter).shape)
        if isinstance(x, Tensor) and not is_dtensor(x) and tuple(x.shape) == sharding.shape != here:
            raise ValueError(
                f"load_state_dict got all of {name}, shape {sharding.shape}, and this rank holds a shard of shape "
                f"{here}: call mpcore.sharding.load_full_state_dict(model, state), which copies each rank's part"
            )


@torch.no_grad()
def copy_part(parameter: Tensor, sharding: Sharding, full: Tensor) -> None:
    """Copy this rank's part of a logical tensor into a parameter, which may be sharded over tp and over data."""
    part = sharding.take(full)
    if is_dtensor(parameter):
        start, end = data_run(parameter)
        part = part[start:end]
    local_tensor(parameter).copy_(part)
