"""The binary tree that sums over an axis, and the mesh whose axes sum by it.

An axis of size t with the virtual degree V stands for V virtual shards, V/t on each rank. The tree has V leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpcore._torch.values import has_values
from mpcore.collectives import all_to_all_rows, shard_sizes, start_all_gather, wait
from mpcore.mesh.agreement import check_same
from mpcore.mesh.axis import Axis, Mesh, check_mesh


def tree_sum(parts: Iterable[Tensor]) -> Tensor:
    """Sum tensors by a binary tree of neighbours: of 2^n terms, each aligned run of 2^m terms has its own subtotal."""
    parts = list(parts)
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@dataclass(frozen=True)
class TreeSums:
    """The `Sums` of an axis: one binary tree over V virtual shards adds in the same order at every size of the axis.

    Args:
        degree: V, the virtual degree.
    """

    degree: int

    def all_reduce(self, x: Tensor, axis: Axis) -> Tensor:
        """Sum `x` over the axis."""
        return tree_sum(wait(start_all_gather(x.unsqueeze(0), axis)).unbind())

    def reduce_scatter(self, x: Tensor, axis: Axis, dim: int) -> Tensor:
        """Sum `x` over the axis, and return this rank's shard of `dim`."""
        sizes = shard_sizes(x.shape[dim], axis.size)
        receive = [sizes[axis.rank]] * axis.size
        terms = all_to_all_rows(x.movedim(dim, 0), axis, sizes, receive)
        return tree_sum(terms.split(receive)).movedim(0, dim).contiguous()

    def split(self, x: Tensor, axis: Axis, dim: int, length: int) -> list[Tensor]:
        """Split this rank's shard of `dim`, of full length `length`, into its virtual shards."""
        check_pieces(f"dimension {dim} of length", (length,), axis, rest=1)
        return cut_pieces(x, dim, pieces(axis))


def degree(axis: Axis) -> int:
    """Return V, the virtual degree of the axis.

    Raises:
        ValueError: if the axis has none.
    """
    if not isinstance(axis.sums, TreeSums):
        raise ValueError(
            f"the {axis.name} axis of size {axis.size} has no virtual degree: take invariant_mesh(mesh, 8)"
        )
    return axis.sums.degree


def pieces(axis: Axis) -> int:
    """Return the number of virtual shards on this rank, V / size."""
    return degree(axis) // axis.size


def check_pieces(name: str, sizes: Sequence[int], axis: Axis, unit: int = 1, rest: int = 0) -> None:
    """Raise ValueError if the virtual degree does not divide a block's units; up to `rest` units may be left over."""
    V = degree(axis)
    for size in sizes:
        if size // unit % V > rest:
            units = f"{size}" if unit == 1 else f"{size} / {unit} = {size // unit}"
            raise ValueError(
                f"{name} {units} is not a multiple of the virtual degree {V} of {axis.name}: take a size that is, or a "
                f"smaller virtual degree in invariant_mesh"
            )


def own(x: Tensor) -> Tensor:
    """Return the tensor contiguous and 64-byte aligned like a new one: MKL may choose kernels by alignment."""
    x = x.contiguous()
    return x if not has_values(x) or x.data_ptr() % 64 == 0 else x.clone()


def cut_pieces(
    x: Tensor, dim: int, n: int, blocks: Sequence[int] = (), own: Callable[..., Tensor] = own
) -> list[Tensor]:
    """Split a dimension, made of blocks of these lengths, into n virtual shards, each in its own memory."""
    parts = x.split(list(blocks), dim) if blocks else [x]
    parts = [part.split(shard_sizes(part.shape[dim], n), dim) for part in parts]
    return [own(each[0] if len(each) == 1 else torch.cat(each, dim)) for each in zip(*parts, strict=True)]


def invariant_mesh(mesh: Mesh, degree: int | tuple[int, int]) -> Mesh:
    """Return a mesh whose tp and data axes sum by one binary tree. Build the model's layers on its axes.

    The meshes share their process groups: close one of them.

    Args:
        mesh: the mesh from `build_mesh`.
        degree: the virtual degrees of (tp, data ranks), or one number for both. Each is a power of two that its axis'
            size divides. Results have the same bits on all meshes of the same degrees.

    Raises:
        ValueError: on every rank, if a degree doesn't fit its axis, ranks pass different degrees, or cp, ep or worlds
            is above 1.

    Example:
        >>> from mpcore.tools.invariant import invariant_mesh
        >>> invariant_mesh(mpcore.build_mesh(), 8).tp.sums
        TreeSums(degree=8)
    """
    check_mesh(mesh)
    check_same("mesh", {"virtual degrees": degree}, mesh.job)
    tp, data = (degree, degree) if isinstance(degree, int) else degree
    for name, axis, V in (("tp", mesh.tp, tp), ("dp", mesh.dp, data)):
        if V < 1 or V & (V - 1) or V % axis.size:
            raise ValueError(
                f"virtual degree {V} of {name}, of size {axis.size}: take a power of two, and a size that divides it"
            )
    for axis in (mesh.cp, mesh.ep, mesh.worlds):
        if axis.size > 1:
            raise ValueError(f"virtual degrees don't go with {axis.name} {axis.size}: take {axis.name} 1")
    made = copy(mesh)
    degrees = {"tp": tp, **dict.fromkeys(("dp", "data", "edp"), data)}
    vars(made).update({name: replace(mesh.axes[name], sums=TreeSums(V)) for name, V in degrees.items()})
    return made
