"""The forward pass of attention for Hopper: one warp group copies, two multiply, each half of the queries of a block.

Triton deals out the warps itself where it is told to, `tl.range(warp_specialize=True)`, and keeps to rules that its
documentation doesn't name (Triton 3.6 and 3.7, found by compiling):

- 4 warps are asked for, and 12 come out; descriptors are made in the kernel; one loop, and no `if` in it.
- Two groups that multiply share the work only of blocks of 128 queries. With 64 both do all of it.
- Nothing may be loaded that has an element for each query, as it can't be cut in two; so a mask that is loaded is one
  of keys: as neither bound of the keys that a query sees falls, the queries that see a key are a run too.
"""

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
from __future__ import annotations

import importlib
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ._dispatch import tl, triton
from ._launch import launch
from .attention import _mask, _programs, _scores_of, _store_rows, _whole


class _Tile(NamedTuple):
    """Queries and keys of a program's block, and stages of its pipeline."""

    queries: int
    keys: int
    stages: int


def _tile(K: int, V: int, mask: str, softcap: float) -> _Tile:
    """Large without spilling, or running out of shared memory. Not timed."""
    keys = 64 if mask == "bounds" or max(K, V) == 256 else 128
    return _Tile(128, 32 if max(K, V) == 256 and (mask == "bounds" or softcap > 0) else keys, 2)


def forward(
    outs: tuple[Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor, low: Tensor | None, high: Tensor | None,
    causal: bool, scale: float, softcap: float,
) -> None:  # fmt: skip
    """Write attention's output and lse; arguments as of the operator `attention_forward`."""
    output, lse = outs
    (B, T, H, K), keys, V = query.shape, key.shape[1], value.shape[3]
    if keys == 0:
        output.zero_()
        lse.fill_(-math.inf)
        return
    mask, of_keys = _mask(low, causal), _bounds_of_keys(low, high, keys)
    tile = _tile(K, V, mask, softcap)
    q, k, v = map(_placed, (query, key, value))
    tensors = (q, k, v, _whole(low), _whole(high), *of_keys, output, lse)
    strides = (stride for x in (q, k, v) for stride in x.stride()[:3])
    _let_triton_allocate()
    launch(
        _forward_kernel, (_programs(T, tile.queries, B * H), 1, 1), tensors,
        (T, keys, H, H // key.shape[2], scale, *strides), (K, V, mask, softcap, *tile), num_warps=4,
    )  # fmt: skip


def _bounds_of_keys(low: Tensor | None, high: Tensor | None, keys: int) -> tuple[Tensor | None, Tensor | None]:
    """Of each key the first query that sees it, and the first after it that doesn't."""
    if low is None or high is None:
        return None, None
    index = torch.arange(keys, dtype=torch.int32, device=low.device)
    first = torch.searchsorted(high.contiguous(), index, right=True, out_int32=True)
    return first, torch.searchsorted(low.contiguous(), index, right=True, out_int32=True)


def _placed(x: Tensor) -> Tensor:
    """`x` where the copying unit can take it from: rows of whole elements, 16 bytes apart, or a multiple."""
    step = 16 // x.element_size()
    fits = x.data_ptr() % 16 == 0 and all(stride % step == 0 for stride in x.stride()[:3])
    return (
        x if fits and x.stride(3) == 1 and x.stride(1) >= x.shape[3] else x.clone(memory_format=torch.contiguous_format)
    )


def _let_triton_allocate() -> None:
    """Give Triton memory for descriptors from torch's allocator, in this thread, unless it has some already."""
    allocation = importlib.import_module("triton.runtime._allocation")
    if isinstance(allocation._allocator.get(), allocation.NullAllocator):
        allocation.set_allocator(_allocate)


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """On the device and stream of the launch, so that it is freed in order, and captured in a graph."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


@triton.jit
def _span(low_ptr, high_ptr, start, T, KEYS, MASK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys that some of a block of queries see; at least one block, so that no copy outlives the program."""
    if MASK == "bounds":
        begin = tl.maximum(tl.load(low_ptr + start), 0) // BLOCK_N * BLOCK_N
        end = tl.minimum(tl.load(high_ptr + tl.minimum(start + BLOCK_M, T) - 1), KEYS)
        return begin, tl.maximum(end, begin + 1)
    elif MASK == "causal":
        return 0, tl.minimum(start + BLOCK_M, KEYS)
    else:
        return 0, KEYS


@triton.jit
def _load_queries(first_ptr, past_ptr, keys, KEYS, MASK: tl.constexpr):
    """The first query that sees each key, and the first after it that doesn't; without bounds, what costs nothing."""
    if MASK == "bounds":
        first = tl.load(first_ptr + keys, mask=keys < KEYS, other=0)
        return first, tl.load(past_ptr + keys, mask=keys < KEYS, other=0)
    else:
        return keys, keys


@triton.jit
def _sees(queries, keys, first, past, KEYS, MASK: tl.constexpr):
    if MASK == "bounds":
        return (first <= queries) & (queries < past)
    elif MASK == "causal":
        return keys <= queries
    else:
        return keys < KEYS


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, low_ptr, high_ptr, first_ptr, past_ptr, output_ptr, lse_ptr,
    T, KEYS, H, GROUP, scale, q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    K: tl.constexpr, V: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tl.static_assert(BLOCK_M == 128, "two groups of warps cut 128 queries in half; of 64 each would do all")
    blocks = tl.cdiv(T, BLOCK_M)
    heads = tl.program_id(0) // blocks
    start = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M  # of a causal mask, the longest first
    batch, head = (heads // H).to(tl.int64), (heads % H).to(tl.int64)
    q_ptr += batch * q_batch + head * q_head
    k_ptr += batch * k_batch + head // GROUP * k_head
    v_ptr += batch * v_batch + head // GROUP * v_head
    q_rows = tl.make_tensor_descriptor(q_ptr, [T, K], [q_token, 1], [BLOCK_M, K])  # past the last row are zeros
    k_rows = tl.make_tensor_descriptor(k_ptr, [KEYS, K], [k_token, 1], [BLOCK_N, K])
    v_rows = tl.make_tensor_descriptor(v_ptr, [KEYS, V], [v_token, 1], [BLOCK_N, V])
    q = q_rows.load([start, 0])
    queries = start + tl.arange(0, BLOCK_M)
    begin, end = _span(low_ptr, high_ptr, start, T, KEYS, MASK, BLOCK_M, BLOCK_N)

    acc = tl.zeros((BLOCK_M, V), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for block in tl.range(begin, end, BLOCK_N, num_stages=STAGES, warp_specialize=True):
        keys = block + tl.arange(0, BLOCK_N)
        first, past = _load_queries(first_ptr, past_ptr, keys, KEYS, MASK)
        k = k_rows.load([block, 0])
        z, unit, _ = _scores_of(tl.dot(q, k.T), scale, SOFTCAP)
        sees = _sees(queries[:, None], keys[None, :], first[None, :], past[None, :], KEYS, MASK)
        z = tl.where(sees, z, float("-inf"))
        larger = tl.maximum(largest, tl.max(z, 1) * unit)
        base = tl.where(larger == float("-inf"), 0.0, larger) if MASK == "bounds" else larger
        p = tl.exp2(tl.fma(z, unit, -base[:, None]))  # rounded once, so that p near 1 is exact
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(p, 1)
        v = v_rows.load([block, 0])
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        largest = larger

    LN_2: tl.constexpr = 0.6931471805599453
    total = tl.where(total == 0.0, 1.0, total)  # of a query that sees nothing: output 0, lse -inf
    output_ptr += batch * T * H * V + head * V
    _store_rows(output_ptr, queries, H * V, T, acc / total[:, None], V, V)
    tl.store(lse_ptr + heads.to(tl.int64) * T + queries, largest * LN_2 + tl.log(total), mask=queries < T)
