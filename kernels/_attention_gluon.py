"""Attention's forward pass for Hopper (sm_90), in Gluon: one warp copies, two warpgroups multiply.

A tile is 128 queries of one head, and a program takes several, one after the other. Its producer, a single warp, has
the copy engine (TMA) bring the queries, and blocks of keys and values into rings of buffers, those of the next tile
while the last is being finished; each buffer has a barrier that says "full" and one that says "empty".
Two consumers, warpgroups of 64 queries each, go through the blocks from the last to the first, so that those that are
partly hidden by a causal mask come first. A consumer issues the scores of block i and the output of block i - 1
together, and takes the softmax of block i while the tensor cores are still at the output of block i - 1. The consumers
take turns at issuing, so that the softmax of one falls into the products of the other.

Shah, Bikshandi, Zhang, Thakkar, Ramani and Dao, "FlashAttention-3" (2024): section 3.1 for producers, consumers and
their turns, algorithm 2 for the overlap inside a warpgroup.

Imported at first use, as this is where Triton's Gluon must be there: versions without one of the names below are told
apart by the ImportError.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportCallIssue=false, reportOperatorIssue=false
# (Gluon's types don't say that its constants are what they hold.)
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ._dispatch import decorate
from ._launch import launch, multiprocessors
from .attention import _load_bounds, _mask, _programs, _scores_of, _sees, _spans_of_keys, _whole

decorate()  # those of the portable kernel too, which are called from here


class Tile(NamedTuple):
    """Keys of a block, buffers of each ring, and whether the consumers take turns."""

    keys: int
    stages: int
    turns: bool


QUERIES = 128  # of a tile, 64 for each consumer
TILES = {64: Tile(128, 4, True), 128: Tile(128, 2, True), 256: Tile(64, 2, True)}  # by head dimension; not timed
SMALL_256 = Tile(32, 4, True)  # with bounds or a soft cap, where more keys would spill registers
STAYS = True  # whether there is one program a multiprocessor, which goes from tile to tile; not timed
SECTION_BYTES = 2**25  # of keys and values that tiles share for a while, in an L2 cache of 50 MB; not timed


def forward(
    outs: tuple[Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor, low: Tensor | None, high: Tensor | None,
    causal: bool, scale: float, softcap: float,
) -> None:  # fmt: skip
    """Launch the forward pass of `attention`.

    Args:
        outs: the output `[B, Tq, H, K]`, in any dtype, and lse `[B, H, Tq]` in float32, both contiguous; are written.
        query, key, value: `[B, Tq, H, K]` and `[B, Tk, Hkv, K]`, K of `TILES`, in bfloat16 or float16.
        low, high: int32 `[Tq]`, or `None` where `causal` says it all.
        causal: a query sees itself and what is before it.
        scale: of the scores.
        softcap: 0 for none.
    """
    output, lse = outs
    if key.shape[1] == 0:  # nothing to copy from
        output.zero_()
        lse.fill_(-torch.inf)
        return
    (B, T, H, K), keys = query.shape, key.shape[1]
    tile = SMALL_256 if K == 256 and (low is not None or softcap > 0) else TILES[K]
    copied = output if output.dtype == query.dtype else None  # by the copy engine, which does not convert
    rows = QUERIES // 2, tile.keys, tile.keys, QUERIES // 2
    described = (query, key, value, copied)
    descriptors = tuple(None if x is None else _descriptor(x, n) for x, n in zip(described, rows, strict=True))
    group = H // key.shape[2]
    section = max(1, SECTION_BYTES // (2 * keys * K * key.element_size())) * group
    scalars = (T, keys, H, group, B * H, min(section, B * H), scale)
    tensors = (lse, output, _whole(low), _whole(high))
    constants = (K, _mask(low, causal), softcap, *tile)
    programs = _programs(T, QUERIES, B * H)
    programs = min(programs, multiprocessors(query.device)) if STAYS else programs
    launch(_forward_kernel, (programs, 1, 1), tensors, scalars, constants, 4, descriptors)


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """What the copy engine needs to know of x, to copy `rows` tokens of a head and leave out those past the last.

    Made on the host, and passed with the launch: one made on the device costs each program its writing to global
    memory and back. Four dimensions, so that views of a packed projection need no copy, whatever their strides are.
    """
    step = 16 // x.element_size()
    strides = [stride for stride, size in zip(x.stride()[:3], x.shape, strict=False) if size > 1]
    if x.stride(3) != 1 or x.data_ptr() % 16 or any(stride <= 0 or stride % step for stride in strides):
        x = x.clone(memory_format=torch.contiguous_format)
    B, T, H, K = x.shape
    batch, token, head = (stride if size > 1 else K for stride, size in zip(x.stride()[:3], x.shape, strict=False))
    return TensorDescriptor(x, [B, H, T, K], [batch, head, token, 1], [1, 1, rows, K], _layout(rows, K, x.dtype))


@functools.cache
def _layout(rows: int, K: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, K], getattr(gl, str(dtype).removeprefix("torch.")))


@gluon.jit
def _turns(total):
    """How many tiles this program has: one, or where programs stay, each one of every so many."""
    programs, program = gl.num_programs(0), gl.program_id(0)
    rounds = total // programs
    return rounds + gl.where(_place(rounds, programs, program) < total % programs, 1, 0)


@gluon.jit
def _place(turn, programs, program):
    """Which tile of a round it has: of every second round in reverse, so that no program has the longest of each."""
    return gl.where(turn & 1 == 0, program, programs - 1 - program)


@gluon.jit
def _tile(turn, low_ptr, high_ptr, T, KEYS, H, HEADS, SECTION, MASK: gl.constexpr, BLOCK_N: gl.constexpr):
    """Batch, head and first query of a tile; the first key of its last block, and how many blocks there are.

    Heads go by sections, whose keys and values stay in the cache, and in each the longest of a causal mask go first.
    Blocks up to `right`, and from `within` on, are partly hidden.
    """
    programs, program = gl.num_programs(0), gl.program_id(0)
    number = turn * programs + _place(turn, programs, program)
    tiles = gl.cdiv(T, 128)
    section = number // (SECTION * tiles) * SECTION
    number = number - section * tiles
    width = gl.minimum(SECTION, HEADS - section)
    heads = section + number % width
    start = (tiles - 1 - number // width) * 128
    begin, inner, outer, end = _spans_of_keys(low_ptr, high_ptr, start, T, KEYS, MASK, 128, BLOCK_N)
    right = gl.cdiv(gl.maximum(end - outer, 0), BLOCK_N)
    first = gl.maximum(outer + (right - 1) * BLOCK_N, 0)
    within = right + (outer - inner) // BLOCK_N
    blocks = gl.maximum(within + gl.cdiv(inner - begin, BLOCK_N), 1)  # what no query sees is hidden like the rest
    right = gl.maximum(right, 1)  # the first block is always looked at for hidden keys
    return heads // H, heads % H, start, first, right, gl.maximum(right, within), blocks


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, queries, keys, values, low_ptr, high_ptr, T, KEYS, H, GROUP, SECTION, HEADS,
    MASK: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_smem, q_full, q_empty = queries
    k_smem, k_full, k_empty = keys
    v_smem, v_full, v_empty = values
    done = 0  # blocks of the tiles before
    for turn in range(_turns(HEADS * gl.cdiv(T, 128))):
        batch, head, start, first, _, _, blocks = _tile(
            turn, low_ptr, high_ptr, T, KEYS, H, HEADS, SECTION, MASK, BLOCK_N
        )
        group = head // GROUP
        for i in range(blocks + 1):  # in the order in which buffers become empty: keys one block ahead of values
            if i < blocks:
                stage, parity = (done + i) % STAGES, (done + i) // STAGES & 1
                mbarrier.wait(k_empty.index(stage), parity ^ 1)
                mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
                at = [batch, group, first - i * BLOCK_N, 0]
                tma.async_copy_global_to_shared(k_desc, at, k_full.index(stage), k_smem.index(stage))
            if i == 0:
                mbarrier.wait(q_empty, turn & 1 ^ 1)
                mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
                for half in gl.static_range(2):
                    at = [batch, head, start + half * 64, 0]
                    tma.async_copy_global_to_shared(q_desc, at, q_full, q_smem.index(half))
            else:
                before = done + i - 1
                stage, parity = before % STAGES, before // STAGES & 1
                mbarrier.wait(v_empty.index(stage), parity ^ 1)
                mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
                at = [batch, group, first - (i - 1) * BLOCK_N, 0]
                tma.async_copy_global_to_shared(v_desc, at, v_full.index(stage), v_smem.index(stage))
        done += blocks


@gluon.jit
def _exponentials(
    scores, total, largest, scale, rows, low, count, key, KEYS,
    BLOCK_N: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr, HIDES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """e^(z - the largest z) of a block of scores, the sum and the largest so far, and what shrinks what came before."""
    scores, unit, _ = _scores_of(scores, scale, SOFTCAP)
    if HIDES:
        columns = key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        sees = _sees(rows[:, None], columns[None, :], low[:, None], count[:, None], KEYS, MASK)
        scores = gl.where(sees, scores, float("-inf"))
    larger = gl.maximum(largest, gl.max(scores, 1) * unit)
    base = gl.where(larger == float("-inf"), 0.0, larger) if HIDES else larger
    p = gl.exp2(gl.fma(scores, unit, -base[:, None]))  # rounded once, so that p near 1 is exact
    shrink = gl.exp2(largest - base)
    return p, total * shrink + gl.sum(p, 1), larger, shrink


@gluon.jit
def _attend(
    acc, p, total, largest, q, keys, values, turns, done, begin, end, scale, rows, low, count, first, KEYS,
    WHICH: gl.constexpr, K: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
    MASK: gl.constexpr, SOFTCAP: gl.constexpr, HIDES: gl.constexpr, LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Go from block begin - 1, whose p is given, to block end - 1, whose p is returned and not yet multiplied."""
    k_smem, k_full, k_empty = keys
    v_smem, v_full, v_empty = values
    none = gl.zeros([64, BLOCK_N], gl.float32, layout=LAYOUT)
    for i in range(begin, end):
        now, before = done + i, done + i - 1
        stage, parity = now % STAGES, now // STAGES & 1
        stage_before, parity_before = before % STAGES, before // STAGES & 1
        mbarrier.wait(k_full.index(stage), parity)
        if TURNS:
            mbarrier.wait(turns.index(WHICH), (now + WHICH + 1) & 1)
        k = k_smem.index(stage).reshape([BLOCK_N, K]).permute((1, 0))
        scores = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(stage_before), parity_before)
        v = v_smem.index(stage_before).reshape([BLOCK_N, K])
        acc = warpgroup_mma(p, v, acc, is_async=True)
        if TURNS:
            mbarrier.arrive(turns.index(1 - WHICH), count=1)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_empty.index(stage), count=1)
        p_next, total, largest, shrink = _exponentials(
            scores,
            total,
            largest,
            scale,
            rows,
            low,
            count,
            first - i * BLOCK_N,
            KEYS,
            BLOCK_N,
            MASK,
            SOFTCAP,
            HIDES,
            LAYOUT,
        )
        # Over already, but a branch: without one the compiler puts the exponentials behind the wait for the product.
        mbarrier.wait(v_full.index(stage_before), parity_before)
        acc, p_next, _ = warpgroup_mma_wait(0, deps=[acc, p_next, p])
        mbarrier.arrive(v_empty.index(stage_before), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUT_LAYOUT))[:, None]
        p = gl.convert_layout(p_next.to(p.dtype), gl.DotOperandLayout(0, OUT_LAYOUT, 2))
    return acc, p, total, largest


@gluon.jit
def _consume(
    o_desc, o_smem, queries, keys, values, turns, lse_ptr, output_ptr, low_ptr, high_ptr,
    T, KEYS, H, GROUP, SECTION, HEADS, scale,
    WHICH: gl.constexpr, K: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, OWN_OUTPUT: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    q_smem, q_full, q_empty = queries
    k_smem, k_full, k_empty = keys
    v_smem, v_full, v_empty = values
    q = q_smem.index(WHICH).reshape([64, K])
    none = gl.zeros([64, BLOCK_N], gl.float32, layout=LAYOUT)
    done = 0
    for turn in range(_turns(HEADS * gl.cdiv(T, 128))):
        batch, head, start, first, right, within, blocks = _tile(
            turn, low_ptr, high_ptr, T, KEYS, H, HEADS, SECTION, MASK, BLOCK_N
        )
        rows = start + WHICH * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
        low, count = _load_bounds(low_ptr, high_ptr, rows, T, KEYS, MASK)
        total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, LAYOUT))
        largest = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, LAYOUT))
        acc = gl.zeros([64, K], gl.float32, layout=OUT_LAYOUT)

        stage, parity = done % STAGES, done // STAGES & 1
        mbarrier.wait(q_full, turn & 1)
        mbarrier.wait(k_full.index(stage), parity)
        if TURNS:
            mbarrier.wait(turns.index(WHICH), (done + WHICH + 1) & 1)
        k = k_smem.index(stage).reshape([BLOCK_N, K]).permute((1, 0))
        scores = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
        if TURNS:
            mbarrier.arrive(turns.index(1 - WHICH), count=1)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(stage), count=1)
        p, total, largest, _ = _exponentials(
            scores, total, largest, scale, rows, low, count, first, KEYS, BLOCK_N, MASK, SOFTCAP, True, LAYOUT
        )
        p = gl.convert_layout(p.to(q_smem.dtype), gl.DotOperandLayout(0, OUT_LAYOUT, 2))
        if MASK == "bounds" or (MASK == "causal" and BLOCK_N < 128):
            acc, p, total, largest = _attend(
                acc, p, total, largest, q, keys, values, turns, done, 1, right, scale, rows, low, count, first, KEYS,
                WHICH, K, BLOCK_N, STAGES, TURNS, MASK, SOFTCAP, True, LAYOUT, OUT_LAYOUT,
            )  # fmt: skip
        acc, p, total, largest = _attend(
            acc, p, total, largest, q, keys, values, turns, done, right, within, scale, rows, low, count, first, KEYS,
            WHICH, K, BLOCK_N, STAGES, TURNS, MASK, SOFTCAP, False, LAYOUT, OUT_LAYOUT,
        )  # fmt: skip
        if MASK == "bounds":
            acc, p, total, largest = _attend(
                acc, p, total, largest, q, keys, values, turns, done, within, blocks, scale, rows, low, count, first,
                KEYS, WHICH, K, BLOCK_N, STAGES, TURNS, MASK, SOFTCAP, True, LAYOUT, OUT_LAYOUT,
            )  # fmt: skip
        if OWN_OUTPUT:
            mbarrier.arrive(q_empty, count=1)
        done += blocks
        stage, parity = (done - 1) % STAGES, (done - 1) // STAGES & 1
        mbarrier.wait(v_full.index(stage), parity)
        acc = warpgroup_mma(p, v_smem.index(stage).reshape([BLOCK_N, K]), acc, is_async=True)
        acc, _ = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(v_empty.index(stage), count=1)

        total = gl.where(total == 0.0, 1.0, total)  # of a query that sees nothing: output 0, lse -inf
        at = gl.cast(batch * H + head, gl.int64) * T
        gl.store(lse_ptr + at + rows, largest * 0.6931471805599453 + gl.log(total), mask=rows < T)
        output = acc / gl.convert_layout(total, gl.SliceLayout(1, OUT_LAYOUT))[:, None]
        if o_desc is not None:
            tma.store_wait(0)  # for the output of the tile before
            o_smem.index(WHICH).reshape([64, K]).store(output.to(o_smem.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(o_desc, [batch, head, start + WHICH * 64, 0], o_smem.index(WHICH))
        else:
            rows = gl.convert_layout(rows, gl.SliceLayout(1, OUT_LAYOUT))
            columns = gl.arange(0, K, layout=gl.SliceLayout(0, OUT_LAYOUT))
            offsets = ((gl.cast(batch, gl.int64) * T + rows) * H + head) * K
            gl.store(output_ptr + offsets[:, None] + columns[None, :], output, mask=rows[:, None] < T)
        if not OWN_OUTPUT:  # it lies where the queries were
            tma.store_wait(0)
            mbarrier.arrive(q_empty, count=1)
    tma.store_wait(0)


@gluon.jit
def _forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, output_ptr, low_ptr, high_ptr, T, KEYS, H, GROUP, HEADS, SECTION, scale,
    K: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    OWN_OUTPUT: gl.constexpr = K < 256 or o_desc is None
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, 64, K], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, K], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, K], v_desc.layout)
    if K < 256 and o_desc is not None:
        o_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, 64, K], q_desc.layout)
    else:
        o_smem = q_smem
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)  # by either consumer
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    queries, keys, values = (q_smem, q_full, q_empty), (k_smem, k_full, k_empty), (v_smem, v_full, v_empty)
    gl.warp_specialize(
        [
            (_consume, (
                o_desc, o_smem, queries, keys, values, turns, lse_ptr, output_ptr, low_ptr, high_ptr,
                T, KEYS, H, GROUP, SECTION, HEADS, scale, 0, K, MASK, SOFTCAP, BLOCK_N, STAGES, TURNS, OWN_OUTPUT,
            )),
            (_consume, (
                o_desc, o_smem, queries, keys, values, turns, lse_ptr, output_ptr, low_ptr, high_ptr,
                T, KEYS, H, GROUP, SECTION, HEADS, scale, 1, K, MASK, SOFTCAP, BLOCK_N, STAGES, TURNS, OWN_OUTPUT,
            )),
            (_produce, (
                q_desc, k_desc, v_desc, queries, keys, values, low_ptr, high_ptr, T, KEYS, H, GROUP, SECTION, HEADS,
                MASK, BLOCK_N, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
