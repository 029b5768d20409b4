"""Softmax attention of grouped query heads, with the log-sum-exp of each row as a second, differentiable output.

    z = scale q k^T, or c tanh(scale q k^T / c) with a soft cap c, over the keys that a query sees
    lse = log sum e^z,  p = e^(z - lse),  output = p v

    delta = sum output doutput - dlse
    dz = p (doutput v^T - delta),  ds = dz, or dz (1 - (z / c)^2)
    dq = scale ds k,  dk = scale ds^T q,  dv = p^T doutput           (dk and dv summed over the query heads of a group)

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), for the one pass; Dao, "FlashAttention-2"
(2023), section 3, for the blocks; Ainslie et al., "GQA" (2023), for groups; dlse in delta follows from dlse/dz = p.

Query i sees the keys low[i] <= j < high[i]; neither bound falls as i rises. Causal and full masks, windows, packed
documents, and a block of keys at an offset are all of this kind, and blocks of keys outside are never read. A query
that sees nothing has output 0, lse -inf and gradient 0.

The backward pass takes (output, lse) as given: those merged over several blocks of keys (m = logaddexp(lse1, lse2),
o = e^(lse1 - m) o1 + e^(lse2 - m) o2, in float32) make each block's dq, dk and dv its terms of the whole gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ._dispatch import REFERENCE_DTYPES, define, launches, refuse_second_derivative, runs_triton

Bounds = tuple[Tensor, Tensor]

HEAD_DIMS = (64, 80, 96, 128, 256)  # of keys and of values, that the kernels are tiled for
CHUNK_SCORES = 2**19  # of the reference: 2 MiB in float32, which a core's cache holds


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    bounds: Bounds | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v over the keys that each query sees, and the logarithm of the softmax's denominator.

    Args:
        query: `[B, Tq, H, K]`, float32, bfloat16 or float16 (the reference takes float64 too), with any strides.
        key: `[B, Tk, Hkv, K]`; H is a multiple of Hkv, and each KV head serves a run of H / Hkv query heads.
        value: `[B, Tk, Hkv, Kv]`.
        causal: a query sees itself and what is before it; not read if there are bounds.
        window: with causal, the number of keys a query sees, itself counted; `None`: all.
        cu_seqlens: `[n + 1]` ends of packed documents, from 0 to T, for B = 1; tokens see their own document.
        bounds: instead of the above, int32 `(low, high)`, each `[Tq]`: query i sees the keys low[i] <= j < high[i]
            that there are. Neither may fall as i rises.
        scale: of the scores; `None`: K^(-1/2).
        softcap: c; `None`: none.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `query` and by the head dimensions.

    Returns:
        `(output, lse)`: `[B, Tq, H, Kv]` in the dtype of `query`, and `[B, H, Tq]`, natural, in float32 (float64 for
        float64 inputs).

    Raises:
        ValueError: shapes, dtypes or devices don't go together, a mask has no meaning, or `impl` can't run here.
    """
    scale, cap = _check(query, key, value, scale, softcap)
    low, high = _bounds(query, key, causal, window, cu_seqlens, bounds)
    return _Attention.apply(query, key, value, low, high, causal, scale, cap, _runs_triton(impl, query, value))


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    bounds: Bounds | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dlse: Tensor | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys and values add to the gradient of attention, by its output and lse alone. Not differentiable.

    Args:
        grad: `[B, Tq, H, Kv]`, the gradient of the output.
        query, key, value: as in the forward pass; the keys and values may be a part of those that were attended to.
        output, lse: of the forward pass, over all keys.
        causal, window, cu_seqlens, bounds, scale, softcap, impl: as in the forward pass, for these keys.
        dlse: `[B, H, Tq]`, the gradient of lse; `None`: 0.

    Returns:
        `(dq, dk, dv)`, of the shapes and dtypes of `query`, `key` and `value`.

    Raises:
        ValueError: as `attention`.
    """
    scale, cap = _check(query, key, value, scale, softcap)
    B, T, H, _ = query.shape
    shapes = {"grad": (B, T, H, value.shape[-1]), "lse": (B, H, T)}
    shapes |= {"output": shapes["grad"], "dlse": shapes["lse"]}
    for name, given in (("grad", grad), ("output", output), ("lse", lse), ("dlse", dlse)):
        if given is not None and (given.shape != shapes[name] or given.device != query.device):
            there = f"{tuple(given.shape)} on {given.device}"
            raise ValueError(f"{name} is {there}, but goes with a query on {query.device} as {shapes[name]}")
    low, high = _bounds(query, key, causal, window, cu_seqlens, bounds)
    triton = _runs_triton(impl, query, value)
    return _backward_op(grad, dlse, query, key, value, output, lse, low, high, causal, scale, cap, triton)


def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    bounds: Bounds | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention` in plain torch, some queries at a time; computes in float32, or float64 for a float64 query."""
    return attention(
        query, key, value, causal=causal, window=window, cu_seqlens=cu_seqlens, bounds=bounds, scale=scale,
        softcap=softcap, impl="reference",
    )  # fmt: skip


def key_bounds(
    T: int,
    *,
    causal: bool = True,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    device: torch.device | None = None,
) -> Bounds:
    """The bounds `(low, high)`, int32 `[T]` each, of T queries of as many keys; arguments as of `attention`."""
    index = torch.arange(T, device=device, dtype=torch.int32)
    low, high = torch.zeros_like(index), torch.full_like(index, T)
    if cu_seqlens is not None:
        check_documents(cu_seqlens, T)
        ends = cu_seqlens.to(torch.int32)
        document = torch.searchsorted(ends, index, right=True)
        low, high = ends[document - 1], ends[document]
    if causal:
        high = index + 1
    if window is not None:
        low = torch.maximum(low, high - window)
    return low, high


def check_documents(cu_seqlens: Tensor, T: int) -> None:
    """Refuse document ends that don't rise from 0 to T; on a GPU, and while compiling, not: it would stall."""
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0 or last != T or bool((cu_seqlens.diff() < 0).any()):
        raise ValueError(f"cu_seqlens must rise from 0 to the sequence length {T}, but runs from {first} to {last}")


def _check(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, softcap: float | None
) -> tuple[float, float]:
    """Refuse what doesn't fit; return the scale and the cap, 0 for none."""
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in (("query", query), ("key", key), ("value", value)))
    if not query.dim() == key.dim() == value.dim() == 4:
        raise ValueError(f"{shapes}: each must have 4 dimensions [B, T, H, K]")
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3] or key.shape[:3] != value.shape[:3]:
        raise ValueError(f"{shapes} are not [B, Tq, H, K], [B, Tk, Hkv, K] and [B, Tk, Hkv, Kv]")
    if query.shape[2] % max(key.shape[2], 1) or query.shape[2] < key.shape[2]:
        raise ValueError(f"{query.shape[2]} query heads are not a multiple of {key.shape[2]} KV heads")
    for name, t in (("key", key), ("value", value)):
        if (t.dtype, t.device) != (query.dtype, query.device):
            raise ValueError(f"{name} is {t.dtype} on {t.device}, but query is {query.dtype} on {query.device}")
    if query.dtype not in REFERENCE_DTYPES:
        raise ValueError(f"query is {query.dtype}; it must be float64, float32, bfloat16 or float16")
    if scale is None:
        scale = max(query.shape[3], 1) ** -0.5
    if not 0 < scale < math.inf:
        raise ValueError(f"scale {scale} is not a positive number")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap {softcap} is not a positive number; None is none")
    return scale, softcap or 0.0


def _bounds(
    query: Tensor, key: Tensor, causal: bool, window: int | None, cu_seqlens: Tensor | None, bounds: Bounds | None
) -> tuple[Tensor | None, Tensor | None]:
    """The mask as bounds, or (None, None) where `causal` says it all."""
    B, T, keys = query.shape[0], query.shape[1], key.shape[1]
    if window is not None and (not causal or window < 1):
        raise ValueError(f"window {window} needs a causal mask and at least 1 token")
    if bounds is not None:
        if window is not None or cu_seqlens is not None:
            raise ValueError("bounds are the whole mask: give no window and no cu_seqlens with them")
        for name, bound in zip(("low", "high"), bounds, strict=True):
            if bound.shape != (T,) or bound.dtype != torch.int32 or bound.device != query.device:
                there = f"{bound.dtype} {tuple(bound.shape)} on {bound.device}"
                raise ValueError(f"bound {name} is {there}; it must be torch.int32 ({T},) on {query.device}")
        return bounds
    if T != keys and (causal or cu_seqlens is not None):
        raise ValueError(f"{T} queries of {keys} keys have no diagonal: give bounds, or causal=False")
    if cu_seqlens is not None and B != 1:
        raise ValueError(f"cu_seqlens packs documents in one row, but the batch has {B}: flatten it to [1, B*T]")
    if cu_seqlens is None and window is None:
        return None, None
    return key_bounds(T, causal=causal, window=window, cu_seqlens=cu_seqlens, device=query.device)


def _runs_triton(impl: str | None, query: Tensor, value: Tensor) -> bool:
    dims = query.shape[3], value.shape[3]
    tiled = all(dim in HEAD_DIMS for dim in dims)
    if impl == "triton" and not tiled:
        raise ValueError(f"impl='triton' has no kernel of head dimensions {dims}, only of {HEAD_DIMS}")
    return runs_triton(impl, query) and tiled


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, low, high, causal, scale, softcap, triton):
        output, lse = _forward_op(query, key, value, low, high, causal, scale, softcap, triton)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, output, lse, low, high)
        ctx.options = causal, scale, softcap, triton
        return output, lse

    @staticmethod
    def backward(ctx, doutput, dlse):
        refuse_second_derivative("attention")
        query, key, value, output, lse, low, high = ctx.saved_tensors
        if doutput is None and dlse is None:
            return (None,) * 9
        doutput = torch.zeros_like(output) if doutput is None else doutput
        return *_backward_op(doutput, dlse, query, key, value, output, lse, low, high, *ctx.options), *[None] * 6


def _empty_forward(query: Tensor, key: Tensor, value: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    B, T, H, _ = query.shape
    exact = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty((B, T, H, value.shape[3])), query.new_empty((B, H, T), dtype=exact)


def _empty_backward(
    grad: Tensor, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *others: object
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


_OPTIONS = "Tensor? low, Tensor? high, bool causal, float scale, float softcap, bool triton"
_forward_op = define(
    f"attention_forward(Tensor query, Tensor key, Tensor value, {_OPTIONS}) -> (Tensor output, Tensor lse)",
    _empty_forward,
)
_backward_op = define(
    "attention_backward(Tensor grad, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse,"
    f" {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    _empty_backward,
)


@register_flop_formula(torch.ops.mpcore.attention_forward)
def _forward_flops(query: torch.Size, key: torch.Size, value: torch.Size, *others, **kwargs) -> int:
    """Two products, of all pairs of query and key whatever the mask, as torch counts its own attention."""
    B, T, H, K = query
    return 2 * B * H * T * key[1] * (K + value[3])


@register_flop_formula(torch.ops.mpcore.attention_backward)
def _backward_flops(grad, dlse, query: torch.Size, key: torch.Size, value: torch.Size, *others, **kwargs) -> int:
    """Five products, one of them done again."""
    B, T, H, K = query
    return 2 * B * H * T * key[1] * (3 * K + 2 * value[3])


@launches(_forward_op)
def _run_forward(query, key, value, low, high, causal, scale, softcap, triton):
    return _forward_reference(query, key, value, low, high, causal, scale, softcap)


@launches(_backward_op)
def _run_backward(grad, dlse, query, key, value, output, lse, low, high, causal, scale, softcap, triton):
    return _backward_reference(grad, dlse, query, key, value, output, lse, low, high, causal, scale, softcap)


def _forward_reference(
    query: Tensor, key: Tensor, value: Tensor, low: Tensor | None, high: Tensor | None, causal: bool, scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    output, lse = outs = _empty_forward(query, key, value)
    if lse.numel() == 0:
        return outs
    q, k, v = _grouped(query, key), _grouped(key, key), _grouped(value, key)
    by_group, rows_lse = q.new_zeros((*q.shape[:3], v.shape[3])), lse.view(q.shape[:3]).fill_(-math.inf)
    for some, rows, keys, hidden in _chunks(q, k, low, high, causal):
        z, _ = _scores(q[some, :, rows], k[some, :, keys], scale, softcap)
        _hide(z, hidden)
        largest = z.amax(-1, keepdim=True).clamp_(min=torch.finfo(z.dtype).min)  # of a query that sees nothing, -inf
        p = z.sub_(largest).exp_()
        total = p.sum(-1, keepdim=True)
        by_group[some, :, rows] = _product(p, v[some, :, keys]).div_(total.masked_fill(total == 0, 1))
        rows_lse[some, :, rows] = (total.log() + largest).squeeze(-1)
    output.copy_(_ungrouped(by_group, query))
    return outs


def _backward_reference(
    grad: Tensor, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor,
    low: Tensor | None, high: Tensor | None, causal: bool, scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = _grouped(query, key), _grouped(key, key), _grouped(value, key)
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    if dq.numel() > 0 and dk.numel() > 0:
        do = _grouped(grad, key)
        delta = (do * _grouped(output, key)).sum(-1, keepdim=True)
        rows_lse = lse.to(q.dtype).view(delta.shape)
        if dlse is not None:
            delta -= dlse.to(q.dtype).reshape(delta.shape)
        nothing = rows_lse == -math.inf
        rows_lse, delta = rows_lse.masked_fill(nothing, math.inf), delta.masked_fill(nothing, 0)
        for some, rows, keys, hidden in _chunks(q, k, low, high, causal):
            queries, dout, part = q[some, :, rows], do[some, :, rows], k[some, :, keys]
            z, slope = _scores(queries, part, scale, softcap)
            _hide(z, hidden)
            p = z.sub_(rows_lse[some, :, rows]).exp_()
            dv[some, :, keys] += _sum_product(p, dout)
            ds = _product(dout, v[some, :, keys].mT).sub_(delta[some, :, rows]).mul_(p)
            ds = ds if slope is None else ds.mul_(slope)
            dq[some, :, rows] = _product(ds, part)
            dk[some, :, keys] += _sum_product(ds, queries)
    dq, dk = dq.mul_(scale), dk.mul_(scale)
    outs = _empty_backward(grad, dlse, query, key, value)
    for out, by_group in zip(outs, (dq, dk, dv), strict=True):
        out.copy_(_ungrouped(by_group, out))
    return outs


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """`[B, T, H, K]` -> `[B Hkv, H/Hkv, T, K]` in the dtype that the reference computes in."""
    B, T, H, K = x.shape
    groups = max(key.shape[2], 1)
    x = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(B, T, groups, H // groups, K)
    return x.permute(0, 2, 3, 1, 4).reshape(B * groups, H // groups, T, K)


def _ungrouped(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_grouped`, for an x of as many tokens and heads as `like`."""
    B, T, H, _ = like.shape
    return x.reshape(B, H, T, x.shape[3]).transpose(1, 2)


def _chunks(
    q: Tensor, k: Tensor, low: Tensor | None, high: Tensor | None, causal: bool
) -> Iterator[tuple[slice, slice, slice, list[tuple[slice, Tensor]]]]:
    """Some groups of heads, some queries, the keys that these see, and which of their scores are hidden, where any are.

    Queries that see nothing may be left out.
    """
    N, G, T, _ = q.shape
    keys = k.shape[2]
    if low is None or high is None:
        low, high = torch.zeros(T, dtype=torch.int32), torch.full((T,), keys, dtype=torch.int32)
        high = torch.arange(1, T + 1, dtype=torch.int32) if causal else high
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
        hidden = []
        if starts[last] > start:  # on the left of some
            stop = min(starts[last], end)
            index = torch.arange(start, stop, device=q.device)
            hidden.append((slice(0, stop - start), index < low[rows, None]))
        if ends[first] < end:  # on the right
            begin = max(ends[first], start)
            index = torch.arange(begin, end, device=q.device)
            hidden.append((slice(begin - start, end - start), index >= high[rows, None]))
        step = max(1, CHUNK_SCORES // (G * (last + 1 - first) * (end - start)))
        for n in range(0, N, step):
            yield slice(n, n + step), rows, slice(start, end), hidden


def _scores(q: Tensor, k: Tensor, scale: float, softcap: float) -> tuple[Tensor, Tensor | None]:
    """z `[N, G, rows, keys]`, and with a soft cap its slope by s = scale q k^T."""
    z = _product(q, k.mT).mul_(scale)
    if not softcap:
        return z, None
    tanh = z.div_(softcap).tanh_()
    return softcap * tanh, 1 - tanh.square()


def _hide(z: Tensor, hidden: list[tuple[slice, Tensor]]) -> None:
    for columns, mask in hidden:
        z[..., columns].masked_fill_(mask, -math.inf)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """`[N, G, I, J] x [N, 1, J, L] -> [N, G, I, L]`, without a copy of y for each of G."""
    N, G, rows, _ = x.shape
    return torch.bmm(x.reshape(N, G * rows, -1), y.squeeze(1)).view(N, G, rows, -1)


def _sum_product(x: Tensor, y: Tensor) -> Tensor:
    """`[N, G, I, J], [N, G, I, L] -> [N, 1, J, L]`, x^T y summed over G."""
    return torch.bmm(x.flatten(1, 2).mT, y.reshape(x.shape[0], -1, y.shape[3])).unsqueeze(1)
