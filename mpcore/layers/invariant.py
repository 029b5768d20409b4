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

from mpcore.collectives import all_reduce, gather, reduce_scatter, shard_sizes, tree_sum
from mpcore.layers.linear_ops import flat_tokens, unsafe_view
from mpcore.layers.module import refuse_second_derivative
from mpcore.mesh.axis import Axis


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
    """Return the tensor contiguous, and at an address as a new one has, a multiple of 64 bytes: MKL may look at it."""
    x = x.contiguous()
    return x if x.data_ptr() % 64 == 0 else x.clone()


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


def _join(pieces: Sequence[Tensor], dim: int, blocks: Sequence[int] = ()) -> Tensor:
    """Put the virtual shards of `cut_pieces` together again."""
    if len(pieces) == 1:
        return pieces[0]
    if len(blocks) < 2:
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
    function: Callable[..., Tensor], axis: Axis, dim: int, sharded: bool, x: Tensor, *weights: Tensor | None
) -> Tensor:
    """Call a function of tokens on each virtual shard of the sequence, and join the results.

    Args:
        function: `function(x, *weights)`, which computes each token by itself, such as `torch.mul`.
        axis: tensor parallel, with a virtual degree.
        dim: the dimension of x that is the sequence.
        sharded: whether this rank has a shard of the sequence, by sequence parallel, or all of it.
        x: [B, T, ...], or of two dimensions: then the function is called once.
        weights: tensors without a sequence, or None. Their gradients are summed over all tokens on every rank, so
            declare no pending sum (`partial`).

    Raises:
        ValueError: if the virtual degree does not divide a sequence that is sharded.

    Example:
        >>> tp = mpcore.build_mesh(virtual=2).tp
        >>> mpcore.layers.on_tokens(torch.mul, tp, 1, False, torch.ones(1, 4, 2), torch.tensor([1.0, 3.0])).sum()
        tensor(16.)
    """
    n = axis.pieces if sharded else axis.virtual
    if x.dim() < 3 or (x.shape[dim] % n and not sharded):
        n = 1  # not cut on any rank
    elif x.shape[dim] % n:
        length, V = x.shape[dim] * axis.size, axis.virtual
        raise ValueError(
            f"sequence length {length} is not a multiple of the virtual degree {V} of {axis.name}, which sequence "
            f"parallel needs: pad it to {-(-length // V) * V} with ignored targets"
        )
    copies = [[None] * n if w is None else _FanOut.apply(w, n, axis if sharded else Axis()) for w in weights]
    pieces = zip(cut_pieces(x, dim, n, own=_Own.apply), *copies, strict=True)
    return _join([_Own.apply(function(*piece)) for piece in pieces], dim)


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


def _spread(whole: Tensor, rows: Tensor, bias: Tensor | None, tp: Axis, blocks: tuple[int, ...] = ()) -> Tensor:
    """[..., D] @ rows.T + bias, this rank's [F/tp, D] and [F/tp]: [..., F/tp], a product for each virtual shard."""
    flat, n = flat_tokens(whole), tp.pieces
    biases = [None] * n if bias is None else cut_pieces(bias, 0, n, blocks)
    ys = [F.linear(flat, w, b) for w, b in zip(cut_pieces(rows, 0, n, blocks), biases, strict=True)]
    return unsafe_view(_join(ys, 1, blocks), (*whole.shape[:-1], len(rows)))  # no view


def _tree_product(x: Tensor, rows: Tensor, tp: Axis, dim: int | None, blocks: tuple[int, ...] = ()) -> Tensor:
    """The tree sum over ranks of [..., F/tp] @ rows, [F/tp, D]: [..., D], or this rank's shard of dimension `dim`."""
    pairs = zip(cut_pieces(flat_tokens(x), 1, tp.pieces, blocks), cut_pieces(rows, 0, tp.pieces, blocks), strict=True)
    y = tree_sum(_wide(piece @ w) for piece, w in pairs).view(*x.shape[:-1], rows.shape[1])
    return (all_reduce(y, tp) if dim is None else reduce_scatter(y, tp, dim)).to(x.dtype)


class ColumnProduct(Function):
    """`x @ weight.T + bias`, this rank's output features, and the tree sum of the input's gradient.

    Of x [..., D], weight [F/tp, D], bias [F/tp] or None, tp, the dimension that sequence parallel shards or None, and
    the local lengths of the matrices that the output features are made of.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None, blocks: tuple[int, ...]
    ) -> Tensor:
        whole = own(x if dim is None else gather(x, tp, dim))
        ctx.save_for_backward(whole, weight)
        ctx.how = tp, dim, blocks
        return _spread(whole, weight, bias, tp, blocks)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        refuse_second_derivative("a linear layer on a virtual degree")
        (x, weight), (tp, _, blocks), wanted = ctx.saved_tensors, ctx.how, ctx.needs_input_grad
        dys = cut_pieces(flat_tokens(dy), 1, tp.pieces, blocks)
        dx = _tree_product(dy, weight, *ctx.how) if wanted[0] else None
        dweight = _join([d.t() @ flat_tokens(x) for d in dys], 0, blocks) if wanted[1] else None
        dbias = _join([d.sum(0) for d in dys], 0, blocks) if wanted[2] else None
        return dx, dweight, dbias, None, None, None


class RowProduct(Function):
    """The tree sum over ranks of `x @ weight.T`.

    Of x [..., F/tp], weight [D, F/tp], tp, and the dimension of which to return this rank's shard, or None.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, tp: Axis, dim: int | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp, ctx.dim = tp, dim
        return _tree_product(x, weight.t(), tp, dim)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        refuse_second_derivative("a linear layer on a virtual degree")
        x, weight = ctx.saved_tensors
        whole = own(dy if ctx.dim is None else gather(dy, ctx.tp, ctx.dim))
        dx = _spread(whole, weight.t(), None, ctx.tp) if ctx.needs_input_grad[0] else None
        xs = cut_pieces(flat_tokens(x), 1, ctx.tp.pieces) if ctx.needs_input_grad[1] else []
        dweight = _join([flat_tokens(whole).t() @ piece for piece in xs], 1) if xs else None
        return dx, dweight, None, None
