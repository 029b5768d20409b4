"""The part of a parameter that this rank holds once data parallelism has sharded it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from torch import Tensor, nn

from mpcore._torch import fsdp

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(x: Tensor) -> TypeGuard[DTensor]:
    """Whether data parallelism sharded `x`. It doesn't import DTensor, which takes 0.4 s."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local_tensor(x: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, or a plain tensor itself."""
    return x.to_local() if is_dtensor(x) else x


def lies_as(value: Tensor, parameter: Tensor) -> bool:
    """Whether a tensor lies as a parameter: with a DTensor, whose memory is its mesh's, may go a local tensor of the
    host's."""
    if is_dtensor(value) and (not is_dtensor(parameter) or value.shape != parameter.shape):
        return False
    return local_tensor(value).shape == local_tensor(parameter).shape


def data_run(x: DTensor) -> tuple[int, int]:
    """The run of dimension 0 that this rank holds of a parameter that `fully_shard` cut."""
    return data_runs(x)[0]


def data_runs(x: DTensor) -> list[tuple[int, int]]:
    """The run of each dimension that this rank holds: as torch.chunk, equal ones, the last ones shorter or empty."""
    runs, placements = [(0, size) for size in x.shape], cast("tuple[Any, ...]", x.placements)
    for i, (placement, rank) in enumerate(zip(placements, _coordinate(x), strict=True)):
        if placement.is_shard():
            start, end = runs[placement.dim]
            each = -(-(end - start) // x.device_mesh.size(i))
            runs[placement.dim] = (min(start + rank * each, end), min(start + (rank + 1) * each, end))
    return runs


def is_first_replica(x: DTensor) -> bool:
    """Whether no lower rank holds the same shard: shards may be replicated over nodes."""
    return all(rank == 0 for place, rank in zip(x.placements, _coordinate(x), strict=True) if place.is_replicate())


def _coordinate(x: DTensor) -> Sequence[int]:
    """This rank's place in the DTensor's mesh, not the groups': torch's caches may return a mesh of ended groups."""
    coordinate = x.device_mesh.get_coordinate()
    assert coordinate is not None
    return coordinate


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters of a module, which a forward without a backward leaves, and hold shards again.

    `save`, `load` and `load_full_state_dict` call it for the model that they get. If the stages of a rank were sharded
    separately and then joined, call it for each stage first.
    """
    for unit in fsdp.units(model):
        unit.reshard()
