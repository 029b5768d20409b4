"""Attention for Hopper: one group of warps copies, two multiply, each half of the queries or keys of a block.

Triton deals out the warps itself where it is told to, `tl.range(warp_specialize=True)`, and keeps to rules that its
documentation doesn't name (Triton 3.6 and 3.7, found by compiling):

- 4 warps are asked for, and 12 come out; descriptors are made in the kernel; one loop, and no `if` in it.
- Two groups that multiply share the work only where the products have 128 rows. With 64 both do all of it.
- Nothing may be loaded that has an element for each of these rows, as it can't be cut in two. So the mask of queries is
  one of keys: as neither bound of the keys that a query sees falls, the queries that see a key are a run too. And lse
  and delta come as the sums of products, which can be: three numbers of bfloat16 that are times one hold a float32.
"""

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
from __future__ import annotations

import importlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._dispatch import tl, triton
from ._launch import launch, multiprocessors
from ._rows import ceil_div
from .attention import _load_bounds, _lse_and_delta, _mask, _programs, _scores_of, _store_rows, _views, _whole
from .attention import _sees as _sees_by_bounds

PARTS = 16  # bfloat16 numbers that make one of a query: 3 hold it, and the smallest product sums 16


class _Tile(NamedTuple):
    """Queries and keys of a program's block, stages of its pipeline, and whether it takes one block after another."""

    queries: int
    keys: int
    stages: int
    persistent: bool = False


def _tile(kernel: str, K: int, V: int, mask: str, softcap: float) -> _Tile:
    """Large without spilling, or running out of shared memory. Not timed."""
    if kernel == "dkdv":
        return _Tile(32 if softcap > 0 and max(K, V) == 128 else 64, 128, 2)
    if max(K, V) == 256:
        return _Tile(128, 32 if mask == "bounds" or softcap > 0 else 64, 2)
    small = kernel == "dq" or mask == "bounds" or (mask == "full" and softcap > 0)
    return _Tile(128, 64 if small else 128, 2)


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
    mask = _mask(low, causal)
    tile = _tile("forward", K, V, mask, softcap)
    q, k, v = map(_placed, (query, key, value))
    tensors = (q, k, v, _whole(low), _whole(high), *_bounds_of_keys(low, high, keys), output, lse)
    scalars = (B, T, keys, H, H // key.shape[2], scale, *_strides(q, k, v))
    programs = _programs(T, tile.queries, B * H)
    if tile.persistent and all(_columns(x) < 2**31 for x in (q, k, v)):
        programs = min(programs, multiprocessors(query.device))
    else:
        tile = tile._replace(persistent=False)
    _launch(_forward_kernel, (programs, 1, 1), tensors, scalars, (K, V, mask, softcap, *tile))


def backward(
    outs: tuple[Tensor, Tensor, Tensor], grad: Tensor, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
    output: Tensor, lse: Tensor, low: Tensor | None, high: Tensor | None, causal: bool, scale: float, softcap: float,
) -> None:  # fmt: skip
    """Write the gradients; arguments as of the operator `attention_backward`, and some queries and keys."""
    dq, dk, dv = outs
    (B, T, H, K), (_, keys, groups, V) = query.shape, value.shape
    parts, do, o = lse.new_empty((B, T, H, 2 * PARTS), dtype=torch.bfloat16), _views(grad), _views(output)
    unit = math.log2(math.e) if softcap > 0 else 1 / scale
    _launch(
        _parts_kernel, (_programs(T, 32, B * H), 1, 1), (do.x, o.x, lse.contiguous(), _whole(dlse), parts),
        (T, H, unit, *do.strides, *o.strides), (V, 32, PARTS),
    )  # fmt: skip
    mask, of_keys, group = _mask(low, causal), _bounds_of_keys(low, high, keys), H // groups
    q, k, v, do = _placed(query, group), _placed(key), _placed(value), _placed(grad, group)
    low, high = _whole(low), _whole(high)
    scalars = (T, keys, H, group, scale, *_strides(q, k, v, do))

    tile = _tile("dkdv", K, V, mask, softcap)
    grid = (_programs(keys, tile.keys, B * groups), 1, 1)
    tensors = (q, k, v, do, parts, low, high, *of_keys, dk, dv)
    _launch(_backward_keys_kernel, grid, tensors, scalars, (K, V, PARTS, mask, softcap, *tile[:3]))
    tile = _tile("dq", K, V, mask, softcap)
    grid = (_programs(T, tile.queries, B * H), 1, 1)
    tensors = (q, k, v, do, parts, low, high, *of_keys, dq)
    _launch(_backward_queries_kernel, grid, tensors, scalars, (K, V, PARTS, mask, softcap, *tile[:3]))


def _launch(kernel: Any, grid: tuple[int, int, int], tensors: tuple, scalars: tuple, constants: tuple) -> None:
    _let_triton_allocate()
    launch(kernel, grid, tensors, scalars, constants, num_warps=4)


def _columns(x: Tensor) -> int:
    """Of a descriptor whose rows are tokens, and whose columns are all else, at the distances that they have."""
    return (x.shape[0] - 1) * x.stride(0) + (x.shape[2] - 1) * x.stride(2) + x.shape[3]


def _strides(*inputs: Tensor) -> tuple[int, ...]:
    """Of batch, tokens and heads."""
    return tuple(stride for x in inputs for stride in x.stride()[:3])


def _bounds_of_keys(low: Tensor | None, high: Tensor | None, keys: int) -> tuple[Tensor | None, Tensor | None]:
    """Of each key the first query that sees it, and the first after it that doesn't; nobody sees what fills a block."""
    if low is None or high is None:
        return None, None
    index = torch.arange(ceil_div(keys, 128) * 128, dtype=torch.int32, device=low.device)
    first = torch.searchsorted(high.clamp(max=keys).contiguous(), index, right=True, out_int32=True)
    return first, torch.searchsorted(low.contiguous(), index, right=True, out_int32=True)


def _placed(x: Tensor, heads: int = 1) -> Tensor:
    """`x` where the copying unit can take it from: rows of whole elements, 16 bytes apart, or a multiple.

    So many heads are columns of one descriptor, which counts them in 32 bits.
    """
    step = 16 // x.element_size()
    fits = x.data_ptr() % 16 == 0 and all(stride % step == 0 for stride in x.stride()[:3])
    fits = fits and x.stride(3) == 1 and x.stride(1) >= x.shape[3] and heads * x.stride(2) < 2**31
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _let_triton_allocate() -> None:
    """Give Triton memory for descriptors from torch's allocator, in this thread, unless it has some already."""
    allocation = importlib.import_module("triton.runtime._allocation")
    if isinstance(allocation._allocator.get(), allocation.NullAllocator):
        allocation.set_allocator(_allocate)


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """On the device and stream of the launch, so that it is freed in order, and captured in a graph."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


@triton.jit
def _span_of_keys(low_ptr, high_ptr, start, T, KEYS, MASK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys that some of a block of queries see; at least one block, so that no copy outlives the program."""
    if MASK == "bounds":
        begin = tl.minimum(tl.maximum(tl.load(low_ptr + start), 0), KEYS - 1) // BLOCK_N * BLOCK_N
        end = tl.minimum(tl.load(high_ptr + tl.minimum(start + BLOCK_M, T) - 1), KEYS)
        return begin, tl.maximum(end, begin + 1)
    elif MASK == "causal":
        return 0, tl.minimum(start + BLOCK_M, KEYS)
    else:
        return 0, KEYS


@triton.jit
def _span_of_queries(
    first_ptr, past_ptr, start, T, KEYS, MASK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The queries that see some of a block of keys; at least one block."""
    if MASK == "bounds":
        begin = tl.load(first_ptr + start) // BLOCK_M * BLOCK_M
        end = tl.load(past_ptr + tl.minimum(start + BLOCK_N, KEYS) - 1)
        return begin, tl.maximum(end, begin + 1)
    elif MASK == "causal":
        return start // BLOCK_M * BLOCK_M, T
    else:
        return 0, T


@triton.jit
def _load_queries(first_ptr, past_ptr, keys, MASK: tl.constexpr):
    """The first query that sees each key, and the first after it that doesn't; without bounds, what costs nothing."""
    if MASK == "bounds":
        return tl.load(first_ptr + keys), tl.load(past_ptr + keys)
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
def _attend(
    q_rows, k_rows, v_rows, q_column, k_column, v_column, low_ptr, high_ptr, first_ptr, past_ptr, output_ptr, lse_ptr,
    start, T, KEYS, H, scale,
    V: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, ROLES: tl.constexpr,
):  # fmt: skip
    q = q_rows.load([start, q_column])
    queries = start + tl.arange(0, BLOCK_M)
    begin, end = _span_of_keys(low_ptr, high_ptr, start, T, KEYS, MASK, BLOCK_M, BLOCK_N)
    acc = tl.zeros((BLOCK_M, V), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for block in tl.range(begin, end, BLOCK_N, num_stages=STAGES, warp_specialize=ROLES):
        keys = block + tl.arange(0, BLOCK_N)
        first, past = _load_queries(first_ptr, past_ptr, keys, MASK)
        k = k_rows.load([block, k_column])
        z, unit, _ = _scores_of(tl.dot(q, k.T), scale, SOFTCAP)
        sees = _sees(queries[:, None], keys[None, :], first[None, :], past[None, :], KEYS, MASK)
        z = tl.where(sees, z, float("-inf"))
        larger = tl.maximum(largest, tl.max(z, 1) * unit)
        base = tl.where(larger == float("-inf"), 0.0, larger) if MASK == "bounds" else larger
        p = tl.exp2(tl.fma(z, unit, -base[:, None]))  # rounded once, so that p near 1 is exact
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(p, 1)
        v = v_rows.load([block, v_column])
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        largest = larger

    LN_2: tl.constexpr = 0.6931471805599453
    total = tl.where(total == 0.0, 1.0, total)  # of a query that sees nothing: output 0, lse -inf
    _store_rows(output_ptr, queries, H * V, T, acc / total[:, None], V, V)
    tl.store(lse_ptr + queries, largest * LN_2 + tl.log(total), mask=queries < T)


@triton.jit(do_not_specialize=["T", "KEYS"])  # a loop of one turn, known before, has no roles
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, low_ptr, high_ptr, first_ptr, past_ptr, output_ptr, lse_ptr,
    B, T, KEYS, H, GROUP, scale, q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    K: tl.constexpr, V: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    tl.static_assert(BLOCK_M == 128, "two groups of warps cut 128 queries in half; of 64 each would do all")
    blocks = tl.cdiv(T, BLOCK_M)
    if PERSISTENT:  # tokens are rows, all else is columns: rows may overlap, only their number is what clips
        last, groups = B - 1, H // GROUP
        q_columns = (last * q_batch + (H - 1) * q_head + K).to(tl.int32)
        k_columns = (last * k_batch + (groups - 1) * k_head + K).to(tl.int32)
        v_columns = (last * v_batch + (groups - 1) * v_head + V).to(tl.int32)
        q_rows = tl.make_tensor_descriptor(q_ptr, [T, q_columns], [q_token, 1], [BLOCK_M, K])
        k_rows = tl.make_tensor_descriptor(k_ptr, [KEYS, k_columns], [k_token, 1], [BLOCK_N, K])
        v_rows = tl.make_tensor_descriptor(v_ptr, [KEYS, v_columns], [v_token, 1], [BLOCK_N, V])
        for turn in tl.range(tl.program_id(0), blocks * B * H, tl.num_programs(0), num_stages=2, warp_specialize=True):
            heads = turn // blocks
            start = (blocks - 1 - turn % blocks) * BLOCK_M  # of a causal mask, the longest first
            batch, head = heads // H, heads % H
            _attend(
                q_rows, k_rows, v_rows, (batch * q_batch + head * q_head).to(tl.int32),
                (batch * k_batch + head // GROUP * k_head).to(tl.int32),
                (batch * v_batch + head // GROUP * v_head).to(tl.int32), low_ptr, high_ptr, first_ptr, past_ptr,
                output_ptr + (batch.to(tl.int64) * T * H + head) * V, lse_ptr + heads.to(tl.int64) * T,
                start, T, KEYS, H, scale, V, MASK, SOFTCAP, BLOCK_M, BLOCK_N, STAGES, False,
            )  # fmt: skip
    else:
        heads = tl.program_id(0) // blocks
        start = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
        batch, head = (heads // H).to(tl.int64), (heads % H).to(tl.int64)
        q_ptr += batch * q_batch + head * q_head
        k_ptr += batch * k_batch + head // GROUP * k_head
        v_ptr += batch * v_batch + head // GROUP * v_head
        q_rows = tl.make_tensor_descriptor(q_ptr, [T, K], [q_token, 1], [BLOCK_M, K])  # past the last row are zeros
        k_rows = tl.make_tensor_descriptor(k_ptr, [KEYS, K], [k_token, 1], [BLOCK_N, K])
        v_rows = tl.make_tensor_descriptor(v_ptr, [KEYS, V], [v_token, 1], [BLOCK_N, V])
        _attend(
            q_rows, k_rows, v_rows, 0, 0, 0, low_ptr, high_ptr, first_ptr, past_ptr,
            output_ptr + (batch * T * H + head) * V, lse_ptr + heads.to(tl.int64) * T,
            start, T, KEYS, H, scale, V, MASK, SOFTCAP, BLOCK_M, BLOCK_N, STAGES, True,
        )  # fmt: skip


@triton.jit
def _parts_kernel(
    do_ptr, o_ptr, lse_ptr, dlse_ptr, parts_ptr, T, H, unit, do_batch, do_token, do_head, o_batch, o_token, o_head,
    V: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """-lse in the given unit, and -delta, as sums of bfloat16 numbers: such can be copied, and summed by products."""
    batch, head, queries, _, lse, delta = _lse_and_delta(
        do_ptr, o_ptr, lse_ptr, dlse_ptr, T, H, do_batch, do_token, do_head, o_batch, o_token, o_head, V, V, BLOCK_M
    )  # fmt: skip
    nothing = lse == float("-inf")  # of a query that sees nothing p and delta are 0
    parts_ptr += (batch * T * H + head) * 2 * PARTS
    _store_parts(parts_ptr, queries, H, T, tl.where(nothing, float("-inf"), -lse * unit), PARTS)
    _store_parts(parts_ptr + PARTS, queries, H, T, tl.where(nothing, 0.0, -delta), PARTS)


@triton.jit
def _store_parts(parts_ptr, queries, H, T, x, PARTS: tl.constexpr):
    high = x.to(tl.bfloat16)
    finite = tl.where(x == float("-inf"), 0.0, x)
    rest = finite - finite.to(tl.bfloat16).to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = rest - middle.to(tl.float32)
    part = tl.arange(0, PARTS)[None, :]
    parts = tl.where(part == 1, middle.to(tl.float32)[:, None], tl.where(part == 2, low[:, None], 0.0))
    parts = tl.where(part == 0, high.to(tl.float32)[:, None], parts)
    _store_rows(parts_ptr, queries, H * 2 * PARTS, T, parts, PARTS, PARTS)


@triton.jit
def _log2_p(products, parts, scale, SOFTCAP: tl.constexpr):
    """Of the products of queries and keys, or of these and the parts of lse; and the slope of the soft cap."""
    z, unit, slope = _scores_of(products, scale, SOFTCAP)
    if SOFTCAP != 0.0:
        return tl.fma(z, unit, parts), slope
    else:
        return z * unit, slope


@triton.jit(do_not_specialize=["T", "KEYS"])  # a loop of one turn, known before, has no roles
def _backward_keys_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, parts_ptr, low_ptr, high_ptr, first_ptr, past_ptr, dk_ptr, dv_ptr,
    T, KEYS, H, GROUP, scale,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, do_batch, do_token, do_head,
    K: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tl.static_assert(BLOCK_N == 128, "two groups of warps cut 128 keys in half; of 64 each would do all")
    blocks = tl.cdiv(KEYS, BLOCK_N)
    start = tl.program_id(0) % blocks * BLOCK_N  # of a causal mask, the longest first
    groups = H // GROUP
    batch, group = (tl.program_id(0) // blocks // groups).to(tl.int64), (tl.program_id(0) // blocks % groups)
    first = group.to(tl.int64) * GROUP
    parts_ptr += (batch * T * H + first) * 2 * PARTS
    k_ptr += batch * k_batch + group.to(tl.int64) * k_head
    v_ptr += batch * v_batch + group.to(tl.int64) * v_head
    q_ptr += batch * q_batch + first * q_head
    do_ptr += batch * do_batch + first * do_head
    k_rows = tl.make_tensor_descriptor(k_ptr, [KEYS, K], [k_token, 1], [BLOCK_N, K])
    v_rows = tl.make_tensor_descriptor(v_ptr, [KEYS, V], [v_token, 1], [BLOCK_N, V])
    # The heads of a group are columns, as all are of a program that takes several blocks in the forward pass.
    q_rows = tl.make_tensor_descriptor(q_ptr, [T, (GROUP - 1) * q_head + K], [q_token, 1], [BLOCK_M, K])
    do_rows = tl.make_tensor_descriptor(do_ptr, [T, (GROUP - 1) * do_head + V], [do_token, 1], [BLOCK_M, V])
    parts_rows = tl.make_tensor_descriptor(parts_ptr, [T, GROUP * 2 * PARTS], [H * 2 * PARTS, 1], [BLOCK_M, PARTS])
    k = k_rows.load([start, 0])
    v = v_rows.load([start, 0])
    keys = start + tl.arange(0, BLOCK_N)
    begin, end = _span_of_queries(first_ptr, past_ptr, start, T, KEYS, MASK, BLOCK_M, BLOCK_N)

    dk = tl.zeros((BLOCK_N, K), tl.float32)
    dv = tl.zeros((BLOCK_N, V), tl.float32)
    blocks_of_head = tl.cdiv(end - begin, BLOCK_M)
    for turn in tl.range(0, GROUP * blocks_of_head, num_stages=STAGES, warp_specialize=True):
        head, row = turn // blocks_of_head, begin + turn % blocks_of_head * BLOCK_M
        queries = row + tl.arange(0, BLOCK_M)
        low, count = _load_bounds(low_ptr, high_ptr, queries, T, KEYS, MASK)
        ones = tl.full((BLOCK_N, PARTS), 1.0, tl.float32).to(tl.bfloat16)
        lse = tl.dot(ones, parts_rows.load([row, head * 2 * PARTS]).T)
        q = q_rows.load([row, head * q_head])
        products = tl.dot(k, q.T) if SOFTCAP != 0.0 else tl.dot(k, q.T, lse)
        log2_p, slope = _log2_p(products, lse, scale, SOFTCAP)
        if MASK != "full":
            sees = _sees_by_bounds(queries[None, :], keys[:, None], low[None, :], count[None, :], KEYS, MASK)
            log2_p = tl.where(sees, log2_p, float("-inf"))
        p = tl.exp2(log2_p)
        do = do_rows.load([row, head * do_head])
        dv = tl.dot(p.to(do.dtype), do, dv)
        delta = tl.dot(ones, parts_rows.load([row, (head * 2 + 1) * PARTS]).T)
        ds = p * tl.dot(v, do.T, delta)
        if SOFTCAP != 0.0:
            ds *= slope
        dk = tl.dot(ds.to(q.dtype), q, dk)
    at = batch * KEYS * groups + group
    _store_rows(dk_ptr + at * K, keys, groups * K, KEYS, dk * scale, K, K)
    _store_rows(dv_ptr + at * V, keys, groups * V, KEYS, dv, V, V)


@triton.jit(do_not_specialize=["T", "KEYS"])  # a loop of one turn, known before, has no roles
def _backward_queries_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, parts_ptr, low_ptr, high_ptr, first_ptr, past_ptr, dq_ptr,
    T, KEYS, H, GROUP, scale,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, do_batch, do_token, do_head,
    K: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tl.static_assert(BLOCK_M == 128, "two groups of warps cut 128 queries in half; of 64 each would do all")
    blocks = tl.cdiv(T, BLOCK_M)
    heads = tl.program_id(0) // blocks
    start = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    batch, head = (heads // H).to(tl.int64), (heads % H).to(tl.int64)
    q_ptr += batch * q_batch + head * q_head
    k_ptr += batch * k_batch + head // GROUP * k_head
    v_ptr += batch * v_batch + head // GROUP * v_head
    do_ptr += batch * do_batch + head * do_head
    parts_ptr += (batch * T * H + head) * 2 * PARTS
    q_rows = tl.make_tensor_descriptor(q_ptr, [T, K], [q_token, 1], [BLOCK_M, K])
    k_rows = tl.make_tensor_descriptor(k_ptr, [KEYS, K], [k_token, 1], [BLOCK_N, K])
    v_rows = tl.make_tensor_descriptor(v_ptr, [KEYS, V], [v_token, 1], [BLOCK_N, V])
    do_rows = tl.make_tensor_descriptor(do_ptr, [T, V], [do_token, 1], [BLOCK_M, V])
    parts_rows = tl.make_tensor_descriptor(parts_ptr, [T, 2 * PARTS], [H * 2 * PARTS, 1], [BLOCK_M, PARTS])
    q = q_rows.load([start, 0])
    do = do_rows.load([start, 0])
    lse = parts_rows.load([start, 0])
    delta = parts_rows.load([start, PARTS])
    queries = start + tl.arange(0, BLOCK_M)
    begin, end = _span_of_keys(low_ptr, high_ptr, start, T, KEYS, MASK, BLOCK_M, BLOCK_N)

    dq = tl.zeros((BLOCK_M, K), tl.float32)
    for block in tl.range(begin, end, BLOCK_N, num_stages=STAGES, warp_specialize=True):
        keys = block + tl.arange(0, BLOCK_N)
        first, past = _load_queries(first_ptr, past_ptr, keys, MASK)
        k = k_rows.load([block, 0])
        ones = tl.full((PARTS, BLOCK_N), 1.0, tl.float32).to(tl.bfloat16)
        summed = tl.dot(lse, ones)
        products = tl.dot(q, k.T) if SOFTCAP != 0.0 else tl.dot(q, k.T, summed)
        log2_p, slope = _log2_p(products, summed, scale, SOFTCAP)
        sees = _sees(queries[:, None], keys[None, :], first[None, :], past[None, :], KEYS, MASK)
        log2_p = tl.where(sees, log2_p, float("-inf"))
        v = v_rows.load([block, 0])
        ds = tl.exp2(log2_p) * tl.dot(delta, ones, tl.dot(do, v.T))
        if SOFTCAP != 0.0:
            ds *= slope
        dq = tl.dot(ds.to(k.dtype), k, dq)
    _store_rows(dq_ptr + (batch * T * H + head) * K, queries, H * K, T, dq * scale, K, K)
