"""Where a parameter's local tensor lies in its logical tensor.

A layer declares this once for each of its parameters, in `layer.shardings`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from mpcore.collectives import shard_sizes, start_all_gather, wait
from mpcore.mesh.axis import Axis, Mesh, check_axis
from mpcore.sharding.local import is_dtensor

Run = tuple[int, int]


@dataclass(frozen=True)
class Shard:
    """How one dimension of a logical tensor is sharded over an axis.

    Args:
        axis: the axis.
        dim: the dimension of the logical tensor.
        runs: for each rank the runs `(start, end)` of the dimension that it holds, in that order; () for a rank that
            holds nothing. Runs of different ranks may overlap: those ranks hold replicas, and their gradients are terms
            of one sum.
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
    for _, found in itertools.groupby(enumerate(places), lambda pair: None if pair[1] is None else pair[1] - pair[0]):
        (index, place), *more = found
        if place is not None:
            yield index, place, 1 + len(more)


@dataclass(frozen=True)
class Sharding:
    """The place of a local tensor in its logical tensor, and the axes over which its gradient must be summed.

    Args:
        shape: the logical shape.
        shards: the sharded dimensions, each with its axis. Over all other axes the tensor is replicated.
        partial: axes over which the tensor is replicated while each rank's gradient is one term of a sum, such as the
            weight of a norm that sees only this rank's part of the sequence.
        blocks: lengths of the matrices that the tensor is made of, such as Q, K and V; (): it is one.
        block_dim: the dimension that they follow each other in.
        added: those of `partial` that hold for every use of the parameter, whichever module's: what `add_partial` said.
        data: the axis that `shard_data_parallel` sharded or replicated it over; None: it wasn't called.
    """

    shape: tuple[int, ...]
    shards: tuple[Shard, ...] = ()
    partial: tuple[Axis, ...] = ()
    blocks: tuple[int, ...] = ()
    block_dim: int = 0
    added: tuple[Axis, ...] = field(default=(), compare=False)
    data: Axis | None = field(default=None, compare=False)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's tensor."""
        shape = list(self.shape)
        for shard in self.shards:
            shape[shard.dim] = shard.size(shard.axis.rank)
        return tuple(shape)

    @cached_property
    def pending(self) -> tuple[Axis, ...]:
        """The axes over which `mpcore.reduce_gradients` sums the gradient: `partial`, and those that hold replicas."""
        axes = (*self.partial, *(shard.axis for shard in self.shards if shard.replicated))
        return tuple(axis for axis in axes if axis.size > 1)

    def data_axis(self, mesh: Mesh) -> Axis:
        """The axis on which the tensor is replicated while its ranks see other data: their gradients are to be summed.

        That is `mesh.edp` for what is sharded over the experts' axis, and `mesh.data` for all else.
        """
        return mesh.edp if self._is_expert(mesh) else mesh.data

    def replica_axes(self, mesh: Mesh) -> tuple[Axis, ...]:
        """The axes besides `data_axis` on which other ranks hold the same elements."""
        over = self.partial if self._is_expert(mesh) else (mesh.tp, *self.partial)  # experts have their own etp
        cut = {shard.axis.key for shard in self.shards}
        return tuple(axis for axis in over if axis.key not in cut)

    def _is_expert(self, mesh: Mesh) -> bool:
        return any(shard.axis.key == mesh.ep.key for shard in self.shards)

    def take(self, full: Tensor) -> Tensor:
        """This rank's part of the logical tensor, in a tensor of its own unless that is all of it."""
        if tuple(full.shape) != self.shape:
            raise ValueError(f"a tensor of shape {tuple(full.shape)} is not the logical shape {self.shape}")
        for shard in self.shards:
            runs = shard.mine or ((0, 0),)  # torch.cat takes no empty list
            full = torch.cat([full.narrow(shard.dim, start, end - start) for start, end in runs], shard.dim)
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


def check_lies_on(name: str, parameter: Tensor, sharding: Sharding, mesh: Mesh) -> None:
    """Refuse a parameter that lies on axes of another mesh: whose replica is whose would be guessed.

    Raises:
        ValueError: naming it and the axis, or that a DTensor isn't of `shard_data_parallel`.
    """
    if is_dtensor(parameter) and sharding.data is None and parameter.device_mesh.size() > 1:
        raise ValueError(
            f"{name} is a DTensor over {parameter.device_mesh.size()} ranks that shard_data_parallel didn't make: cut "
            f"it over tp by parallelize or mpcore's layers, over data by shard_data_parallel"
        )
    for axis in (*(shard.axis for shard in sharding.shards), sharding.data):
        if axis is not None and axis.size > 1:
            namesake = getattr(mesh, axis.role, None) if axis.role else None
            there = [namesake] if namesake is not None else mesh.axes.values()  # of one's own: any
            if all(axis.group is not one.group for one in there):
                raise ValueError(
                    f"{name} lies on the axis {axis.name} ({axis.size} ranks) of another mesh than the one given: give "
                    f"the mesh that its layers were made with"
                )


def cut(length: int, axis: Axis, dim: int, unit: int = 1) -> Shard:
    """Shard a dimension of `length` in one run for each rank. A `unit` is never split."""
    return cut_blocks((length,), axis, dim, (unit,))


def cut_blocks(lengths: Sequence[int], axis: Axis, dim: int, units: Sequence[int]) -> Shard:
    """Shard a dimension made of blocks, such as gate and up: each block is sharded over the axis."""
    check_axis(axis)
    runs: list[list[Run]] = [[] for _ in range(axis.size)]
    offset = 0
    for length, unit in zip(lengths, units, strict=True):
        start = offset
        for rank, size in enumerate(shard_sizes(length, axis.size, unit)):
            runs[rank].append((start, start + size))
            start += size
        offset += length
    return Shard(axis, dim, tuple(tuple(r) for r in runs))
