"""Find the part of a parameter that this rank holds after `fully_shard`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from torch import Tensor, nn

from mpcore._torch import fsdp

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(x: Tensor) -> TypeGuard[DTensor]:
    """Return whether `x` is a DTensor. The function never imports DTensor, which takes 0.4 s."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local_tensor(x: Tensor) -> Tensor:
    """Return the local tensor of a DTensor; return a plain tensor unchanged."""
    return x.to_local() if is_dtensor(x) else x


def lies_as(value: Tensor, parameter: Tensor) -> bool:
    """Return whether a tensor is sharded as a parameter is.

    A DTensor needs a DTensor parameter of the same shape. A plain tensor needs the shape of the local parameter. So
    optimizer state on the CPU matches a parameter on a CUDA mesh, whose DTensors can't hold CPU memory.
    """
    if is_dtensor(value) and (not is_dtensor(parameter) or value.shape != parameter.shape):
        return False
    return local_tensor(value).shape == local_tensor(parameter).shape


def data_run(x: DTensor) -> tuple[int, int]:
    """Return the range (start, end) of dimension 0 that this rank holds of a parameter that `fully_shard` sharded."""
    return data_runs(x)[0]


def data_runs(x: DTensor) -> list[tuple[int, int]]:
    """Return the range (start, end) of each dimension that this rank holds.

    Ranges are equal as in `torch.chunk`: the last ones may be shorter or empty.
    """
    runs, placements = [(0, size) for size in x.shape], cast("tuple[Any, ...]", x.placements)
    for i, (placement, rank) in enumerate(zip(placements, _coordinate(x), strict=True)):
        if placement.is_shard():
            start, end = runs[placement.dim]
            each = -(-(end - start) // x.device_mesh.size(i))
            runs[placement.dim] = (min(start + rank * each, end), min(start + (rank + 1) * each, end))
    return runs


def is_first_replica(x: DTensor) -> bool:
    """Return whether no lower rank holds the same shard. HSDP replicates shards across groups of ranks."""
    return all(rank == 0 for place, rank in zip(x.placements, _coordinate(x), strict=True) if place.is_replicate())


def _coordinate(x: DTensor) -> Sequence[int]:
    """Return this rank's coordinate. It does not read the mesh's groups: torch's caches may hold destroyed ones."""
    coordinate = x.device_mesh.get_coordinate()
    assert coordinate is not None
    return coordinate


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters, so that every module holds its shards again.

    Parameters stay gathered after a forward with gradients that no backward follows. `save`, `load` and
    `load_full_state_dict` call `reshard` on the model that they are given. If the stages of a rank were sharded
    separately and then joined, call `reshard` on each stage first.

    Args:
        model: the model, before or after `shard_data_parallel`.
    """
    for unit in fsdp.units(model):
        unit.reshard()
