"""Floor 2: where a parameter's local tensor lies in its logical tensor.

A layer declares this once for each of its parameters, in `layer.shardings`. Initialisation, gradient sums, gradient
norm, state dicts and checkpoints all read that one declaration; none of them looks at a parameter's name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from mpcore.collectives import shard_sizes, start_all_gather, wait
from mpcore.mesh import Axis, Mesh

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Run = tuple[int, int]


@dataclass(frozen=True)
class Shard:
    """How one dimension of a logical tensor is dealt out over an axis.

    Args:
        axis: the axis.
        dim: the dimension of the logical tensor.
        runs: for each rank the runs `(start, end)` of the dimension that it holds, in the order it holds them. Runs of
            different ranks may overlap: then those ranks hold replicas, and their gradients are terms of one sum.
    """

    axis: Axis
    dim: int
    runs: tuple[tuple[Run, ...], ...]

    @property
    def mine(self) -> tuple[Run, ...]:
        """The runs that this rank holds."""
        return self.runs[self.axis.rank]

    def size(self, rank: int) -> int:
        """How many indices of the dimension `rank` holds."""
        return sum(end - start for start, end in self.runs[rank])

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        """The indices that more than one rank holds, in order."""
        seen: set[int] = set()
        twice: set[int] = set()
        for runs in self.runs:
            held = {i for start, end in runs for i in range(start, end)}
            twice |= seen & held
            seen |= held
        return tuple(sorted(twice))

    @cached_property
    def owned(self) -> tuple[bool, ...]:
        """For each index this rank holds: whether no lower rank holds it too."""
        lower = {i for runs in self.runs[: self.axis.rank] for start, end in runs for i in range(start, end)}
        return tuple(i not in lower for start, end in self.mine for i in range(start, end))

    @cached_property
    def owned_runs(self) -> tuple[Run, ...]:
        """The runs of what this rank holds, counted from its first index, that no lower rank holds too."""
        kept = [i if mine else None for i, mine in enumerate(self.owned)]
        return tuple((start, start + length) for start, _, length in _runs(kept))

    @cached_property
    def replica_runs(self) -> tuple[tuple[int, int, int], ...]:
        """The replicas that this rank holds in runs: where in what it holds, where in `replicated`, how many."""
        slot = {index: i for i, index in enumerate(self.replicated)}
        return tuple(_runs([slot.get(index) for start, end in self.mine for index in range(start, end)]))


def _runs(places: Sequence[int | None]) -> Iterator[tuple[int, int, int]]:
    """The index, the place and the length of each run of places that follow each other."""
    for _, found in groupby(enumerate(places), lambda pair: None if pair[1] is None else pair[1] - pair[0]):
        (index, place), *more = found
        if place is not None:
            yield index, place, 1 + len(more)


@dataclass(frozen=True)
class Sharding:
    """Where a local tensor lies in its logical tensor, and which axes its gradient is still to be summed over.

    Args:
        shape: the logical shape.
        shards: the sharded dimensions, each with its axis. Over all other axes the tensor is replicated.
        partial: axes over which the tensor is replicated while each rank's gradient is one term of a sum, such as the
            weight of a norm that sees only this rank's part of the sequence.
        blocks: lengths of the matrices that the tensor is made of, such as Q, K and V; (): it is one.
        block_dim: the dimension that they follow each other in.
    """

    shape: tuple[int, ...]
    shards: tuple[Shard, ...] = ()
    partial: tuple[Axis, ...] = ()
    blocks: tuple[int, ...] = ()
    block_dim: int = 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's tensor."""
        shape = list(self.shape)
        for shard in self.shards:
            shape[shard.dim] = shard.size(shard.axis.rank)
        return tuple(shape)

    def data_axis(self, mesh: Mesh) -> Axis:
        """The axis on which the tensor is replicated while its ranks see other data: their gradients are to be summed.

        That is `mesh.edp` for what is sharded over the experts' axis, and `mesh.data` for all else.
        """
        return mesh.edp if self._is_expert(mesh) else mesh.data

    def replica_axes(self, mesh: Mesh) -> tuple[Axis, ...]:
        """The axes besides `data_axis` on which other ranks hold the same elements."""
        over = self.partial if self._is_expert(mesh) else (mesh.tp, *self.partial)  # experts have their own etp
        return tuple(axis for axis in over if not any(_same_axis(axis, shard.axis) for shard in self.shards))

    def _is_expert(self, mesh: Mesh) -> bool:
        return any(_same_axis(shard.axis, mesh.ep) for shard in self.shards)

    def take(self, full: Tensor) -> Tensor:
        """This rank's part of the logical tensor, in a tensor of its own unless that is all of it."""
        if tuple(full.shape) != self.shape:
            raise ValueError(f"a tensor of shape {tuple(full.shape)} is not the logical shape {self.shape}")
        for shard in self.shards:
            full = torch.cat([full.narrow(shard.dim, start, end - start) for start, end in shard.mine], shard.dim)
        return full

    def assemble(self, local: Tensor) -> Tensor:
        """The logical tensor, gathered over the axes it is sharded on: a collective, on all of their ranks."""
        for shard in reversed(self.shards):
            if shard.axis.size == 1:
                parts = [local.movedim(shard.dim, 0)]
            else:
                longest = max(shard.size(rank) for rank in range(shard.axis.size))
                front = local.movedim(shard.dim, 0)
                front = torch.cat([front, front.new_zeros(longest - len(front), *front.shape[1:])])
                parts = list(wait(start_all_gather(front, shard.axis)).split(longest))
            full = parts[0].new_empty(self.shape[shard.dim], *parts[0].shape[1:])
            for part, runs in zip(parts, shard.runs, strict=True):
                offset = 0
                for start, end in runs:
                    full[start:end] = part[offset : offset + end - start]
                    offset += end - start
            local = full.movedim(0, shard.dim)
        return local.contiguous()


def _same_axis(a: Axis, b: Axis) -> bool:
    return a.group is b.group and (a.group is not None or a.name == b.name)  # the group says which ranks they are


def cut(length: int, axis: Axis, dim: int, unit: int = 1) -> Shard:
    """A dimension of `length` cut in one run for each rank, no `unit` torn apart."""
    return cut_blocks((length,), axis, dim, (unit,))


def cut_blocks(lengths: Sequence[int], axis: Axis, dim: int, units: Sequence[int]) -> Shard:
    """A dimension made of blocks, such as gate and up, each of which is cut over the axis."""
    runs: list[list[Run]] = [[] for _ in range(axis.size)]
    offset = 0
    for length, unit in zip(lengths, units, strict=True):
        start = offset
        for rank, size in enumerate(shard_sizes(length, axis.size, unit)):
            runs[rank].append((start, start + size))
            start += size
        offset += length
    return Shard(axis, dim, tuple(tuple(r) for r in runs))


# --- of a whole model ---------------------------------------------------------------------------------------------


def owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """For each parameter, tied ones once: its full name, the module that holds it, its name there, the parameter.

    Raises:
        ValueError: if what a module declares is no parameter of it any more, as when torch parametrizes it.
    """
    modules = dict(model.named_modules())
    for prefix, module in modules.items():
        for leaf in getattr(module, "shardings", ()):
            if leaf not in module._parameters:
                raise ValueError(
                    f"{prefix}.{leaf} is no parameter any more, and {type(module).__name__} declares how it is cut and "
                    f"summed: in place of parametrize or weight_norm write a ParallelModule that declares the factors, "
                    f"or merge them (remove_parametrizations)".lstrip(".")
                )
    for name, parameter in model.named_parameters():
        prefix, _, leaf = name.rpartition(".")
        yield name, modules[prefix], leaf, parameter


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """For each buffer in the state dict: its full name, the module that holds it, its name there, the buffer."""
    for prefix, module in model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf not in module._non_persistent_buffers_set:
                yield f"{prefix}.{leaf}".lstrip("."), module, leaf, buffer


def shardings(model: nn.Module) -> dict[str, Sharding]:
    """The declaration of every parameter by full name; a parameter that nobody declares is replicated."""
    return {name: sharding_of(module, leaf, p) for name, module, leaf, p in owners(model)}


def sharding_of(module: nn.Module, leaf: str, parameter: Tensor) -> Sharding:
    """What `module` declares of its parameter `leaf`."""
    declared: Mapping[str, Sharding] = getattr(module, "shardings", {})
    return declared.get(leaf) or Sharding(tuple(parameter.shape))


def add_partial(module: nn.Module, leaf: str, axis: Axis) -> None:
    """Declare that the gradient of `module`'s parameter `leaf` is, besides all else, a pending sum over `axis`."""
    if axis.size > 1:
        old = sharding_of(module, leaf, getattr(module, leaf))
        declared = {**getattr(module, "shardings", {})}
        declared[leaf] = replace(old, partial=(*old.partial, axis))
        module.shardings = declared  # type: ignore[assignment]


def is_dtensor(x: Tensor) -> TypeGuard[DTensor]:
    """Whether data parallelism sharded `x`. DTensor takes 0.4 s to import: where nobody did, nothing is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local_tensor(x: Tensor) -> Tensor:
    """The tensor this rank holds of a DTensor; a plain tensor is itself."""
    return x.to_local() if is_dtensor(x) else x


def data_run(x: DTensor) -> tuple[int, int]:
    """The run of dimension 0 that this rank holds of a parameter that `fully_shard` cut."""
    coordinate = x.device_mesh.get_coordinate()  # not get_local_rank: torch's caches may return a mesh of ended groups
    assert coordinate is not None
    size = -(-x.shape[0] // x.device_mesh.size(x.device_mesh.ndim - 1))
    start = min(coordinate[-1] * size, x.shape[0])
    return start, start + x.to_local().shape[0]


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
    """The logical tensor of a parameter or gradient, also where data parallelism shards it: a collective."""
    x = x.full_tensor() if is_dtensor(x) else x
    return sharding.assemble(x.detach())


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter in its logical shape, by full name, gathered to every rank: a collective on all ranks.

    Tied parameters are there once. A model cut in pipeline stages gives its own stage's parameters. All are copies.

    Raises:
        ValueError: before anything is sent, naming a parameter that is offloaded.
    """
    declared = shardings(model)
    for name, parameter in model.named_parameters():
        check_present(name, parameter)
    state = {}
    for name, parameter in model.named_parameters():
        full = full_tensor(parameter, declared[name])
        own = full.data_ptr() == local_tensor(parameter).data_ptr()  # what no other rank holds a part of
        state[name] = full.clone() if own else full
    return state


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy each parameter's part of a logical state dict into the model. No communication.

    Args:
        model: a model whose parameters are plain tensors.
        state: logical tensors by full name; may hold more than this model's stage needs.

    Raises:
        ValueError: before any parameter changes, naming what is missing, has another shape or is offloaded.
    """
    declared = shardings(model)
    for name, parameter in model.named_parameters():
        check_present(name, parameter)
    for name, sharding in declared.items():
        if name not in state:
            raise ValueError(f"the state dict of {len(state)} tensors has no {name!r}")
        if tuple(state[name].shape) != sharding.shape:
            raise ValueError(f"{name} has shape {tuple(state[name].shape)}, the model needs {sharding.shape}")
    for name, parameter in model.named_parameters():
        parameter.copy_(declared[name].take(state[name]))
