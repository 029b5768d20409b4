"""Gated DeltaNet: linear attention that corrects its state. Heads are sharded over tp, tokens over cp.

Each value head has a state S [K, V], a matrix that maps keys to values. Token t decays it, replaces a part beta of what
it holds for the key k_t by the value v_t, and reads it with the query q_t:

    S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = S_t^T q_t

The tokens are computed in chunks of C. With the decays G_i = a_1 .. a_i of a chunk, D_ij = G_i / G_j for i >= j and
else 0, and T = (I + tril(beta K K^T * D, -1))^-1, which a triangular solve applies:

    U = T beta V,  W = T beta G K,  L = (G_C / G) K        of each chunk, all chunks at once
    S' = (G_C I - L^T W) S + L^T U                         from chunk to chunk: one matrix product each
    O = G Q S + (Q K^T * D) (U - W S)                      of each chunk, all chunks at once

Under context parallelism each run of tokens computes, from a state of 0, the map S -> M S + N of the whole run. One
all-gather of M and N [K, K + V] gives each rank the state before each of its runs, so all ranks work at the same time.
Any pattern of `shard_sequence` fits, "zigzag" too: its ranks have two runs. One more all-gather brings the W - 1 tokens
before each run, which the short convolution reads.

Source: Yang et al. 2024 (arXiv:2412.06464), equation 10 and section 3.3; the layer is that of Qwen3-Next.
"""

from __future__ import annotations

import math
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from mpcore import collectives
from mpcore.kernels._checks import can_read
from mpcore.layers.attention.documents import document_positions
from mpcore.layers.attention.heads import _length_from_documents, _repeat_heads
from mpcore.layers.attention.sequence import KINDS, Runs, check_kind, sequence_index, sequence_runs, tokens_of
from mpcore.layers.linear import ColumnParallelLinear, RowParallelLinear, check_size
from mpcore.layers.module import (
    Init,
    LayerOptions,
    ParallelModule,
    TensorOptions,
    check_names,
    constant,
    input_error,
    select_options,
    uniform,
)
from mpcore.layers.norm import RMSNorm
from mpcore.mesh.axis import Axis
from mpcore.sharding.declare import Run, Shard, cut


class GatedDeltaNet(ParallelModule):
    """Linear attention with the gated delta rule, a short convolution before it and a gated norm after it.

        q, k, v, z, b, a = W_in x;   q, k, v = silu(convolution([q k v]))
        o = gated_delta_rule(q / (|q| sqrt(K)), k / |k|, v, log a = -exp(A_log) softplus(a + dt_bias), sigmoid(b))
        y = W_o (rms_norm(o) silu(z))                        the norm is over each head

    The value heads are sharded over tp. Each rank has the key heads that its value heads read.

    Args:
        dim: D, the model width.
        num_key_heads: the number of query heads and of key heads; it divides `num_value_heads`.
        num_value_heads: H, at least the tp size. Shards may be uneven.
        key_dim, value_dim: K and V, the widths of a key head and of a value head.
        convolution: W, the number of tokens that the causal convolution of each channel sees.
        norm_eps: eps of the norm.
        chunk: C, the number of tokens of a chunk.
        context: which tokens each rank of cp holds, a pattern of `shard_sequence`. Required if cp has more than one
            rank. Give it the `context` of the model's attention layers.
        cp: the context-parallel axis.
        output_init: fills the weight of the output projection; None: use `init`.
        options: `LayerOptions`: `tp`, `sequence_parallel`, `sequence_dim`, `init`, `device`, `dtype`.

    Raises:
        ValueError: if the key heads don't divide the value heads, there are fewer value heads than ranks of tp, or
            `context` is unknown or missing.

    Note:
        - The logical rows of `in_proj` are [q | k | v | z | b | a], each ordered by head, and those of `conv_weight`
          [q | k | v]. Qwen3-Next stores the same rows by key head.

    Example:
        >>> layer = mpcore.experimental.GatedDeltaNet(16, 2, 4, key_dim=4, value_dim=8)
        >>> layer(torch.zeros(1, 5, 16)).shape
        torch.Size([1, 5, 16])
    """

    conv_weight: Tensor
    A_log: Tensor
    dt_bias: Tensor

    def __init__(
        self,
        dim: int,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        convolution: int = 4,
        norm_eps: float = 1e-6,
        chunk: int = 64,
        context: str | None = None,
        cp: Axis = Axis(name="cp"),
        output_init: Init | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        check_names(options, LayerOptions)
        super().__init__(**options)
        if num_key_heads < 1 or num_value_heads % num_key_heads:
            raise ValueError(f"num_value_heads {num_value_heads} is not a multiple of num_key_heads {num_key_heads}")
        check_size("num_value_heads", num_value_heads, self.tp)
        if context is None and cp.size > 1:
            raise ValueError(f"the {cp.name} size {cp.size} needs a context, one of {', '.join(map(repr, KINDS))}")
        self.context, self.cp = context or "ring", cp
        check_kind(self.context, cp)
        self.convolution, self.chunk = convolution, chunk
        group = num_value_heads // num_key_heads
        values = [run for (run,) in cut(num_value_heads, self.tp, 0).runs]  # each rank's value heads
        keys = [(start // group, (end - 1) // group + 1) for start, end in values]  # the key heads that they read
        q = k = (keys, num_key_heads, key_dim)
        v = z = (values, num_value_heads, value_dim)
        b = a = (values, num_value_heads, 1)
        layer = select_options(options, LayerOptions)
        shard, blocks = _shard_heads(self.tp, q, k, v, z, b, a)
        self.in_proj = ColumnParallelLinear(dim, sum(blocks), False, blocks=blocks, shard=shard, **layer)
        start, end = values[self.tp.rank]
        self.widths = [(n := keys[self.tp.rank][1] - keys[self.tp.rank][0]) * key_dim, n * key_dim]
        self.widths += [(end - start) * width for width in (value_dim, value_dim, 1, 1)]
        self.key_dim, self.value_dim, self.local_heads = key_dim, value_dim, end - start
        self.repeats = [len(list(same)) for _, same in groupby(head // group for head in range(start, end))]
        shard, blocks = _shard_heads(self.tp, q, k, v)
        self.declare("conv_weight", (sum(blocks), convolution), uniform(convolution**-0.5), shard=shard, blocks=blocks)
        heads = cut(num_value_heads, self.tp, 0)
        self.declare("A_log", (num_value_heads,), _log_uniform, shard=heads)
        self.declare("dt_bias", (num_value_heads,), constant(1.0), shard=heads)
        like = select_options(options, TensorOptions)
        self.norm = RMSNorm(value_dim, norm_eps, partial=(self.tp,), **like)  # each rank normalizes its own heads
        layer = select_options(layer, LayerOptions, init=output_init)
        self.output = RowParallelLinear(num_value_heads * value_dim, dim, False, unit=value_dim, **layer)

    def new_cache(self, max_length: int) -> DeltaCache:
        """Create an empty cache for decoding. Its size doesn't depend on `max_length`.

        Raises:
            ValueError: if cp has more than one rank, or sequence parallelism is on.
        """
        if self.cp.size > 1 or self.sequence_parallel:
            raise ValueError(
                f"a cache needs cp 1 and sequence_parallel=False, not cp {self.cp.size} and {self.sequence_parallel}: "
                f"load the weights into a model built so"
            )
        return DeltaCache()

    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, length: int | None = None, cache: DeltaCache | None = None
    ) -> Tensor:
        """[B, T/cp, D] -> [B, T/cp, D]. With `sequence_dim=0`: [T/cp, B, D] -> [T/cp, B, D].

        Args:
            cu_seqlens: [n + 1] document ends from 0 to B T, as `document_ends` returns them; the same on every rank of
                tp and cp. State and convolution start anew in each document.
            length: T, needed if the shards of cp are uneven and `cu_seqlens` is not in CPU memory. None: every rank
                has as many tokens as this one.
            cache: a `DeltaCache` from `new_cache`. x continues its tokens.

        Raises:
            ValueError: before any collective of cp, if x doesn't fit the pattern, or a cache is given with documents.
        """
        if x.dim() != 3:
            raise input_error(f"x has {x.dim()} dimensions, but a gated DeltaNet takes [B, T, D]")
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
        if cache is not None and (cu_seqlens is not None or torch.is_grad_enabled()):
            raise input_error("a cache has one sequence a row and no gradients: decode under torch.no_grad()")
        places = None  # of each token in its document: [B, T/cp], or [1, T/cp]
        if cu_seqlens is not None:
            index = sequence_index(length, self.cp, self.context, x.device)
            places = document_positions(cu_seqlens, rows, length, x.device)[:, index]
        runs = tuple(tuple((start, end) for start, end in of_rank if start < end) for of_rank in runs)

        parts = self.in_proj(x)
        parts = parts.transpose(0, 1) if self.sequence_dim == 0 else parts
        *_, z, b, a = parts.split(self.widths, -1)
        qkv = parts[..., : sum(self.widths[:3])]
        before = None if cache is None else cache.tail
        if cache is not None:
            seen = qkv if before is None else torch.cat([before, qkv], 1)
            cache.tail = seen[:, max(seen.shape[1] - self.convolution + 1, 0) :].clone()
        q, k, v = F.silu(self._convolve(qkv, before, runs, places)).split(self.widths[:3], -1)
        wide = torch.promote_types(x.dtype, torch.float32)
        q, k, v = (
            t.to(wide).unflatten(-1, (-1, width))
            for t, width in ((q, self.key_dim), (k, self.key_dim), (v, self.value_dim))
        )
        q, k = (_repeat_heads(t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt(), self.repeats) for t in (q, k))
        decay = -self.A_log.to(wide).exp() * F.softplus(a.to(wide) + self.dt_bias.to(wide))
        o, state = gated_delta_rule(
            q / math.sqrt(self.key_dim), k, v, decay, b.to(wide).sigmoid(),
            resets=None if places is None else places == 0, state=None if cache is None else cache.state,
            chunk=self.chunk, runs=runs, cp=self.cp,
        )  # fmt: skip
        if cache is not None:
            cache.state, cache.length = state, cache.length + tokens
        y = self.norm(o.to(x.dtype)) * F.silu(z.to(wide)).unflatten(-1, (-1, self.value_dim))
        y = y.to(x.dtype).flatten(2)
        return self.output(y.transpose(0, 1) if self.sequence_dim == 0 else y)

    def _convolve(self, x: Tensor, before: Tensor | None, runs: tuple[Runs, ...], places: Tensor | None) -> Tensor:
        """[B, T/cp, C] -> [B, T/cp, C]: y_t = sum of w_i x_{t-i} over the tokens t - i of the same document."""
        reach = self.convolution - 1
        halos = [F.pad(x[:, :0], (0, 0, reach, 0))] if before is None else [F.pad(before, (0, 0, reach, 0))[:, -reach:]]
        if self.cp.size > 1:
            halos = _tokens_before(x, reach, runs, self.cp)
        sizes = [end - start for start, end in runs[self.cp.rank]]
        parts = [torch.cat(pair, 1) for pair in zip(halos, x.split(sizes, 1), strict=True)] if reach else [x]
        weight, y = self.conv_weight.to(x.dtype), torch.zeros_like(x)
        for i in range(self.convolution):
            shifted = torch.cat([part[:, reach - i : part.shape[1] - i] for part in parts], 1)
            shifted = shifted if places is None or i == 0 else shifted * (places >= i).unsqueeze(-1)
            y = y + shifted * weight[:, reach - i]
        return y


class DeltaCache:
    """The state of a `GatedDeltaNet` after the tokens seen so far: O(1) memory for a sequence of any length.

    Attributes:
        length: the number of tokens seen. Unlike a `KVCache`, this cache can't drop its last tokens.
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
        self.length = 0
        self.state: Tensor | None = None
        self.tail: Tensor | None = None

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order. Use it to choose beams or to drop finished sequences."""
        if self.state is not None and self.tail is not None:
            self.state, self.tail = self.state[rows], self.tail[rows]


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    *,
    resets: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = 64,
    runs: tuple[Runs, ...] | None = None,
    cp: Axis = Axis(name="cp"),
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule of this rank's tokens in chunks, with the state of all tokens before them.

    Args:
        q, k: [B, T/cp, H, K]. The rule doesn't scale or normalize them.
        v: [B, T/cp, H, V].
        decay: [B, T/cp, H], the logarithm of the factor a on the state before each token; at most 0.
        beta: [B, T/cp, H], which part of the state's value for the key is replaced.
        resets: bool [B, T/cp] or [1, T/cp], True where the state before the token is 0, as at a document's start.
        state: [B, H, K, V], the state before the first token; None: 0. Only with cp 1.
        chunk: C, the number of tokens of a chunk.
        runs: for each rank of cp, the ranges of tokens that it holds, none empty. None: one run, for cp 1.
        cp: the context-parallel axis.

    Returns:
        The outputs [B, T/cp, H, V], and the state [B, H, K, V] after this rank's last run.

    Example:
        >>> q, v, zeros = torch.ones(1, 2, 1, 1), torch.tensor([3.0, 5.0]).view(1, 2, 1, 1), torch.zeros(1, 2, 1)
        >>> mpcore.experimental.gated_delta_rule(q, q, v, zeros, zeros + 0.5)[0].flatten()  # 3 / 2, (3 / 2 + 5) / 2
        tensor([1.5000, 3.2500])
    """
    runs = (((0, q.shape[1]),),) if runs is None else runs
    mine, C = runs[cp.rank], min(chunk, max(end - start for start, end in runs[cp.rank]))
    sizes = [end - start for start, end in mine]
    counts = [-(-size // C) for size in sizes]  # chunks of each run

    def chunks(x: Tensor) -> Tensor:  # [B, T, H, ...] -> [N, B, H, C, ...]: each run is padded to full chunks
        parts = [F.pad(part, (0, 0) * (x.dim() - 2) + (0, n * C - size)) for part, n, size in
                 zip(x.split(sizes, 1), counts, sizes, strict=True)]  # fmt: skip
        return torch.cat(parts, 1).unflatten(1, (-1, C)).movedim(1, 0).transpose(2, 3)

    with torch.autocast(q.device.type, enabled=False):
        q, k, v, decay, beta = (chunks(t) for t in (q, k, v, decay, beta.unsqueeze(-1)))
        # resets so far in the chunk: a state reaches a token, or a token another, if none lies between
        seen = None if resets is None else chunks(resets.unsqueeze(-1).int()).cumsum(-1)
        total = decay.cumsum(-1)

        def reach(log: Tensor, between: Tensor | None) -> Tensor:
            return log.exp() if between is None else log.exp() * (between == 0)

        later = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1)
        pairs = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -math.inf)
        pairs = reach(pairs, None if seen is None else seen.unsqueeze(-1) - seen.unsqueeze(-2))
        begin = reach(total, seen).unsqueeze(-1)
        end = reach(total[..., -1:] - total, None if seen is None else seen[..., -1:] - seen).unsqueeze(-1)
        right = torch.cat([v, k * begin], -1) * beta
        solved = torch.linalg.solve_triangular(
            (k @ k.mT * pairs * beta).tril(-1), right, upper=False, unitriangular=True
        )
        U, W = solved.split([v.shape[-1], k.shape[-1]], -1)
        late = (k * end).mT
        one = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
        maps, added = begin[..., -1:, :] * one - late @ W, late @ U
        states, after = _scan(maps, added, counts, state, runs, cp)
        o = begin * q @ states + (q @ k.mT * pairs) @ (U - W @ states)
        o = o.transpose(2, 3).movedim(0, 1).flatten(1, 2)  # [B, N C, H, V]
    parts = [part[:, :size] for part, size in zip(o.split([n * C for n in counts], 1), sizes, strict=True)]
    return torch.cat(parts, 1), after


def _scan(
    maps: Tensor, added: Tensor, counts: list[int], state: Tensor | None, runs: tuple[Runs, ...], cp: Axis
) -> tuple[Tensor, Tensor]:
    """Return the state before each chunk [N, B, H, K, V] and after the last: maps[n] @ state + added[n]."""
    if cp.size == 1:
        states = [torch.zeros_like(added[0]) if state is None else state.to(added.dtype)]
        for change, plus in zip(maps.unbind(), added.unbind(), strict=True):
            states.append(change @ states[-1] + plus)
        return torch.stack(states[:-1]), states[-1]

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


def _shard_heads(tp: Axis, *parts: tuple[list[Run], int, int]) -> tuple[Shard, tuple[int, ...]]:
    """Shard concatenated projections by heads: each part has the heads of each rank, their number and their width."""
    blocks = tuple(heads * width for _, heads, width in parts)
    starts = [start for start, _ in pairwise([0, *accumulate(blocks)])]
    runs = tuple(
        tuple((at + of_rank[rank][0] * width, at + of_rank[rank][1] * width)
              for at, (of_rank, _, width) in zip(starts, parts, strict=True))
        for rank in range(tp.size)
    )  # fmt: skip
    return Shard(tp, 0, runs), blocks


def _log_uniform(tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    return tensor.uniform_(0.01, 16, generator=generator).log_()
