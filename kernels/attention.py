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

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
# (Triton's types say that a kernel called by a kernel does not return, and that no constant is a constexpr.)
from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._dispatch import (
    INTERPRETING,
    REFERENCE_DTYPES,
    define,
    launches,
    refuse_second_derivative,
    runs_triton,
    tl,
    triton,
)
from ._flops import flops
from ._launch import launch
from ._rows import MAX_ROWS, ceil_div, next_power_of_2
from .cross_entropy import _tanh as tanh_and_slope

Bounds = tuple[Tensor, Tensor]

IMPLS = ("reference", "triton", "triton_ws", "gluon")
WIDEST_HEAD = 256  # head dimension, of keys and of values, that the kernels are tiled for
# For that GPU alone, in modules that are imported at the first launch.
HOPPER = {"triton_ws": "_attention_ws", "gluon": "_attention_gluon"}
HOPPER_HEAD_DIMS = (64, 128, 256)
# By (device name, dtype, head dimension of keys, of values, kind of mask): which of IMPLS was measured to be fastest.
# Empty, because nothing has been timed on a GPU yet: "triton" runs.
FASTEST: dict[tuple[str, torch.dtype, int, int, str], str] = {}
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
    out_dtype: torch.dtype | None = None,
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
        out_dtype: of the output: what is merged with other blocks of keys is best not rounded; `None`: as `query`.
        impl: `"triton"` (not float64, and K and Kv up to 256), `"triton_ws"` (for Hopper in half precision, and K and
            Kv 64, 128 or 256), `"gluon"` (another forward pass for it, for K = Kv, with the backward pass of
            `"triton"`), `"reference"`, or `None` to choose by the device of `query`, the head dimensions and what was
            measured: what `"triton"` can't do takes the reference, thousands of small operators a layer.

    Returns:
        `(output, lse)`: `[B, Tq, H, Kv]` in `out_dtype`, and `[B, H, Tq]`, natural, in float32 (float64 for
        float64 inputs).

    Raises:
        ValueError: shapes, dtypes or devices don't go together, a mask has no meaning, or `impl` can't run here.
    """
    device = query.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # as torch's own attention
        query, key, value = (_autocast(t) for t in (query, key, value))
    scale, cap = _check(query, key, value, scale, softcap)
    low, high = _bounds(query, key, causal, window, cu_seqlens, bounds)
    options = causal, scale, cap, _chosen(impl, query, value, _mask(low, causal), out_dtype)
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
    """What these keys and values add to the gradient of attention, by its output and lse alone. Not differentiable.

    Args:
        grad: `[B, Tq, H, Kv]`, the gradient of the output, in the dtype of `query`.
        query, key, value: as in the forward pass; the keys and values may be a part of those that were attended to.
        output, lse: of the forward pass, over all keys.
        causal, window, cu_seqlens, bounds, scale, softcap, impl: as in the forward pass, for these keys.
        dlse: `[B, H, Tq]`, the gradient of lse; `None`: 0.
        out_dtype: of the three gradients, which are summed with those of other keys; `None`: as `query`.

    Returns:
        `(dq, dk, dv)`, of the shapes of `query`, `key` and `value`.

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
    if grad.dtype != query.dtype:
        raise ValueError(f"grad is {grad.dtype}, but query is {query.dtype}: cast it")
    low, high = _bounds(query, key, causal, window, cu_seqlens, bounds)
    options = causal, scale, cap, _chosen(impl, query, value, _mask(low, causal))
    return _backward_op(grad, dlse, query, key, value, output, lse, low, high, *options, out_dtype)


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
    """`attention` in plain torch, some queries at a time; computes in float32, or float64 for a float64 query."""
    return attention(
        query, key, value, causal=causal, window=window, cu_seqlens=cu_seqlens, bounds=bounds, scale=scale,
        softcap=softcap, out_dtype=out_dtype, impl="reference",
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
    check_ends(cu_seqlens)
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    first, last, falls = int(cu_seqlens[0]), int(cu_seqlens[-1]), cu_seqlens.diff() < 0
    if first != 0 or last != T or bool(falls.any()):
        where = [f", falling from {int(cu_seqlens[i])} to {int(cu_seqlens[i + 1])}" for i in falls.nonzero()[:1]]
        raise ValueError(
            f"cu_seqlens must rise from 0 to the sequence length {T}, but runs from {first} to {last}{''.join(where)}"
        )


def check_ends(cu_seqlens: Tensor) -> None:
    """Refuse document ends that are no tensor of integers in one dimension; reads no value."""
    if not isinstance(cu_seqlens, Tensor):
        found = f"a {type(cu_seqlens).__name__}"
    elif cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        found = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
    else:
        return
    raise ValueError(
        f"cu_seqlens is {found}, but must be int32 or int64 [n + 1], such as torch.tensor([0, 3, 8]) for documents of "
        f"3 and 5 tokens"
    )


def _autocast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(x.device.type))


def _check(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, softcap: float | None
) -> tuple[float, float]:
    """Refuse what doesn't fit; return the scale and the cap, 0 for none."""
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
    if keys != T and (causal or cu_seqlens is not None):
        raise ValueError(f"{T} queries of {keys} keys have no diagonal: give bounds, or causal=False")
    if cu_seqlens is not None and B != 1:
        raise ValueError(f"cu_seqlens packs documents in one row, but the batch has {B}: flatten it to [1, B*T]")
    if cu_seqlens is None and window is None:
        return None, None
    return key_bounds(T, causal=causal, window=window, cu_seqlens=cu_seqlens, device=query.device)


def _mask(low: Tensor | None, causal: bool) -> str:
    return "bounds" if low is not None else "causal" if causal else "full"


def _chosen(impl: str | None, query: Tensor, value: Tensor, mask: str, out_dtype: torch.dtype | None = None) -> str:
    """The one of `IMPLS` that runs: what is asked for, where it can, or what is best here."""
    if impl not in (None, *IMPLS):
        raise ValueError(f"impl {impl!r} is none of None, {', '.join(map(repr, IMPLS))}")
    dims = query.shape[3], value.shape[3]
    tiled = all(1 <= dim <= WIDEST_HEAD for dim in dims)
    if impl == "triton" and not tiled:
        raise ValueError(f"impl='triton' has no kernel of head dimensions {dims}, only of 1 to {WIDEST_HEAD}")
    if impl in HOPPER:
        refusal = _refusal_of_hopper(impl, query, value, out_dtype)
        if refusal:
            raise ValueError(f"impl={impl!r} {refusal}; use impl='triton'")
        runs_triton("triton", query)
        return impl
    if not runs_triton(impl, query) or not tiled:
        return "reference"
    if impl is None and FASTEST and query.is_cuda:
        device = torch.cuda.get_device_properties(query.device).name
        best = FASTEST.get((device, query.dtype, *dims, mask), "triton")
        return "triton" if best in HOPPER and _refusal_of_hopper(best, query, value, out_dtype) else best
    return "triton"


def _refusal_of_hopper(impl: str, query: Tensor, value: Tensor, out_dtype: torch.dtype | None) -> str | None:
    """What keeps the kernels for that GPU alone from running, or None."""
    dims = query.shape[3], value.shape[3]
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"has no {query.dtype} kernel, only of torch.bfloat16 and torch.float16"
    if not all(dim in HOPPER_HEAD_DIMS for dim in dims):
        return f"has no kernel of head dimensions {dims}, only of {HOPPER_HEAD_DIMS}"
    if impl == "gluon" and dims[0] != dims[1]:
        return f"has no kernel of head dimensions {dims}, only of two that are the same"
    if impl == "gluon" and dims[1] == 256 and out_dtype not in (None, query.dtype):
        return f"has no registers for an output of {out_dtype} at head dimension 256"
    if impl == "gluon" and not torch.compiler.is_compiling() and (missing := _missing_from_gluon()):
        return f"needs the Gluon of Triton 3.6 or 3.7: {missing}"
    if impl == "triton_ws" and dims[1] == 256 and out_dtype == torch.float32:
        return f"has no shared memory for an output of {out_dtype} at head dimension 256"
    if query.is_cuda:
        device = torch.cuda.get_device_properties(query.device)
        if (device.major, device.minor) != (9, 0) or torch.version.hip is not None:
            there = f"{device.name} of compute capability {device.major}.{device.minor}"
            return f"is for GPUs of compute capability 9.0, not for {there}"
    elif impl == "gluon":
        return f"is for GPUs of compute capability 9.0, not for {query.device}"
    return None


def _missing_from_gluon() -> str:
    """What this Triton lacks of what the kernel names, or nothing."""
    try:
        importlib.import_module("._attention_gluon", __package__)
    except (ImportError, AttributeError) as error:
        return str(error)
    return ""


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, low, high, options, out_dtype):
        output, lse = _forward_op(query, key, value, low, high, *options, out_dtype)
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
        return *_backward_op(*given, *ctx.options, None), *[None] * 4


def _empty_forward(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    (B, T, H, _), out_dtype = query.shape, options[-1]
    exact = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty((B, T, H, value.shape[3]), dtype=out_dtype), query.new_empty((B, H, T), dtype=exact)


def _empty_backward(
    grad: Tensor, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (t.new_empty(t.shape, dtype=options[-1]) for t in (query, key, value))
    return dq, dk, dv


_OPTIONS = "Tensor? low, Tensor? high, bool causal, float scale, float softcap, str impl, ScalarType? out_dtype"
_forward_op = define(
    f"attention_forward(Tensor query, Tensor key, Tensor value, {_OPTIONS}) -> (Tensor output, Tensor lse)",
    _empty_forward,
)
_backward_op = define(
    "attention_backward(Tensor grad, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse,"
    f" {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    _empty_backward,
)


@flops(torch.ops.mpcore.attention_forward)
def _forward_flops(query: torch.Size, key: torch.Size, value: torch.Size, *others, **kwargs) -> int:
    """Two products, of all pairs of query and key whatever the mask, as torch counts its own attention."""
    B, T, H, K = query
    return 2 * B * H * T * key[1] * (K + value[3])


@flops(torch.ops.mpcore.attention_backward)
def _backward_flops(grad, dlse, query: torch.Size, key: torch.Size, value: torch.Size, *others, **kwargs) -> int:
    """Five products, one of them done again."""
    B, T, H, K = query
    return 2 * B * H * T * key[1] * (3 * K + 2 * value[3])


@launches(_forward_op)
def _run_forward(
    query: Tensor, key: Tensor, value: Tensor, low: Tensor | None, high: Tensor | None, causal: bool, scale: float,
    softcap: float, impl: str, out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    output, lse = outs = _empty_forward(query, key, value, out_dtype)
    if impl == "reference":
        with torch.autocast(query.device.type, enabled=False):
            _forward_reference(outs, query, key, value, low, high, causal, scale, softcap)
        return outs
    if output.numel() == 0:
        return outs
    if impl in HOPPER:
        _module_of(impl).forward(outs, query, key, value, low, high, causal, scale, softcap)
        return outs
    B, T, H, _ = query.shape
    tile = _tile("forward", query, value, low, softcap)
    q, k, v = _views(query), _views(key), _views(value)
    low, high = _whole(low), _whole(high)
    tensors = (q.x, k.x, v.x, low, high, output, lse)
    scalars = (T, key.shape[1], H, H // key.shape[2], scale, *q.strides, *k.strides, *v.strides)
    constants = (*_constants(query, value, low, causal, softcap), *tile.blocks, tile.stages)
    launch(_forward_kernel, (_programs(T, tile.blocks[0], B * H), 1, 1), tensors, scalars, constants, tile.warps)
    return outs


@launches(_backward_op)
def _run_backward(
    grad: Tensor, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor,
    low: Tensor | None, high: Tensor | None, causal: bool, scale: float, softcap: float, impl: str,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = outs = _empty_backward(grad, dlse, query, key, value, out_dtype)
    if impl == "reference":
        with torch.autocast(query.device.type, enabled=False):
            _backward_reference(outs, grad, dlse, query, key, value, output, lse, low, high, causal, scale, softcap)
        return outs
    if dq.numel() == 0 or dk.numel() == 0:
        for gradient in outs:
            gradient.zero_()
        return outs
    if impl == "triton_ws" and max(query.shape[3], value.shape[3]) < 256:  # there dk and dv don't fit in registers
        given = grad, dlse, query, key, value, output, lse, low, high, causal, scale, softcap
        _module_of(impl).backward(outs, *given)
        return outs
    B, T, H, _ = query.shape
    keys, groups = key.shape[1:3]
    lse, dlse = lse.contiguous(), _whole(dlse)
    do, o = _views(grad), _views(output)
    rows = lse.new_empty((2, B, H, T))  # log2 of the softmax's denominator, and delta
    constants = (value.shape[3], _padded(value.shape[3]), 32)
    scalars = (T, H, B * H * T, *do.strides, *o.strides)
    launch(_rows_kernel, (_programs(T, 32, B * H), 1, 1), (do.x, o.x, lse, dlse, rows), scalars, constants, num_warps=4)

    q, k, v = _views(query), _views(key), _views(value)
    scalars = (T, keys, H, H // groups, scale, B * H * T, *q.strides, *k.strides, *v.strides, *do.strides)
    options = _constants(query, value, low, causal, softcap)
    low, high = _whole(low), _whole(high)
    for name, kernel, written, count, heads in (
        ("dkdv", _backward_keys_kernel, (dk, dv), keys, groups),
        ("dq", _backward_queries_kernel, (dq,), T, H),
    ):
        tile = _tile(name, query, value, low, softcap)
        tensors = (q.x, k.x, v.x, do.x, rows, low, high, *written)
        grid = (_programs(count, tile.blocks[name == "dkdv"], B * heads), 1, 1)
        launch(kernel, grid, tensors, scalars, (*options, *tile.blocks, tile.stages), tile.warps)
    return outs


def _module_of(impl: str) -> Any:
    return importlib.import_module(f".{HOPPER[impl]}", __package__)


class _View(NamedTuple):
    x: Tensor
    strides: tuple[int, int, int]  # of batch, tokens and heads


def _views(x: Tensor) -> _View:
    x = x if x.stride(3) == 1 else x.contiguous()
    return _View(x, (x.stride(0), x.stride(1), x.stride(2)))


def _whole(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _constants(query: Tensor, value: Tensor, low: Tensor | None, causal: bool, softcap: float) -> tuple:
    K, V = query.shape[3], value.shape[3]
    return K, V, _padded(K), _padded(V), _mask(low, causal), softcap


def _padded(dim: int) -> int:
    """A head dimension as a matrix instruction takes it."""
    return max(16, next_power_of_2(dim))


def _programs(tokens: int, block: int, heads: int) -> int:
    programs = ceil_div(tokens, block) * heads
    if programs > MAX_ROWS:
        raise ValueError(f"{programs} blocks of tokens are more than the {MAX_ROWS} that a launch can count")
    return programs


class _Tile(NamedTuple):
    """Queries and keys of a program's block, stages of its pipeline, warps."""

    blocks: tuple[int, int]
    stages: int
    warps: int


# Blocks by head dimension, large without spilling registers: plain, and with bounds, a soft cap or padding, or of
# heads below 64. Not timed.
_LARGE = {  # 227 KiB of shared memory: H100, B200
    "forward": {64: ((128, 128), (128, 64)), 128: ((128, 128), (128, 64)), 256: ((64, 64), (64, 32))},
    "dkdv": {64: ((64, 128), (64, 64)), 128: ((64, 128), (32, 64)), 256: ((32, 32), (32, 32))},
    "dq": {64: ((128, 64), (64, 64)), 128: ((128, 64), (64, 64)), 256: ((64, 64), (64, 32))},
}
_BLACKWELL = _LARGE | {"forward": _LARGE["forward"] | {128: ((128, 64), (128, 64)), 256: ((64, 64), (32, 64))}}
_SMALL = {  # 99 KiB and more: other GPUs of Nvidia
    "forward": {64: ((128, 64), (64, 64)), 128: ((128, 64), (64, 64)), 256: ((64, 32), (64, 32))},
    "dkdv": {64: ((64, 64), (32, 64)), 128: ((64, 64), (32, 64)), 256: ((32, 32), (32, 32))},
    "dq": {64: ((64, 64), (64, 32)), 128: ((64, 64), (64, 32)), 256: ((32, 32), (32, 32))},
}
_AMD = {  # 64 KiB
    "forward": {64: ((128, 64), (64, 32)), 128: ((128, 64), (32, 32)), 256: ((64, 32), (32, 32))},
    "dkdv": {64: ((64, 64), (16, 32)), 128: ((32, 32), (16, 32)), 256: ((32, 32), (16, 32))},
    "dq": {64: ((64, 32), (32, 32)), 128: ((64, 32), (32, 16)), 256: ((32, 32), (32, 16))},
}


def _tile(kernel: str, query: Tensor, value: Tensor, low: Tensor | None, softcap: float) -> _Tile:
    dims = query.shape[3], value.shape[3]
    width = max(64, next_power_of_2(max(dims)))
    if query.dtype == torch.float32:  # no matrix instruction computes it exactly
        return _Tile((16, 16) if width > 128 else (32, 32), 1, 8)
    table = _SMALL if INTERPRETING else _tiles_of(_driver().get_current_device())
    odd = dims != tuple(map(_padded, dims)) or max(dims) < 64
    blocks = table[kernel][width][low is not None or softcap > 0 or odd]
    return _Tile(blocks, 1, 4) if table is _AMD else _Tile(blocks, 2, 8)


def _driver() -> Any:
    return importlib.import_module("triton.runtime").driver.active


@functools.cache
def _tiles_of(device: object) -> dict:
    driver = _driver()
    target = driver.get_current_target()
    if target.backend != "cuda":
        return _AMD
    if driver.utils.get_device_properties(device)["max_shared_mem"] < 200 * 1024:
        return _SMALL
    return _BLACKWELL if target.arch >= 100 else _LARGE


def _forward_reference(
    outs: tuple[Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor, low: Tensor | None, high: Tensor | None,
    causal: bool, scale: float, softcap: float,
) -> None:  # fmt: skip
    output, lse = outs
    if lse.numel() == 0:
        return
    q, k, v = _grouped(query, key).mul(scale), _grouped(key, key), _grouped(value, key)
    by_group, rows_lse = q.new_zeros((*q.shape[:3], v.shape[3])), lse.view(q.shape[:3]).fill_(-math.inf)
    for some, rows, keys, hidden in _chunks(q, k, low, high, causal):
        z, _ = _scores(q[some, :, rows], k[some, :, keys], softcap)
        _hide(z, hidden)
        largest = z.amax(-1, keepdim=True).clamp_(min=torch.finfo(z.dtype).min)  # of a query that sees nothing, -inf
        p = z.sub_(largest).exp_()
        total = p.sum(-1, keepdim=True)
        by_group[some, :, rows] = _product(p, v[some, :, keys]).div_(total.masked_fill(total == 0, 1))
        rows_lse[some, :, rows] = (total.log() + largest).squeeze(-1)
    output.copy_(_ungrouped(by_group, query))


def _backward_reference(
    outs: tuple[Tensor, Tensor, Tensor], grad: Tensor, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
    output: Tensor, lse: Tensor, low: Tensor | None, high: Tensor | None, causal: bool, scale: float, softcap: float,
) -> None:  # fmt: skip
    q, k, v = _grouped(query, key).mul(scale), _grouped(key, key), _grouped(value, key)
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
            z, slope = _scores(queries, part, softcap)
            _hide(z, hidden)
            p = z.sub_(rows_lse[some, :, rows]).exp_()
            dv[some, :, keys] += _sum_product(p, dout)
            ds = _product(dout, v[some, :, keys].mT).sub_(delta[some, :, rows]).mul_(p)
            ds = ds if slope is None else ds.mul_(slope)
            dq[some, :, rows] = _product(ds, part)
            dk[some, :, keys] += _sum_product(ds, queries)
    dq *= scale
    for out, by_group in zip(outs, (dq, dk, dv), strict=True):
        out.copy_(_ungrouped(by_group, out))


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


def _scores(q: Tensor, k: Tensor, softcap: float) -> tuple[Tensor, Tensor | None]:
    """z `[N, G, rows, keys]` of scaled queries, and with a soft cap its slope by their product with the keys."""
    z = _product(q, k.mT)
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


@triton.jit
def _first(bound_ptr, T, limit):
    """The first query whose bound is no less than `limit`, or T: by halves, as bounds don't fall."""
    first, last = 0, T
    while first < last:
        middle = (first + last) // 2
        if tl.load(bound_ptr + middle) < limit:
            first = middle + 1
        else:
            last = middle
    return first


@triton.jit
def _whole_blocks(begin, inner, outer, end, BLOCK: tl.constexpr):
    """From begin to end, with a part inside in which nothing is hidden: all but the last in whole blocks."""
    begin = begin // BLOCK * BLOCK
    inner = tl.maximum(begin, tl.minimum(tl.cdiv(inner, BLOCK), tl.cdiv(end, BLOCK)) * BLOCK)
    return begin, inner, tl.maximum(inner, outer // BLOCK * BLOCK), end


@triton.jit
def _spans_of_keys(low_ptr, high_ptr, start, T, KEYS, MASK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys that the queries from `start` on see: some of them, all, and some."""
    if MASK == "bounds":
        last = tl.minimum(start + BLOCK_M, T) - 1
        begin, inner = tl.maximum(tl.load(low_ptr + start), 0), tl.maximum(tl.load(low_ptr + last), 0)
        end, outer = tl.minimum(tl.load(high_ptr + last), KEYS), tl.minimum(tl.load(high_ptr + start), KEYS)
        return _whole_blocks(begin, inner, tl.maximum(outer, 0), tl.maximum(end, 0), BLOCK_N)
    elif MASK == "causal":
        return 0, 0, start // BLOCK_N * BLOCK_N, tl.minimum(start + BLOCK_M, KEYS)
    else:
        return 0, 0, KEYS // BLOCK_N * BLOCK_N, KEYS


@triton.jit
def _spans_of_queries(
    low_ptr, high_ptr, start, T, KEYS, MASK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The queries that see the keys from `start` on: some of these, all, and some. Past the last query all is 0."""
    stop = tl.minimum(start + BLOCK_N, KEYS)
    if MASK == "bounds":
        begin, inner = _first(high_ptr, T, start + 1), _first(high_ptr, T, stop)
        outer, end = _first(low_ptr, T, start + 1), _first(low_ptr, T, stop)
    elif MASK == "causal":
        begin, inner, outer, end = start, stop, T, T
    else:
        begin, inner, outer, end = 0, 0, T, T
    return _whole_blocks(begin, inner, tl.where(outer == T, T + BLOCK_M - 1, outer), end, BLOCK_M)


@triton.jit
def _blocks(begin, inner, outer, end, BLOCK: tl.constexpr, SIDE: tl.constexpr):
    """Blocks on the left, and all blocks, of the side that is asked for: "left", "right", "both" or "within"."""
    left, right = tl.cdiv(inner - begin, BLOCK), tl.cdiv(tl.maximum(end - outer, 0), BLOCK)
    if SIDE == "left":
        return left, left
    elif SIDE == "right":
        return left, right
    elif SIDE == "both":
        return left, left + right
    else:
        return left, (outer - inner) // BLOCK


@triton.jit
def _start(block, left, begin, inner, outer, BLOCK: tl.constexpr, SIDE: tl.constexpr):
    if SIDE == "left":
        return begin + block * BLOCK
    elif SIDE == "right":
        return outer + block * BLOCK
    elif SIDE == "both":
        return tl.where(block < left, begin, outer - left * BLOCK) + block * BLOCK
    else:
        return inner + block * BLOCK


@triton.jit
def _load_bounds(low_ptr, high_ptr, queries, T, KEYS, MASK: tl.constexpr):
    """The first key that each query sees, and how many it sees; without bounds, what costs nothing."""
    if MASK == "bounds":
        queries = tl.minimum(queries, T - 1)
        low, high = tl.load(low_ptr + queries), tl.load(high_ptr + queries)
        return low, tl.maximum(tl.minimum(high, KEYS) - low, 0)
    else:
        return queries, queries


@triton.jit
def _sees(queries, keys, low, count, KEYS, MASK: tl.constexpr):
    if MASK == "bounds":
        return (keys - low).to(tl.uint32) < count.to(tl.uint32)  # one comparison for both bounds
    elif MASK == "causal":
        return keys <= queries
    else:
        return keys < KEYS


@triton.jit
def _load_rows(x_ptr, tokens, stride, count, D: tl.constexpr, BLOCK_D: tl.constexpr, CHECK: tl.constexpr):
    """`[tokens, BLOCK_D]` of one head, with 0 past D, and where tokens are checked past the last of them."""
    cols = tl.arange(0, BLOCK_D)[None, :]
    ptrs = x_ptr + tokens[:, None].to(tl.int64) * stride + cols
    if CHECK and D != BLOCK_D:
        return tl.load(ptrs, mask=(tokens[:, None] < count) & (cols < D), other=0.0)
    elif CHECK:
        return tl.load(ptrs, mask=tokens[:, None] < count, other=0.0)
    elif D != BLOCK_D:
        return tl.load(ptrs, mask=cols < D, other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def _store_rows(x_ptr, tokens, stride, count, x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    cols = tl.arange(0, BLOCK_D)[None, :]
    mask = (tokens[:, None] < count) & (cols < D)
    tl.store(x_ptr + tokens[:, None].to(tl.int64) * stride + cols, x.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scores_of(products, scale, SOFTCAP: tl.constexpr):
    """Scores in a positive unit, the unit in powers of two, and the slope of the soft cap."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    if SOFTCAP != 0.0:
        tanh, slope = tanh_and_slope(products * (scale / SOFTCAP))
        return tanh, SOFTCAP * LOG2_E, slope
    else:
        return products, scale * LOG2_E, 1.0


@triton.jit
def _attend(
    acc, total, largest, q, k_ptr, v_ptr, k_stride, v_stride, queries, low, count, begin, inner, outer, end, KEYS,
    scale,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, MASK: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    left, blocks = _blocks(begin, inner, outer, end, BLOCK_N, SIDE)
    for block in tl.range(0, blocks, num_stages=STAGES):
        keys = _start(block, left, begin, inner, outer, BLOCK_N, SIDE) + tl.arange(0, BLOCK_N)
        k = _load_rows(k_ptr, keys, k_stride, KEYS, K, BLOCK_K, SIDE != "within")
        z, unit, _ = _scores_of(tl.dot(q, k.T, input_precision="ieee"), scale, SOFTCAP)
        if SIDE != "within":
            sees = _sees(queries[:, None], keys[None, :], low[:, None], count[:, None], KEYS, MASK)
            z = tl.where(sees, z, float("-inf"))
        larger = tl.maximum(largest, tl.max(z, 1) * unit)
        base = tl.where(larger == float("-inf"), 0.0, larger) if SIDE != "within" else larger
        p = tl.exp2(tl.fma(z, unit, -base[:, None]))  # rounded once, so that p near 1 is exact
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(p, 1)
        v = _load_rows(v_ptr, keys, v_stride, KEYS, V, BLOCK_V, SIDE != "within")
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        largest = larger
    return acc, total, largest


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, low_ptr, high_ptr, output_ptr, lse_ptr,
    T, KEYS, H, GROUP, scale, q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, MASK: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(T, BLOCK_M)
    heads = tl.program_id(0) // blocks
    start = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M  # of a causal mask, the longest first
    batch, head = (heads // H).to(tl.int64), (heads % H).to(tl.int64)
    k_ptr += batch * k_batch + head // GROUP * k_head
    v_ptr += batch * v_batch + head // GROUP * v_head
    queries = start + tl.arange(0, BLOCK_M)
    q = _load_rows(q_ptr + batch * q_batch + head * q_head, queries, q_token, T, K, BLOCK_K, True)
    low, count = _load_bounds(low_ptr, high_ptr, queries, T, KEYS, MASK)
    begin, inner, outer, end = _spans_of_keys(low_ptr, high_ptr, start, T, KEYS, MASK, BLOCK_M, BLOCK_N)

    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    acc, total, largest = _attend(
        acc, total, largest, q, k_ptr, v_ptr, k_token, v_token, queries, low, count, begin, inner, outer, end, KEYS,
        scale, K, V, BLOCK_K, BLOCK_V, MASK, SOFTCAP, BLOCK_N, STAGES, "within",
    )  # fmt: skip
    acc, total, largest = _attend(
        acc, total, largest, q, k_ptr, v_ptr, k_token, v_token, queries, low, count, begin, inner, outer, end, KEYS,
        scale, K, V, BLOCK_K, BLOCK_V, MASK, SOFTCAP, BLOCK_N, STAGES, "both" if MASK == "bounds" else "right",
    )  # fmt: skip
    LN_2: tl.constexpr = 0.6931471805599453
    total = tl.where(total == 0.0, 1.0, total)  # of a query that sees nothing: output 0, lse -inf
    output_ptr += batch * T * H * V + head * V
    _store_rows(output_ptr, queries, H * V, T, acc / total[:, None], V, BLOCK_V)
    tl.store(lse_ptr + heads.to(tl.int64) * T + queries, largest * LN_2 + tl.log(total), mask=queries < T)


@triton.jit
def _lse_and_delta(
    do_ptr, o_ptr, lse_ptr, dlse_ptr, T, H, do_batch, do_token, do_head, o_batch, o_token, o_head,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Of a block of queries: batch, head, which they are, where their rows lie in `[B, H, T]`, lse and delta."""
    blocks = tl.cdiv(T, BLOCK_M)
    heads = tl.program_id(0) // blocks
    batch, head = (heads // H).to(tl.int64), (heads % H).to(tl.int64)
    queries = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    do = _load_rows(do_ptr + batch * do_batch + head * do_head, queries, do_token, T, V, BLOCK_V, True)
    o = _load_rows(o_ptr + batch * o_batch + head * o_head, queries, o_token, T, V, BLOCK_V, True)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    at = heads.to(tl.int64) * T + queries
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + at, mask=queries < T, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + at, mask=queries < T, other=0.0)
    return batch, head, queries, at, lse, delta


@triton.jit
def _rows_kernel(
    do_ptr, o_ptr, lse_ptr, dlse_ptr, rows_ptr, T, H, size, do_batch, do_token, do_head, o_batch, o_token, o_head,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """lse log2 e, but inf for a query that sees nothing, whose p is then 0; and delta."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    _, _, queries, at, lse, delta = _lse_and_delta(
        do_ptr, o_ptr, lse_ptr, dlse_ptr, T, H, do_batch, do_token, do_head, o_batch, o_token, o_head,
        V, BLOCK_V, BLOCK_M,
    )  # fmt: skip
    nothing = lse == float("-inf")
    tl.store(rows_ptr + at, tl.where(nothing, float("inf"), lse * LOG2_E), mask=queries < T)
    tl.store(rows_ptr + size + at, tl.where(nothing, 0.0, delta), mask=queries < T)


@triton.jit
def _add_to_keys(
    dk, dv, k, v, q_ptr, do_ptr, rows_ptr, size, low_ptr, high_ptr, q_token, q_head, do_token, do_head, keys,
    begin, inner, outer, end, GROUP, T, KEYS, scale,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, MASK: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    left, blocks = _blocks(begin, inner, outer, end, BLOCK_M, SIDE)
    for turn in tl.range(0, GROUP * blocks, num_stages=STAGES):  # of all heads, as nested loops take more registers
        head, block = (turn // blocks).to(tl.int64), turn % blocks
        queries = _start(block, left, begin, inner, outer, BLOCK_M, SIDE) + tl.arange(0, BLOCK_M)
        q = _load_rows(q_ptr + head * q_head, queries, q_token, T, K, BLOCK_K, True)
        lse_ptr = rows_ptr + head * T
        lse = tl.load(lse_ptr + queries, mask=queries < T, other=float("inf"))
        z, unit, slope = _scores_of(tl.dot(k, q.T, input_precision="ieee"), scale, SOFTCAP)
        log2_p = tl.fma(z, unit, -lse[None, :])
        if SIDE != "within":
            low, count = _load_bounds(low_ptr, high_ptr, queries, T, KEYS, MASK)
            sees = _sees(queries[None, :], keys[:, None], low[None, :], count[None, :], KEYS, MASK)
            log2_p = tl.where(sees, log2_p, float("-inf"))
        p = tl.exp2(log2_p)
        do = _load_rows(do_ptr + head * do_head, queries, do_token, T, V, BLOCK_V, True)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        delta = tl.load(lse_ptr + size + queries, mask=queries < T, other=0.0)
        ds = p * (tl.dot(v, do.T, input_precision="ieee") - delta[None, :])
        if SOFTCAP != 0.0:
            ds *= slope
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _backward_keys_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, rows_ptr, low_ptr, high_ptr, dk_ptr, dv_ptr, T, KEYS, H, GROUP, scale, size,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, do_batch, do_token, do_head,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, MASK: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(KEYS, BLOCK_N)
    start = tl.program_id(0) % blocks * BLOCK_N  # of a causal mask, the longest first
    groups = H // GROUP
    batch, group = (tl.program_id(0) // blocks // groups).to(tl.int64), (tl.program_id(0) // blocks % groups)
    keys = start + tl.arange(0, BLOCK_N)
    k = _load_rows(k_ptr + batch * k_batch + group.to(tl.int64) * k_head, keys, k_token, KEYS, K, BLOCK_K, True)
    v = _load_rows(v_ptr + batch * v_batch + group.to(tl.int64) * v_head, keys, v_token, KEYS, V, BLOCK_V, True)
    begin, inner, outer, end = _spans_of_queries(low_ptr, high_ptr, start, T, KEYS, MASK, BLOCK_M, BLOCK_N)

    dk = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    first = group.to(tl.int64) * GROUP
    rows_ptr += (batch * H + first) * T
    q_ptr += batch * q_batch + first * q_head
    do_ptr += batch * do_batch + first * do_head
    dk, dv = _add_to_keys(
        dk, dv, k, v, q_ptr, do_ptr, rows_ptr, size, low_ptr, high_ptr, q_token, q_head, do_token, do_head, keys,
        begin, inner, outer, end, GROUP, T, KEYS, scale,
        K, V, BLOCK_K, BLOCK_V, MASK, SOFTCAP, BLOCK_M, STAGES, "within",
    )  # fmt: skip
    if MASK != "full":
        HIDDEN_STAGES: tl.constexpr = 1 if MASK == "bounds" else STAGES  # Triton can't pipeline the loads of bounds
        dk, dv = _add_to_keys(
            dk, dv, k, v, q_ptr, do_ptr, rows_ptr, size, low_ptr, high_ptr, q_token, q_head, do_token, do_head, keys,
            begin, inner, outer, end, GROUP, T, KEYS, scale,
            K, V, BLOCK_K, BLOCK_V, MASK, SOFTCAP, BLOCK_M, HIDDEN_STAGES, "both" if MASK == "bounds" else "left",
        )  # fmt: skip
    at = batch * KEYS * groups + group
    _store_rows(dk_ptr + at * K, keys, groups * K, KEYS, dk * scale, K, BLOCK_K)
    _store_rows(dv_ptr + at * V, keys, groups * V, KEYS, dv, V, BLOCK_V)


@triton.jit
def _add_to_queries(
    dq, q, do, lse, delta, k_ptr, v_ptr, k_stride, v_stride, queries, low, count, begin, inner, outer, end, KEYS,
    scale,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, MASK: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    left, blocks = _blocks(begin, inner, outer, end, BLOCK_N, SIDE)
    for block in tl.range(0, blocks, num_stages=STAGES):
        keys = _start(block, left, begin, inner, outer, BLOCK_N, SIDE) + tl.arange(0, BLOCK_N)
        k = _load_rows(k_ptr, keys, k_stride, KEYS, K, BLOCK_K, SIDE != "within")
        z, unit, slope = _scores_of(tl.dot(q, k.T, input_precision="ieee"), scale, SOFTCAP)
        log2_p = tl.fma(z, unit, -lse[:, None])
        if SIDE != "within":
            sees = _sees(queries[:, None], keys[None, :], low[:, None], count[:, None], KEYS, MASK)
            log2_p = tl.where(sees, log2_p, float("-inf"))
        v = _load_rows(v_ptr, keys, v_stride, KEYS, V, BLOCK_V, SIDE != "within")
        ds = tl.exp2(log2_p) * (tl.dot(do, v.T, input_precision="ieee") - delta[:, None])
        if SOFTCAP != 0.0:
            ds *= slope
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def _backward_queries_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, rows_ptr, low_ptr, high_ptr, dq_ptr, T, KEYS, H, GROUP, scale, size,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, do_batch, do_token, do_head,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, MASK: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(T, BLOCK_M)
    heads = tl.program_id(0) // blocks
    start = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    batch, head = (heads // H).to(tl.int64), (heads % H).to(tl.int64)
    k_ptr += batch * k_batch + head // GROUP * k_head
    v_ptr += batch * v_batch + head // GROUP * v_head
    queries = start + tl.arange(0, BLOCK_M)
    q = _load_rows(q_ptr + batch * q_batch + head * q_head, queries, q_token, T, K, BLOCK_K, True)
    do = _load_rows(do_ptr + batch * do_batch + head * do_head, queries, do_token, T, V, BLOCK_V, True)
    rows_ptr += heads.to(tl.int64) * T
    lse = tl.load(rows_ptr + queries, mask=queries < T, other=float("inf"))
    delta = tl.load(rows_ptr + size + queries, mask=queries < T, other=0.0)
    low, count = _load_bounds(low_ptr, high_ptr, queries, T, KEYS, MASK)
    begin, inner, outer, end = _spans_of_keys(low_ptr, high_ptr, start, T, KEYS, MASK, BLOCK_M, BLOCK_N)

    dq = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    dq = _add_to_queries(
        dq, q, do, lse, delta, k_ptr, v_ptr, k_token, v_token, queries, low, count, begin, inner, outer, end, KEYS,
        scale, K, V, BLOCK_K, BLOCK_V, MASK, SOFTCAP, BLOCK_N, STAGES, "within",
    )  # fmt: skip
    dq = _add_to_queries(
        dq, q, do, lse, delta, k_ptr, v_ptr, k_token, v_token, queries, low, count, begin, inner, outer, end, KEYS,
        scale, K, V, BLOCK_K, BLOCK_V, MASK, SOFTCAP, BLOCK_N, STAGES, "both" if MASK == "bounds" else "right",
    )  # fmt: skip
    _store_rows(dq_ptr + (batch * T * H + head) * K, queries, H * K, T, dq * scale, K, BLOCK_K)
