"""Hide the all-reduces of tensor parallelism under the other half of their micro-batch.

A dense block computes the two halves of its rows in turns, so that one half computes while the other is summed:

    attention 1 | attention 2  | MLP 1        | MLP 2
                  all-reduce 1   all-reduce 2   all-reduce 1, then 2, which nothing hides

Source: Wang et al. 2024, DeepSpeed-Domino (arXiv:2409.15241).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from mpcore import collectives
from mpcore._torch.module import has_forward_hooks
from mpcore.collectives import start_all_reduce, wait
from mpcore.experimental.overlap_experts import Half, HalvesBlock, foreign
from mpcore.layers.attention.heads import HeadAttention
from mpcore.layers.block import TransformerBlock
from mpcore.layers.linear import ParallelLinear, RowParallelLinear
from mpcore.layers.linear_ops import Product, WrappedProduct
from mpcore.layers.mlp import ParallelMLP
from mpcore.layers.moe.layer import ParallelMoE
from mpcore.layers.overlap import OverlapProduct
from mpcore.mesh.agreement import gather_objects, raising_together
from mpcore.mesh.axis import Axis
from mpcore.parallel.recompute import assigned_forward
from mpcore.sharding.declarations import named_modules

OUT = "leave out overlap_halves"


def overlap_halves(model: nn.Module | Sequence[nn.Module], pp: Axis = Axis(role="pp")) -> None:
    """Hide all-reduces of tensor parallelism under the other half of their micro-batch, in each dense block on tp > 1.

    Call it on every rank before `prepare`. Such a block computes its rows in two halves. Results differ from those
    without it by the rounding of weights' gradients, which are sums over the two halves.

    Note:
        - Three of the four all-reduces in forward of a block run beside computation. In backward each one runs beside
          the gradient of a weight, as without this call.
        - In compiled code, and in a block whose modules have hooks, no all-reduce of forward runs beside computation.
        - The rows of a block must not depend on each other: layers of mpcore, and torch's norms of features, don't.
        - Forward without gradients computes all rows at once.
        - Blocks with experts stay as they are: see `overlap_experts`.

    Args:
        model: the model, or this rank's pipeline stages.
        pp: the axis of the pipeline's stages, `mesh.pp`.

    Raises:
        ValueError: on every rank of pp, before anything is changed, if no stage has a dense `TransformerBlock` on tp >
            1, or one is sequence parallel, or has `sequence_dim=0`, invariant numerics, or a module with a
            forward of its own. In forward, if a micro-batch has one row, or an argument is unknown or doesn't have a
            row for each of x.

    Example:
        >>> tp = mpcore.Axis(rank=0, size=2, role="tp")
        >>> block = mpcore.TransformerBlock(mpcore.ParallelAttention(8, num_heads=2, tp=tp),
        ...     mpcore.ParallelMLP(8, 16, tp=tp), mpcore.RMSNorm(8), mpcore.RMSNorm(8))
        >>> mpcore.experimental.overlap_halves(block)
        >>> type(block)
        <class 'mpcore.experimental.overlap_halves.DenseHalvesBlock'>
    """
    stages = [model] if isinstance(model, nn.Module) else list(model)
    blocks = [(n, m) for stage in stages for n, m in named_modules(stage) if type(m) is TransformerBlock]
    dense = {
        name: block for name, block in blocks if not isinstance(block.mlp, ParallelMoE)
        and any(isinstance(layer, ParallelLinear) and layer.tp.size > 1 for layer in block.modules())
    }  # fmt: skip
    if not any(gather_objects(bool(dense), pp.group)):
        experts = sum(isinstance(block.mlp, ParallelMoE) for _, block in blocks)
        raise ValueError(
            f"overlap_halves hides messages of dense TransformerBlocks on tp > 1, and the model has none (on this rank "
            f"{len(blocks)} blocks, {experts} with experts): leave it out, or call overlap_experts for experts on ep"
        )
    with raising_together():
        for name, block in dense.items():
            own = foreign(block)
            for why in (own and f"{own}: {OUT}", *map(_problem, (block.attention, block.mlp))):
                if why:
                    raise ValueError(f"{name or 'the model'} {why}")
    for block in dense.values():
        block.__class__ = DenseHalvesBlock  # so that copies, recomputation and data parallelism find its forward


def _problem(owner: nn.Module) -> str:
    """Return why attention or an MLP can't leave its all-reduce to the block, and the way out."""
    row = _row(owner)
    if row is None:
        return f"has a {type(owner).__name__} that may not return the output of a RowParallelLinear: {OUT}"
    if row.sequence_parallel:
        return f"is sequence parallel on tp {row.tp.size}, without all-reduces: {OUT}, and pass prepare overlap=True"
    if row.sequence_dim == 0:
        return f"has sequence_dim=0, and halves are of dimension 0: {OUT}"
    return f"has invariant numerics, which don't sum gradients of 2 halves: {OUT}" if row.tp.sums is not None else ""


def _row(owner: nn.Module) -> RowParallelLinear | None:
    """Return the layer whose output a plain attention or MLP returns; None: there is none."""
    kind, leaf = (HeadAttention, "output") if isinstance(owner, HeadAttention) else (ParallelMLP, "down")
    row = getattr(owner, leaf, None)
    if not isinstance(row, RowParallelLinear) or any(assigned_forward(x) is not None for x in (owner, row)):
        return None
    is_plain = type(owner).forward is kind.forward and type(row).forward is RowParallelLinear.forward
    return row if is_plain else None


class DenseHalvesBlock(HalvesBlock):
    """A dense `TransformerBlock`, made by `overlap_halves`. A flight is a tensor and its all-reduces under way."""

    maker = "overlap_halves"

    def begin(self, half: Half) -> None:
        half.flight = _start(self.attention, self.attention_norm(half.x), half.attention)

    def go_on(self, half: Half) -> None:
        half.x = self.attention_dropout(_finish(*half.flight), half.samples, half.tokens, residual=half.x)
        half.flight = _start(self.mlp, self.mlp_norm(half.x), half.mlp)

    def end(self, half: Half) -> Tensor:
        return self.mlp_dropout(_finish(*half.flight), half.samples, half.tokens, residual=half.x)

    def stop(self, half: Half) -> None:
        for pending, *_ in half.flight[1] if half.flight else ():
            wait(pending)


Started = list[tuple[Tensor, Tensor | None, Axis]]  # all-reduces under way: the sum, the bias to add to it, tp


@dataclass(frozen=True)
class _StartingProduct(WrappedProduct):
    """A product that starts the all-reduce of `row`, and returns this rank's term of the sum."""

    started: Started

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None = None) -> Tensor:
        if tp.size == 1 or torch.compiler.is_compiling():
            return self.base.row(x, weight, bias, tp, dim)
        y = self.base.column(x, weight, None, Axis())
        self.started.append((start_all_reduce(y.detach(), tp), bias, tp))
        return y


def _start(owner: nn.Module, x: Tensor, arguments: Mapping[str, Any]) -> tuple[Tensor, Started]:
    """Call attention or an MLP, and leave its all-reduce under way. If a hook sees the output, it is the sum."""
    row, started = _row(owner), Started()
    if row is None or has_forward_hooks(owner) or has_forward_hooks(row):
        return owner(x, **arguments), started
    base = row.product
    if type(base).row in (Product.row, OverlapProduct.row):  # their sum is one all-reduce, or chunks of it
        row.product = _StartingProduct(base, started)
    try:
        return owner(x, **arguments), started
    finally:
        row.product = base


def _finish(y: Tensor, started: Started) -> Tensor:
    """Wait for the all-reduce, and return the sum plus the bias."""
    while started:
        pending, bias, tp = started.pop()
        y = _Sum.apply(y, (pending, tp))
        y = y if bias is None else y + bias.to(y.dtype)
    return y


class _Sum(Function):
    """`collectives.reduce`, which has started: the gradient flows to this rank's term of the sum."""

    @staticmethod
    def forward(ctx, y: Tensor, flying: tuple[Tensor, Axis]) -> Tensor:
        pending, ctx.tp = flying
        return wait(pending)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        return collectives.copy(dy, ctx.tp), None
