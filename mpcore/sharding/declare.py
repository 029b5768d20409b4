"""Describe which part of a logical tensor a rank holds: `Shard` for one dimension, `Sharding` for the tensor.

A layer declares a `Sharding` for each of its parameters in `layer.shardings`.
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
        runs: one entry per rank: the index ranges `(start, end)` of the dimension that the rank holds, in storage
            order. An empty entry means that the rank holds nothing. Ranges of different ranks may overlap: those ranks
            hold replicas, and their gradients must be all-reduced.
    """

    axis: Axis
    dim: int
    runs: tuple[tuple[Run, ...], ...]

    @property
    def mine(self) -> tuple[Run, ...]:
        """The index ranges that this rank holds."""
        return self.runs[self.axis.rank]

    def size(self, rank: int) -> int:
        """Return how many indices of the dimension `rank` holds."""
        return sum(end - start for start, end in self.runs[rank])

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        """The indices that more than one rank holds, in ascending order."""
        seen: set[int] = set()
        twice: set[int] = set()
        for runs in self.runs:
            held = {i for start, end in runs for i in range(start, end)}
            twice |= seen & held
            seen |= held
        return tuple(sorted(twice))

    @cached_property
    def owned(self) -> tuple[bool, ...]:
        """For each index that this rank holds: True if no lower rank holds the same index."""
        lower = {i for runs in self.runs[: self.axis.rank] for start, end in runs for i in range(start, end)}
        return tuple(i not in lower for start, end in self.mine for i in range(start, end))

    @cached_property
    def owned_runs(self) -> tuple[Run, ...]:
        """The local index ranges that no lower rank holds, counted from this rank's first index."""
        kept = [i if mine else None for i, mine in enumerate(self.owned)]
        return tuple((start, start + length) for start, _, length in _runs(kept))

    @cached_property
    def replica_runs(self) -> tuple[tuple[int, int, int], ...]:
        """The ranges of this rank's indices that other ranks hold too: (local start, start in `replicated`, length)."""
        slot = {index: i for i, index in enumerate(self.replicated)}
        return tuple(_runs([slot.get(index) for start, end in self.mine for index in range(start, end)]))


def _runs(places: Sequence[int | None]) -> Iterator[tuple[int, int, int]]:
    for _, found in itertools.groupby(enumerate(places), lambda pair: None if pair[1] is None else pair[1] - pair[0]):
        (index, place), *more = found
        if place is not None:
            yield index, place, 1 + len(more)


@dataclass(frozen=True)
class Sharding:
    """Which part of a logical tensor this rank's local tensor holds, and over which axes its gradient must be reduced.

    Args:
        shape: the logical shape.
        shards: the sharded dimensions, each with its axis. Over all other axes the tensor is replicated.
        partial: the axes over which the tensor is replicated but its gradient is partial, so that it must be
            all-reduced. Example: the weight of a norm that sees only this rank's part of the sequence.
        blocks: sizes of the matrices that are concatenated in the tensor, such as Q, K and V. (): one matrix.
        block_dim: the dimension along which `blocks` are concatenated.
        added: the axes in `partial` that `add_partial` declared. They hold for every module that uses the parameter.
        data: the axis over which `shard_data_parallel` sharded or replicated the parameter. None: `shard_data_parallel`
            was not called on it.
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
        """The shape of this rank's local tensor."""
        shape = list(self.shape)
        for shard in self.shards:
            shape[shard.dim] = shard.size(shard.axis.rank)
        return tuple(shape)

    @cached_property
    def pending(self) -> tuple[Axis, ...]:
        """The axes over which `mpcore.gradients.reduce_gradients` sums the gradient.

        These are the axes in `partial`, and the axes in `shards` on which several ranks hold the same indices.
        """
        axes = (*self.partial, *(shard.axis for shard in self.shards if shard.replicated))
        return tuple(axis for axis in axes if axis.size > 1)

    def data_axis(self, mesh: Mesh) -> Axis:
        """Return the axis whose ranks hold the same tensor and see different data: the gradient is summed over it.

        It is `mesh.edp` for a tensor that is sharded over `mesh.ep`, `mesh.data` for every other tensor.
        """
        return mesh.edp if self._is_expert(mesh) else mesh.data

    def replica_axes(self, mesh: Mesh) -> tuple[Axis, ...]:
        """Return the axes besides `data_axis` on which other ranks hold the same elements."""
        over = self.partial if self._is_expert(mesh) else (mesh.tp, *self.partial)  # experts have their own etp
        cut = {shard.axis.key for shard in self.shards}
        return tuple(axis for axis in over if axis.key not in cut)

    def _is_expert(self, mesh: Mesh) -> bool:
        return any(shard.axis.key == mesh.ep.key for shard in self.shards)

    def take(self, full: Tensor) -> Tensor:
        """Return this rank's part of a logical tensor: a copy of `local_shape`, or `full` if nothing is sharded.

        Raises:
            ValueError: if `full` doesn't have the logical shape.
        """
        if tuple(full.shape) != self.shape:
            raise ValueError(f"a tensor of shape {tuple(full.shape)} is not the logical shape {self.shape}")
        for shard in self.shards:
            runs = shard.mine or ((0, 0),)  # torch.cat takes no empty list
            full = torch.cat([full.narrow(shard.dim, start, end - start) for start, end in runs], shard.dim)
        return full

    def assemble(self, local: Tensor) -> Tensor:
        """All-gather the logical tensor, contiguous, over the axes that shard it. All their ranks must call it."""
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
    """Refuse a parameter that is sharded over axes of another mesh: it would be unclear which ranks hold replicas."""
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
    """Shard a dimension over an axis: each rank holds one contiguous index range.

    Args:
        length: the size of the dimension.
        axis: the axis.
        dim: the dimension of the logical tensor.
        unit: the number of consecutive indices that must stay on one rank, such as the size of a head.

    Returns:
        The `Shard`. If the axis doesn't divide `length / unit`, the first ranks hold one unit more.

    Raises:
        ValueError: if `length` is not a multiple of `unit`.

    Example:
        >>> mpcore.sharding.cut(5, mpcore.Axis(size=2, rank=0), 0).runs  # rows 0 to 2 on rank 0, rows 3 and 4 on rank 1
        (((0, 3),), ((3, 5),))
    """
    return cut_blocks((length,), axis, dim, (unit,))


def cut_blocks(lengths: Sequence[int], axis: Axis, dim: int, units: Sequence[int]) -> Shard:
    """Shard a dimension that concatenates several blocks, such as gate and up. Each block is sharded over the axis.

    Args:
        lengths: the size of each block.
        axis: the axis.
        dim: the dimension of the logical tensor.
        units: for each block, the number of consecutive indices that must stay on one rank.
    """
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
