"""Compute layers with a recurrence over the tokens: a short convolution, chunks of tokens, and states passed over cp.

The state before each chunk is S' = M S + N, where M and N depend on the chunk alone. Under context parallelism each run
of tokens computes, from a state of 0, the map S -> M S + N of the whole run. One all-gather of M and N [K, K + V] gives
each rank the state before each of its runs, so all ranks work at the same time. Any pattern of `shard_sequence` fits,
"zigzag" too: its ranks have two runs. One more all-gather brings the W - 1 tokens before each run, which the short
convolution reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from mpcore import collectives
from mpcore.kernels._checks import can_read
from mpcore.layers.attention.cache import LayerCache
from mpcore.layers.attention.documents import document_positions
from mpcore.layers.attention.heads import _length_from_documents
from mpcore.layers.attention.sequence import KINDS, Runs, check_kind, sequence_index, sequence_runs, tokens_of
from mpcore.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpcore.layers.module import LayerOptions, ParallelModule, check_names, input_error, uniform
from mpcore.mesh.axis import Axis
from mpcore.sharding.declare import Run, Shard


class RecurrentLayer(ParallelModule):
    """A layer whose heads pass a state from token to token: heads are sharded over tp, tokens over cp.

    Args:
        convolution: W, at least 1, the number of tokens that the causal convolution of each channel sees.
        chunk: C, the number of tokens of a chunk.
        context: which tokens each rank of cp holds, a pattern of `shard_sequence`. Required if cp has more than one
            rank.
        cp: the context-parallel axis.
        options: `LayerOptions`.
    """

    exchanges_tokens = True
    conv_weight: Tensor
    in_proj: ColumnParallelLinear
    output: RowParallelLinear

    def __init__(
        self, convolution: int, chunk: int, context: str | None, cp: Axis, **options: Unpack[LayerOptions]
    ) -> None:
        check_names(options, LayerOptions)
        super().__init__(**options)
        if context is None and cp.size > 1:
            raise ValueError(f"the {cp.name} size {cp.size} needs a context, one of {', '.join(map(repr, KINDS))}")
        self.context: str = context or "ring"
        self.cp = cp
        check_kind(self.context, cp)
        if convolution < 1 or chunk < 1:
            raise ValueError(f"convolution is {convolution} and chunk {chunk}: give at least 1 token")
        self.convolution = convolution
        self.chunk = chunk

    def new_cache(self, max_length: int) -> RecurrentCache:
        """Create an empty cache for decoding. Its size doesn't depend on `max_length`.

        Raises:
            ValueError: if cp has more than one rank, or sequence parallelism is on.
        """
        if self.cp.size > 1 or self.sequence_parallel:
            raise ValueError(
                f"a cache needs cp 1 and sequence_parallel=False, not cp {self.cp.size} and {self.sequence_parallel}: "
                f"load the weights into a model built so"
            )
        return RecurrentCache()

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        length: int | None = None,
        cache: RecurrentCache | None = None,
    ) -> Tensor:
        """[B, T/cp, D] -> [B, T/cp, D]. With `sequence_dim=0`: [T/cp, B, D] -> [T/cp, B, D].

        Args:
            cu_seqlens: [n + 1] document ends from 0 to B T, as `document_ends` returns them; the same on every rank of
                tp and cp. State and convolution start anew in each document.
            length: T, needed if the shards of cp are uneven and `cu_seqlens` is not in CPU memory. None: every rank
                has as many tokens as this one.
            cache: a `RecurrentCache` from `new_cache`. x continues its tokens.

        Raises:
            ValueError: before any collective of cp, if x doesn't fit the pattern, or a cache is given with documents.
        """
        tokens, runs, places = self._places(x, cu_seqlens, length, cache)
        parts = self._project(x)
        y = self._mix(parts.transpose(0, 1) if self.sequence_dim == 0 else parts, runs, places, cache)
        if cache is not None:
            cache._length += tokens
        return self.output(y.transpose(0, 1) if self.sequence_dim == 0 else y)

    def _projection(
        self, dim: int, bias: bool, options: LayerOptions, *parts: tuple[list[Run], int, int]
    ) -> ColumnParallelLinear:
        """Return the projection [D, F] of the input to these parts."""
        shard, blocks = shard_heads(self.tp, *parts)
        return ColumnParallelLinear(dim, sum(blocks), bias, blocks=blocks, shard=shard, **options)

    def _declare_convolution(self, *parts: tuple[list[Run], int, int]) -> tuple[Shard, tuple[int, ...]]:
        """Declare the weight of the convolution of these parts of `in_proj`; return its shard and blocks."""
        shard, blocks = shard_heads(self.tp, *parts)
        shape = (sum(blocks), self.convolution)
        self.declare("conv_weight", shape, uniform(self.convolution**-0.5), shard=shard, blocks=blocks)
        return shard, blocks

    def _project(self, x: Tensor) -> Tensor:
        return self.in_proj(x)

    def _mix(
        self, parts: Tensor, runs: tuple[Runs, ...], places: Tensor | None, cache: RecurrentCache | None
    ) -> Tensor:
        """Map what `_project` returns to the inputs of `output`, [B, T/cp, features of this rank]."""
        raise NotImplementedError

    def _apply_rule(
        self,
        rule: Callable[..., tuple[Tensor, Tensor]],
        inputs: Sequence[Tensor],
        runs: tuple[Runs, ...],
        places: Tensor | None,
        cache: RecurrentCache | None,
    ) -> Tensor:
        """Apply a recurrence from the state of the cache, and store the state after it there."""
        resets, state = None if places is None else places == 0, None if cache is None else cache.state
        y, state = rule(*inputs, resets=resets, state=state, chunk=self.chunk, runs=runs, cp=self.cp)
        if cache is not None:
            cache.state = state
        return y

    def _places(
        self, x: Tensor, cu_seqlens: Tensor | None, length: int | None, cache: RecurrentCache | None
    ) -> tuple[int, tuple[Runs, ...], Tensor | None]:
        """Check the input, and return T/cp, each rank's runs of tokens, and each token's place in its document.

        The places are [B, T/cp] or [1, T/cp], or None without documents.
        """
        if x.dim() != 3:
            raise input_error(f"x has {x.dim()} dimensions, but a {type(self).__name__} takes [B, T, D]")
        rows, tokens = x.shape[1 - self.sequence_dim], x.shape[self.sequence_dim]
        if length is None and cu_seqlens is not None and can_read(cu_seqlens):
            tp = self.tp if self.sequence_parallel else None
            length = _length_from_documents(int(cu_seqlens[-1]), tokens, rows, self.cp, tp)
        tokens *= self.tp.size if self.sequence_parallel else 1
        length = tokens * self.cp.size if length is None else length
        runs = sequence_runs(length, self.cp, self.context)
        if tokens != tokens_of(runs[self.cp.rank]):
            raise input_error(
                f"this rank has {tokens} tokens, but rank {self.cp.rank} of the {self.cp.name} axis of size "
                f"{self.cp.size} holds {tokens_of(runs[self.cp.rank])} of {length}: give the length of the whole "
                f"sequence"
            )
        if cache is not None:
            cache.check_layer(self, rows, cache.state)
            if cu_seqlens is not None or torch.is_grad_enabled():
                raise input_error("a cache has one sequence a row and no gradients: decode under torch.no_grad()")
        places = None  # of each token in its document: [B, T/cp], or [1, T/cp]
        if cu_seqlens is not None:
            index = sequence_index(length, self.cp, self.context, x.device)
            places = document_positions(cu_seqlens, rows, length, x.device)[:, index]
        runs = tuple(tuple(run for run in of_rank if run[0] < run[1]) or ((0, 0),) for of_rank in runs)
        return tokens, runs, places

    def _convolve(
        self, x: Tensor, runs: tuple[Runs, ...], places: Tensor | None, cache: RecurrentCache | None
    ) -> Tensor:
        """[B, T/cp, C] -> [B, T/cp, C]: y_t = sum of w_i x_{t-i} over the tokens t - i of the same document."""
        reach = self.convolution - 1
        before = x[:, :0] if cache is None or cache.tail is None else cache.tail
        if cache is not None:
            seen = torch.cat([before, x], 1)
            cache.tail = seen[:, max(seen.shape[1] - reach, 0) :].clone()
        halos = [F.pad(before, (0, 0, reach, 0))[:, before.shape[1] :]]
        if self.cp.size > 1 and reach:
            halos = _tokens_before(x, reach, runs, self.cp)
        sizes = [end - start for start, end in runs[self.cp.rank]]
        parts = [torch.cat(pair, 1) for pair in zip(halos, x.split(sizes, 1), strict=True)] if reach else [x]
        weight, y = self.conv_weight.to(x.dtype), torch.zeros_like(x)
        for i in range(self.convolution):
            shifted = torch.cat([part[:, reach - i : part.shape[1] - i] for part in parts], 1)
            shifted = shifted if places is None or i == 0 else shifted * (places >= i).unsqueeze(-1)
            y = y + shifted * weight[:, reach - i]
        return y


class RecurrentCache(LayerCache):
    """The state of a recurrent layer after the tokens seen so far: O(1) memory for a sequence of any length.

    Attributes:
        length: the number of tokens seen. Unlike a `KVCache`, this cache can't drop its last tokens: setting it raises.
        state: [B, H/tp, K, V], or None before the first call.
        tail: [B, W - 1, channels], the last inputs of the convolution, or None.

    Example:
        >>> layer = mpcore.experimental.GatedDeltaNet(16, 2, 4, key_dim=4, value_dim=8)
        >>> cache, x = layer.new_cache(max_length=8), torch.randn(1, 5, 16)
        >>> with torch.no_grad():
        ...     y, last = layer(x[:, :4], cache=cache), layer(x[:, 4:], cache=cache)
        >>> cache.length, torch.allclose(last, layer(x)[:, 4:], atol=1e-6)
        (5, True)
    """

    def __init__(self) -> None:
        self._length = 0
        self.state: Tensor | None = None
        self.tail: Tensor | None = None

    @property
    def length(self) -> int:
        return self._length

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order. Use it to choose beams or to drop finished sequences."""
        if self.state is not None and self.tail is not None:
            self.state, self.tail = self.state[rows], self.tail[rows]


@dataclass(frozen=True)
class Chunks:
    """The tokens of this rank in chunks of C; each run is padded to full chunks.

    Attributes:
        size: C.
        sizes, counts: the tokens and the chunks of each run.
        begin, end: [N, B, H, C, 1 or K], the decay from the begin of the chunk to each token, and from there to its
            end.
        pairs: [N, B, H, C, C, 1 or K], the decay from token j to token i; 0 for j > i.
    """

    size: int
    sizes: list[int]
    counts: list[int]
    begin: Tensor
    end: Tensor
    pairs: Tensor

    def cut(self, x: Tensor) -> Tensor:
        """[B, T, H, ...] -> [N, B, H, C, ...]."""
        return _cut(x, self.size, self.sizes, self.counts)

    def join(self, x: Tensor) -> Tensor:
        """[N, B, H, C, V] -> [B, T, H, V], without the padding."""
        x = x.transpose(2, 3).movedim(0, 1).flatten(1, 2)
        runs = x.split([n * self.size for n in self.counts], 1)
        return torch.cat([part[:, :size] for part, size in zip(runs, self.sizes, strict=True)], 1)


def in_chunks(decay: Tensor, resets: Tensor | None, chunk: int, runs: tuple[Runs, ...], cp: Axis) -> Chunks:
    """Cut this rank's tokens into chunks. Raise ValueError if `runs` are not those of the ranks of cp.

    Args:
        decay: [B, T/cp, H], or [B, T/cp, H, K] with one for each row of the state: the logarithm of the factor on the
            state before each token; at most 0.
        resets: bool [B, T/cp] or [1, T/cp], True where the state before the token is 0, as at a document's start.
        chunk: the largest C.
        runs: for each rank of cp, the ranges of tokens that it holds, none empty unless there are no tokens.
    """
    if len(runs) != cp.size:
        raise input_error(f"runs are of {len(runs)} ranks, but {cp.name} has {cp.size}: give sequence_runs(T, cp, ..)")
    sizes = [end - start for start, end in runs[cp.rank]]
    C = max(1, min(chunk, max(sizes)))
    counts = [-(-size // C) or 1 for size in sizes]  # no tokens are one chunk of padding
    # resets so far in the chunk: a state reaches a token, or a token another, if none lies between
    seen = None if resets is None else _cut(resets[..., None, None].int(), C, sizes, counts).cumsum(3)
    total = _cut(decay if decay.dim() == 4 else decay.unsqueeze(-1), C, sizes, counts).cumsum(3)

    def reach(log: Tensor, between: Tensor | None) -> Tensor:
        return log.exp() if between is None else log.exp() * (between == 0)

    later = torch.ones(C, C, dtype=torch.bool, device=decay.device).triu(1)
    pairs = (total.unsqueeze(4) - total.unsqueeze(3)).masked_fill(later.unsqueeze(-1), -math.inf)
    pairs = reach(pairs, None if seen is None else seen.unsqueeze(4) - seen.unsqueeze(3))
    begin = reach(total, seen)
    end = reach(total[..., -1:, :] - total, None if seen is None else seen[..., -1:, :] - seen)
    return Chunks(C, sizes, counts, begin, end, pairs)


def _cut(x: Tensor, C: int, sizes: list[int], counts: list[int]) -> Tensor:
    parts = [F.pad(part, (0, 0) * (x.dim() - 2) + (0, n * C - size)) for part, n, size in
             zip(x.split(sizes, 1), counts, sizes, strict=True)]  # fmt: skip
    return torch.cat(parts, 1).unflatten(1, (-1, C)).movedim(1, 0).transpose(2, 3)


def scan(
    maps: Tensor, added: Tensor, counts: list[int], state: Tensor | None, runs: tuple[Runs, ...], cp: Axis
) -> tuple[Tensor, Tensor]:
    """Return the state before each chunk [N, B, H, K, V] and after the last: maps[n] @ state + added[n]."""
    if cp.size == 1:
        states = [torch.zeros_like(added[0]) if state is None else state.to(added.dtype)]
        for change, plus in zip(maps.unbind(), added.unbind(), strict=True):
            states.append(change @ states[-1] + plus)
        return torch.stack(states[:-1]), states[-1]
    if state is not None:
        raise input_error(f"a state before the first token needs {cp.name} 1, not {cp.size}: pass state=None")

    # [N, M] of each run so far: the state after it is N + M @ (the state before the run)
    width, one = added.shape[-1], torch.eye(maps.shape[-1], dtype=maps.dtype, device=maps.device)
    start = torch.cat([torch.zeros_like(added[0]), one.expand_as(maps[0])], -1)
    added = torch.cat([added, torch.zeros_like(maps)], -1)
    local, totals = [], []
    for changes, pluses in zip(maps.split(counts), added.split(counts), strict=True):
        so_far = start
        for change, plus in zip(changes.unbind(), pluses.unbind(), strict=True):
            local.append(so_far)
            so_far = change @ so_far + plus
        totals.append(so_far)
    most = max(map(len, runs))
    totals += [start] * (most - len(totals))
    gathered = collectives.all_gather(torch.stack(totals), cp, 0)
    order = sorted((run, rank * most + i) for rank, of_rank in enumerate(runs) for i, run in enumerate(of_rank))
    states = [torch.zeros_like(added[0, ..., :width])]
    for _, i in order:
        states.append(gathered[i, ..., :width] + gathered[i, ..., width:] @ states[-1])
    # Every rank computes and stacks all of them: a rank that used none would miss the all-gather's backward.
    places = [next(n for n, (other, _) in enumerate(order) if other == run) for run in runs[cp.rank]]
    before = torch.stack(states)[[n for n, count in zip(places, counts, strict=True) for _ in range(count)]]
    sofar = torch.stack(local)
    return sofar[..., :width] + sofar[..., width:] @ before, states[places[-1] + 1]


def _tokens_before(x: Tensor, reach: int, runs: tuple[Runs, ...], cp: Axis) -> list[Tensor]:
    """Return, for each run of this rank, the `reach` tokens before it, [B, reach, C]; 0 before the first token."""
    most = max(map(len, runs))

    def last(of_rank: Runs) -> list[int]:  # the last tokens of each run, as many on each rank
        padded = (*of_rank, *[of_rank[-1]] * (most - len(of_rank)))
        return [max(end - i, start) for start, end in padded for i in range(reach, 0, -1)]

    starts = [0, *accumulate(end - start for start, end in runs[cp.rank])]
    local = {token: offset + token - start for (start, end), offset in zip(runs[cp.rank], starts, strict=False)
             for token in range(max(end - reach, start), end)}  # fmt: skip
    sent = torch.stack([x[:, local[token]] for token in last(runs[cp.rank])], 1)
    gathered = F.pad(collectives.all_gather(sent, cp, 1), (0, 0, 1, 0))
    at = {token: 1 + i for i, token in enumerate(token for of_rank in runs for token in last(of_rank))}
    return [gathered[:, [at.get(start - i, 0) for i in range(reach, 0, -1)]] for start, _ in runs[cp.rank]]


def shard_heads(tp: Axis, *parts: tuple[list[Run], int, int]) -> tuple[Shard, tuple[int, ...]]:
    """Shard concatenated projections by heads: each part has the heads of each rank, their number and their width."""
    blocks = tuple(heads * width for _, heads, width in parts)
    starts = [start for start, _ in pairwise([0, *accumulate(blocks)])]
    runs = tuple(
        tuple((at + of_rank[rank][0] * width, at + of_rank[rank][1] * width)
              for at, (of_rank, _, width) in zip(starts, parts, strict=True))
        for rank in range(tp.size)
    )  # fmt: skip
    return Shard(tp, 0, runs), blocks
