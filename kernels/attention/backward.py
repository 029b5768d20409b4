"""The backward pass of attention: the operator, its launches, and its three kernels."""

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .._dispatch import operator
from .._rows import by_heads, contiguous
from .._triton import launch, tl, triton
from . import tiles
from .bounds import Scores, block_start, count_blocks, key_spans, load_bounds, query_spans, sees_keys
from .forward import OPTIONS
from .reference import backward_reference
from .tiles import capped_scores, load_rows, store_rows


@operator(
    "attention_backward(Tensor grad, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse,"
    f" {OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    # five products, one of which the forward pass computed already
    flops=lambda grad, dlse, query, key, value, *_, **__: (
        2 * math.prod(query[:3]) * key[1] * (3 * query[3] + 2 * value[3])
    ),
)
def backward_op(grad, dlse, query, key, value, output, lse, *options) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    *given, impl, out_dtype = options
    scores = Scores(*given)
    dq, dk, dv = (t.new_empty(t.shape, dtype=out_dtype) for t in (query, key, value))
    yield dq, dk, dv
    if dk.numel() == 0:
        dq.zero_()
        return
    if impl == "reference":
        with torch.autocast(query.device.type, enabled=False):
            return backward_reference((dq, dk, dv), grad, dlse, query, key, value, output, lse, scores)
    (B, T, H, _), (keys, groups), V = query.shape, key.shape[1:3], value.shape[3]
    lse, dlse = contiguous(lse, dlse)  # type: ignore[assignment]
    rows = query.new_empty((2, B, H, T), dtype=torch.float32)  # lse log2 e, and delta
    launch(
        _rows_kernel, (tiles.programs(T, 32, B * H), 1, 1), num_warps=4,
        **by_heads(do=grad, o=output), lse_ptr=lse, dlse_ptr=dlse, rows_ptr=rows, T=T, H=H, size=B * H * T,
        V=V, BLOCK_V=tiles.padded(V), BLOCK_M=32,
    )  # fmt: skip
    shared = tiles.arguments(query, value, scores) | by_heads(q=query, k=key, v=value, do=grad)
    first, last = scores.queries(keys)
    of_keys = {"first_ptr": first, "last_ptr": last, "dk_ptr": dk, "dv_ptr": dv}
    for name, kernel, written, count, of_batch in (
        ("dkdv", _backward_keys_kernel, of_keys, keys, groups),
        ("dq", _backward_queries_kernel, {"dq_ptr": dq}, T, H),
    ):
        tile = tiles.tile(name, query, value, scores)
        grid = (tiles.programs(count, tile.blocks[name == "dkdv"], B * of_batch), 1, 1)
        launch(
            kernel, grid, num_warps=tile.warps, **shared, **written, rows_ptr=rows, size=B * H * T,
            BLOCK_M=tile.blocks[0], BLOCK_N=tile.blocks[1], STAGES=tile.stages,
        )  # fmt: skip


@triton.jit
def _rows_kernel(
    do_ptr, o_ptr, lse_ptr, dlse_ptr, rows_ptr, T, H, size, do_batch, do_token, do_head, o_batch, o_token, o_head,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store lse log2 e and delta of each query; for a query that sees no key, inf and 0, so that its p is 0."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    blocks = tl.cdiv(T, BLOCK_M)
    heads = tl.program_id(0) // blocks
    batch, head = (heads // H).to(tl.int64), (heads % H).to(tl.int64)
    queries = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    do = load_rows(do_ptr + batch * do_batch + head * do_head, queries, do_token, T, V, BLOCK_V, True)
    o = load_rows(o_ptr + batch * o_batch + head * o_head, queries, o_token, T, V, BLOCK_V, True)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    at = heads.to(tl.int64) * T + queries
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + at, mask=queries < T, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + at, mask=queries < T, other=0.0)
    nothing = lse == float("-inf")
    tl.store(rows_ptr + at, tl.where(nothing, float("inf"), lse * LOG2_E), mask=queries < T)
    tl.store(rows_ptr + size + at, tl.where(nothing, 0.0, delta), mask=queries < T)


@triton.jit
def _backward_keys_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, rows_ptr, low_ptr, high_ptr, first_ptr, last_ptr, dk_ptr, dv_ptr,
    T, KEYS, H, GROUP, scale, size,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, do_batch, do_token, do_head,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, MASK: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(KEYS, BLOCK_N)
    start = tl.program_id(0) % blocks * BLOCK_N  # under a causal mask, the longest program starts first
    groups = H // GROUP
    batch, group = (tl.program_id(0) // blocks // groups).to(tl.int64), (tl.program_id(0) // blocks % groups)
    keys = start + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr + batch * k_batch + group.to(tl.int64) * k_head, keys, k_token, KEYS, K, BLOCK_K, True)
    v = load_rows(v_ptr + batch * v_batch + group.to(tl.int64) * v_head, keys, v_token, KEYS, V, BLOCK_V, True)
    spans = query_spans(first_ptr, last_ptr, start, T, KEYS, MASK, BLOCK_M, BLOCK_N)

    dk = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    first = group.to(tl.int64) * GROUP
    rows_ptr += (batch * H + first) * T
    q_ptr += batch * q_batch + first * q_head
    do_ptr += batch * do_batch + first * do_head
    EDGE: tl.constexpr = "both" if MASK == "bounds" else "left"
    for edge in tl.static_range(1 if MASK == "full" else 2):  # first the queries that see every key, then the others
        left, turns = count_blocks(spans, BLOCK_M, EDGE if edge else "within")
        # One loop over heads and blocks, as nested loops take more registers. Triton can't pipeline loads of bounds.
        for turn in tl.range(0, GROUP * turns, num_stages=1 if edge and MASK == "bounds" else STAGES):
            head = (turn // turns).to(tl.int64)
            queries = block_start(turn % turns, left, spans, BLOCK_M, EDGE if edge else "within")
            queries += tl.arange(0, BLOCK_M)
            q = load_rows(q_ptr + head * q_head, queries, q_token, T, K, BLOCK_K, True)
            lse_ptr = rows_ptr + head * T
            lse = tl.load(lse_ptr + queries, mask=queries < T, other=float("inf"))
            z, unit, slope = capped_scores(tl.dot(k, q.T, input_precision="ieee"), scale, SOFTCAP)
            do = load_rows(do_ptr + head * do_head, queries, do_token, T, V, BLOCK_V, True)
            dp = tl.dot(v, do.T, input_precision="ieee")  # before the exponentials, which run beside it
            log2_p = tl.fma(z, unit, -lse[None, :])
            if edge:
                low, count = load_bounds(low_ptr, high_ptr, queries, T, KEYS, MASK)
                sees = sees_keys(queries[None, :], keys[:, None], low[None, :], count[None, :], KEYS, MASK)
                log2_p = tl.where(sees, log2_p, float("-inf"))
            p = tl.exp2(log2_p)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
            delta = tl.load(lse_ptr + size + queries, mask=queries < T, other=0.0)
            ds = p * (dp - delta[None, :])
            if SOFTCAP != 0.0:
                ds *= slope
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    at = batch * KEYS * groups + group
    store_rows(dk_ptr + at * K, keys, groups * K, KEYS, dk * scale, K, BLOCK_K)
    store_rows(dv_ptr + at * V, keys, groups * V, KEYS, dv, V, BLOCK_V)


@triton.jit
def _backward_queries_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, rows_ptr, low_ptr, high_ptr, dq_ptr, T, KEYS, H, GROUP, scale, size,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, do_batch, do_token, do_head,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, MASK: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    query_blocks = tl.cdiv(T, BLOCK_M)
    heads = tl.program_id(0) // query_blocks
    start = (query_blocks - 1 - tl.program_id(0) % query_blocks) * BLOCK_M
    batch, head = (heads // H).to(tl.int64), (heads % H).to(tl.int64)
    k_ptr += batch * k_batch + head // GROUP * k_head
    v_ptr += batch * v_batch + head // GROUP * v_head
    queries = start + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr + batch * q_batch + head * q_head, queries, q_token, T, K, BLOCK_K, True)
    do = load_rows(do_ptr + batch * do_batch + head * do_head, queries, do_token, T, V, BLOCK_V, True)
    rows_ptr += heads.to(tl.int64) * T
    lse = tl.load(rows_ptr + queries, mask=queries < T, other=float("inf"))
    delta = tl.load(rows_ptr + size + queries, mask=queries < T, other=0.0)
    low, count = load_bounds(low_ptr, high_ptr, queries, T, KEYS, MASK)
    spans = key_spans(low_ptr, high_ptr, start, T, KEYS, MASK, BLOCK_M, BLOCK_N)

    dq = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    EDGE: tl.constexpr = "both" if MASK == "bounds" else "right"
    for edge in tl.static_range(2):  # first the blocks of keys that every query sees, then the others
        left, blocks = count_blocks(spans, BLOCK_N, EDGE if edge else "within")
        for block in tl.range(0, blocks, num_stages=STAGES):
            keys = block_start(block, left, spans, BLOCK_N, EDGE if edge else "within") + tl.arange(0, BLOCK_N)
            k = load_rows(k_ptr, keys, k_token, KEYS, K, BLOCK_K, edge)
            z, unit, slope = capped_scores(tl.dot(q, k.T, input_precision="ieee"), scale, SOFTCAP)
            log2_p = tl.fma(z, unit, -lse[:, None])
            if edge:
                sees = sees_keys(queries[:, None], keys[None, :], low[:, None], count[:, None], KEYS, MASK)
                log2_p = tl.where(sees, log2_p, float("-inf"))
            v = load_rows(v_ptr, keys, v_token, KEYS, V, BLOCK_V, edge)
            ds = tl.exp2(log2_p) * (tl.dot(do, v.T, input_precision="ieee") - delta[:, None])
            if SOFTCAP != 0.0:
                ds *= slope
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    store_rows(dq_ptr + (batch * T * H + head) * K, queries, H * K, T, dq * scale, K, BLOCK_K)
