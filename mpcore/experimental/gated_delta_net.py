"""Gated DeltaNet: linear attention that corrects its state. Heads are sharded over tp, tokens over cp.

Each value head has a state S [K, V], a matrix that maps keys to values. Token t decays it, replaces a part beta of what
it holds for the key k_t by the value v_t, and reads it with the query q_t:

    S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = S_t^T q_t

The tokens are computed in chunks of C. With the decays G_i = a_1 .. a_i of a chunk, D_ij = G_i / G_j for i >= j and
else 0, and T = (I + tril(beta K K^T * D, -1))^-1, which a triangular solve applies:

    U = T beta V,  W = T beta G K,  L = (G_C / G) K        of each chunk, all chunks at once
    S' = (G_C I - L^T W) S + L^T U                         from chunk to chunk: one matrix product each
    O = G Q S + (Q K^T * D) (U - W S)                      of each chunk, all chunks at once

`mpcore.experimental.recurrence` computes the states under context parallelism.

Source: Yang et al. 2024 (arXiv:2412.06464), equation 10 and section 3.3; the layer is that of Qwen3-Next.
"""

from __future__ import annotations

import math
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from mpcore.experimental.recurrence import RecurrentCache, RecurrentLayer, in_chunks, scan
from mpcore.layers.attention.heads import _repeat_heads
from mpcore.layers.attention.sequence import Runs
from mpcore.layers.linear import ColumnParallelLinear, RowParallelLinear, check_size
from mpcore.layers.module import Init, LayerOptions, TensorOptions, constant, select_options
from mpcore.layers.norm import RMSNorm
from mpcore.mesh.axis import Axis
from mpcore.sharding.declare import cut


class GatedDeltaNet(RecurrentLayer):
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
        super().__init__(convolution, chunk, context, cp, **options)
        if num_key_heads < 1 or num_value_heads % num_key_heads:
            raise ValueError(f"num_value_heads {num_value_heads} is not a multiple of num_key_heads {num_key_heads}")
        check_size("num_value_heads", num_value_heads, self.tp)
        group = num_value_heads // num_key_heads
        values = [run for (run,) in cut(num_value_heads, self.tp, 0).runs]  # each rank's value heads
        keys = [(start // group, (end - 1) // group + 1) for start, end in values]  # the key heads that they read
        q = k = (keys, num_key_heads, key_dim)
        v = z = (values, num_value_heads, value_dim)
        b = a = (values, num_value_heads, 1)
        layer = select_options(options, LayerOptions)
        self.in_proj: ColumnParallelLinear = self._projection(dim, False, layer, q, k, v, z, b, a)
        start, end = values[self.tp.rank]
        self.widths: list[int] = [(n := keys[self.tp.rank][1] - keys[self.tp.rank][0]) * key_dim, n * key_dim]
        self.widths += [(end - start) * width for width in (value_dim, value_dim, 1, 1)]
        self.key_dim = key_dim
        self.value_dim = value_dim
        self.local_heads: int = end - start
        self.repeats: list[int] = [len(list(same)) for _, same in groupby(head // group for head in range(start, end))]
        self._declare_convolution(q, k, v)
        heads = cut(num_value_heads, self.tp, 0)
        self.declare("A_log", (num_value_heads,), log_uniform, shard=heads)
        self.declare("dt_bias", (num_value_heads,), constant(1.0), shard=heads)
        like = select_options(options, TensorOptions)
        # Each rank normalizes its own heads.
        self.norm: RMSNorm = RMSNorm(value_dim, norm_eps, partial=(self.tp,), **like)
        layer = select_options(layer, LayerOptions, init=output_init)
        self.output: RowParallelLinear = RowParallelLinear(
            num_value_heads * value_dim, dim, False, unit=value_dim, **layer
        )

    def _mix(
        self, parts: Tensor, runs: tuple[Runs, ...], places: Tensor | None, cache: RecurrentCache | None
    ) -> Tensor:
        *_, z, b, a = parts.split(self.widths, -1)
        qkv = parts[..., : sum(self.widths[:3])]
        q, k, v = F.silu(self._convolve(qkv, runs, places, cache)).split(self.widths[:3], -1)
        wide = torch.promote_types(parts.dtype, torch.float32)
        q, k, v = (
            t.to(wide).unflatten(-1, (-1, width))
            for t, width in ((q, self.key_dim), (k, self.key_dim), (v, self.value_dim))
        )
        q, k = (_repeat_heads(t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt(), self.repeats) for t in (q, k))
        decay = -self.A_log.to(wide).exp() * F.softplus(a.to(wide) + self.dt_bias.to(wide))
        inputs = q / math.sqrt(self.key_dim), k, v, decay, b.to(wide).sigmoid()
        o = self._apply_rule(gated_delta_rule, inputs, runs, places, cache)
        y = self.norm(o.to(parts.dtype)) * F.silu(z.to(wide)).unflatten(-1, (-1, self.value_dim))
        return y.to(parts.dtype).flatten(2)


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
        decay: [B, T/cp, H], the logarithm of the factor a on the state before each token; at most 0. Or
            [B, T/cp, H, K], one for each row of the state, as in Kimi Delta Attention.
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
    with torch.autocast(q.device.type, enabled=False):
        chunks = in_chunks(decay, resets, chunk, runs, cp)
        begin = chunks.begin
        q, k, v, beta = (chunks.cut(t) for t in (q, k, v, beta.unsqueeze(-1)))
        right = torch.cat([v, k * begin], -1) * beta
        within = (_decayed(k, k, chunks.pairs) * beta).tril(-1)
        solved = torch.linalg.solve_triangular(within, right, upper=False, unitriangular=True)
        U, W = solved.split([v.shape[-1], k.shape[-1]], -1)
        late = (k * chunks.end).mT
        one = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
        states, after = scan(begin[..., -1, :, None] * one - late @ W, late @ U, chunks.counts, state, runs, cp)
        return chunks.join(begin * q @ states + _decayed(q, k, chunks.pairs) @ (U - W @ states)), after


def _decayed(a: Tensor, b: Tensor, pairs: Tensor) -> Tensor:
    """[.., C, K] and [.., C, K] -> [.., C, C]: the products a_i b_j, decayed from token j to token i."""
    if pairs.shape[-1] == 1:
        return a @ b.mT * pairs[..., 0]
    return (b.unsqueeze(-3) * pairs @ a.unsqueeze(-1)).squeeze(-1)  # one decay for each channel


def log_uniform(tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill with the logarithm of numbers that are uniform between 0.01 and 16."""
    return tensor.uniform_(0.01, 16, generator=generator).log_()
