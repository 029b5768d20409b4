"""Kimi Delta Attention: gated DeltaNet with one decay for each channel of the keys.

Token t decays each row of the state [K, V] of a head by its own factor a_t [K]:

    S_t = (I - beta_t k_t k_t^T) diag(a_t) S_{t-1} + beta_t k_t v_t^T,    o_t = S_t^T q_t

`mpcore.experimental.gated_delta_net` computes it in chunks.

Source: Kimi Linear (arXiv:2510.26692), sections 3 and 4; the layer is transformers' `KimiLinearDeltaAttention`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from mpcore.experimental.gated_delta_net import gated_delta_rule, log_uniform
from mpcore.experimental.mamba2 import inverse_of_step
from mpcore.experimental.recurrence import RecurrentCache, RecurrentLayer
from mpcore.layers.attention.sequence import Runs
from mpcore.layers.linear import ColumnParallelLinear, RowParallelLinear, check_size, replicated_linear
from mpcore.layers.module import Init, LayerOptions, TensorOptions, select_options
from mpcore.layers.norm import RMSNorm
from mpcore.mesh.axis import Axis
from mpcore.sharding.declare import cut


class KimiDeltaAttention(RecurrentLayer):
    """Linear attention with the gated delta rule and one decay for each channel.

        q, k, v, b = W_in x;   q, k, v = silu(convolution([q k v]))
        log a = -exp(A_log) softplus(W_fb W_fa x + dt_bias)              one for each channel of each head
        o = gated_delta_rule(q / (|q| sqrt(K)), k / |k|, v, log a, sigmoid(b))
        y = W_o (rms_norm(o) sigmoid(W_gb W_ga x))                       the norm is over each head

    The heads are sharded over tp. The first projections of both gates, [K, D], are replicated.

    Args:
        dim: D, the model width.
        num_heads: H, at least the tp size. Shards may be uneven.
        head_dim: K, the width of each query, key and value head.
        convolution: W, the number of tokens that the causal convolution of each channel sees.
        norm_eps: eps of the norm.
        chunk: C, the number of tokens of a chunk. A chunk needs C C K numbers for each head.
        context: which tokens each rank of cp holds, a pattern of `shard_sequence`. Required if cp has more than one
            rank. Give it the `context` of the model's attention layers.
        cp: the context-parallel axis.
        output_init: fills the weight of the output projection; None: use `init`.
        options: `LayerOptions`: `tp`, `sequence_parallel`, `sequence_dim`, `init`, `device`, `dtype`.

    Raises:
        ValueError: if there are fewer heads than ranks of tp, or `context` is unknown or missing.

    Note:
        - The logical rows of `in_proj` are [q | k | v | b], and those of `conv_weight` [q | k | v], each ordered by
          head, as transformers stores them.

    Example:
        >>> layer = mpcore.experimental.KimiDeltaAttention(16, num_heads=2, head_dim=4)
        >>> layer(torch.zeros(1, 5, 16)).shape
        torch.Size([1, 5, 16])
    """

    A_log: Tensor
    dt_bias: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        *,
        convolution: int = 4,
        norm_eps: float = 1e-5,
        chunk: int = 16,
        context: str | None = None,
        cp: Axis = Axis(name="cp"),
        output_init: Init | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(convolution, chunk, context, cp, **options)
        check_size("num_heads", num_heads, self.tp)
        heads = [run for (run,) in cut(num_heads, self.tp, 0).runs]  # of each rank
        layer, like = select_options(options, LayerOptions), select_options(options, TensorOptions)
        width = num_heads * head_dim
        q = k = v = (heads, num_heads, head_dim)
        self.in_proj: ColumnParallelLinear = self._projection(dim, False, layer, q, k, v, (heads, num_heads, 1))
        start, end = heads[self.tp.rank]
        self.head_dim = head_dim
        self.local_heads: int = end - start
        self._declare_convolution(q, k, v)
        self.declare("A_log", (num_heads,), log_uniform, shard=cut(num_heads, self.tp, 0))
        self.declare("dt_bias", (width,), inverse_of_step, shard=cut(width, self.tp, 0, head_dim))
        self.decay_down: ColumnParallelLinear = replicated_linear(dim, head_dim, False, **layer)
        self.decay_up: ColumnParallelLinear = ColumnParallelLinear(head_dim, width, False, unit=head_dim, **layer)
        self.gate_down: ColumnParallelLinear = replicated_linear(dim, head_dim, False, **layer)
        self.gate_up: ColumnParallelLinear = ColumnParallelLinear(head_dim, width, False, unit=head_dim, **layer)
        # Each rank normalizes its own heads.
        self.norm: RMSNorm = RMSNorm(head_dim, norm_eps, partial=(self.tp,), **like)
        layer = select_options(layer, LayerOptions, init=output_init)
        self.output: RowParallelLinear = RowParallelLinear(width, dim, False, unit=head_dim, **layer)

    def _project(self, x: Tensor) -> Tensor:
        decay, gate = self.decay_up(self.decay_down(x)), self.gate_up(self.gate_down(x))
        return torch.cat([self.in_proj(x), decay, gate], -1)

    def _mix(
        self, parts: Tensor, runs: tuple[Runs, ...], places: Tensor | None, cache: RecurrentCache | None
    ) -> Tensor:
        width, heads = self.local_heads * self.head_dim, (self.local_heads, self.head_dim)
        qkv, b, decay, gate = parts.split([3 * width, self.local_heads, width, width], -1)
        wide = torch.promote_types(parts.dtype, torch.float32)
        mixed = F.silu(self._convolve(qkv, runs, places, cache)).to(wide)
        q, k, v = (part.unflatten(-1, heads) for part in mixed.split(width, -1))
        q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
        decay = F.softplus(decay.to(wide) + self.dt_bias.to(wide)).unflatten(-1, heads)
        decay = -self.A_log.to(wide).exp().unsqueeze(-1) * decay
        inputs = q / math.sqrt(self.head_dim), k, v, decay, b.to(wide).sigmoid()
        o = self._apply_rule(gated_delta_rule, inputs, runs, places, cache)
        y = self.norm(o.to(parts.dtype)) * gate.to(wide).sigmoid().unflatten(-1, heads)
        return y.to(parts.dtype).flatten(2)
