"""`Axis`, one axis of the mesh, and `Mesh`, all axes, as one rank sees them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mpcore._torch.distributed import forget_meshes, has_peers, mesh_caches, use_group
from mpcore.mesh.layout import layout_table


class Sums(Protocol):
    """How to sum over an axis, instead of in the fastest order. Axes that are equal need equal `Sums`."""

    def all_reduce(self, x: Tensor, axis: Axis) -> Tensor:
        """Sum `x` over the axis."""
        ...

    def reduce_scatter(self, x: Tensor, axis: Axis, dim: int) -> Tensor:
        """Sum `x` over the axis, and return this rank's shard of `dim` (`shard_sizes`), contiguous."""
        ...

    def split(self, x: Tensor, axis: Axis, dim: int, length: int) -> list[Tensor]:
        """Split this rank's shard of `dim`, of full length `length`, into the terms of a sum over `dim`."""
        ...


@dataclass(frozen=True, repr=False)
class Axis:
    """One axis of the mesh, as one rank sees it. `Axis()` has size 1, no group and no communication.

    Args:
        size: the number of ranks along the axis.
        rank: this process's rank on the axis, `0 <= rank < size`.
        group: the process group of the ranks along the axis. None is enough for size 1, or to compute with sizes only.
        name: the name in messages; two axes may have the same name. If empty, the name is `role`, or "axis" without a
            role.
        role: the axis's place in a `Mesh`, such as "ep". Leave it empty for an axis that you create yourself: its
            process group identifies that axis.
        levels: the outer and the inner axis of two-level context parallelism. The ranks of an inner axis are neighbors.
            Only cp has levels, if you pass `cp_inner` to `build_mesh`.
        sums: how to sum over the axis, for example in an order that doesn't depend on `size`
            (`mpcore.tools.invariant`). None: the fastest order.

    Raises:
        ValueError: if `rank` is not in [0, size), or the group has another number of ranks than `size`.

    Example:
        >>> mpcore.Axis(size=4, rank=1, name="tp")  # without a group, for sizes alone
        Axis(tp: rank 1 of 4)
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    name: str = field(default="", compare=False)
    levels: tuple[Axis, Axis] | None = None
    role: str = ""
    sums: Sums | None = None
    group_name: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.role or "axis")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} lies outside the {self.name} axis of size {self.size}")
        if self.group is not None:
            if isinstance(self.group, str):
                raise ValueError(f"group is {self.group!r}: pass a process group, and a name as name={self.group!r}")
            if self.group.size() != self.size:
                raise ValueError(
                    f"the {self.name} axis has size {self.size}, its process group {self.group.size()} ranks"
                )
            # Collectives name their group by a string: a constant to torch.compile, unlike the group itself.
            object.__setattr__(self, "group_name", self.group.group_name)

    def __repr__(self) -> str:
        return f"Axis({self.name}: rank {self.rank} of {self.size})"

    @property
    def key(self) -> tuple[object, ...]:
        """A key that identifies the axis: its group or, without a group, its role, size and rank."""
        return (self.group_name,) if self.group_name else (self.role, self.size, self.rank)

    @property
    def order(self) -> tuple[str, str]:
        """A sort key that is the same on all ranks: all ranks start the collectives of several axes in this order."""
        return self.role, self.group_name

    def __copy__(self) -> Axis:
        return self

    def __deepcopy__(self, memo: dict[Any, Any]) -> Axis:
        return self  # a process group can't be copied, and a copied layer communicates with the same ranks

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None:
            raise TypeError(
                f"the {self.name} axis of size {self.size} belongs to running processes and can't be pickled: save "
                f"full_state_dict(model) instead of the model, or use mpcore.checkpoint.save"
            )
        return vars(self)


@dataclass(frozen=True, repr=False)
class Mesh:
    """All axes as one rank sees them. Call `build_mesh` to make a mesh. One process may have several meshes.

    Attributes:
        tp, cp, dp, pp: the tensor, context, data and pipeline parallel axes.
        ep, etp: the expert parallel axis, and the axis of tensor parallelism inside each expert. They divide the ranks
            of a pipeline stage.
        edp: the ranks of a pipeline stage that hold replicas of the same experts: etp x ep x edp = tp x cp x dp.
        data: dp x cp, the ranks that hold the same weights and different tokens.
        ends: the first and last pipeline rank, for tied embeddings; size 1 on the ranks between them.
        world: all ranks that train this model.
        worlds: the ranks with the same `world.rank` in each world of the job. Each world trains a model of its own.
        job: all ranks of all worlds. With one world the same ranks as `world`.
        device_type: "cuda" or "cpu".
        device_mesh: torch's mesh with dimensions pp, dp, cp, tp; with several worlds its first dimension is worlds.
            None if torch.distributed isn't running.
        made_ns: when the mesh was made, in nanoseconds of the host's clock. Earlier events of a group with the same
            name belong to another mesh.

    Example:
        >>> mpcore.Mesh().tp.size  # a process alone
        1
    """

    tp: Axis = Axis(role="tp")
    cp: Axis = Axis(role="cp")
    dp: Axis = Axis(role="dp")
    pp: Axis = Axis(role="pp")
    ep: Axis = Axis(role="ep")
    etp: Axis = Axis(role="etp")
    edp: Axis = Axis(role="edp")
    data: Axis = Axis(role="data")
    ends: Axis = Axis(role="ends")
    world: Axis = Axis(role="world")
    worlds: Axis = Axis(role="worlds")
    job: Axis = Axis(role="job")
    device_type: str = "cpu"
    device_mesh: DeviceMesh | None = None
    made_ns: int = field(default_factory=time.time_ns, init=False, repr=False, compare=False)
    _held: list[dist.ProcessGroup] = field(default_factory=list, init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={axis.size}' for name, axis in self.axes.items() if axis.size > 1)})"

    def __str__(self) -> str:
        sizes = {name: getattr(self, name).size for name in ("tp", "cp", "pp", "ep", "dp", "etp")}
        table = layout_table(**sizes, rank=self.world.rank, device_type=self.device_type)
        return f"world {self.worlds.rank} of {self.worlds.size}: {table}" if self.worlds.size > 1 else table

    def hold(self) -> Mesh:
        """Count this mesh as a user of its process groups. `build_mesh` calls it."""
        if self.job.group is not None and has_peers():
            levels = [level for axis in self.axes.values() for level in axis.levels or ()]
            groups = {axis.group for axis in (*self.axes.values(), *levels)} - {None, self.job.group}
            self._held.extend(sorted((group for group in groups if group is not None), key=lambda g: g.group_name))
            for group in self._held:
                use_group(group, 1)
        return self

    def close(self) -> None:
        """Destroy the process groups that no other mesh of this process uses. Call it on every rank.

        The job's default process group stays, and a model or optimizer built on the mesh can't be used any more. gloo
        closes connections when no object refers to them. A `with` block closes its mesh, unless the block raised.

        Example:
            >>> with mpcore.build_mesh() as mesh:
            ...     print(mesh.tp.size)
            1
        """
        ended = [use_group(group, -1) for group in self._held]
        self._held.clear()
        if any(ended):
            forget_meshes(mesh_caches())

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # else other ranks may still be in a collective
            self.close()

    @property
    def axes(self) -> dict[str, Axis]:
        """Every axis by name. If two names have the same group, the more common name comes first."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: axis for name, axis in found.items() if isinstance(axis, Axis)}

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        if self.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.device_type)


def check_axis(axis: Axis) -> None:
    """Raise TypeError if `axis` is not an `Axis`, for example a DeviceMesh, a process group or a `Mesh`."""
    if not isinstance(axis, Axis):
        raise TypeError(
            f"an axis is wanted, such as mesh.tp of build_mesh(tp=2), or Axis(group.size(), group.rank(), group) of a "
            f"process group, not {type(axis).__name__} {axis!r:.40}"
        )


def check_mesh(mesh: Mesh) -> None:
    """Raise TypeError if `mesh` is not a `Mesh`, for example a DeviceMesh or an `Axis`."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"expected the mesh that the model lies on, found {type(mesh).__name__}: give build_mesh's")
