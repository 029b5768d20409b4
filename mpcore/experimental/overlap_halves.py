"""Hide the messages of tensor parallelism under the other half of their micro-batch.

A dense block computes the two halves of its rows in turns, so that one half computes while the other is summed:

    attention 1 | attention 2  | MLP 1        | MLP 2
                  all-reduce 1   all-reduce 2   all-reduce 1, then 2, which nothing hides

With sequence parallelism a half is reduce-scattered after attention and all-gathered before the MLP. Its all-gather
starts before the last product of the other half's attention, so that both messages travel beside products:

    attention 1 | qkv 2            | output 2     | up 1             | down 1       | ..
                  reduce-scatter 1   all-gather 1   reduce-scatter 2   all-gather 2

Source: Wang et al. 2024, DeepSpeed-Domino (arXiv:2409.15241).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from mpcore import collectives
from mpcore._torch.module import has_forward_hooks
from mpcore.collectives import Flying, finish, shards_along, shards_in_front, start, start_all_reduce, wait
from mpcore.experimental.overlap_experts import Half, HalvesBlock, foreign
from mpcore.layers.attention.heads import HeadAttention
from mpcore.layers.block import TransformerBlock
from mpcore.layers.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from mpcore.layers.linear_ops import Product, WrappedProduct, autocast_dtype, cast
from mpcore.layers.mlp import ParallelMLP
from mpcore.layers.moe.layer import ParallelMoE
from mpcore.layers.overlap import OverlapProduct
from mpcore.mesh.agreement import gather_objects, raising_together
from mpcore.mesh.axis import Axis
from mpcore.parallel.recompute import assigned_forward
from mpcore.sharding.declarations import named_modules

OUT = "leave out overlap_halves"


def overlap_halves(model: nn.Module | Sequence[nn.Module], pp: Axis = Axis(role="pp")) -> None:
    """Hide messages of tensor parallelism under the other half of their micro-batch, in each dense block on tp > 1.

    Call it on every rank before `prepare`. Such a block computes its rows in two halves. Results differ from those
    without it by the rounding of weights' gradients, which are sums over the two halves.

    Note:
        - Three of the four all-reduces in forward of a block run beside computation. In backward each one runs beside
          the gradient of a weight, as without this call.
        - With sequence parallelism six of the eight messages of a block run beside computation, in both passes. An
          all-gather runs beside nothing if its layer has `regather` or an adapter, or attention recomputes alone.
        - In compiled code, and in a block whose modules have hooks, no message of forward runs beside computation.
        - The rows of a block must not depend on each other: layers of mpcore, and torch's norms of features, don't.
        - Forward without gradients computes all rows at once. A micro-batch of one row hides nothing, and warns.
        - What draws from torch's generators, such as LoRA's dropout, draws other numbers than for all rows at once.
        - Blocks with experts stay as they are: see `overlap_experts`.

    Args:
        model: the model, or this rank's pipeline stages.
        pp: the axis of the pipeline's stages, `mesh.pp`.

    Raises:
        ValueError: on every rank of pp, before anything is changed, if no stage has a dense `TransformerBlock` on tp >
            1, or one has `sequence_dim=0`, invariant numerics, or a module with a forward of its own. In forward, if an
            argument is unknown or doesn't have a row for each of x.

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
    if row.sequence_dim == 0:
        return f"has sequence_dim=0, and halves are of dimension 0: {OUT}"
    return f"has invariant numerics, which don't sum gradients of 2 halves: {OUT}" if row.tp.sums is not None else ""


def _row(owner: nn.Module) -> RowParallelLinear | None:
    """Return the layer whose output a plain attention or MLP returns; None: there is none."""
    kind, leaf = (HeadAttention, "output") if isinstance(owner, HeadAttention) else (ParallelMLP, "down")
    row = getattr(owner, leaf, None)
    is_plain = type(owner).forward is kind.forward and assigned_forward(owner) is None
    return row if isinstance(row, RowParallelLinear) and is_plain and _is_plain(row, RowParallelLinear) else None


def _column(owner: nn.Module) -> ColumnParallelLinear | None:
    """Return the layer that all-gathers the input of attention or an MLP; None: none, or one that can't start early."""
    column = getattr(owner, "qkv" if isinstance(owner, HeadAttention) else "up", None)
    if not isinstance(column, ColumnParallelLinear) or not _is_plain(column, ColumnParallelLinear):
        return None
    early = column.sequence_parallel and column.tp.size > 1 and not column.regather
    plain = isinstance(column.product, _GatheredProduct) or not isinstance(column.product, WrappedProduct)
    return column if early and plain else None


def _is_plain(layer: ParallelLinear, kind: type[ParallelLinear]) -> bool:
    return type(layer).forward is kind.forward and assigned_forward(layer) is None


class DenseHalvesBlock(HalvesBlock):
    """A dense `TransformerBlock`, made by `overlap_halves`. A flight is a `_Part`."""

    maker = "overlap_halves"
    fewest = 2  # all ranks of tp have the same rows

    def compute(self, halves: list[Half]) -> Tensor:
        """Compute both halves, in the order of the pictures above."""
        first, second = halves
        for half in halves:
            half.flight = _Part(self.attention, self.attention_norm(half.x), half.attention)
        first.flight.run()
        second.flight.run(lambda: self.go_on(first))
        first.flight.run(lambda: self.go_on(second))
        second.flight.run()
        return torch.cat([self.end(half) for half in halves])

    def go_on(self, half: Half) -> None:
        half.x = self.attention_dropout(half.flight.finish(), half.samples, half.tokens, residual=half.x)
        half.flight = _Part(self.mlp, self.mlp_norm(half.x), half.mlp)

    def end(self, half: Half) -> Tensor:
        return self.mlp_dropout(half.flight.finish(), half.samples, half.tokens, residual=half.x)

    def stop(self, half: Half) -> None:
        for message in half.flight.messages if half.flight else ():
            message.stop()


class _Part:
    """Attention or an MLP of one half: its input, its output, and the messages that are under way."""

    def __init__(self, owner: nn.Module, x: Tensor, arguments: dict[str, Any]) -> None:
        self.owner, self.x, self.arguments = owner, x, arguments
        row, column = _row(owner), _column(owner)
        parts = [layer for layer in (owner, row, column) if layer is not None]
        hooked = any(map(has_forward_hooks, parts))  # a hook sees the whole input, and the sum
        alone = any("forward" in vars(layer) for layer in parts)  # recomputed by itself
        if row is not None and (hooked or (alone and row.sequence_parallel) or type(row.product).row not in SUMS):
            row = None  # the owner communicates by itself
        self.row, self.column = row, column if row is not None else None
        self.messages: list[_Gather | _Sum | _Scatter] = []
        if self.column is not None:
            self.messages.append(_Gather(x, self.column))

    def run(self, between: Callable[[], None] = lambda: None) -> None:
        """Call the module, and leave its sum under way. With sequence parallelism, `between` is before the product."""
        row, column, waiting = self.row, self.column, [between]
        if row is None:
            self.y = self.owner(self.x, **self.arguments)
        else:
            before: dict[ParallelLinear, Product] = {row: row.product}
            if column is not None:
                before[column] = column.product
                column.product = _GatheredProduct(column.product, self.x, self.messages.pop().finish(self.x))
            row.product = _StartingProduct(row.product, self.messages, waiting)
            try:
                self.y = self.owner(self.x, **self.arguments)
            finally:
                for layer, product in before.items():
                    layer.product = product
        for each in waiting:
            each()

    def finish(self) -> Tensor:
        """Wait for the sum, and return it plus the bias."""
        while self.messages:
            self.y = self.messages.pop().finish(self.y)
        return self.y


@dataclass(frozen=True)
class _StartingProduct(WrappedProduct):
    """A product that starts the sum of `row`, and returns this rank's term of it."""

    messages: list[_Gather | _Sum | _Scatter]
    waiting: list[Callable[[], None]]

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None = None) -> Tensor:
        if tp.size == 1 or torch.compiler.is_compiling():
            return self.base.row(x, weight, bias, tp, dim)
        while dim is not None and self.waiting:
            self.waiting.pop()()
        y = self.base.column(x, weight, None, Axis())
        self.messages.append(_Sum(y, bias, tp) if dim is None else _Scatter(y, bias, tp, dim))
        return y


SUMS = (Product.row, OverlapProduct.row, _StartingProduct.row)  # one sum, or chunks of it


@dataclass(frozen=True)
class _GatheredProduct(WrappedProduct):
    """A product of the whole sequence, which has been gathered from shards such as x."""

    x: Tensor
    whole: Tensor

    def column(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None = None, regather: bool = False
    ) -> Tensor:
        if x is not self.x or torch.compiler.is_compiling():
            return self.base.column(x, weight, bias, tp, dim, regather)
        return self.base.column(self.whole, weight, bias, Axis())


class _Sum:
    """The all-reduce of a row-parallel layer's output, under way."""

    def __init__(self, y: Tensor, bias: Tensor | None, tp: Axis) -> None:
        self.pending, self.bias, self.tp = start_all_reduce(y.detach(), tp), bias, tp

    def finish(self, y: Tensor) -> Tensor:
        return _add(_Reduce.apply(y, (self.pending, self.tp)), self.bias)

    def stop(self) -> None:
        wait(self.pending)


class _Rows:
    """Rows to and from the other ranks of tp, under way. Backward sends their gradients back, under way too."""

    def __init__(self, x: Tensor, rows: int, tp: Axis) -> None:
        sizes = [rows * (rank != tp.rank) for rank in range(tp.size)]
        self.flying: Flying = start("all_to_all_rows", x, tp, sizes, sizes)

    def stop(self) -> None:
        if self.flying.pending is not None:
            wait(self.flying.pending)


class _Gather(_Rows):
    """The all-gather of a column-parallel layer's input."""

    def __init__(self, x: Tensor, layer: ColumnParallelLinear) -> None:
        self.tp, self.dim, self.own = layer.tp, layer.sequence_dim, cast(x, autocast_dtype(x))
        super().__init__(torch.cat([self.own] * (self.tp.size - 1)), len(x), self.tp)

    def finish(self, _: Tensor) -> Tensor:
        others, mine = finish(self.flying), self.tp.rank * len(self.own)
        return shards_along(torch.cat([others[:mine], self.own, others[mine:]]), self.tp.size, self.dim)


class _Scatter(_Rows):
    """The reduce-scatter of a row-parallel layer's output."""

    def __init__(self, y: Tensor, bias: Tensor | None, tp: Axis, dim: int) -> None:
        shards = shards_in_front(y, tp.size, dim).split(len(y))
        self.own, self.bias = shards[tp.rank], bias
        others = [shard for rank, shard in enumerate(shards) if rank != tp.rank]
        super().__init__(torch.cat(others), len(y), tp)

    def finish(self, _: Tensor) -> Tensor:
        terms = torch.cat([self.own, finish(self.flying)])
        return _add(terms.view(-1, *self.own.shape).sum(0), self.bias)


def _add(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.to(y.dtype)


class _Reduce(Function):
    """`collectives.reduce`, which has started: the gradient flows to this rank's term of the sum."""

    @staticmethod
    def forward(ctx, y: Tensor, flying: tuple[Tensor, Axis]) -> Tensor:
        pending, ctx.tp = flying
        return wait(pending)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        return collectives.copy(dy, ctx.tp), None
