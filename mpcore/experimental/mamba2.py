"""Mamba-2: a state space with one decay for each head. Heads are sharded over tp, tokens over cp.

Each head has a state S [N, P]. Token t decays it, adds its input x_t [P] under the key B_t [N], scaled by the step size
d_t, and reads it with C_t [N]:

    S_t = exp(d_t A) S_{t-1} + d_t B_t x_t^T,    y_t = S_t^T C_t + D x_t

The tokens are computed in chunks. With the decays G_i of a chunk and D_ij = G_i / G_j for i >= j and else 0:

    S' = G_C S + ((G_C / G) B)^T (d X)      from chunk to chunk
    Y = G C S + (C B^T * D) (d X)           of each chunk, all chunks at once

`mpcore.experimental.recurrence` computes the states under context parallelism.

Source: Dao and Gu 2024 (arXiv:2405.21060), sections 6 and 7; the layer is transformers' `Mamba2Mixer`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from mpcore import collectives
from mpcore.experimental.recurrence import RecurrentCache, RecurrentLayer, in_chunks, scan
from mpcore.layers.attention.sequence import Runs
from mpcore.layers.linear import ColumnParallelLinear, RowParallelLinear, check_size
from mpcore.layers.module import Init, LayerOptions, constant, select_options, uniform
from mpcore.mesh.axis import Axis
from mpcore.sharding.declare import cut


class Mamba2(RecurrentLayer):
    """A selective state space with a short convolution before it and a gated norm after it.

        z, x, B, C, d = W_in u;   x, B, C = silu(convolution([x B C]) + bias);   d = softplus(d + dt_bias)
        y = state_space_dual(C, B, d x, -exp(A_log) d) + D x
        out = W_o rms_norm(y silu(z))                         the norm is over the heads of a group

    The heads are sharded over tp. Each rank has the groups of B and C that its heads read. Where the heads of a group
    are on several ranks, they sum the squares of the norm.

    Args:
        dim: the model width.
        num_heads: H, at least the tp size. Shards may be uneven.
        head_dim: P, the width of a head.
        state_dim: N, the width of B and C.
        num_groups: G, the number of groups of heads that share B and C; it divides `num_heads`.
        convolution: W, the number of tokens that the causal convolution of each channel sees.
        norm_eps: eps of the norm.
        chunk: the number of tokens of a chunk.
        bias: whether both projections have a bias. The convolution always has one.
        context: which tokens each rank of cp holds, a pattern of `shard_sequence`. Required if cp has more than one
            rank. Give it the `context` of the model's attention layers.
        cp: the context-parallel axis.
        output_init: fills the weight of the output projection; None: use `init`.
        options: `LayerOptions`: `tp`, `sequence_parallel`, `sequence_dim`, `init`, `device`, `dtype`.

    Raises:
        ValueError: if the groups don't divide the heads, there are fewer heads than ranks of tp, or `context` is
            unknown or missing.

    Note:
        - The logical rows of `in_proj` are [z | x | B | C | d], and those of `conv_weight` [x | B | C], as transformers
          stores them.

    Example:
        >>> layer = mpcore.experimental.Mamba2(16, num_heads=4, head_dim=8, state_dim=4)
        >>> layer(torch.zeros(1, 5, 16)).shape
        torch.Size([1, 5, 16])
    """

    A_log: Tensor
    D: Tensor
    dt_bias: Tensor
    conv_bias: Tensor
    norm_weight: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        state_dim: int,
        num_groups: int = 1,
        *,
        convolution: int = 4,
        norm_eps: float = 1e-5,
        chunk: int = 64,
        bias: bool = False,
        context: str | None = None,
        cp: Axis = Axis(name="cp"),
        output_init: Init | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(convolution, chunk, context, cp, **options)
        if num_groups < 1 or num_heads % num_groups:
            raise ValueError(f"num_heads {num_heads} is not a multiple of num_groups {num_groups}")
        check_size("num_heads", num_heads, self.tp)
        per_group = num_heads // num_groups
        heads = [run for (run,) in cut(num_heads, self.tp, 0).runs]  # of each rank
        groups = [(start // per_group, (end - 1) // per_group + 1) for start, end in heads]
        z = x = (heads, num_heads, head_dim)
        B = C = (groups, num_groups, state_dim)
        layer = select_options(options, LayerOptions)
        self.in_proj: ColumnParallelLinear = self._projection(dim, bias, layer, z, x, B, C, (heads, num_heads, 1))
        (start, end), (first, last) = heads[self.tp.rank], groups[self.tp.rank]
        inner, states = (end - start) * head_dim, (last - first) * state_dim
        self.widths: list[int] = [inner, inner, states, states, end - start]
        self.head_dim = head_dim
        self.state_dim = state_dim
        self.num_groups = num_groups
        self.norm_eps = norm_eps
        self.group_of_head: list[int] = [head // per_group for head in range(start, end)]
        self.group_width: int = per_group * head_dim
        self.group_on_ranks: bool = any(run[0] % per_group for run in heads)  # a group has heads on several ranks
        shard, blocks = self._declare_convolution(x, B, C)
        self.declare("conv_bias", (sum(blocks),), uniform(convolution**-0.5), shard=shard, blocks=blocks)
        by_head = cut(num_heads, self.tp, 0)
        self.declare("A_log", (num_heads,), _log_of_place, shard=by_head)
        self.declare("D", (num_heads,), constant(1.0), shard=by_head)
        self.declare("dt_bias", (num_heads,), inverse_of_step, shard=by_head)
        width = num_heads * head_dim
        self.declare("norm_weight", (width,), constant(1.0), shard=cut(width, self.tp, 0, head_dim))
        layer = select_options(layer, LayerOptions, init=output_init)
        self.output: RowParallelLinear = RowParallelLinear(width, dim, bias, unit=head_dim, **layer)

    def _mix(
        self, parts: Tensor, runs: tuple[Runs, ...], places: Tensor | None, cache: RecurrentCache | None
    ) -> Tensor:
        z, mixed, step = parts.split([self.widths[0], sum(self.widths[1:4]), self.widths[4]], -1)
        mixed = F.silu(self._convolve(mixed, runs, places, cache) + self.conv_bias.to(parts.dtype))
        wide = torch.promote_types(parts.dtype, torch.float32)
        inputs, B, C = mixed.to(wide).split(self.widths[1:4], -1)
        inputs = inputs.unflatten(-1, (-1, self.head_dim))
        local = [group - self.group_of_head[0] for group in self.group_of_head]
        B, C = (t.unflatten(-1, (-1, self.state_dim))[:, :, local] for t in (B, C))
        step = F.softplus(step.to(wide) + self.dt_bias.to(wide))
        rule_inputs = C, B, step.unsqueeze(-1) * inputs, -self.A_log.to(wide).exp() * step
        y = self._apply_rule(state_space_dual, rule_inputs, runs, places, cache)
        y = (y + self.D.to(wide).unsqueeze(-1) * inputs) * F.silu(z.to(wide)).unflatten(-1, (-1, self.head_dim))
        return (y * self._scale(y)).flatten(2).to(parts.dtype) * self.norm_weight.to(parts.dtype)

    def _scale(self, y: Tensor) -> Tensor:
        """[B, T, H/tp, P] -> [B, T, H/tp, 1]: one over the root mean square of each head's group."""
        index = torch.tensor(self.group_of_head, device=y.device)
        squares = y.square().sum(-1)
        total = squares.new_zeros(*squares.shape[:-1], self.num_groups).index_add(-1, index, squares)
        if self.group_on_ranks:
            total = collectives.copy(collectives.reduce(total, self.tp), self.tp)
        return (total / self.group_width + self.norm_eps).rsqrt()[..., index].unsqueeze(-1)


def state_space_dual(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    *,
    resets: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = 64,
    runs: tuple[Runs, ...] | None = None,
    cp: Axis = Axis(name="cp"),
) -> tuple[Tensor, Tensor]:
    """Compute S_t = exp(decay_t) S_{t-1} + k_t v_t^T and S_t^T q_t of this rank's tokens in chunks.

    It is linear attention with a decay. Mamba-2 calls q, k and v C, B and the input.

    Args:
        q, k: [B, T/cp, H, N].
        v: [B, T/cp, H, P].
        decay: [B, T/cp, H], the logarithm of the factor on the state before each token; at most 0.
        resets: bool [B, T/cp] or [1, T/cp], True where the state before the token is 0, as at a document's start.
        state: [B, H, N, P], the state before the first token; None: 0. Only with cp 1.
        chunk: the number of tokens of a chunk.
        runs: for each rank of cp, the ranges of tokens that it holds, none empty. None: one run, for cp 1.
        cp: the context-parallel axis.

    Returns:
        The outputs [B, T/cp, H, P], and the state [B, H, N, P] after this rank's last run.

    Example:
        >>> q, v = torch.ones(1, 2, 1, 1), torch.tensor([3.0, 5.0]).view(1, 2, 1, 1)
        >>> half = torch.full((1, 2, 1), 0.5).log()
        >>> mpcore.experimental.state_space_dual(q, q, v, half)[0].flatten()  # 3, 3 / 2 + 5
        tensor([3.0000, 6.5000])
    """
    runs = (((0, q.shape[1]),),) if runs is None else runs
    with torch.autocast(q.device.type, enabled=False):
        chunks = in_chunks(decay, resets, chunk, runs, cp)
        q, k, v = (chunks.cut(t) for t in (q, k, v))
        maps = chunks.begin[..., -1:, :] * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
        states, after = scan(maps, (k * chunks.end).mT @ v, chunks.counts, state, runs, cp)
        return chunks.join(chunks.begin * q @ states + (q @ k.mT * chunks.pairs[..., 0]) @ v), after


def _log_of_place(tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill with log(1), log(2), ..: the decays of the heads, as transformers draws them."""
    return tensor.copy_(torch.arange(1, len(tensor) + 1, device=tensor.device).log())


def inverse_of_step(tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill with the inverse of softplus of step sizes that are log-uniform between 0.001 and 0.1."""
    step = tensor.uniform_(math.log(0.001), math.log(0.1), generator=generator).exp_()
    return tensor.copy_(step + torch.log(-torch.expm1(-step)))
