"""The forward pass of attention: the operator, its launch, and its kernel."""

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._dispatch import operator
from .._rows import by_heads
from .._triton import launch, tl, triton
from . import tiles
from .bounds import Scores, block_start, count_blocks, key_spans, load_bounds, sees_keys
from .reference import forward_reference
from .tiles import capped_scores, load_rows, store_rows

OPTIONS = "Tensor? low, Tensor? high, bool causal, float scale, float softcap, str impl, ScalarType? out_dtype"


@operator(
    f"attention_forward(Tensor query, Tensor key, Tensor value, {OPTIONS}) -> (Tensor output, Tensor lse)",
    # two products of all pairs of query and key under any mask, as torch counts its own attention
    flops=lambda query, key, value, *others, **_: 2 * math.prod(query[:3]) * key[1] * (query[3] + value[3]),
)
def forward_op(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Iterator[tuple[Tensor, Tensor]]:
    *given, impl, out_dtype = options
    (B, T, H, _), scores = query.shape, Scores(*given)
    output = query.new_empty((B, T, H, value.shape[3]), dtype=out_dtype)
    lse = query.new_empty((B, H, T), dtype=torch.promote_types(query.dtype, torch.float32))
    yield output, lse
    if impl == "reference":
        with torch.autocast(query.device.type, enabled=False):
            return forward_reference((output, lse), query, key, value, scores)
    tile = tiles.tile("forward", query, value, scores)
    launch(
        _forward_kernel, (tiles.programs(T, tile.blocks[0], B * H), 1, 1), num_warps=tile.warps,
        **by_heads(q=query, k=key, v=value), **tiles.arguments(query, value, scores),
        output_ptr=output, lse_ptr=lse, BLOCK_M=tile.blocks[0], BLOCK_N=tile.blocks[1], STAGES=tile.stages,
    )  # fmt: skip


@triton.jit
def _start_of(block, within, left, spans, BLOCK: tl.constexpr, EDGE: tl.constexpr):
    """Return where a block of keys starts: those that every query sees come first."""
    seen = block_start(block, left, spans, BLOCK, "within")
    return tl.where(block < within, seen, block_start(block - within, left, spans, BLOCK, EDGE))


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, low_ptr, high_ptr, output_ptr, lse_ptr,
    T, KEYS, H, GROUP, scale, q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, MASK: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    query_blocks = tl.cdiv(T, BLOCK_M)
    heads = tl.program_id(0) // query_blocks
    # Under a causal mask, the longest program starts first.
    start = (query_blocks - 1 - tl.program_id(0) % query_blocks) * BLOCK_M
    batch, head = (heads // H).to(tl.int64), (heads % H).to(tl.int64)
    k_ptr += batch * k_batch + head // GROUP * k_head
    v_ptr += batch * v_batch + head // GROUP * v_head
    queries = start + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr + batch * q_batch + head * q_head, queries, q_token, T, K, BLOCK_K, True)
    low, count = load_bounds(low_ptr, high_ptr, queries, T, KEYS, MASK)
    spans = key_spans(low_ptr, high_ptr, start, T, KEYS, MASK, BLOCK_M, BLOCK_N)

    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    EDGE: tl.constexpr = "both" if MASK == "bounds" else "right"
    left, within = count_blocks(spans, BLOCK_N, "within")
    left, others = count_blocks(spans, BLOCK_N, EDGE)
    # Tensor cores multiply the queries with the next block of keys while other units compute this block's exponentials.
    columns = tl.arange(0, BLOCK_N)
    keys = _start_of(0, within, left, spans, BLOCK_N, EDGE) + columns
    products = tl.dot(q, load_rows(k_ptr, keys, k_token, KEYS, K, BLOCK_K, True).T, input_precision="ieee")
    for edge in tl.static_range(2):  # first the blocks of keys that every query sees, then the others
        first, end = within if edge else 0, within + others if edge else within
        for block in tl.range(first, end, num_stages=STAGES):
            keys = _start_of(block, within, left, spans, BLOCK_N, EDGE) + columns
            coming = _start_of(block + 1, within, left, spans, BLOCK_N, EDGE) + columns  # after the last: zeros
            k = load_rows(k_ptr, coming, k_token, KEYS, K, BLOCK_K, True)
            coming_products = tl.dot(q, k.T, input_precision="ieee")
            z, unit, _ = capped_scores(products, scale, SOFTCAP)
            if edge:
                sees = sees_keys(queries[:, None], keys[None, :], low[:, None], count[:, None], KEYS, MASK)
                z = tl.where(sees, z, float("-inf"))
            larger = tl.maximum(largest, tl.max(z, 1) * unit)
            base = tl.where(larger == float("-inf"), 0.0, larger) if edge else larger
            p = tl.exp2(tl.fma(z, unit, -base[:, None]))  # rounded once, so that p near 1 is exact
            shrink = tl.exp2(largest - base)
            total = total * shrink + tl.sum(p, 1)
            v = load_rows(v_ptr, keys, v_token, KEYS, V, BLOCK_V, edge)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            largest, products = larger, coming_products
    LN_2: tl.constexpr = 0.6931471805599453
    total = tl.where(total == 0.0, 1.0, total)  # a query that sees no key: output 0, lse -inf
    output_ptr += batch * T * H * V + head * V
    store_rows(output_ptr, queries, H * V, T, acc / total[:, None], V, BLOCK_V)
    tl.store(lse_ptr + heads.to(tl.int64) * T + queries, largest * LN_2 + tl.log(total), mask=queries < T)
