"""Where data parallelism puts each parameter, its gradient and its optimizer state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from mpcore.mesh.axis import Axis, Mesh
from mpcore.parallel.shared import state_of
from mpcore.sharding.declarations import declarations
from mpcore.sharding.local import is_dtensor, reshard


@dataclass(frozen=True)
class Placement:
    """Where a parameter lies over data.

    Attributes:
        axis: the axis that its gradient is summed over.
        parameter, gradient, state: in how many shards it, its gradient between micro-batches, and its optimizer state
            lie; 1: replicated on the axis.
    """

    axis: Axis
    parameter: int
    gradient: int
    state: int


def placements(stages: nn.Module | Iterable[nn.Module], mesh: Mesh) -> dict[str, Placement]:
    """Return where each parameter, its gradient and its optimizer state lie over data, by name.

    Args:
        stages: the model or stages, sharded over data or not.
        mesh: the mesh it lies on.
    """
    found = {}
    for stage in [stages] if isinstance(stages, nn.Module) else stages:
        reshard(stage)
        state = state_of(stage)
        shared = {p for unit in state.shared for p in unit.shared}
        for name, parameter, sharding in declarations(stage):
            cut = data_shards(parameter)
            zero = 1 if parameter in shared else state.zero
            axis = sharding.data_axis(mesh)
            found[name] = Placement(axis, cut if zero == 3 else 1, cut if zero > 1 else 1, cut)
    return found


def data_shards(x: Tensor) -> int:
    """In how many shards data parallelism cut a tensor; 1: it is whole."""
    if not is_dtensor(x):
        return 1
    sizes = [x.device_mesh.size(i) for i, place in enumerate(x.placements) if not isinstance(place, Replicate)]
    return torch.Size(sizes).numel()
