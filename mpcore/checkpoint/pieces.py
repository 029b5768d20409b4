"""Compute which boxes of its logical tensor this rank holds of each tensor, from the layers' declarations.

A tensor is sharded twice: over tp as its layer declares (`mpcore.sharding`), then over data by `fully_shard`, along
dimension 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from mpcore.kernels.adamw import followed
from mpcore.mesh.axis import Axis, Mesh
from mpcore.sharding.declarations import declarations, named_modules, persistent_buffers, sharding_of
from mpcore.sharding.declare import Sharding
from mpcore.sharding.local import data_runs, is_dtensor, is_first_replica, lies_as, local_tensor
from mpcore.sharding.state_dict import check_present

Segment = tuple[int, int, int, bool]
"""A run of one dimension: start in the local tensor and in the logical one, length, and whether this rank writes it."""


@dataclass(frozen=True)
class Box:
    """A part of a local tensor that is a contiguous box of the logical tensor."""

    local: tuple[int, ...]  # where it begins in the local tensor
    start: tuple[int, ...]  # where it begins in the logical tensor
    shape: tuple[int, ...]
    owned: bool  # whether this rank writes it

    def of(self, tensor: Tensor) -> Tensor:
        """Return the view of the local tensor that is this box."""
        for dim, (start, size) in enumerate(zip(self.local, self.shape, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor

    def of_logical(self, tensor: Tensor) -> Tensor:
        """Return the view of the logical tensor that is this box."""
        return tensor[tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))]


@dataclass(frozen=True)
class LocalTensor:
    """A tensor as this rank holds it."""

    name: str  # `model/NAME` or `optimizer/SLOT/NAME`
    tensor: Tensor  # the local tensor, sharing memory with the model or optimizer
    shape: tuple[int, ...]  # of the logical tensor
    boxes: tuple[Box, ...]  # of the logical tensor, that the local tensor consists of
    is_weight: bool = False  # not a buffer, and not the optimizer's
    replicas: tuple[Axis, ...] = ()  # on which other ranks hold the same local tensor, without the replicas of HSDP


def held_by_model(model: nn.Module, mesh: Mesh, masters: Mapping[Any, Tensor] | None = None) -> list[LocalTensor]:
    """Return the parameters (tied ones once) and persistent buffers of a model, as this rank holds them.

    A parameter that has a float32 master weight is replaced by it. So a checkpoint holds the same float32 values,
    whether the run computes in float32 or bfloat16, sharded or not.

    Args:
        masters: the master weights, by parameter. None: none.

    Raises:
        ValueError: if a module has an extra state, which is no tensor.
    """
    masters = masters or {}
    extra = [name for name, m in named_modules(model) if type(m).get_extra_state is not nn.Module.get_extra_state]
    if extra:
        raise ValueError(
            f"{len(extra)} modules have an extra state, such as {extra[0] or type(model).__name__}, that is lost: "
            f"keep the state in a buffer, or save what get_extra_state() returns yourself"
        )
    return [
        _held(f"model/{name}", masters.get(tensor, tensor), sharding, mesh, placed=tensor)
        for name, tensor, sharding in _tensors(model)
    ]


@torch.no_grad()
def check_finite(tensors: Iterable[tuple[str, Tensor, bool]], where: str) -> None:
    """Raise ValueError if a weight holds NaN or infinity, or another tensor NaN. A mask may hold infinity.

    Args:
        tensors: name, tensor, and whether it is a weight. A tensor of integers is not read, nor one on "meta".
    """
    parts = ((n, torch.view_as_real(x.resolve_conj()) if x.is_complex() else x, w) for n, x, w in tensors)
    named = [each for each in parts if each[1].is_floating_point() and each[1].numel() and not each[1].is_meta]
    ranges = [torch.stack(torch.aminmax(x if x.itemsize > 1 else x.float())).double() for _, x, _ in named]
    if not ranges:
        return
    found = torch.stack([each.to(ranges[0].device) for each in ranges]).tolist()  # waits for a device once
    for (name, x, is_weight), values in zip(named, found, strict=True):
        if any(math.isnan(value) or (is_weight and math.isinf(value)) for value in values):
            raise ValueError(
                f"{where}: {name} {tuple(x.shape)} holds NaN or infinity (from {values[0]:g} to {values[1]:g}): go "
                f"back to an earlier checkpoint"
            )


def masters_of(optimizer: torch.optim.Optimizer | None) -> dict[Tensor, Tensor]:
    """Return the float32 master weights that an optimizer keeps, by parameter.

    A value that was written to a 16-bit parameter since the last step is copied into its master weight first.
    """
    states = {} if optimizer is None else optimizer.state
    found = {p: state["master"] for p, state in states.items() if "master" in state}
    for p, master in found.items():
        held = local_tensor(master.detach())
        held.copy_(followed(held, local_tensor(p.detach()).to(held.device)))
    return found


def held_by_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh) -> list[LocalTensor]:
    """Return every tensor of the optimizer's state, as this rank holds it."""
    named = {id(tensor): (name, sharding) for name, tensor, sharding in _tensors(model)}
    held = []
    for parameter in itertools.chain(*(group["params"] for group in optimizer.param_groups)):
        name, sharding = _known(named, parameter)
        for slot, value in optimizer.state.get(parameter, {}).items():
            if value is None or slot == "master":  # a master weight is saved as the model's parameter
                continue
            if not isinstance(value, Tensor):
                raise ValueError(f"the optimizer's {slot} of {name} is {value!r}: only tensors can be saved")
            held.append(held_slot(f"optimizer/{slot}/{name}", value, parameter, sharding, mesh))
    return held


def held_slot(name: str, value: Tensor, parameter: Tensor, sharding: Sharding, mesh: Mesh) -> LocalTensor:
    """Return a tensor of the optimizer's state as this rank holds it.

    The tensor is sharded as its parameter, or is a scalar that belongs to the full parameter.
    """
    if lies_as(value, parameter):
        return _held(name, value, sharding, mesh, placed=parameter)
    if value.dim() == 0 and not is_dtensor(value):
        return _held(name, value, replace(sharding, shape=(), shards=()), mesh)  # one number on each of its ranks
    raise ValueError(f"{name} has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a local tensor with the placement of a parameter: a DTensor if the parameter is one, else unchanged."""
    if not is_dtensor(parameter):
        return local
    placed = {"device_mesh": parameter.device_mesh, "placements": parameter.placements}
    return DTensor.from_local(local, **placed, run_check=False, shape=parameter.shape, stride=parameter.stride())


def parameter_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups as JSON values: `{"options": {...}, "params": [names], "kind": class}`.

    The class is the one of torch or mpcore that the optimizer's class extends, if it extends one. A group of matrices
    that Muon updates also has `"blocks": {name: sizes}` for those that it splits.
    """
    inner = vars(optimizer).get("optimizer", optimizer)  # a wrapper counts as what it wraps
    classes = (c for c in type(inner).__mro__ if c.__module__.startswith(("torch.optim.", "mpcore.optim.")))
    kind = next((c for c in classes if c is not torch.optim.Optimizer), type(inner)).__name__
    named = {id(tensor): (name, sharding) for name, tensor, sharding in _tensors(model)}
    groups, blocks_of = [], getattr(optimizer, "blocks_of", None)
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        options = {n: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for n, v in options.items()}
        names = {_known(named, p)[0]: p for p in group["params"]}
        groups.append({"options": options, "params": list(names), "kind": kind})
        if blocks_of is not None and group["muon"]:
            split = {name: list(blocks_of(p)) for name, p in names.items()}
            groups[-1]["blocks"] = {name: sizes for name, sizes in split.items() if sizes}
    return groups


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, Sharding]]:
    yield from declarations(model)
    for name, module, leaf, buffer in persistent_buffers(model):
        yield name, buffer, sharding_of(module, leaf, buffer)


def _known(named: dict[int, tuple[str, Sharding]], parameter: Tensor) -> tuple[str, Sharding]:
    if id(parameter) not in named:
        raise ValueError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is none of the model's: make the "
            f"optimizer after the model is sharded, or make it a parameter of the model"
        )
    return named[id(parameter)]


def _held(name: str, tensor: Tensor, sharding: Sharding, mesh: Mesh, placed: Tensor | None = None) -> LocalTensor:
    placed = tensor if placed is None else placed
    if tuple(placed.shape) != sharding.local_shape:
        raise ValueError(f"{name} has shape {tuple(placed.shape)}, declared is {sharding.local_shape} on this rank")
    check_present(name, tensor)
    dims = [[(0, 0, size, True)] for size in sharding.shape]
    for shard in sharding.shards:
        dims[shard.dim] = _declared(shard.mine, shard.owned)
    replicas = list(sharding.replica_axes(mesh))
    first = True
    if is_dtensor(placed):
        dims, first = _over_data(name, placed, dims)
    else:
        replicas.append(sharding.data_axis(mesh))
    replicas = sorted({axis.key: axis for axis in replicas if axis.size > 1}.values(), key=lambda axis: axis.order)
    first = first and all(axis.rank == 0 for axis in replicas)
    boxes = []
    for segments in itertools.product(*dims):
        local, start, shape, owned = zip(*segments, strict=True) if segments else ((), (), (), ())
        if 0 not in shape:
            boxes.append(Box(local, start, shape, first and all(owned)))
    is_weight = isinstance(placed, nn.Parameter) and name.startswith("model/")
    return LocalTensor(name, local_tensor(tensor).detach(), sharding.shape, tuple(boxes), is_weight, tuple(replicas))


def _declared(runs: tuple[tuple[int, int], ...], owned: tuple[bool, ...]) -> list[Segment]:
    segments, local = [], 0
    for start, end in runs:
        held = zip(range(start, end), owned[local : local + end - start], strict=True)
        for mine, indices in itertools.groupby(held, key=lambda pair: pair[1]):
            begin, *rest = (index for index, _ in indices)
            segments.append((local + begin - start, begin, 1 + len(rest), mine))
        local += end - start
    return segments


def _over_data(name: str, tensor: DTensor, dims: list[list[Segment]]) -> tuple[list[list[Segment]], bool]:
    """Clip the segments to this rank's shard of `fully_shard`."""
    for placement in tensor.placements:
        if not placement.is_replicate() and type(placement) is not Shard:  # torch's _StridedShard is a Shard too
            raise ValueError(f"{name} is placed as {placement}: only shards and replicas over data can be saved")
    runs = data_runs(tensor)
    clipped: list[list[Segment]] = []
    for segments, (start, end) in zip(dims, runs, strict=True):
        cut = [(max(local, start), min(local + size, end), logical - local, owned)
               for local, logical, size, owned in segments]  # fmt: skip
        clipped.append([(a - start, a + shift, b - a, owned) for a, b, shift, owned in cut if a < b])
    want = tuple(end - start for start, end in runs)
    if tuple(tensor.to_local().shape) != want:
        raise ValueError(f"{name} has shape {tuple(tensor.to_local().shape)} on this data rank, expected {want}")
    return clipped, is_first_replica(tensor)
