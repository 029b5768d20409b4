"""Masks: the host turns each one into bounds of the keys that a query sees; kernels read from them what is hidden."""

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
# (Triton's types say that a kernel called by a kernel does not return, and that no constant is a constexpr.)
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import can_read, check_dtype, check_shapes
from .._triton import tl, triton

Bounds = tuple[Tensor, Tensor]


class Scores(NamedTuple):
    """How scores come from queries and keys."""

    low: Tensor | None  # int32 `[Tq]`, or `None` where `causal` is the whole mask
    high: Tensor | None
    causal: bool  # without bounds: whether a query sees itself and the keys before it only
    scale: float  # factor of the products
    softcap: float  # 0 for none

    @staticmethod
    def of(
        query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int | None, cu_seqlens: Tensor | None,
        bounds: Bounds | None, scale: float | None, softcap: float | None,
    ) -> Scores:  # fmt: skip
        """Raise `ValueError` unless the inputs of `attention` go together; return how its scores are computed."""
        check_shapes(query=(query, "B Tq H K"), key=(key, "B Tk Hkv K"), value=(value, "B Tk Hkv Kv"))
        (H, K), (Hkv, Kv) = query.shape[2:], value.shape[2:]
        if 0 in (K, Kv):
            raise ValueError(f"K is {K} and Kv {Kv}: heads have no dimensions; both must be at least 1")
        if H % max(Hkv, 1) or Hkv > H:
            raise ValueError(f"{H} query heads are not a multiple of {Hkv} KV heads")
        for name, t in (("key", key), ("value", value)):
            if (t.dtype, t.device) != (query.dtype, query.device):
                raise ValueError(f"{name} is {t.dtype} on {t.device}, but query is {query.dtype} on {query.device}")
        check_dtype("query", query.dtype)
        scale = 1 / math.sqrt(K) if scale is None else scale
        if not 0 < scale < math.inf:
            raise ValueError(f"scale {scale} is not a positive number")
        if softcap is not None and not 0 < softcap < math.inf:
            raise ValueError(f"softcap {softcap} is not a positive number; None is none")
        low, high = _mask_bounds(query, key, causal, window, cu_seqlens, bounds)
        return Scores(low, high, causal, scale, softcap or 0.0)

    def queries(self, keys: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return int32 `(first, last)`, each `[Tk]`: key j is seen by the queries first[j] <= i < last[j]."""
        if self.low is None or self.high is None:
            return None, None
        index = torch.arange(keys, device=self.low.device, dtype=torch.int32)
        first, last = (torch.searchsorted(b, index, right=True, out_int32=True) for b in (self.high, self.low))
        return first, last

    @property
    def mask(self) -> str:
        """The kind of mask that kernels are compiled for."""
        return "bounds" if self.low is not None else "causal" if self.causal else "full"


def key_bounds(
    T: int, *, causal: bool = True, window: int | None = None, cu_seqlens: Tensor | None = None,
    device: torch.device | None = None,
) -> Bounds:  # fmt: skip
    """Return the bounds of a mask of T queries and as many keys.

    Returns:
        `(low, high)`, int32 `[T]` each: query i sees the keys low[i] <= j < high[i].
    """
    index = torch.arange(T, device=device, dtype=torch.int32)
    low = high = None
    if cu_seqlens is not None:
        check_documents(cu_seqlens, T)
        ends = cu_seqlens.to(torch.int32)
        document = torch.searchsorted(ends[1:], index, right=True)
        low, high = ends[document], None if causal else ends[1:][document]
    if window is not None:
        first = index + (1 - window)
        low = first.clamp_(min=0) if low is None else torch.maximum(low, first)
    low = torch.zeros_like(index) if low is None else low
    high = index + 1 if causal else torch.full_like(index, T) if high is None else high
    return low, high


def check_documents(cu_seqlens: Tensor, T: int) -> None:
    """Raise `ValueError` unless document ends rise from 0 to T; reads no values where `can_read` is false."""
    check_ends(cu_seqlens)
    if not can_read(cu_seqlens):
        return
    first, last, falls = int(cu_seqlens[0]), int(cu_seqlens[-1]), cu_seqlens.diff() < 0
    if first != 0 or last != T or bool(falls.any()):
        where = [f", falling from {int(cu_seqlens[i])} to {int(cu_seqlens[i + 1])}" for i in falls.nonzero()[:1]]
        runs = f"runs from {first} to {last}{''.join(where)}"
        raise ValueError(f"cu_seqlens must rise from 0 to {T}, the tokens of all rows, but {runs}")


def check_ends(cu_seqlens: Tensor) -> None:
    """Raise `ValueError` unless document ends are a one-dimensional tensor of integers; reads no value."""
    known = isinstance(cu_seqlens, Tensor)
    if known and cu_seqlens.dtype in (torch.int32, torch.int64) and cu_seqlens.dim() == 1 and len(cu_seqlens) > 0:
        return
    found = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}" if known else f"a {type(cu_seqlens).__name__}"
    raise ValueError(
        f"cu_seqlens is {found}, but must be int32 or int64 [n + 1], such as torch.tensor([0, 3, 8]) for documents of "
        f"3 and 5 tokens"
    )


def _mask_bounds(
    query: Tensor, key: Tensor, causal: bool, window: int | None, cu_seqlens: Tensor | None, bounds: Bounds | None
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Check the options of a mask and return its bounds, or `(None, None)` where `causal` is the whole mask."""
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


# --- in kernels: MASK is "bounds", "causal" or "full" -----------------------------------------------------------------


@triton.jit
def _whole_blocks(begin, inner, outer, end, BLOCK: tl.constexpr):
    """Round begin, inner and outer to whole blocks, so that from inner to outer the mask hides nothing."""
    begin = begin // BLOCK * BLOCK
    inner = tl.maximum(begin, tl.minimum(tl.cdiv(inner, BLOCK), tl.cdiv(end, BLOCK)) * BLOCK)
    return begin, inner, tl.maximum(inner, outer // BLOCK * BLOCK), end


@triton.jit
def key_spans(low_ptr, high_ptr, start, T, KEYS, MASK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return begin, inner, outer and end for a block of queries, which all see the keys from inner to outer."""
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
def query_spans(first_ptr, last_ptr, start, T, KEYS, MASK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return begin, inner, outer and end for a block of keys, which the queries from inner to outer, or past T, see."""
    stop = tl.minimum(start + BLOCK_N, KEYS)
    if MASK == "bounds":
        begin, inner = tl.load(first_ptr + start), tl.load(first_ptr + stop - 1)
        outer, end = tl.load(last_ptr + start), tl.load(last_ptr + stop - 1)
    elif MASK == "causal":
        begin, inner, outer, end = start, stop, T, T
    else:
        begin, inner, outer, end = 0, 0, T, T
    return _whole_blocks(begin, inner, tl.where(outer == T, T + BLOCK_M - 1, outer), end, BLOCK_M)


@triton.jit
def count_blocks(spans, BLOCK: tl.constexpr, SIDE: tl.constexpr):
    """Return how many blocks lie left of inner, and how many `SIDE` has: "left", "right", "both" or "within"."""
    begin, inner, outer, end = spans
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
def block_start(block, left, spans, BLOCK: tl.constexpr, SIDE: tl.constexpr):
    """Return where a block of `SIDE` starts."""
    begin, inner, outer, _ = spans
    if SIDE == "left":
        return begin + block * BLOCK
    elif SIDE == "right":
        return outer + block * BLOCK
    elif SIDE == "both":
        return tl.where(block < left, begin, outer - left * BLOCK) + block * BLOCK
    else:
        return inner + block * BLOCK


@triton.jit
def load_bounds(low_ptr, high_ptr, queries, T, KEYS, MASK: tl.constexpr):
    """Return the first key that each query sees and how many it sees; without bounds, two values that nobody reads."""
    if MASK == "bounds":
        queries = tl.minimum(queries, T - 1)
        low, high = tl.load(low_ptr + queries), tl.load(high_ptr + queries)
        return low, tl.maximum(tl.minimum(high, KEYS) - low, 0)
    else:
        return queries, queries


@triton.jit
def sees_keys(queries, keys, low, count, KEYS, MASK: tl.constexpr):
    """Return whether each query sees each key."""
    if MASK == "bounds":
        return (keys - low).to(tl.uint32) < count.to(tl.uint32)  # one comparison instead of two
    elif MASK == "causal":
        return keys <= queries
    else:
        return keys < KEYS
