"""Functions on virtual shards: results have the same bits at every size of the axis.

Each virtual shard is computed separately, in its own memory: a library chooses its kernel by the shape, and a
vectorized kernel treats the end of a tensor with other instructions. One binary tree adds the shards' partial sums, in
float32 (float64 for float64). Sums over tokens use the same tree, over V runs of the sequence, with and without
sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from mpcore.collectives import all_reduce, gather, reduce_scatter
from mpcore.layers.linear_ops import flat_tokens, unsafe_view
from mpcore.layers.module import refuse_second_derivative
from mpcore.mesh.axis import Axis
from mpcore.tools.invariant.sums import cut_pieces, degree, own, pieces, tree_sum


class _Own(Function):
    """Copy a tensor to its own memory; in backward, do the same with its gradient."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)  # no view, whose hook `fully_shard` would lose

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return own(dy)


def _join(found: Sequence[Tensor], dim: int, blocks: Sequence[int] = ()) -> Tensor:
    if len(found) == 1:
        return found[0]
    if len(blocks) < 2:
        return torch.cat(list(found), dim)
    parts = zip(*(piece.split([length // len(found) for length in blocks], dim) for piece in found), strict=True)
    return torch.cat([each for part in parts for each in part], dim)


def in_pieces(function: Callable[..., Tensor], axis: Axis, dim: int, *xs: Tensor, blocks: int = 1) -> Tensor:
    """Call `function(*xs)` on each virtual shard of `dim`, and concatenate the results.

    `dim`, counted from the front, is sharded over the axis. In xs it consists of `blocks` equal blocks, such as gate
    and up.
    """
    cut = [cut_pieces(x, dim, pieces(axis), (x.shape[dim] // blocks,) * blocks, _Own.apply) for x in xs]
    return _join([_Own.apply(function(*piece)) for piece in zip(*cut, strict=True)], dim)


def on_tokens(
    function: Callable[..., Tensor], axis: Axis, dim: int, sharded: bool, x: Tensor, *weights: Tensor | None
) -> Tensor:
    """Call a function of tokens on each virtual shard of the sequence, and concatenate the results.

    Args:
        function: `function(x, *weights)`, which computes each token independently, for example `torch.mul`.
        axis: the tensor-parallel axis, with a virtual degree.
        dim: the sequence dimension of x.
        sharded: True if sequence parallelism shards the sequence over the axis; False if this rank has all of it.
        x: [B, T, ...]. If x has only two dimensions, the function is called once.
        weights: tensors without a sequence dimension, or None. Their gradients are summed over all tokens on every
            rank, so do not declare them `partial`.

    Returns:
        The result of the function for all tokens of x.

    Raises:
        ValueError: if the sequence is sharded and the virtual degree does not divide its length.

    Example:
        >>> from mpcore.tools.invariant import invariant_mesh, on_tokens
        >>> tp = invariant_mesh(mpcore.build_mesh(), 2).tp
        >>> on_tokens(torch.mul, tp, 1, False, torch.ones(1, 4, 2), torch.tensor([1.0, 3.0])).sum()
        tensor(16.)
    """
    n = pieces(axis) if sharded else degree(axis)
    if x.dim() < 3 or (x.shape[dim] % n and not sharded):
        n = 1  # not cut on any rank
    elif x.shape[dim] % n:
        length, V = x.shape[dim] * axis.size, degree(axis)
        raise ValueError(
            f"sequence length {length} is not a multiple of the virtual degree {V} of {axis.name}, which sequence "
            f"parallel needs: pad it to {-(-length // V) * V} with ignored targets"
        )
    copies = [[None] * n if w is None else _FanOut.apply(w, n, axis if sharded else Axis()) for w in weights]
    each = zip(cut_pieces(x, dim, n, own=_Own.apply), *copies, strict=True)
    return _join([_Own.apply(function(*piece)) for piece in each], dim)


class _FanOut(Function):
    """Copy a weight for each virtual shard of the sequence; in backward the binary tree sums the gradients."""

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
    """[..., D] @ rows.T + bias -> [..., F/tp], one product per virtual shard. rows: [F/tp, D]; bias: [F/tp] or None."""
    flat, n = flat_tokens(whole), pieces(tp)
    biases = [None] * n if bias is None else cut_pieces(bias, 0, n, blocks)
    ys = [F.linear(flat, w, b) for w, b in zip(cut_pieces(rows, 0, n, blocks), biases, strict=True)]
    return unsafe_view(_join(ys, 1, blocks), (*whole.shape[:-1], len(rows)))  # no view


def _tree_product(x: Tensor, rows: Tensor, tp: Axis, dim: int | None, blocks: tuple[int, ...] = ()) -> Tensor:
    """[..., F/tp] @ rows, summed over ranks by the tree: [..., D], or this rank's shard of dimension `dim`."""
    n = pieces(tp)
    pairs = zip(cut_pieces(flat_tokens(x), 1, n, blocks), cut_pieces(rows, 0, n, blocks), strict=True)
    y = tree_sum(_wide(piece @ w) for piece, w in pairs).view(*x.shape[:-1], rows.shape[1])
    return (all_reduce(y, tp) if dim is None else reduce_scatter(y, tp, dim)).to(x.dtype)


class ColumnProduct(Function):
    """`x @ weight.T + bias` for this rank's output features; backward sums the input's gradient by the tree.

    Arguments: x [..., D], weight [F/tp, D], bias [F/tp] or None, tp, the dimension that sequence parallelism shards or
    None, and the local lengths of the matrices that make up the output features.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None, blocks: tuple[int, ...]
    ) -> Tensor:
        whole = own(x if dim is None else gather(x, tp, dim))
        ctx.save_for_backward(whole, weight)
        ctx.how = tp, dim, blocks
        return _spread(whole, weight, bias, tp, blocks)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        refuse_second_derivative("a linear layer on a virtual degree")
        (x, weight), (tp, _, blocks), wanted = ctx.saved_tensors, ctx.how, ctx.needs_input_grad
        dys = cut_pieces(flat_tokens(dy), 1, pieces(tp), blocks)
        dx = _tree_product(dy, weight, *ctx.how) if wanted[0] else None
        dweight = _join([d.t() @ flat_tokens(x) for d in dys], 0, blocks) if wanted[1] else None
        dbias = _join([d.sum(0) for d in dys], 0, blocks) if wanted[2] else None
        return dx, dweight, dbias, None, None, None


class RowProduct(Function):
    """`x @ weight.T`, summed over ranks by the tree.

    Arguments: x [..., F/tp], weight [D, F/tp], tp, and the dimension to reduce-scatter, or None to all-reduce.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tp: Axis, dim: int | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp, ctx.dim = tp, dim
        return _tree_product(x, weight.t(), tp, dim)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        refuse_second_derivative("a linear layer on a virtual degree")
        x, weight = ctx.saved_tensors
        whole = own(dy if ctx.dim is None else gather(dy, ctx.tp, ctx.dim))
        dx = _spread(whole, weight.t(), None, ctx.tp) if ctx.needs_input_grad[0] else None
        xs = cut_pieces(flat_tokens(x), 1, pieces(ctx.tp)) if ctx.needs_input_grad[1] else []
        dweight = _join([flat_tokens(whole).t() @ piece for piece in xs], 1) if xs else None
        return dx, dweight, None, None
