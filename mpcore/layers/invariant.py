"""Products, norms and pieces of layers on an axis with a virtual degree: the same bits at every size of the axis.

An axis of size t with the virtual degree V (`build_mesh(virtual=V)`) stands for V virtual shards, V/t on each rank.
Each is computed by itself, in memory of its own: a library chooses its kernel by the shape, and a vectorised kernel
computes the end of a tensor by other instructions. One binary tree joins the shards' partial sums, in float32 (float64
for float64). Sums over tokens follow that tree too, over V runs of the sequence, with and without sequence parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from mpcore.collectives import all_reduce, gather_shards, reduce_scatter_shards, shard_sizes, tree_sum
from mpcore.layers.linear_ops import flat_tokens, unsafe_view
from mpcore.layers.module import refuse_second_derivative
from mpcore.mesh.axis import Axis

_ALIGNMENT = 64  # bytes: where torch's allocator begins a tensor; MKL may look at it


def check_pieces(name: str, sizes: Sequence[int], axis: Axis, unit: int = 1, rest: int = 0) -> None:
    """Refuse blocks of units that the virtual degree does not divide; a `rest`, as of 257 tokens, may lie first."""
    for size in sizes if axis.virtual else ():
        if size // unit % axis.virtual > rest:
            units = f"{size}" if unit == 1 else f"{size} / {unit} = {size // unit}"
            raise ValueError(
                f"{name} {units} is not a multiple of the virtual degree {axis.virtual} of {axis.name}: take a size "
                f"that is, or a smaller virtual degree in build_mesh"
            )


def own(x: Tensor) -> Tensor:
    """Return the tensor contiguous, and at an address as a new one has."""
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


class _Own(Function):
    """A tensor in memory of its own, whose gradient is in memory of its own."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)  # no view, whose hook `fully_shard` would lose

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        return own(dy)


def cut_pieces(
    x: Tensor, dim: int, n: int, blocks: Sequence[int] = (), own: Callable[..., Tensor] = own
) -> list[Tensor]:
    """Cut a dimension, made of blocks of these lengths, in n virtual shards, each in memory of its own."""
    parts = x.split(list(blocks), dim) if blocks else [x]
    parts = [part.split(shard_sizes(part.shape[dim], n), dim) for part in parts]
    return [own(each[0] if len(each) == 1 else torch.cat(each, dim)) for each in zip(*parts, strict=True)]


def _join(pieces: Sequence[Tensor], dim: int, blocks: Sequence[int] = (1,)) -> Tensor:
    """Put the virtual shards of `cut_pieces` together again."""
    if len(pieces) == 1:
        return pieces[0]
    if len(blocks) == 1:
        return torch.cat(list(pieces), dim)
    parts = zip(*(piece.split([length // len(pieces) for length in blocks], dim) for piece in pieces), strict=True)
    return torch.cat([each for part in parts for each in part], dim)


def in_pieces(function: Callable[..., Tensor], axis: Axis, dim: int, *xs: Tensor, blocks: int = 1) -> Tensor:
    """Call `function(*xs)` for each virtual shard of `dim`, and join its results.

    `dim`, counted from the front, is sharded over the axis. In xs it has so many equal `blocks`, such as gate and up.
    """
    pieces = [cut_pieces(x, dim, axis.pieces, (x.shape[dim] // blocks,) * blocks, _Own.apply) for x in xs]
    return _join([_Own.apply(function(*piece)) for piece in zip(*pieces, strict=True)], dim)


def on_tokens(
    norm: Callable[..., Tensor], axis: Axis, dim: int, sharded: bool, x: Tensor, *weights: Tensor | None
) -> Tensor:
    """Call `norm(x, *weights)`, a function of tokens, on each virtual shard of the sequence, and join its results.

    The sequence is dimension `dim` of x; `sharded` says whether this rank has a shard of it or all. Each weight is a
    tensor without a sequence, or None. Its gradient is summed over all tokens on every rank: declare no partial axis.
    """
    n = _runs_of_tokens(x, axis, dim, sharded)
    copies = [[None] * n if w is None else _FanOut.apply(w, n, axis if sharded else Axis()) for w in weights]
    pieces = zip(cut_pieces(x, dim, n, own=_Own.apply), *copies, strict=True)
    return _join([_Own.apply(norm(*piece)) for piece in pieces], dim)


def _runs_of_tokens(x: Tensor, axis: Axis, dim: int, sharded: bool) -> int:
    """How many virtual shards of the sequence are here; 1: V does not divide it, which sequence parallel needs."""
    if x.dim() < 3:
        return 1
    n = axis.pieces if sharded else axis.virtual
    if x.shape[dim] % n == 0:
        return n
    if sharded:
        raise ValueError(
            f"sequence length {x.shape[dim] * axis.size} is not a multiple of the virtual degree {axis.virtual} of "
            f"{axis.name}, as sequence_parallel needs: pad it to {-(-x.shape[dim] // n) * n * axis.size} with ignored "
            f"targets"
        )
    return 1


class _FanOut(Function):
    """A weight for each virtual shard of the sequence: in backward their gradients are summed by the tree."""

    @staticmethod
    def forward(ctx, weight: Tensor, n: int, axis: Axis) -> tuple[Tensor, ...]:
        ctx.axis, ctx.dtype = axis, weight.dtype
        return tuple(weight.view_as(weight) for _ in range(n))

    @staticmethod
    def backward(ctx, *grads: Tensor):  # type: ignore[override]
        return all_reduce(tree_sum(map(_wide, grads)), ctx.axis).to(ctx.dtype), None, None


# --- products -----------------------------------------------------------------------------------------------------


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _sum_tokens(dy: Tensor, axis: Axis, dim: int, sharded: bool) -> Tensor:
    """The sum over all tokens of each feature, whole on every rank."""
    pieces = cut_pieces(dy, dim, _runs_of_tokens(dy, axis, dim, sharded))
    total = tree_sum(flat_tokens(piece).sum(0, dtype=_wide(piece[:0]).dtype) for piece in pieces)
    return all_reduce(total, axis) if sharded else total


class ColumnProduct(Function):
    """`x @ weight.T + bias`, this rank's output features, and the tree sum of the input's gradient.

    Of x [..., D], weight [F/tp, D], bias [F/tp] or None, tp, the dimension that sequence parallel shards or None, and
    the local lengths of the matrices that the output features are made of.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None, blocks: tuple[int, ...]
    ) -> Tensor:
        whole = own(x if dim is None else gather_shards(x, tp, dim))
        ctx.save_for_backward(whole, weight)
        ctx.tp, ctx.dim, ctx.blocks = tp, dim, blocks
        n, flat = tp.pieces, flat_tokens(whole)
        biases = [None] * n if bias is None else cut_pieces(bias, 0, n, blocks)
        ys = [F.linear(flat, w, b) for w, b in zip(cut_pieces(weight, 0, n, blocks), biases, strict=True)]
        return unsafe_view(_join(ys, 1, blocks), (*whole.shape[:-1], len(weight)))  # no view

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        refuse_second_derivative("a linear layer on a virtual degree")
        x, weight = ctx.saved_tensors
        tp, blocks, n = ctx.tp, ctx.blocks, ctx.tp.pieces
        dys, dx = cut_pieces(flat_tokens(dy), 1, n, blocks), None
        if ctx.needs_input_grad[0]:
            dx = tree_sum(_wide(d @ w) for d, w in zip(dys, cut_pieces(weight, 0, n, blocks), strict=True)).view(
                x.shape
            )
            dx = all_reduce(dx, tp) if ctx.dim is None else reduce_scatter_shards(dx, tp, ctx.dim)
            dx = dx.to(x.dtype)
        dweight = _join([d.t() @ flat_tokens(x) for d in dys], 0, blocks) if ctx.needs_input_grad[1] else None
        dbias = _join([d.sum(0) for d in dys], 0, blocks) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None, None, None


class RowProduct(Function):
    """The tree sum over ranks of `x @ weight.T`, plus the bias.

    Of x [..., F/tp], weight [D, F/tp], bias [D] or None, tp, the dimension that is the sequence, and whether to return
    this rank's shard of it.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int, sharded: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp, ctx.dim, ctx.sharded = tp, dim, sharded
        pairs = zip(cut_pieces(flat_tokens(x), 1, tp.pieces), cut_pieces(weight, 1, tp.pieces), strict=True)
        y = tree_sum(_wide(F.linear(piece, w)) for piece, w in pairs).view(*x.shape[:-1], len(weight))
        y = (reduce_scatter_shards(y, tp, dim) if sharded else all_reduce(y, tp)).to(x.dtype)
        return y if bias is None else y + bias.to(y.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        refuse_second_derivative("a linear layer on a virtual degree")
        x, weight = ctx.saved_tensors
        tp, n = ctx.tp, ctx.tp.pieces
        dbias = _sum_tokens(dy, tp, ctx.dim, ctx.sharded).to(dy.dtype) if ctx.needs_input_grad[2] else None
        whole = own(flat_tokens(gather_shards(dy, tp, ctx.dim) if ctx.sharded else dy))
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = _join([whole @ w for w in cut_pieces(weight, 1, n)], 1).view(x.shape)
        if ctx.needs_input_grad[1]:
            dweight = _join([whole.t() @ piece for piece in cut_pieces(flat_tokens(x), 1, n)], 1)
        return dx, dweight, dbias, None, None, None
