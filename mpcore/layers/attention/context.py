"""Attention over a sequence that is sharded over the context-parallel axis.

    kind         tokens of a rank                    communication
    alltoall     one run                             all-to-all turns token shards of q, k, v into head shards, and back
    ring         one run                             keys and values are sent from rank to rank
    zigzag       one run from each end of the        the same as ring; causal attention is equal work on all ranks
                 sequence, mirrored
    allgather    the same as zigzag                  keys and values are all-gathered
    two-level    the same as zigzag, over the        all-to-all on the inner axis, ring on the outer axis
                 outer axis

A run is a contiguous range of tokens. Each query sees one run of keys [low, high): causal and full masks, windows and
packed documents all have this form. For a block of keys from another rank, the bounds are shifted to indices in that
block. A block that no query of a rank sees is not computed there, and is not sent beyond the last rank that needs it.
The host decides this from the mask, and from `cu_seqlens` if it is in CPU memory.

Partial outputs, and gradients of keys and values, are merged in fp32, in an order that depends only on rank numbers.

Source: Jacobs et al. 2023 (arXiv:2309.14509) for alltoall; Liu et al. 2023 (arXiv:2310.01889) for the ring; Brandon et
al. 2023 (arXiv:2311.09431) for equal causal work; Llama 3 (arXiv:2407.21783), section 3.3.2, for allgather; Fang and
Zhao 2024 (arXiv:2405.07719) for two levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from mpcore import collectives
from mpcore.collectives import shard_range, shard_sizes
from mpcore.kernels._checks import can_read
from mpcore.kernels._choice import TORCH
from mpcore.kernels.attention import Bounds, attention, attention_backward, check_documents, check_torch, key_bounds
from mpcore.layers.attention.ring import _RingAttention, ring_attention, sinks_gradient, with_sinks
from mpcore.layers.attention.scores import check_boolean, scored_attention
from mpcore.layers.attention.sequence import Runs, index_of_runs, order_of_runs, sequence_runs, tokens_of
from mpcore.layers.module import input_error, refuse_second_derivative
from mpcore.mesh.axis import Axis
from mpcore.sharding.declare import Run


def check_heads(kind: str, cp: Axis, heads: int) -> None:
    """Raise ValueError if a rank has fewer heads than the all-to-all has ranks."""
    size = cp.size if kind == "alltoall" else cp.levels[1].size if kind == "two-level" and cp.levels else 1
    if heads < size:
        what = "cp size" if kind == "alltoall" else "cp_inner size"
        raise input_error(
            f"context {kind!r} can't cut {heads} heads over the {what} {size}: 'zigzag', 'ring' and 'allgather' can"
        )


def check_mask(mask: Tensor, rows: int, tokens: int, kind: str, cp: Axis) -> None:
    """Raise ValueError if a mask doesn't fit `rows` sequences of `tokens` local tokens, or `kind` supports no masks."""
    check_boolean(mask)
    shape, length = tuple(mask.shape), mask.shape[-1] if mask.dim() else 0
    if cp.size > 1 and kind not in ("alltoall", "allgather"):  # others meet keys in blocks
        raise input_error(
            f"context {kind!r} can't serve a mask {shape} over {cp.size} ranks, only causal, full, window and "
            f"documents: 'allgather' and 'alltoall' can"
        )
    fits = len(shape) > 1 and shape[-2] in (1, length) and shape[:-2] in ((), (1,), (rows,))
    if not fits or tokens != tokens_of(sequence_runs(length, cp, kind)[cp.rank]):
        raise input_error(
            f"mask {shape} is none of [T, T], [B, T, T] and [B, 1, T] for {rows} rows with {tokens} tokens on each of "
            f"{cp.size} ranks"
        )
    if mask.shape[-2] == length > 1 and can_read(mask) and not mask.diagonal(dim1=-2, dim2=-1).any() and mask.any():
        raise input_error(f"no query sees its own key in the mask {shape}: True is a key that is seen here, give ~mask")


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kind: str,
    cp: Axis,
    *,
    causal: bool = True,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    length: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Attend from this rank's queries to the keys and values of the full sequence.

    Args:
        q: [B, T/cp, H, K], the tokens that `shard_sequence` gives this rank. RoPE is already applied.
        k, v: [B, T/cp, Hkv, K] and [B, T/cp, Hkv, V]. H must be a multiple of Hkv.
        kind: one of `KINDS`.
        cp: the context-parallel axis.
        causal, window, scale, softcap, impl: see `mpcore.kernels.attention.attention`.
        cu_seqlens: [n + 1] document ends, counted over the B full rows concatenated; the same on every rank. None: one
            document per row.
        length: T. None: every rank has as many tokens as this one.
        sinks: [H], a logit for each head that takes part in the softmax and has no value. Its gradient covers this
            rank's tokens or heads: sum it over cp, as the gradients of all parameters.

    Returns:
        [B, T/cp, H, V].

    Raises:
        ValueError: before any communication, if `kind` can't shard this sequence or these heads.

    Example:
        >>> q, k = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8)
        >>> mpcore.layers.attention.context_attention(q, k, k, "zigzag", mpcore.Axis(name="cp"), window=3).shape
        torch.Size([1, 5, 4, 8])
    """
    length = q.shape[1] * cp.size if length is None else length
    runs = sequence_runs(length, cp, kind)
    mine = tokens_of(runs[cp.rank])
    if q.shape[1] != mine:
        raise input_error(
            f"this rank has {q.shape[1]} tokens, but rank {cp.rank} of the {cp.name} axis of size {cp.size} holds "
            f"{mine} of {length}: give the length of the whole sequence"
        )
    check_heads(kind, cp, q.shape[2])
    if window is not None and (not causal or window < 1):
        raise input_error(f"window {window} needs a causal mask and at least 1 token")
    if impl == TORCH:
        masked = kind if cp.size > 1 and kind == "allgather" else None
        check_torch(q, k, v, causal, context=masked, window=window, cu_seqlens=cu_seqlens, softcap=softcap)
    (B, _, heads, _), documents, rows = q.shape, None, 1  # with documents, the tokens of all rows are packed in one row
    cp = cp if B else Axis(name=cp.name)  # nothing to send
    if cu_seqlens is not None:
        rows = max(B, 1)
        check_documents(cu_seqlens, rows * length)
        documents = cu_seqlens.tolist() if can_read(cu_seqlens) else list(range(0, (rows + 1) * length, length))
        cu_seqlens = cu_seqlens.to(q.device, non_blocking=True)
    options = {"scale": scale, "softcap": softcap, "impl": impl}
    if cp.size == 1 or kind == "alltoall":
        q, k, v = _to_heads(q, k, v, cp, length)
        own = None if sinks is None else _own_heads(sinks, cp)
        options["sinks"] = None if own is None else lambda y, lse: with_sinks(y, lse, own)[0].to(y.dtype)
        y = packed_attention(q, k, v, causal=causal, window=window, cu_seqlens=cu_seqlens, **options)
        return collectives.all_to_all(y, cp, 1, 2, heads)

    bounds = key_bounds(rows * length, causal=causal, window=window, cu_seqlens=cu_seqlens, device=q.device)
    if kind == "allgather":
        bounds = _at(bounds, _packed(runs[cp.rank], rows, length))
        return _as_rows(_AllGather.apply(_as_rows(q, B // rows), k, v, sinks, *bounds, cp, runs, options), B)
    outer, inner = cp, Axis()
    if kind == "two-level":
        assert cp.levels is not None
        outer, inner = cp.levels
        runs = tuple(_join(runs[i : i + inner.size]) for i in range(0, cp.size, inner.size))
    q, k, v = (_as_rows(t, B // rows) for t in _to_heads(q, k, v, inner, tokens_of(runs[outer.rank])))
    runs = tuple(_packed(of_rank, rows, length) for of_rank in runs)
    ring = ring_attention(outer, runs, causal, window, documents)
    sinks = None if sinks is None else _own_heads(sinks, inner)
    y = _RingAttention.apply(q, k, v, sinks, *_at(bounds, runs[outer.rank]), ring, options)
    return collectives.all_to_all(_as_rows(y, B), inner, 1, 2, heads)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor | None, sinks: Any = None, **options: Any
) -> Tensor:
    """Call `mpcore.kernels.attention.attention` on full rows. `cu_seqlens` counts all rows concatenated."""
    rows = q.shape[0] if cu_seqlens is None else 1
    y, lse = attention(*(_as_rows(t, rows) for t in (q, k, v)), cu_seqlens=cu_seqlens, **options)
    return _as_rows(y if sinks is None else sinks(y, lse), q.shape[0])


def _own_heads(sinks: Tensor, axis: Axis) -> Tensor:
    return sinks[slice(*shard_range(len(sinks), axis))]


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, kind: str, cp: Axis, **scores: Any) -> Tensor:
    """Compute `scored_attention` under any mask that `check_mask` accepts. Needs O(T^2) memory.

    Returns:
        [B, T/cp, H, V]. A query that sees no key gets 0 and no gradient.
    """
    length = mask.shape[-1]
    runs = sequence_runs(length, cp, kind)
    heads = q.shape[2]
    if kind == "alltoall":
        q, k, v = _to_heads(q, k, v, cp, length)
    elif cp.size > 1:
        k, v = _gather_keys(k, v, cp, runs)
        if mask.shape[-2] > 1:
            mask = mask.index_select(-2, index_of_runs(runs[cp.rank], mask.device))
    y = scored_attention(q, k, v, mask=mask, **scores)
    return collectives.all_to_all(y, cp, 1, 2, heads) if kind == "alltoall" else y


def _as_rows(x: Tensor, rows: int) -> Tensor:
    return x if x.shape[0] == rows else x.reshape(rows, x.shape[0] * x.shape[1] // rows, *x.shape[2:])


def _packed(runs: Runs, rows: int, length: int) -> Runs:
    return tuple((row * length + start, row * length + end) for row in range(rows) for start, end in runs)


def _at(bounds: Bounds, runs: Runs) -> Bounds:
    low, high = (torch.cat([bound[start:end] for start, end in runs]) for bound in bounds)
    return low, high


def _join(runs: Sequence[Runs]) -> Runs:
    joined: list[Run] = []
    for start, end in sorted(run for of_rank in runs for run in of_rank):
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return tuple(joined)


def _to_heads(q: Tensor, k: Tensor, v: Tensor, axis: Axis, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """All-to-all: [B, T/n, H, K] -> [B, T, H/n, K]. Each rank gets the KV heads that its query heads read."""
    if axis.size == 1:
        return q, k, v
    group = q.shape[2] // k.shape[2]
    sizes = shard_sizes(q.shape[2], axis.size)
    reads = [list(range(a // group, (b - 1) // group + 1)) for a, b in pairwise([0, *accumulate(sizes)])]
    regular = all(
        size % len(heads) == 0 and (size // len(heads) == group or len(heads) == 1)
        for size, heads in zip(sizes, reads, strict=True)
    )
    held = [head for heads in reads for head in heads]
    if not regular or [len(heads) for heads in reads] != shard_sizes(len(held), axis.size):
        held = [head // group for head in range(q.shape[2])]  # uneven shards of groups: one for each query head
    if held != list(range(k.shape[2])):
        k, v = (torch.cat([each[head] for head in held], 2) for each in (k.split(1, 2), v.split(1, 2)))
    q, k, v = (collectives.all_to_all(t, axis, 2, 1, length) for t in (q, k, v))
    return q, k, v


class _AllGather(Function):
    """All-gather keys and values; gather them again in backward, so that only shards are kept."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, low, high, cp: Axis, runs: tuple[Runs, ...], options: dict[str, Any]):
        keys, values = (_as_rows(t, q.shape[0]) for t in _gather_keys(k, v, cp, runs))
        output, lse = attention(q, keys, values, bounds=(low, high), **options)
        if sinks is not None:
            wide, lse = with_sinks(output, lse, sinks)
            output = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, output, lse, low, high)
        ctx.cp, ctx.runs, ctx.options = cp, runs, options
        return output

    @staticmethod
    def backward(ctx, grad):
        refuse_second_derivative("context-parallel attention")
        q, k, v, sinks, output, lse, low, high = ctx.saved_tensors
        keys, values = (_as_rows(t, q.shape[0]) for t in _gather_keys(k, v, ctx.cp, ctx.runs))
        order, wide = order_of_runs(ctx.runs, q.device), torch.promote_types(q.dtype, torch.float32)
        options = {"bounds": (low, high), "out_dtype": wide, **ctx.options}
        dq, *grads = attention_backward(grad, q, keys, values, output, lse, **options)
        grads = (_as_rows(t, k.shape[0]).index_select(1, order) for t in grads)
        dk, dv = (collectives.reduce_scatter(t, ctx.cp, 1) for t in grads)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), sinks_gradient(grad, output, lse, sinks), *[None] * 5


def _gather_keys(k: Tensor, v: Tensor, cp: Axis, runs: tuple[Runs, ...]) -> tuple[Tensor, Tensor]:
    order = order_of_runs(runs, k.device)
    place = order.argsort()
    k, v = (collectives.all_gather(t, cp, 1, len(order)).index_select(1, place) for t in (k, v))
    return k, v
