"""The public functions of attention, the checks of their inputs, and the autograd function."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._dispatch import REFERENCE_DTYPES, refuse_second_derivative, runs_triton
from .backward import backward_op
from .bounds import Bounds, mask_bounds
from .forward import forward_op
from .tiles import WIDEST_HEAD


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
    out_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
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
        impl: `"triton"` (not float64; K and Kv up to 256), `"reference"`, or `None` to choose by the device, the dtype
            and the head dimensions of `query` and `value`.

    Returns:
        `(output, lse)`: `[B, Tq, H, Kv]` in `out_dtype`, and the natural logarithm `[B, H, Tq]` in float32 (float64 for
        float64 inputs).

    Raises:
        ValueError: shapes, dtypes or devices don't go together, a mask has no meaning, or `impl` can't run here.

    Note:
        - Eleven parameters: three tensors, and the options of the mask and of the scores by keyword.
        - With `impl=None`, what the kernels can't compute runs on the reference: thousands of small operators a layer.

    Example:
        >>> query, key = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8)
        >>> output, lse = attention(query, key, key, window=3)
        >>> tuple(output.shape), tuple(lse.shape)
        ((1, 5, 4, 8), (1, 4, 5))
    """
    device = query.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # as torch's own attention does
        query, key, value = (_autocast(t) for t in (query, key, value))
    scale, cap = _check(query, key, value, scale, softcap)
    low, high = mask_bounds(query, key, causal, window, cu_seqlens, bounds)
    options = causal, scale, cap, _choose(impl, query, value)
    return _Attention.apply(query, key, value, low, high, options, out_dtype)


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
    out_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the terms of the gradient that these keys and values contribute. Not differentiable.

    Args:
        grad: `[B, Tq, H, Kv]`, the gradient of the output, in the dtype of `query`.
        query, key, value: as in the forward pass; `key` and `value` may be a part of the keys that were attended to.
        output, lse: of the forward pass over all keys.
        causal, window, cu_seqlens, bounds, scale, softcap, impl: as in the forward pass, for these keys.
        dlse: `[B, H, Tq]`, the gradient of lse; `None` for 0.
        out_dtype: dtype of the three gradients, which the caller adds to those of other keys; `None` for that of
            `query`.

    Returns:
        `(dq, dk, dv)`, of the shapes of `query`, `key` and `value`.

    Raises:
        ValueError: as `attention`.

    Note:
        - Fifteen parameters: six tensors of the forward pass, and the options of `attention` by keyword.

    Example:
        >>> query, key = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8)
        >>> output, lse = attention(query, key, key)
        >>> dq, dk, dv = attention_backward(torch.ones_like(output), query, key, key, output, lse)
        >>> tuple(dq.shape), tuple(dk.shape)
        ((1, 5, 4, 8), (1, 5, 2, 8))
    """
    scale, cap = _check(query, key, value, scale, softcap)
    B, T, H, _ = query.shape
    shapes = {"grad": (B, T, H, value.shape[-1]), "lse": (B, H, T)}
    shapes |= {"output": shapes["grad"], "dlse": shapes["lse"]}
    for name, given in (("grad", grad), ("output", output), ("lse", lse), ("dlse", dlse)):
        if given is not None and (given.shape != shapes[name] or given.device != query.device):
            there = f"{tuple(given.shape)} on {given.device}"
            raise ValueError(f"{name} is {there}, but goes with a query on {query.device} as {shapes[name]}")
    if grad.dtype != query.dtype:
        raise ValueError(f"grad is {grad.dtype}, but query is {query.dtype}: cast it")
    low, high = mask_bounds(query, key, causal, window, cu_seqlens, bounds)
    options = causal, scale, cap, _choose(impl, query, value)
    return backward_op(grad, dlse, query, key, value, output, lse, low, high, *options, out_dtype)


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
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention` in plain torch, in chunks of queries; computes in float32, or float64 for a float64 query."""
    return attention(
        query, key, value, causal=causal, window=window, cu_seqlens=cu_seqlens, bounds=bounds, scale=scale,
        softcap=softcap, out_dtype=out_dtype, impl="reference",
    )  # fmt: skip


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, low, high, options, out_dtype):
        output, lse = forward_op(query, key, value, low, high, *options, out_dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, output, lse, low, high)
        ctx.options = options
        return output, lse

    @staticmethod
    def backward(ctx, doutput, dlse):
        refuse_second_derivative("attention", "torch.nn.functional.scaled_dot_product_attention")
        query, key, value, output, lse, low, high = ctx.saved_tensors
        if doutput is None and dlse is None:
            return (None,) * 7
        doutput = torch.zeros_like(output) if doutput is None else doutput
        given = doutput.to(query.dtype), dlse, query, key, value, output, lse, low, high
        return *backward_op(*given, *ctx.options, None), *[None] * 4


def _autocast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(x.device.type))


def _check(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, softcap: float | None
) -> tuple[float, float]:
    """Raise `ValueError` unless the inputs go together; return the scale and the cap, 0 for none."""
    if not query.dim() == key.dim() == value.dim() == 4:
        raise ValueError(f"{_shapes(query, key, value)}: each must have 4 dimensions [B, T, H, K]")
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3] or key.shape[:3] != value.shape[:3]:
        raise ValueError(f"{_shapes(query, key, value)} are not [B, Tq, H, K], [B, Tk, Hkv, K] and [B, Tk, Hkv, Kv]")
    if query.shape[2] % max(key.shape[2], 1) or query.shape[2] < key.shape[2]:
        raise ValueError(f"{query.shape[2]} query heads are not a multiple of {key.shape[2]} KV heads")
    for name, t in (("key", key), ("value", value)):
        if (t.dtype, t.device) != (query.dtype, query.device):
            raise ValueError(f"{name} is {t.dtype} on {t.device}, but query is {query.dtype} on {query.device}")
    if query.dtype not in REFERENCE_DTYPES:
        raise ValueError(f"query is {query.dtype}; it must be float64, float32, bfloat16 or float16")
    factor = 1 / math.sqrt(max(query.shape[3], 1)) if scale is None else scale
    if not 0 < factor < math.inf:
        raise ValueError(f"scale {factor} is not a positive number")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap {softcap} is not a positive number; None is none")
    return factor, softcap or 0.0


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"


def _choose(impl: str | None, query: Tensor, value: Tensor) -> str:
    """Return the implementation that runs, "triton" or "reference"."""
    dims = query.shape[3], value.shape[3]
    tiled = all(1 <= dim <= WIDEST_HEAD for dim in dims)
    if impl == "triton" and not tiled:
        raise ValueError(f"impl='triton' has no kernel of head dimensions {dims}, only of 1 to {WIDEST_HEAD}")
    return "triton" if runs_triton(impl, query) and tiled else "reference"
