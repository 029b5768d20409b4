"""Floor 4: data parallelism over plain local shards, by torch's `fully_shard`."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from mpcore.mesh import Mesh


def shard_data_parallel(model: nn.Module, mesh: Mesh, blocks: Iterable[nn.Module] = ()) -> nn.Module:
    """Shard parameters, gradients and optimizer state over the data axis; gradients are summed, never averaged.

    The loss is divided once by the global number of tokens, so nothing here divides again. With one data rank the model
    stays as it is.

    Args:
        model: the model, or this rank's stage of it, with plain parameters (`materialize` first). Changed in place.
        mesh: the mesh it lies on.
        blocks: submodules that are gathered one after the other, in the order of forward.

    Returns:
        The model.

    Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5; Zhao et al. 2023, arXiv:2304.11277.
    """
    if mesh.data.size == 1 or mesh.device_mesh is None:
        return model
    data = mesh.device_mesh["dp"] if mesh.cp.size == 1 else mesh.device_mesh["dp", "cp"]._flatten("data")
    for module in (*blocks, model):
        sharded = fully_shard(module, mesh=data, reshard_after_forward=False)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    return model


def sync_gradients(model: nn.Module, sync: bool) -> None:
    """Whether the next backward sums gradients over the data axis: only that of a step's last micro-batch need."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(sync)
