"""Softmax attention of grouped query heads; the log-sum-exp of each row is a second, differentiable output.

    z = scale q k^T, or c tanh(scale q k^T / c) with a soft cap c, over the keys that a query sees
    lse = log sum e^z,  p = e^(z - lse),  output = p v

    delta = sum output doutput - dlse
    dz = p (doutput v^T - delta),  ds = dz, or dz (1 - (z / c)^2)
    dq = scale ds k,  dk = scale ds^T q,  dv = p^T doutput           (dk and dv summed over the query heads of a group)

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), for the one pass; Dao, "FlashAttention-2"
(2023), section 3, for the blocks; Ainslie et al., "GQA" (2023), for groups; dlse in delta follows from dlse/dz = p.

Query i sees the keys low[i] <= j < high[i]; neither bound falls as i rises. Causal and full masks, windows, packed
documents, and a block of keys at an offset are all of this kind. Kernels skip blocks of keys that no query of a block
sees. A query that sees no key has output 0, lse -inf and gradient 0.

The backward pass reads (output, lse) and no other result of the forward pass. Merge several blocks of keys in float32
(m = logaddexp(lse1, lse2), o = e^(lse1 - m) o1 + e^(lse2 - m) o2): with the merged pair, the backward pass of each
block returns that block's terms of the whole gradient. Ring attention works this way.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .._checks import check_shapes
from .._choice import REFERENCE, TORCH, TRITON
from .._dispatch import refuse_second_derivative, runs_triton
from .backward import backward_op
from .bounds import Bounds, Scores, check_documents, check_ends, key_bounds
from .forward import forward_op
from .merge import attention_merge
from .tiles import WIDEST_HEAD
from .torch_blocks import check_torch, torch_backward, torch_forward

__all__ = [
    "Bounds", "attention", "attention_backward", "attention_merge", "attention_reference", "check_documents",
    "check_ends", "check_torch", "key_bounds",
]  # fmt: skip


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = True, window: int | None = None,
    cu_seqlens: Tensor | None = None, bounds: Bounds | None = None, scale: float | None = None,
    softcap: float | None = None, out_dtype: torch.dtype | None = None, impl: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute softmax(scale q k^T) v over the keys that each query sees, and the log-sum-exp of its scores.

    Args:
        query: `[B, Tq, H, K]`, float32, bfloat16 or float16 (the reference takes float64 too), with any strides.
        key: `[B, Tk, Hkv, K]`; H is a multiple of Hkv, and each KV head serves a run of H / Hkv query heads.
        value: `[B, Tk, Hkv, Kv]`.
        causal: a query sees itself and the keys before it. Ignored where `bounds` are given.
        window: with `causal`, how many keys a query sees, its own included; `None` for all.
        cu_seqlens: `[n + 1]` ends of packed documents, from 0 to T, for B = 1; a token sees its own document only.
        bounds: the whole mask, in place of the three above: int32 `(low, high)`, each `[Tq]`. Query i sees the keys
            low[i] <= j < high[i] that exist. Neither bound may fall as i rises.
        scale: factor of the scores; `None` for K^(-1/2).
        softcap: c of the formula above; `None` for no cap.
        out_dtype: dtype of the output; `None` for that of `query`. Use float32 to merge blocks of keys unrounded.
        impl: `"triton"` (not float64; K and Kv up to 256), `"reference"`, or `None` to choose by the device and these
            parameters. The reference runs thousands of small operators per layer. `"torch"`: the kernel of
            `scaled_dot_product_attention`, for causal and full masks without a soft cap. It rounds the output and the
            gradients to the dtype of `query`.

    Returns:
        `(output, lse)`: `[B, Tq, H, Kv]` in `out_dtype`, and the natural logarithm `[B, H, Tq]` in float32 (float64 for
        float64 inputs).

    Raises:
        ValueError: shapes, dtypes or devices don't go together, a mask has no meaning, or `impl` can't run here.

    Example:
        >>> query, key = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8)
        >>> output, lse = attention(query, key, key, window=3)
        >>> tuple(output.shape), tuple(lse.shape)
        ((1, 5, 4, 8), (1, 4, 5))
    """
    device = query.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # as torch's own attention does
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (t if t.dtype == torch.float64 else t.to(dtype) for t in (query, key, value))
    scores = Scores.of(query, key, value, causal, window, cu_seqlens, bounds, scale, softcap)
    return _Attention.apply(query, key, value, *scores, _choose(impl, query, key, value, scores), out_dtype)


attention_reference: functools.partial[tuple[Tensor, Tensor]] = functools.partial(attention, impl="reference")


def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, *, causal: bool = True,
    window: int | None = None, cu_seqlens: Tensor | None = None, bounds: Bounds | None = None,
    scale: float | None = None, softcap: float | None = None, dlse: Tensor | None = None,
    out_dtype: torch.dtype | None = None, impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the terms of the gradient that these keys and values contribute. Not differentiable.

    Args:
        grad: `[B, Tq, H, Kv]`, the gradient of the output, in the dtype of `query`.
        query, key, value, causal, window, cu_seqlens, bounds, scale, softcap, impl: the parameters of `attention`, for
            these keys and values, which may be a part of the keys of the forward pass.
        output, lse: of the forward pass over all keys.
        dlse: `[B, H, Tq]`, the gradient of lse; `None` for 0.
        out_dtype: dtype of the three gradients; `None` for that of `query`.

    Returns:
        `(dq, dk, dv)`, of the shapes of `query`, `key` and `value`.

    Raises:
        ValueError: as `attention`.

    Example:
        >>> query, key = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8)
        >>> output, lse = attention(query, key, key)
        >>> dq, dk, dv = attention_backward(torch.ones_like(output), query, key, key, output, lse)
    """
    scores = Scores.of(query, key, value, causal, window, cu_seqlens, bounds, scale, softcap)
    check_shapes(
        query=(query, "B T H K"), value=(value, "B Tk Hkv Kv"), grad=(grad, "B T H Kv"), output=(output, "B T H Kv"),
        lse=(lse, "B H T"), dlse=(dlse, "B H T"),
    )  # fmt: skip
    for name, x in (("grad", grad), ("output", output), ("lse", lse), ("dlse", dlse)):
        if x is not None and x.device != query.device:
            raise ValueError(f"{name} is on {x.device}, but query is on {query.device}")
    if grad.dtype != query.dtype:
        raise ValueError(f"grad is {grad.dtype}, but query is {query.dtype}: cast it")
    impl = _choose(impl, query, key, value, scores)
    return _operators(impl)[1](grad, dlse, query, key, value, output, lse, *scores, impl, out_dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, low, high, *options):
        output, lse = _operators(options[-2])[0](query, key, value, low, high, *options)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, output, lse, low, high)
        ctx.options = options[:-1]
        return output, lse

    @staticmethod
    def backward(ctx, doutput, dlse):
        refuse_second_derivative("attention", "torch.nn.functional.scaled_dot_product_attention")
        query, _, _, output, *_ = saved = ctx.saved_tensors
        if doutput is None and dlse is None:
            return (None,) * 10
        doutput = torch.zeros_like(output) if doutput is None else doutput
        _, backward = _operators(ctx.options[-1])
        return *backward(doutput.to(query.dtype), dlse, *saved, *ctx.options, None), *[None] * 7


def _operators(impl: str) -> tuple[Any, Any]:
    return (torch_forward, torch_backward) if impl == TORCH else (forward_op, backward_op)


def _choose(impl: str | None, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> str:
    if impl == TORCH:
        if scores.low is not None or scores.softcap:
            bounds = None if scores.low is None else f"of {len(scores.low)} queries"
            check_torch(query, key, value, scores.causal, bounds=bounds, softcap=scores.softcap or None)
        return impl
    dims = query.shape[3], value.shape[3]
    tiled = max(dims) <= WIDEST_HEAD
    if impl == TRITON and not tiled:
        raise ValueError(f"impl='triton' has no kernel of head dimensions {dims}, only of 1 to {WIDEST_HEAD}")
    return TRITON if runs_triton(impl, query, "attention") and tiled else REFERENCE
