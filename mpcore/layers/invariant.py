"""Products, norms and pieces of layers on an axis with a virtual degree: the same bits at every size of the axis.

An axis of size t with the virtual degree V (`build_mesh(virtual=V)`) stands for V virtual shards, V/t on each rank.
Each virtual shard is computed by itself, in memory of its own: a library chooses its kernel by the shape, and a
vectorised kernel computes the end of a tensor by other instructions. Partial sums of the shards are joined by one
binary tree, in float32 (float64 for float64): each rank computes the subtree of its shards, and all compute the rest.
Sums over tokens follow the same tree, over V runs of the sequence, with and without sequence parallel.
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

_ALIGNMENT = 64  # bytes: where torch's allocator begins a tensor


def check_pieces(name: str, sizes: Sequence[int], axis: Axis, unit: int = 1, rest: int = 0) -> None:
    """Refuse a dimension whose blocks of whole units the virtual degree of an axis does not divide, but for a `rest`.

    With a rest of 1, as of 257 tokens, the first virtual shard and so the first rank has one more, at every size.
    """
    for size in sizes if axis.virtual else ():
        if size // unit % axis.virtual > rest:
            units = f"{size}" if unit == 1 else f"{size} / {unit} = {size // unit}"
            raise ValueError(
                f"{name} {units} is not a multiple of the virtual degree {axis.virtual} of {axis.name}: take a size "
                f"that is, or a smaller virtual degree in build_mesh"
            )


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None, blocks: Sequence[int]
) -> Tensor:
    """Compute `x @ weight.T + bias`, this rank's output features, and the tree sum of the input's gradient.

    Args:
        x: [..., D]; with `dim` this rank's shard of that dimension, the sequence.
        weight, bias: [F/tp, D] and [F/tp] or None.
        tp: the axis, with a virtual degree.
        dim: the dimension that sequence parallel shards; None: x is whole.
        blocks: local lengths of the matrices that the output features are made of.
    """
    return _Column.apply(x, weight, bias, tp, dim, tuple(blocks))


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int, sharded: bool) -> Tensor:
    """Compute the tree sum over ranks of `x @ weight.T`, plus the bias.

    Args:
        x: [..., F/tp].
        weight, bias: [D, F/tp] and [D] or None.
        tp: the axis, with a virtual degree.
        dim: the dimension that is the sequence.
        sharded: return this rank's shard of the sequence.
    """
    return _Row.apply(x, weight, bias, tp, dim, sharded)


def in_pieces(function: Callable[..., Tensor], axis: Axis, dim: int, *xs: Tensor, blocks: int = 1) -> Tensor:
    """Call a function on the virtual shards of `dim` one by one, and join its results; at once on an ordinary axis.

    Args:
        function: takes as many tensors as there are `xs` and returns a tensor, each with its shard of `dim`.
        axis: over which `dim` is sharded.
        dim: counted from the front.
        xs: this rank's tensors.
        blocks: of how many equal parts `dim` is made, such as gate and up; the result has one.
    """
    if not axis.virtual:
        return function(*xs)
    pieces = [_Cut.apply(x, dim, axis.pieces, (x.shape[dim] // blocks,) * blocks) for x in xs]
    return _Join.apply(dim, *(function(*piece) for piece in zip(*pieces, strict=True)))


def on_tokens(
    norm: Callable[..., Tensor], axis: Axis, dim: int, sharded: bool, x: Tensor, *weights: Tensor | None
) -> Tensor:
    """Call `norm(x, *weights)` on the virtual shards of the sequence; gradients of the weights are whole on every rank.

    Args:
        norm: works on each token by itself.
        axis: with a virtual degree.
        dim: the dimension of x that is the sequence.
        sharded: whether x is this rank's shard of it.
        x: [B, T, D], or what else has a `dim`.
        weights: [D] or None.
    """
    n = _runs_of_tokens(x, axis, dim, sharded)
    copies = [[None] * n if w is None else _FanOut.apply(w, n, axis if sharded else Axis()) for w in weights]
    pieces = _Cut.apply(x, dim, n, (x.shape[dim],))  # of one too: so autograd adds what x gets here before the rest
    return _Join.apply(dim, *(norm(*piece) for piece in zip(pieces, *copies, strict=True)))


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


def cut_pieces(x: Tensor, dim: int, n: int) -> list[Tensor]:
    """Cut a dimension in n virtual shards, each in memory of its own, without autograd."""
    return _cut(x, dim, n, (x.shape[dim],))


# --- pieces -------------------------------------------------------------------------------------------------------


def _own(x: Tensor) -> Tensor:
    """The tensor contiguous and at an address as a new one has: MKL may look at both."""
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


def _cut(x: Tensor, dim: int, n: int, blocks: Sequence[int]) -> list[Tensor]:
    """The n virtual shards of a dimension that is made of blocks, each in memory of its own."""
    parts = [part.split(shard_sizes(part.shape[dim], n), dim) for part in x.split(list(blocks), dim)]
    return [_own(each[0] if len(each) == 1 else torch.cat(each, dim)) for each in zip(*parts, strict=True)]


def _join(pieces: Sequence[Tensor], dim: int, blocks: Sequence[int] = (1,)) -> Tensor:
    """What `_cut` cut."""
    if len(pieces) == 1:
        return pieces[0]
    if len(blocks) == 1:
        return torch.cat(list(pieces), dim)
    parts = zip(*(piece.split([length // len(pieces) for length in blocks], dim) for piece in pieces), strict=True)
    return torch.cat([each for part in parts for each in part], dim)


class _Cut(Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int, n: int, blocks: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.dim, ctx.blocks = dim, blocks
        pieces = _cut(x, dim, n, blocks)
        return tuple(piece.view_as(piece) for piece in pieces)

    @staticmethod
    def backward(ctx, *grads: Tensor):  # type: ignore[override]
        return _join(grads, ctx.dim, ctx.blocks), None, None, None


class _Join(Function):
    @staticmethod
    def forward(ctx, dim: int, *pieces: Tensor) -> Tensor:
        ctx.dim, ctx.n = dim, len(pieces)
        # no view, whose hook `fully_shard` would lose
        return _join(pieces, dim) if ctx.n > 1 else next(iter(pieces)).clone()

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        return None, *_cut(dy, ctx.dim, ctx.n, (dy.shape[ctx.dim],))


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
    n = _runs_of_tokens(dy, axis, dim, sharded)
    pieces = _cut(dy, dim, n, (dy.shape[dim],))
    total = tree_sum(flat_tokens(piece).sum(0, dtype=_wide(piece[:0]).dtype) for piece in pieces)
    return all_reduce(total, axis) if sharded else total


class _Column(Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None, blocks: tuple[int, ...]
    ) -> Tensor:
        whole = _own(x if dim is None else gather_shards(x, tp, dim))
        ctx.save_for_backward(whole, weight)
        ctx.tp, ctx.dim, ctx.blocks = tp, dim, blocks
        n, flat = tp.pieces, flat_tokens(whole)
        biases = [None] * n if bias is None else _cut(bias, 0, n, blocks)
        ys = [F.linear(flat, w, b) for w, b in zip(_cut(weight, 0, n, blocks), biases, strict=True)]
        return unsafe_view(_join(ys, 1, blocks), (*whole.shape[:-1], len(weight)))

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        refuse_second_derivative("a linear layer on a virtual degree")
        x, weight = ctx.saved_tensors
        tp, blocks, n = ctx.tp, ctx.blocks, ctx.tp.pieces
        dys, dx, dweight, dbias = _cut(flat_tokens(dy), 1, n, blocks), None, None, None
        if ctx.needs_input_grad[0]:
            dx = tree_sum(_wide(d @ w) for d, w in zip(dys, _cut(weight, 0, n, blocks), strict=True)).view(x.shape)
            dx = all_reduce(dx, tp) if ctx.dim is None else reduce_scatter_shards(dx, tp, ctx.dim)
            dx = dx.to(x.dtype)
        if ctx.needs_input_grad[1]:
            dweight = _join([d.t() @ flat_tokens(x) for d in dys], 0, blocks)
        if ctx.needs_input_grad[2]:
            dbias = _join([d.sum(0) for d in dys], 0, blocks)
        return dx, dweight, dbias, None, None, None


class _Row(Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int, sharded: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp, ctx.dim, ctx.sharded = tp, dim, sharded
        n, local = tp.pieces, (x.shape[-1],)
        pairs = zip(_cut(flat_tokens(x), 1, n, local), _cut(weight, 1, n, local), strict=True)
        y = tree_sum(_wide(F.linear(piece, w)) for piece, w in pairs).view(*x.shape[:-1], len(weight))
        y = (reduce_scatter_shards(y, tp, dim) if sharded else all_reduce(y, tp)).to(x.dtype)
        return y if bias is None else y + bias.to(y.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        refuse_second_derivative("a linear layer on a virtual degree")
        x, weight = ctx.saved_tensors
        tp, n, local = ctx.tp, ctx.tp.pieces, (x.shape[-1],)
        dbias = _sum_tokens(dy, tp, ctx.dim, ctx.sharded).to(dy.dtype) if ctx.needs_input_grad[2] else None
        whole = _own(flat_tokens(gather_shards(dy, tp, ctx.dim) if ctx.sharded else dy))
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = _join([whole @ w for w in _cut(weight, 1, n, local)], 1).view(x.shape)
        if ctx.needs_input_grad[1]:
            dweight = _join([whole.t() @ piece for piece in _cut(flat_tokens(x), 1, n, local)], 1)
        return dx, dweight, dbias, None, None, None
