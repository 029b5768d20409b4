"""Show the shards of a model as DTensors, for tools that read them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from mpcore.mesh.axis import Axis, Mesh, check_mesh
from mpcore.sharding.declarations import declarations
from mpcore.sharding.declare import Sharding, check_lies_on
from mpcore.sharding.local import is_dtensor
from mpcore.sharding.state_dict import all_names, check_present


def dtensor_state_dict(model: nn.Module, mesh: Mesh) -> dict[str, DTensor]:
    """Return the parameters of a sharded model as DTensors. They share the parameters' memory.

    Args:
        model: the model, or this rank's pipeline stage of it.
        mesh: the mesh that the model is on, of more than one rank.

    Returns:
        By full name: a DTensor over the axis that the parameter is sharded on, or replicated over `mesh.tp`. A
        parameter that `shard_data_parallel` sharded over data only is returned as it is.

    Raises:
        ValueError: on every rank, if DTensor can't describe how a parameter is sharded: interleaved blocks (QKV, gate
            and up), replicated KV heads, uneven shards other than those of `torch.chunk`, or two axes at once.
    """
    check_mesh(mesh)
    meshes: dict[object, DeviceMesh] = {}
    found: dict[str, DTensor] = {}
    for name, parameter, sharding in declarations(model):
        check_present(name, parameter)
        check_lies_on(name, parameter, sharding, mesh)
        shards = [shard for shard in sharding.shards if shard.axis.size > 1]
        if is_dtensor(parameter) and not shards:
            found[name] = parameter
            continue
        axis, placement = _placement(name, parameter, sharding, mesh)
        if axis.group is None:
            raise ValueError(f"{name} lies on one rank, and a DTensor needs a mesh of ranks: use model.state_dict()")
        if axis.key not in meshes:
            meshes[axis.key] = DeviceMesh.from_group(axis.group, mesh.device_type, mesh_dim_names=(axis.name,))
        shape = torch.Size(sharding.shape)
        found[name] = DTensor.from_local(
            parameter.detach(), meshes[axis.key], [placement], run_check=False, shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )  # fmt: skip
    for first, *others in all_names(model):
        found |= dict.fromkeys(others, found[first]) if first in found else {}
    return found


def _placement(name: str, parameter: Tensor, sharding: Sharding, mesh: Mesh) -> tuple[Axis, Placement]:
    shards = [shard for shard in sharding.shards if shard.axis.size > 1]
    if not shards:
        return mesh.tp if mesh.tp.size > 1 else mesh.world, Replicate()
    shard = shards[0]
    size, ranks = sharding.shape[shard.dim], shard.axis.size
    each = -(-size // ranks)
    chunks = [(min(i * each, size), min((i + 1) * each, size)) for i in range(ranks)]
    if len(shards) > 1 or is_dtensor(parameter) or any(
        [run for run in runs if run[0] < run[1]] != [chunk for chunk in [want] if chunk[0] < chunk[1]]
        for runs, want in zip(shard.runs, chunks, strict=True)
    ):  # fmt: skip
        raise ValueError(
            f"{name} of shape {sharding.shape} is {sharding.local_shape} on this rank of {shard.axis.name} ({ranks} "
            f"ranks), and DTensor can't describe its shards: give the tool mpcore.full_state_dict(model), or "
            f"torch.distributed.checkpoint mpcore.interop.dcp.dcp_state_dict(model, mesh)"
        )
    return shard.axis, Shard(shard.dim)
