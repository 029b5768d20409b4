"""Options of torch's `fully_shard`, and the output tensors that it finds.

Checked with torch 2.11 and 2.13. Before 2.13 all parameters of a unit are on one mesh, and `fully_shard` doesn't look
into dataclasses. This file imports FSDP, which takes half a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mpcore._torch import pytree

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
except ImportError:  # before torch 2.13
    FSDPMeshInfo = HSDPMeshInfo = ShardPlacementResult = None
try:
    from torch.distributed.fsdp._common_utils import collect_grad_tensors
except ImportError:  # before torch 2.13
    collect_grad_tensors = None

SEVERAL_MESHES = ShardPlacementResult is not None
"""Whether the parameters of one unit may lie on several meshes."""


def placement_on(mesh: DeviceMesh) -> Any:
    """Return the value that a `shard_placement_fn` returns for a parameter on a mesh of its own."""
    assert FSDPMeshInfo is not None
    assert HSDPMeshInfo is not None
    assert ShardPlacementResult is not None
    info = FSDPMeshInfo(mesh, 0) if mesh.ndim == 1 else HSDPMeshInfo(mesh, 1, 0)
    return ShardPlacementResult(None, info)


def trained_tensors(out: Any) -> Sequence[Tensor]:
    """Return the tensors of an output that need a gradient and that `fully_shard` finds."""
    if collect_grad_tensors is not None:
        return collect_grad_tensors(out)
    return [x for x in pytree.leaves(out) if isinstance(x, Tensor) and x.requires_grad]


def looks_into(x: object) -> bool:
    """Return whether `fully_shard` looks for tensors inside an object that is not one of torch's containers."""
    return collect_grad_tensors is not None and is_dataclass(x)
