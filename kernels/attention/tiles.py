"""Tile sizes, and how a block is loaded and scored: the forward and the backward kernels share both."""

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._math import tanh_and_slope
from .._rows import MAX_ROWS, ceil_div, contiguous, next_power_of_2
from .._triton import INTERPRETING, driver, tl, triton
from .bounds import Scores

WIDEST_HEAD = 256  # the largest head dimension, of keys and of values, that the tables below have tiles for


class Tile(NamedTuple):
    """How one kernel is launched."""

    blocks: tuple[int, int]  # queries and keys of a program's block
    stages: int  # of the software pipeline
    warps: int  # of a program


# By kernel and head dimension: plain attention, then attention with bounds, a soft cap, padded heads or heads below 64.
# The largest blocks that spill no registers and fit into shared memory with three stages: with two, each step of a loop
# waits for copies that the step before began last (tests/kernels/machine_code.py). No GPU has timed them.
_LARGE: dict[str, dict[Any, Any]] = {  # 227 KiB of shared memory: H100, B200
    "forward": {
        64: ((128, 128), (128, 64)),
        128: ((128, 64), (128, 64)),
        256: ((64, 32), (64, 32)),
        (256, 128): ((128, 32), (128, 32)),  # keys of 192 and values of 128, as in latent attention
    },
    "dkdv": {
        64: ((64, 128), (64, 64)),
        128: ((64, 128), (64, 64)),
        256: ((32, 32), (32, 32)),
        (256, 128): ((32, 64), (32, 64)),
    },
    "dq": {64: ((128, 64), (64, 64)), 128: ((128, 64), (64, 64)), 256: ((64, 32), (64, 32))},
}
_BLACKWELL = _LARGE | {
    "forward": _LARGE["forward"] | {256: ((64, 64), (32, 64))},
    "dkdv": _LARGE["dkdv"] | {(256, 128): ((32, 32), (32, 32))},
}
_A100: dict[str, dict[Any, Any]] = {  # 163 KiB
    "forward": {64: ((128, 64), (64, 64)), 128: ((64, 64), (64, 64)), 256: ((64, 32), (64, 32))},
    "dkdv": {64: ((64, 64), (32, 64)), 128: ((64, 64), (32, 64)), 256: ((32, 32), (32, 32))},
    "dq": {64: ((64, 64), (64, 32)), 128: ((64, 64), (64, 32)), 256: ((32, 32), (32, 32))},
}
_SMALL: dict[str, dict[Any, Any]] = {  # at least 99 KiB: other GPUs of Nvidia
    "forward": _A100["forward"] | {256: ((32, 16), (32, 16))},
    "dkdv": _A100["dkdv"] | {128: ((32, 64), (32, 64))},
    "dq": _A100["dq"] | {128: ((64, 32), (64, 32))},
}
_AMD: dict[str, dict[Any, Any]] = {  # 64 KiB
    "forward": {64: ((128, 64), (64, 32)), 128: ((128, 64), (32, 32)), 256: ((32, 32), (32, 32))},
    "dkdv": {64: ((32, 64), (16, 32)), 128: ((32, 32), (16, 32)), 256: ((32, 32), (16, 32))},
    "dq": {64: ((64, 32), (32, 32)), 128: ((64, 32), (32, 16)), 256: ((32, 32), (32, 16))},
}


def tile(kernel: str, query: Tensor, value: Tensor, scores: Scores) -> Tile:
    """Return the tile of "forward", "dkdv" or "dq" on the GPU that holds the query."""
    dims = query.shape[3], value.shape[3]
    width = max(64, next_power_of_2(max(dims)))
    if query.dtype == torch.float32:  # no matrix instruction computes it exactly
        return Tile((16, 16) if width > 128 else (32, 32), 1, 8)
    table = _SMALL if INTERPRETING else _tiles_of(query.device if query.is_cuda else driver().get_current_device())
    odd = dims != tuple(map(padded, dims)) or max(dims) < 64
    blocks = table[kernel].get((width, padded(dims[1])), table[kernel][width])
    blocks = blocks[scores.low is not None or scores.softcap > 0 or odd]
    return Tile(blocks, 1, 4) if table is _AMD else Tile(blocks, 3, 8)


@functools.cache
def _tiles_of(device: Any) -> dict:
    """Return the table for a GPU, `torch.device` or as the fake driver of the tests names it."""
    if isinstance(device, torch.device):
        found = torch.cuda.get_device_properties(device)
        amd, memory, major = torch.version.hip is not None, found.shared_memory_per_block_optin, found.major
    else:
        target = driver().get_current_target()
        amd, major = target.backend != "cuda", 0 if target.backend != "cuda" else target.arch // 10
        memory = driver().utils.get_device_properties(device)["max_shared_mem"]
    if amd:
        return _AMD
    if memory < 200 * 1024:
        return _A100 if memory >= 160 * 1024 else _SMALL
    return _BLACKWELL if major >= 10 else _LARGE


def arguments(query: Tensor, value: Tensor, scores: Scores) -> dict[str, Any]:
    """Return the arguments of all kernels over pairs of a query and a key: sizes, and how scores are computed."""
    (_, T, H, K), (_, KEYS, Hkv, V) = query.shape, value.shape
    low, high = contiguous(scores.low, scores.high)
    return {
        "low_ptr": low, "high_ptr": high, "T": T, "KEYS": KEYS, "H": H, "GROUP": H // Hkv, "scale": scores.scale,
        "K": K, "V": V, "BLOCK_K": padded(K), "BLOCK_V": padded(V), "MASK": scores.mask, "SOFTCAP": scores.softcap,
    }  # fmt: skip


def padded(dim: int) -> int:
    """Return the head dimension that the matrix instructions multiply: a power of two, at least 16."""
    return max(16, next_power_of_2(dim))


def programs(tokens: int, block: int, heads: int) -> int:
    """Return the number of programs for all blocks of tokens of all heads, which a launch must be able to count."""
    count = ceil_div(tokens, block) * heads
    if count > MAX_ROWS:
        raise ValueError(f"{count} blocks of tokens are more than the {MAX_ROWS} that a launch can count")
    return count


@triton.jit
def load_rows(x_ptr, tokens, stride, count, D: tl.constexpr, BLOCK_D: tl.constexpr, CHECK: tl.constexpr):
    """Load `[tokens, BLOCK_D]` of one head, 0 past D; with `CHECK`, also 0 past token `count`."""
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
def store_rows(x_ptr, tokens, stride, count, x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store `[tokens, D]` of one head, up to token `count`."""
    cols = tl.arange(0, BLOCK_D)[None, :]
    mask = (tokens[:, None] < count) & (cols < D)
    tl.store(x_ptr + tokens[:, None].to(tl.int64) * stride + cols, x.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def capped_scores(products, scale, SOFTCAP: tl.constexpr):
    """Return z and its unit (e^score = 2^(z unit)), and the slope of the soft cap."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    if SOFTCAP != 0.0:
        tanh, slope = tanh_and_slope(products * (scale / SOFTCAP))
        return tanh, SOFTCAP * LOG2_E, slope
    else:
        return products, scale * LOG2_E, 1.0
