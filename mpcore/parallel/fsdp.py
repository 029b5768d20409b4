"""Apply torch's `fully_shard` to one unit after the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mpcore._torch import fsdp, fsdp_wrap
from mpcore._torch.distributed import flatten, group_count
from mpcore.mesh.agreement import exchange
from mpcore.mesh.axis import Axis, Mesh
from mpcore.sharding.declare import Sharding
from mpcore.sharding.local import is_dtensor


class UnitWrapper:
    """`fully_shard` with all that this module says about it, for one unit after the other."""

    def __init__(
        self,
        mesh: Mesh,
        held: dict[int, Sharding],
        zero: int,
        replicate: int,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype,
    ) -> None:
        self.mesh, self.held, self.zero = mesh, held, zero
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        assert mesh.device_mesh is not None
        if replicate > 1:
            self.data = _cut_axis(mesh.data, replicate, mesh.device_type)
        else:
            self.data = mesh.device_mesh["dp"] if mesh.cp.size == 1 else flatten(mesh.device_mesh["dp", "cp"], "data")
        self.experts: Any = None
        if mesh.edp.size > replicate and mesh.edp.group is not mesh.data.group:
            cut = _cut_axis(mesh.edp, replicate, mesh.device_type)
            if not fsdp_wrap.SEVERAL_MESHES:
                raise ValueError(f"experts with zero {zero} need torch 2.13, this is {torch.__version__}: use zero=0")
            self.experts = fsdp_wrap.placement_on(cut)

    def __call__(self, module: nn.Module, ignored: set[nn.Parameter], zero: int | None = None) -> None:
        zero = self.zero if zero is None else zero
        held = [(owner, *place) for owner in module.modules() for place in owner.named_parameters(recurse=False)]
        mine = [(owner, leaf, p) for owner, leaf, p in held if p not in ignored and not is_dtensor(p)]
        wide = any(p.dtype == torch.float64 for *_, p in mine)
        policy = MixedPrecisionPolicy(self.param_dtype, None if wide else self.reduce_dtype, cast_forward_inputs=False)
        options: dict[str, Any] = {"mesh": self.data, "mp_policy": policy, "reshard_after_forward": zero == 3}
        if self.experts is not None:
            options["shard_placement_fn"] = self._placed
        sharded = fully_shard(module, ignored_params=ignored, **options)
        for owner, leaf, p in mine:
            shard = getattr(owner, leaf)
            shard.__dict__.update(vars(p))  # what others read of it, such as an optimizer that makes groups
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        fsdp.reduce_unused(sharded)  # ranks may use different parameters

    def _placed(self, parameter: nn.Parameter) -> Any:
        sharding = self.held.get(id(parameter))
        return self.experts if sharding is not None and sharding.data_axis(self.mesh) is self.mesh.edp else None


def _cut_axis(axis: Axis, replicate: int, device_type: str) -> DeviceMesh:
    """The axis as torch's mesh; with `replicate` > 1 one of (replicate, shard), ranks of a shard group in a row."""
    assert axis.group is not None
    if replicate == 1:
        return DeviceMesh.from_group(axis.group, device_type, mesh_dim_names=(axis.name,))
    ranks = torch.tensor(dist.get_process_group_ranks(axis.group), dtype=torch.int).view(replicate, -1)
    row, column = divmod(axis.rank, ranks.shape[1])
    if dist.get_backend(axis.group) != "fake":
        # torch names a group that is synchronized locally after its ranks and this count. Ranks with different counts,
        # as when a pipeline's outer stages share a group, would wait for one another under different names.
        counts = exchange(None, group_count(), axis.group)
        for _ in range(max(counts) - counts[axis.rank]):
            dist.new_group([dist.get_rank()], use_local_synchronization=True)
    # each rank makes its own two groups alone: the others of the world may not be here
    groups = [dist.new_group(mine.tolist(), use_local_synchronization=True) for mine in (ranks[:, column], ranks[row])]
    names = (f"{axis.name}_replicate", f"{axis.name}_shard")
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)  # type: ignore[arg-type]
