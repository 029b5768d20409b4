"""What `numerics="invariant"` asks of a mesh, a model, its policies and its optimizer (docs/bitwise.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpcore.collectives import tree_sum
from mpcore.gradients.leaves import LeafGradients
from mpcore.layers.attention.heads import HeadAttention
from mpcore.layers.attention.multi_head import ParallelAttention
from mpcore.layers.embedding import ColumnParallelEmbedding
from mpcore.layers.linear import ParallelLinear
from mpcore.layers.moe.router import Router
from mpcore.mesh.axis import Mesh
from mpcore.optim.adamw import AdamW
from mpcore.parallel.shared import shared_units
from mpcore.parallel.sync import reduce_leaves
from mpcore.training.policies import Precision

NUMERICS = ("default", "invariant")


def leaves_of_rank(numerics: str, mesh: Mesh, micro_batches: int) -> int:
    """Return how many micro-batches a step has on each rank: one for each leaf where numerics is "invariant".

    Raises:
        ValueError: if numerics is unknown, doesn't go with the mesh, or leaves can't be dealt out to micro-batches.
    """
    if numerics not in NUMERICS:
        raise ValueError(f"numerics {numerics!r} is none of {', '.join(NUMERICS)}")
    if (numerics == "invariant") != (mesh.data.virtual > 0):
        way_out = "build_mesh(..., virtual=8)" if numerics == "invariant" else 'prepare(..., numerics="invariant")'
        raise ValueError(
            f"numerics {numerics!r} on a mesh with the virtual degree {mesh.data.virtual} of the data ranks: take "
            f"{way_out} too"
        )
    if numerics == "default":
        return micro_batches
    leaves = mesh.data.pieces
    if leaves % micro_batches:
        raise ValueError(
            f"micro_batches {micro_batches} does not divide the {leaves} leaves of a rank, virtual degree "
            f"{mesh.data.virtual} / {mesh.data.size} data ranks: take a number that does"
        )
    return leaves


def check_invariant(
    stages: Sequence[nn.Module], precision: Precision, policies: Mapping[str, Any], splits: bool
) -> None:
    """Refuse what has no invariant form.

    Raises:
        ValueError: naming it.
    """
    data = policies["data"]
    asked = {
        "FP8": precision.fp8, "autocast": precision.autocast_dtype is not None, "compile": policies["compile"],
        "local updates": policies["local_updates"], "a schedule that splits backward": splits,
        "replicate above 1": data.replicate > 1, "offload of parameters": policies["offload"].parameters,
        "a reduce_dtype other than float32": data.reduce_dtype != torch.float32,
    }  # fmt: skip
    refused = [name for name, value in asked.items() if value]
    for stage in stages:
        for name, module in stage.named_modules():
            if _has_no_form(module):
                refused.append(f"{name}, a {type(module).__name__} with these options")
    if refused:
        raise ValueError(f'numerics "invariant" doesn\'t go with {refused[0]}: see docs/bitwise.md')


def _has_no_form(module: nn.Module) -> bool:
    if isinstance(module, HeadAttention):
        plain = isinstance(module, ParallelAttention) and module.q_norm is None and module.sinks is None
        return not plain or module.alibi or module.memory_dim is not None
    if isinstance(module, ParallelLinear):
        return module.mode.fp8 or not module.tp.virtual
    return isinstance(module, Router | ColumnParallelEmbedding)


class InvariantStep:
    """The parts of a run's step that `numerics="invariant"` changes.

    Args:
        stages: this rank's stages, laid out.
        mesh: their mesh.
        optimizer: the run's.

    Raises:
        ValueError: if the optimizer is not mpcore's, or stages of a rank share parameters over data.
    """

    def __init__(self, stages: Sequence[nn.Module], mesh: Mesh, optimizer: torch.optim.Optimizer) -> None:
        if type(optimizer) is not AdamW:
            raise ValueError(
                f'numerics "invariant" steps by mpcore.AdamW, whose step rounds alike on every layout, not by '
                f"{type(optimizer).__name__}: give optimizer=lambda model: mpcore.AdamW(model, lr=...)"
            )
        if any(shared_units(stages)):
            raise ValueError(
                'numerics "invariant" has no ZeRO of parameters that stages of one rank share: take Zero(0)'
            )
        optimizer.set_fused(False)
        self.stages, self.gradients = stages, LeafGradients(stages, mesh)
        self.losses: list[Tensor] = []  # of this step's leaves

    def watch_loss(self, loss: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        """Note the loss of each leaf."""

        def watched(output: Any, target: Tensor) -> Tensor:
            total = loss(output, target)
            if torch.is_grad_enabled():
                self.losses.append(total.detach().double())
            return total

        return watched

    def finish(self, total: Tensor) -> Tensor:
        """After the last leaf: sum the gradients of this rank's leaves, then those of ZeRO over ranks.

        Returns:
            The sum of the leaves' losses where they are known, else `total`.
        """
        self.gradients.finish()
        for stage in self.stages:
            reduce_leaves(stage)
        losses, self.losses = self.losses, []
        return tree_sum(losses) if losses else total

    def drop(self) -> None:
        """Forget a step."""
        self.losses = []
        self.gradients.drop()
