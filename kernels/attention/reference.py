"""Attention in plain torch, in chunks of queries and keys, so that it never holds all scores at once."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .bounds import Scores

Hidden = tuple[slice, Tensor]  # some keys, and which queries don't see them
CHUNK_SCORES = 2**19  # scores of a chunk: 2 MiB in float32, which fit into the cache of a CPU core


def forward_reference(outs: tuple[Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> None:
    """Write the output and lse of attention into `outs`."""
    output, lse = outs
    if lse.numel() == 0:
        return
    q, k, v = _grouped(query, key).mul(scores.scale), _grouped(key, key), _grouped(value, key)
    by_group, rows_lse = q.new_zeros((*q.shape[:3], v.shape[3])), lse.view(q.shape[:3]).fill_(-math.inf)
    for some, rows, keys, hidden in _chunks(q, k, scores):
        z, _ = _scores(q[some, :, rows], k[some, :, keys], scores.softcap, hidden)
        largest = z.amax(-1, keepdim=True).clamp_(min=torch.finfo(z.dtype).min)  # a query that sees no key has -inf
        p = z.sub_(largest).exp_()
        total = p.sum(-1, keepdim=True)
        by_group[some, :, rows] = _product(p, v[some, :, keys]).div_(total.masked_fill(total == 0, 1))
        rows_lse[some, :, rows] = (total.log() + largest).squeeze(-1)
    output.copy_(_ungrouped(by_group, query))


def backward_reference(
    outs: tuple[Tensor, Tensor, Tensor], grad: Tensor, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
    output: Tensor, lse: Tensor, scores: Scores,
) -> None:  # fmt: skip
    """Write dq, dk and dv of attention into `outs`, from the output and lse of the forward pass."""
    q, k, v = _grouped(query, key).mul(scores.scale), _grouped(key, key), _grouped(value, key)
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    if dq.numel() > 0 and dk.numel() > 0:
        do = _grouped(grad, key)
        delta = (do * _grouped(output, key)).sum(-1, keepdim=True)
        rows_lse = lse.to(q.dtype).view(delta.shape)
        if dlse is not None:
            delta -= dlse.to(q.dtype).reshape(delta.shape)
        nothing = rows_lse == -math.inf
        rows_lse, delta = rows_lse.masked_fill(nothing, math.inf), delta.masked_fill(nothing, 0)
        for some, rows, keys, hidden in _chunks(q, k, scores):
            queries, dout, part = q[some, :, rows], do[some, :, rows], k[some, :, keys]
            z, slope = _scores(queries, part, scores.softcap, hidden)
            p = z.sub_(rows_lse[some, :, rows]).exp_()
            dv[some, :, keys] += _sum_product(p, dout)
            ds = _product(dout, v[some, :, keys].mT).sub_(delta[some, :, rows]).mul_(p)
            ds = ds if slope is None else ds.mul_(slope)
            dq[some, :, rows] = _product(ds, part)
            dk[some, :, keys] += _sum_product(ds, queries)
    dq *= scores.scale
    for out, by_group in zip(outs, (dq, dk, dv), strict=True):
        out.copy_(_ungrouped(by_group, out))


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """Reshape `[B, T, H, K] -> [B Hkv, H/Hkv, T, K]`, in the dtype that the reference computes in."""
    groups = max(key.shape[2], 1)
    x = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(2, (groups, x.shape[2] // groups))
    return x.permute(0, 2, 3, 1, 4).flatten(0, 1)


def _ungrouped(x: Tensor, like: Tensor) -> Tensor:
    """Undo `_grouped` for an x that has the tokens and heads of `like`."""
    B, T, H, _ = like.shape
    return x.reshape(B, H, T, x.shape[3]).transpose(1, 2)


def _chunks(q: Tensor, k: Tensor, scores: Scores) -> Iterator[tuple[slice, slice, slice, list[Hidden]]]:
    """Yield chunks: some KV heads, some queries, the keys that these queries see, and which scores are hidden."""
    N, G, T, _ = q.shape
    keys = k.shape[2]
    low, high = scores.low, scores.high
    if low is None or high is None:
        low, high = torch.zeros(T, dtype=torch.int32), torch.full((T,), keys, dtype=torch.int32)
        high = torch.arange(1, T + 1, dtype=torch.int32) if scores.causal else high
    low, high = (bound.cpu().clamp(0, keys) for bound in (low, high))
    if bool((low.diff() < 0).any()) or bool((high.diff() < 0).any()):
        raise ValueError("bounds fall from one query to the next; neither low nor high may")
    low, high, starts, ends = low.to(q.device), high.to(q.device), low.tolist(), high.tolist()
    count = min(256, max(16, CHUNK_SCORES // (G * max(keys, 1))))
    for first in range(0, T, count):
        last = min(first + count, T) - 1
        rows, start, end = slice(first, last + 1), starts[first], ends[last]
        if start >= end:
            continue
        index, hidden = torch.arange(start, end, device=q.device), []
        left, right = min(starts[last], end) - start, max(ends[first], start) - start
        if left > 0:  # the first keys are hidden from the last queries
            hidden.append((slice(left), index[:left] < low[rows, None]))
        if right < end - start:  # the last keys are hidden from the first queries
            hidden.append((slice(right, None), index[right:] >= high[rows, None]))
        step = max(1, CHUNK_SCORES // (G * (last + 1 - first) * (end - start)))
        for n in range(0, N, step):
            yield slice(n, n + step), rows, slice(start, end), hidden


def _scores(q: Tensor, k: Tensor, softcap: float, hidden: list[Hidden]) -> tuple[Tensor, Tensor | None]:
    """Return z `[N, G, rows, keys]` of scaled queries, -inf where hidden, and the slope of the soft cap if any."""
    z, slope = _product(q, k.mT), None
    if softcap:
        tanh = z.div_(softcap).tanh_()
        z, slope = softcap * tanh, 1 - tanh.square()
    for columns, mask in hidden:
        z[..., columns].masked_fill_(mask, -math.inf)
    return z, slope


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Multiply `[N, G, I, J] x [N, 1, J, L] -> [N, G, I, L]` without a copy of y for each of G."""
    N, G, rows, _ = x.shape
    return torch.bmm(x.reshape(N, G * rows, -1), y.squeeze(1)).view(N, G, rows, -1)


def _sum_product(x: Tensor, y: Tensor) -> Tensor:
    """Multiply `[N, G, I, J], [N, G, I, L] -> [N, 1, J, L]`: x^T y, summed over G."""
    return torch.bmm(x.flatten(1, 2).mT, y.reshape(x.shape[0], -1, y.shape[3])).unsqueeze(1)
