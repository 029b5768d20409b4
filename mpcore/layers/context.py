"""Attention over a sequence that is cut over the context-parallel axis, and how the sequence is cut.

    kind         a rank's tokens                   what travels
    alltoall     one run                           q, k, v and the output change between token and head shards
    ring         one run                           keys and values, from rank to rank
    zigzag       a run in front, its mirror image  as ring; with a causal mask all ranks have the same work
    allgather    as zigzag                         keys and values, to every rank at once
    two-level    as zigzag, over the outer level   alltoall within the inner level, ring over the outer

Each query sees one run of keys [low, high): causal and full masks, windows and packed documents are all of this kind.
So a block of keys from another rank is met with these bounds in the block's own places, and a block of which no query
sees a key is neither computed nor sent further than it is needed. That is decided on the host, from the mask and from
`cu_seqlens` where those are in CPU memory; of `cu_seqlens` on a GPU nothing is read, and all that the mask alone
allows is sent.

Partial results are merged in fp32 by their log-sum-exp, in an order that the ranks' places give and no message's
arrival; gradients of keys and values are summed in fp32 likewise.

Source: Jacobs et al. 2023 (arXiv:2309.14509) for alltoall; Liu et al. 2023 (arXiv:2310.01889) for the ring; Brandon et
al. 2023 (arXiv:2311.09431) for equal causal work; Llama 3 (arXiv:2407.21783), section 3.3.2, for allgather; Fang and
Zhao 2024 (arXiv:2405.07719) for two levels.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from mpcore import collectives
from mpcore.collectives import shard_sizes
from mpcore.kernels.attention import Bounds, attention, attention_backward, check_documents, key_bounds
from mpcore.layers.module import refuse_second_derivative
from mpcore.mesh import Axis, check_axis
from mpcore.sharding import Run

KINDS = ("alltoall", "ring", "zigzag", "allgather", "two-level")

Runs = tuple[Run, ...]
Batch = TypeVar("Batch", Tensor, Mapping[str, Tensor])


# --- which token lies where ---------------------------------------------------------------------------------------


def sequence_runs(length: int, cp: Axis, pattern: str) -> tuple[Runs, ...]:
    """For each rank of cp the runs `(start, end)` of the sequence that it holds, in order.

    Rank r holds `shard_sizes(length, cp.size)[r]` tokens under every pattern, so that lengths may be odd.

    Args:
        length: T, of the whole sequence.
        cp: the axis.
        pattern: one of `KINDS`.

    Raises:
        ValueError: for an unknown pattern, fewer tokens than ranks, or two levels of an axis that has one.
    """
    check_kind(pattern, cp)
    if cp.size > 1 and length < cp.size:  # one rank may hold nothing
        raise ValueError(
            f"a sequence of {length} tokens is shorter than the {cp.name} size {cp.size}, which no pattern can cut: "
            f"pad it to {cp.size} with ignored targets, or take {cp.name} {length}"
        )
    sizes = shard_sizes(length, cp.size)
    if pattern in ("alltoall", "ring") or cp.size == 1:
        return tuple((run,) for run in pairwise([0, *accumulate(sizes)]))
    inner = cp.levels[1].size if pattern == "two-level" and cp.levels else 1
    blocks = [sum(sizes[i : i + inner]) for i in range(0, cp.size, inner)]
    halves = [(n + 1) // 2 for n in blocks] + [n // 2 for n in reversed(blocks)]  # chunk i, and its mirror image
    chunks = list(pairwise([0, *accumulate(halves)]))
    pairs = [(chunks[i], chunks[-1 - i]) for i in range(len(blocks))]
    return tuple(runs for i, pair in enumerate(pairs) for runs in _cut_runs(pair, sizes[i * inner : (i + 1) * inner]))


def _cut_runs(runs: Runs, sizes: Sequence[int]) -> list[Runs]:
    """The tokens of `runs`, dealt out in order."""
    pieces: list[Runs] = []
    for a, b in pairwise([0, *accumulate(sizes)]):
        offset, mine = 0, []
        for start, end in runs:
            first, last = max(start, start + a - offset), min(end, start + b - offset)
            offset += end - start
            if first < last:
                mine.append((first, last))
        pieces.append(tuple(mine))
    return pieces


def sequence_index(length: int, cp: Axis, pattern: str, device: torch.device | None = None) -> Tensor:
    """[T/cp] the place in the whole sequence of each token that this rank holds, rising.

    It is what `RotaryEmbedding`, `PositionEmbedding` and `Dropout` need to know. Arguments as of `sequence_runs`.
    """
    return _index(sequence_runs(length, cp, pattern)[cp.rank], device)


def _index(runs: Runs, device: torch.device | None) -> Tensor:
    return torch.cat([torch.arange(start, end, device=device) for start, end in runs])


def _order(runs: Sequence[Runs], device: torch.device | None) -> Tensor:
    return _index(tuple(run for of_rank in runs for run in of_rank), device)


def shard_sequence(batch: Batch, cp: Axis, pattern: str, dim: int = -1) -> Batch:
    """This rank's tokens of whole sequences: tokens, targets, positions and masks are all cut by this one function.

    Shift targets before: `tokens[:, :-1], tokens[:, 1:]`, then no token at a border is lost. I -> S(dim): the same on
    every rank of cp, in backward the shards' gradients are gathered.

    Not for what parameters made within the model, such as images merged into text: gradients of parameters are summed
    over cp as over data, so each rank is to have its tokens' term alone, `x.index_select(dim, sequence_index(...))`.

    Args:
        batch: `[..., T]`, or a mapping of names to such tensors.
        cp: the axis.
        pattern: what the model's attention has as `context`.
        dim: the dimension of each tensor that is the sequence.

    Returns:
        `[..., T/cp]`, or a dictionary; rank r has `shard_sizes(T, cp.size)[r]` tokens.

    Raises:
        ValueError: as `sequence_runs`, or for tensors of several lengths.
    """
    check_axis(cp)
    tensors = {"": batch} if isinstance(batch, Tensor) else batch
    lengths = {name: t.shape[dim] for name, t in tensors.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"one sequence can't have the lengths {lengths}")
    runs = sequence_runs(max(lengths.values(), default=cp.size), cp, pattern)
    if cp.size == 1:
        return batch
    cut = {}
    for name, t in tensors.items():
        cut[name] = collectives.split(t.index_select(dim, _order(runs, t.device)), cp, dim)
    return cut[""] if isinstance(batch, Tensor) else cut  # type: ignore[return-value]


def unshard_sequence(x: Tensor, cp: Axis, pattern: str, dim: int = -1, length: int | None = None) -> Tensor:
    """The inverse of `shard_sequence`: S(dim) -> I, the whole on every rank; backward keeps the own shard.

    Args:
        x: this rank's tokens of a tensor.
        cp, pattern, dim: as of `shard_sequence`.
        length: T; None: all ranks have as many tokens as this one.
    """
    check_axis(cp)
    length = x.shape[dim] * cp.size if length is None else length
    runs = sequence_runs(length, cp, pattern)
    if cp.size == 1:
        return x
    return collectives.gather(x, cp, dim, length).index_select(dim, _order(runs, x.device).argsort())


def check_kind(kind: str, cp: Axis) -> None:
    """Refuse a pattern that isn't there."""
    check_axis(cp)
    if kind not in KINDS:
        raise ValueError(f"context {kind!r} is none of {', '.join(map(repr, KINDS))}")
    if kind == "two-level" and cp.size > 1 and cp.levels is None:
        raise ValueError(
            f"context 'two-level' needs the {cp.name} axis of size {cp.size} as outer x inner: "
            f"build_mesh(cp={cp.size}, cp_inner=...); 'zigzag' needs none"
        )


def check_heads(kind: str, cp: Axis, heads: int) -> None:
    """Refuse fewer heads on this rank than all-to-all has to deal out."""
    size = cp.size if kind == "alltoall" else cp.levels[1].size if kind == "two-level" and cp.levels else 1
    if heads < size:
        what = "cp size" if kind == "alltoall" else "cp_inner size"
        raise ValueError(
            f"context {kind!r} can't cut {heads} heads over the {what} {size}: 'zigzag', 'ring' and 'allgather' can"
        )


def check_mask(mask: Tensor, rows: int, tokens: int, kind: str, cp: Axis) -> None:
    """Refuse a mask that isn't one of so many rows of a batch, with so many tokens here, or that `kind` can't serve.

    Args:
        mask: of the whole sequence.
        rows, tokens: B, and T/cp.
        kind, cp: as of `masked_attention`.

    Raises:
        ValueError: before anything is sent.
    """
    shape, length = tuple(mask.shape), mask.shape[-1] if mask.dim() else 0
    if mask.dtype != torch.bool:
        raise ValueError(f"the mask is of {mask.dtype}, which torch would add to the scores: give mask.bool()")
    if cp.size > 1 and kind not in ("alltoall", "allgather"):  # others meet keys in blocks
        raise ValueError(
            f"context {kind!r} can't serve a mask {shape} over {cp.size} ranks, only causal, full, window and "
            f"documents: 'allgather' and 'alltoall' can"
        )
    fits = len(shape) > 1 and shape[-2] in (1, length) and shape[:-2] in ((), (1,), (rows,))
    runs = sequence_runs(length, cp, kind)[cp.rank] if fits else ()
    if not fits or tokens != sum(end - start for start, end in runs):
        raise ValueError(
            f"mask {shape} is none of [T, T], [B, T, T] and [B, 1, T] for {rows} rows with {tokens} tokens on each of "
            f"{cp.size} ranks"
        )


# --- attention ----------------------------------------------------------------------------------------------------


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kind: str,
    cp: Axis,
    *,
    causal: bool = True,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    length: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    impl: str | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys and values of the whole sequence.

    Args:
        q: [B, T/cp, H, K], tokens as `shard_sequence` deals them out, already rotated.
        k, v: [B, T/cp, Hkv, K] and [B, T/cp, Hkv, V]; H is a multiple of Hkv.
        kind: one of `KINDS`.
        cp: the axis.
        causal, window, scale, softcap, impl: as of `mpcore.kernels.attention.attention`.
        cu_seqlens: [n + 1] ends of packed documents in the whole sequence, the same on every rank, for B = 1.
        length: T; None: all ranks have as many tokens as this one.

    Returns:
        [B, T/cp, H, V].

    Raises:
        ValueError: before anything is sent, if `kind` can't cut this sequence or these heads.
    """
    length = q.shape[1] * cp.size if length is None else length
    runs = sequence_runs(length, cp, kind)
    mine = sum(end - start for start, end in runs[cp.rank])
    if q.shape[1] != mine:
        raise ValueError(
            f"this rank has {q.shape[1]} tokens, but rank {cp.rank} of the {cp.name} axis of size {cp.size} holds "
            f"{mine} of {length}: give the length of the whole sequence"
        )
    check_heads(kind, cp, q.shape[2])
    if window is not None and (not causal or window < 1):
        raise ValueError(f"window {window} needs a causal mask and at least 1 token")
    documents = None
    if cu_seqlens is not None:
        if q.shape[0] != 1:
            raise ValueError(f"cu_seqlens packs documents in one row, but the batch has {q.shape[0]}")
        check_documents(cu_seqlens, length)
        if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
            documents = cu_seqlens.tolist()
        cu_seqlens = cu_seqlens.to(q.device, non_blocking=True)
    options = {"scale": scale, "softcap": softcap, "impl": impl}
    if cp.size == 1 or kind == "alltoall":
        heads = q.shape[2]
        q, k, v = _to_heads(q, k, v, cp, length)
        y, _ = attention(q, k, v, causal=causal, window=window, cu_seqlens=cu_seqlens, **options)
        return collectives.all_to_all(y, cp, 1, 2, heads)

    bounds = key_bounds(length, causal=causal, window=window, cu_seqlens=cu_seqlens, device=q.device)
    if kind == "allgather":
        return _AllGather.apply(q, k, v, *_at(bounds, runs[cp.rank]), cp, runs, options)
    outer, inner, heads = cp, Axis(), q.shape[2]
    if kind == "two-level":
        assert cp.levels is not None
        outer, inner = cp.levels
        runs = tuple(_join(runs[i : i + inner.size]) for i in range(0, cp.size, inner.size))
    block = sum(end - start for start, end in runs[outer.rank])
    q, k, v = _to_heads(q, k, v, inner, block)
    ring = _ring(outer, runs, causal, window, documents)
    y = _RingAttention.apply(q, k, v, *_at(bounds, runs[outer.rank]), ring, options)
    return collectives.all_to_all(y, inner, 1, 2, heads)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, kind: str, cp: Axis, scale: float | None = None
) -> Tensor:
    """Attention under any mask, by torch's own: for short sequences, as the mask is there whole.

    Args:
        q, k, v: as of `context_attention`.
        mask: [T, T], [B, T, T] or [B, 1, T] booleans, as `check_mask` wants them: True where a query (row) sees a key.
        kind, cp: "alltoall" or "allgather" over cp; any kind of an axis of size 1.
        scale: of the scores; None: K^(-1/2).

    Returns:
        [B, T/cp, H, V]; 0, without a gradient, where a query sees no key.
    """
    length = mask.shape[-1]
    runs = sequence_runs(length, cp, kind)
    heads = q.shape[2]
    if kind == "alltoall":
        q, k, v = _to_heads(q, k, v, cp, length)
    elif cp.size > 1:
        k, v = _gather_keys(k, v, cp, runs)
        if mask.shape[-2] > 1:
            mask = mask.index_select(-2, _index(runs[cp.rank], mask.device))
    if mask.dim() == 3:
        mask = mask.unsqueeze(1)  # the same of all heads
    blind = ~mask.any(-1, keepdim=True)  # a softmax over no key may be NaN: they see all, and are struck out
    grouped = q.shape[2] > k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask | blind, scale=scale, enable_gqa=grouped)
    y = y.masked_fill(blind, 0).transpose(1, 2)
    return collectives.all_to_all(y, cp, 1, 2, heads) if kind == "alltoall" else y


def _at(bounds: Bounds, runs: Runs) -> Bounds:
    low, high = (torch.cat([bound[start:end] for start, end in runs]) for bound in bounds)
    return low, high


def _join(runs: Sequence[Runs]) -> Runs:
    """The runs of several ranks as one rank's, those that touch as one."""
    joined: list[Run] = []
    for start, end in sorted(run for of_rank in runs for run in of_rank):
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return tuple(joined)


def _to_heads(q: Tensor, k: Tensor, v: Tensor, axis: Axis, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token shards to head shards: [B, T/n, H, K] -> [B, T, H/n, K], KV heads replicated where they are too few.

    A rank gets the KV heads that its query heads read; autograd sums what their replicas add to the gradient.
    """
    if axis.size == 1:
        return q, k, v
    group = q.shape[2] // k.shape[2]
    sizes = shard_sizes(q.shape[2], axis.size)
    reads = [list(range(a // group, (b - 1) // group + 1)) for a, b in pairwise([0, *accumulate(sizes)])]
    regular = all(
        size % len(heads) == 0 and (size // len(heads) == group or len(heads) == 1)
        for size, heads in zip(sizes, reads, strict=True)
    )
    held = [head for heads in reads for head in heads]
    if not regular or [len(heads) for heads in reads] != shard_sizes(len(held), axis.size):
        held = [head // group for head in range(q.shape[2])]  # uneven shards of groups: one for each query head
    if held != list(range(k.shape[2])):
        k, v = (torch.cat([each[head] for head in held], 2) for each in (k.split(1, 2), v.split(1, 2)))
    q, k, v = (collectives.all_to_all(t, axis, 2, 1, length) for t in (q, k, v))
    return q, k, v


class _AllGather(Function):
    """Keys and values of all ranks at once; they are gathered anew in backward, so that only shards are kept."""

    @staticmethod
    def forward(ctx, q, k, v, low, high, cp: Axis, runs: tuple[Runs, ...], options: dict):
        output, lse = attention(q, *_gather_keys(k, v, cp, runs), bounds=(low, high), **options)
        ctx.save_for_backward(q, k, v, output, lse, low, high)
        ctx.cp, ctx.runs, ctx.options = cp, runs, options
        return output

    @staticmethod
    def backward(ctx, grad):
        refuse_second_derivative("context-parallel attention")
        q, k, v, output, lse, low, high = ctx.saved_tensors
        keys, values = _gather_keys(k, v, ctx.cp, ctx.runs)
        order, wide = _order(ctx.runs, q.device), torch.promote_types(q.dtype, torch.float32)
        options = {"bounds": (low, high), "out_dtype": wide, **ctx.options}
        dq, *grads = attention_backward(grad, q, keys, values, output, lse, **options)
        dk, dv = (collectives.reduce_scatter(t.index_select(1, order), ctx.cp, 1) for t in grads)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *[None] * 5


def _gather_keys(k: Tensor, v: Tensor, cp: Axis, runs: tuple[Runs, ...]) -> tuple[Tensor, Tensor]:
    order = _order(runs, k.device)
    place = order.argsort()
    k, v = (collectives.all_gather(t, cp, 1, len(order)).index_select(1, place) for t in (k, v))
    return k, v


@dataclass(frozen=True)
class _Ring:
    """Which block of keys is where at which step: rank r holds block r - step, of rank r - step, if it came so far.

    Attributes:
        axis: the axis.
        blocks: for each rank the tokens of its block.
        reads: for each rank the blocks of which its queries see a key; its own is one of them.
        reach: for each block how far it travels.
    """

    axis: Axis
    blocks: tuple[Runs, ...]
    reads: tuple[frozenset[int], ...]
    reach: tuple[int, ...]

    @property
    def steps(self) -> int:
        """How often blocks are passed on."""
        return max(self.reach)

    def block(self, rank: int, step: int) -> int:
        """The block at `rank`, or the one that would be if it came so far."""
        return (rank - step) % self.axis.size

    def here(self, step: int) -> bool:
        """Whether this rank holds a block at a step."""
        return step <= self.reach[self.block(self.axis.rank, step)]

    def to(self, rank: int, step: int, home: bool) -> int | None:
        """Where `rank` sends what it holds after a step; `home`: from the end of its way a block returns."""
        block = self.block(rank, step)
        if step < self.reach[block]:
            return (rank + 1) % self.axis.size
        return block if home and 0 < step == self.reach[block] else None

    def receipts(self, unit: int, step: int, home: bool) -> list[int]:
        """How many elements each rank sends here after a step, `unit` a token."""
        senders = (self.to(rank, step, home) == self.axis.rank for rank in range(self.axis.size))
        return [unit * self.tokens(self.block(rank, step)) * here for rank, here in enumerate(senders)]

    def pass_on(self, x: Tensor, unit: int, step: int, home: bool = False) -> Tensor:
        """Begin to send what this rank holds after a step; `wait` gives what comes."""
        to = self.to(self.axis.rank, step, home)
        return collectives.start_send(x, self.axis, to, self.receipts(unit, step, home))

    def returned(self, flying: Tensor, unit: int, step: int, mine: Tensor) -> tuple[Tensor, Tensor]:
        """What was sent after a step: by the rank before, and from the end of its way this rank's own, if it came."""
        parts = collectives.wait(flying).split(self.receipts(unit, step, True))
        rank, far = self.axis.rank, self.reach[self.axis.rank]
        return parts[rank - 1], parts[(rank + far) % self.axis.size] if step == far > 0 else mine

    def tokens(self, block: int) -> int:
        """How many a block has."""
        return sum(end - start for start, end in self.blocks[block])

    def bounds(self, low: Tensor, high: Tensor, block: int) -> Bounds:
        """Bounds in the whole sequence -> in a block's own places."""

        def place(bound: Tensor) -> Tensor:
            """How many of the block's tokens lie before."""
            return torch.stack([(bound - a).clamp(0, b - a) for a, b in self.blocks[block]]).sum(0, dtype=bound.dtype)

        return place(low), place(high)


def _ring(axis: Axis, blocks: tuple[Runs, ...], causal: bool, window: int | None, documents: list[int] | None) -> _Ring:
    """What the mask needs, decided on the host."""

    def seen(run: Run) -> Run:
        """The keys that a run of queries sees: one run, as each sees itself."""
        first, last = run[0], run[1] - 1
        low, high = 0, blocks_end
        if documents is not None:
            low, high = documents[bisect_right(documents, first) - 1], documents[bisect_right(documents, last)]
        if causal:
            high = last + 1
        if window is not None:
            low = max(low, first + 1 - window)
        return low, high

    def meet(a: Run, b: Run) -> bool:
        return max(a[0], b[0]) < min(a[1], b[1])

    blocks_end = max(end for runs in blocks for _, end in runs)
    needs = [[seen(run) for run in runs] for runs in blocks]
    reads = tuple(
        frozenset(j for j, keys in enumerate(blocks) if any(meet(a, b) for a in need for b in keys)) for need in needs
    )
    size = axis.size
    reach = tuple(max((rank - block) % size for rank in range(size) if block in reads[rank]) for block in range(size))
    return _Ring(axis, blocks, reads, reach)


class _RingAttention(Function):
    """Keys and values go round, a block further with each step; the next block travels while one is computed."""

    @staticmethod
    def forward(ctx, q, k, v, low, high, ring: _Ring, options: dict):
        wide = torch.promote_types(q.dtype, torch.float32)
        shapes, rank, merged = _Shapes(k, v), ring.axis.rank, None
        held = shapes.pack(k, v)
        for step in range(ring.steps + 1):
            coming = ring.pass_on(held, shapes.unit, step) if step < ring.steps else held
            block = ring.block(rank, step)
            if ring.here(step) and block in ring.reads[rank]:
                bounds = ring.bounds(low, high, block)
                part = attention(q, *shapes.unpack(held), bounds=bounds, out_dtype=wide, **options)
                merged = part if merged is None else merge(*merged, *part)
            held = collectives.wait(coming) if step < ring.steps else held
        assert merged is not None  # each query sees itself
        # A cast that does nothing is an alias, whose gradient torch 2.11 loses when it is compiled.
        output, lse = merged if wide == q.dtype else (merged[0].to(q.dtype), merged[1])
        ctx.save_for_backward(q, k, v, output, lse, low, high)
        ctx.ring, ctx.options = ring, options
        return output

    @staticmethod
    def backward(ctx, grad):
        """Gradients of a block travel with it, a step behind, and from the end of its way home to its rank."""
        refuse_second_derivative("context-parallel attention")
        q, k, v, output, lse, low, high = ctx.saved_tensors
        ring, shapes, wide = ctx.ring, _Shapes(k, v), torch.promote_types(q.dtype, torch.float32)
        rank, held, dq = ring.axis.rank, shapes.pack(k, v), torch.zeros_like(q, dtype=wide)
        mine = flying = dq.new_empty(0)
        for step in range(ring.steps + 1):
            coming = ring.pass_on(held, shapes.unit, step) if step < ring.steps else held
            block, part = ring.block(rank, step), dq.new_empty(0)
            if ring.here(step) and block in ring.reads[rank]:
                merged = {"output": output, "lse": lse, "bounds": ring.bounds(low, high, block), "out_dtype": wide}
                dq_part, *grads = attention_backward(grad, q, *shapes.unpack(held), **merged, **ctx.options)
                dq += dq_part
                part = shapes.pack(*grads)
            if step == 0:
                mine = part
            else:
                before, mine = ring.returned(flying, shapes.unit, step - 1, mine)
                if ring.here(step):
                    part = before + part if part.numel() else before
            if ring.steps:
                flying = ring.pass_on(part, shapes.unit, step, home=True)
            held = collectives.wait(coming) if step < ring.steps else held
        if ring.steps:
            _, mine = ring.returned(flying, shapes.unit, ring.steps, mine)
        dk, dv = shapes.unpack(mine)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *[None] * 4


class _Shapes:
    """Keys and values of any number of tokens as one flat tensor, and how many elements a token has."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        (self.B, _, self.heads, self.K), self.V = k.shape, v.shape[-1]
        self.unit = self.B * self.heads * (self.K + self.V)

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        """[B, T, Hkv, K] and [B, T, Hkv, V], side by side."""
        return torch.cat([k.reshape(-1), v.reshape(-1)])

    def unpack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `pack`, as views."""
        tokens = x.numel() // max(self.unit, 1)
        k, v = x.split([self.B * tokens * self.heads * d for d in (self.K, self.V)])
        return k.view(self.B, tokens, self.heads, self.K), v.view(self.B, tokens, self.heads, self.V)


def merge(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two sets of keys, from the attention to each.

    Args:
        output, other: [B, T, H, K] in fp32 or fp64.
        lse, other_lse: [B, H, T] in the same; -inf where a query saw nothing.

    Returns:
        Output and log-sum-exp over both.
    """
    total = torch.logaddexp(lse, other_lse)
    finite = total.masked_fill(total == -torch.inf, 0)
    weight, other_weight = ((t - finite).exp().transpose(1, 2).unsqueeze(-1) for t in (lse, other_lse))
    return output * weight + other * other_weight, total
