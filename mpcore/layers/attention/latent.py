"""Multi-head latent attention: keys and values come from one narrow latent per token. Heads are sharded over tp.

    c_q  = norm(W_dq x)                          [q_lora_rank]; x itself without q_lora_rank
    c_kv = norm(W_dkv x),  k_r = RoPE(W_kr x)    [kv_lora_rank], [qk_rope_head_dim]: one rotary key for all heads
    q = [W_uq c_q, RoPE(W_qr c_q)],  k = [W_uk c_kv, k_r],  v = W_uv c_kv           for each head
    y = W_o softmax(q k^T / sqrt(qk_nope_head_dim + qk_rope_head_dim)) v

The down projections and their norms are replicated. The up projections and the output projection are sharded by heads.
The ranks of tp therefore communicate latents: q_lora_rank + kv_lora_rank + qk_rope_head_dim numbers per token (2,112
in DeepSeek-V3, whose x has 7,168). Each latent is communicated once in forward (with sequence parallelism) and once in
backward:

    with sequence parallelism   each rank computes the latents of its own tokens: all-gather, reduce-scatter in backward
    without                     each rank computes the latents of all tokens; backward all-reduces their gradients, so
                                the down projections and x get the full gradient on each rank

Without q_lora_rank, x (D numbers per token) is communicated instead of c_q.

Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1 and appendix C; DeepSeek-V3 (arXiv:2412.19437), section 2.1.1.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor
from typing_extensions import Unpack

from mpcore import collectives
from mpcore.collectives import shard_sizes
from mpcore.kernels.rope import rope as turn
from mpcore.layers.attention.context import check_heads
from mpcore.layers.attention.heads import AttentionOptions, HeadAttention, HeadOptions
from mpcore.layers.linear import ColumnParallelLinear, RowParallelLinear, check_size, replicated_linear
from mpcore.layers.module import LayerOptions, TensorOptions, check_names, select_options
from mpcore.layers.norm import RMSNorm


class MultiLatentAttention(HeadAttention):
    """Multi-head latent attention of DeepSeek-V2 and V3, Kimi K2 and others, with the heads sharded over tp.

    The logical weights have the row order of Hugging Face's `DeepseekV3Attention`. `kv_down` is [kv_lora_rank +
    qk_rope_head_dim, D]. The rows of `q_up` and `kv_up` are ordered by head, with [nope | rope] and [keys | values] in
    each head.

    Args:
        dim: D, the model width.
        num_heads: H of the unsharded layer, at least the tp size. Shards may be uneven.
        kv_lora_rank: width of the latent for keys and values.
        qk_nope_head_dim: width of the part of each query and key head without RoPE.
        qk_rope_head_dim: width of the part of each query and key head with RoPE.
        v_head_dim: width of each value head. It may be smaller than that of a key head.
        q_lora_rank: width of the latent for queries; None: queries are projected from x.
        bias: whether the down projections and the output projection have biases.
        norm_eps: eps of the norms of the latents.
        options: `AttentionOptions`. `rope` must have width `qk_rope_head_dim`; its `score_factor` multiplies the
            scores.

    Raises:
        ValueError: if there are fewer heads than ranks, `rope` has another width, `window` is given without `causal`,
            or `context` is unknown, missing, or can't shard these heads over cp.

    Example:
        >>> sizes = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
        >>> attention = mpcore.MultiLatentAttention(16, num_heads=2, **sizes, rope=mpcore.RotaryEmbedding(2))
        >>> attention(torch.zeros(1, 3, 16)).shape
        torch.Size([1, 3, 16])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None = None,
        bias: bool = False,
        norm_eps: float = 1e-6,
        **options: Unpack[AttentionOptions],
    ) -> None:
        check_names(options, AttentionOptions)
        rope = options.get("rope")
        if rope is not None and rope.dim != qk_rope_head_dim:
            raise ValueError(f"rope turns {rope.dim} dimensions, but qk_rope_head_dim is {qk_rope_head_dim}")
        head_dim = qk_nope_head_dim + qk_rope_head_dim
        scale = head_dim**-0.5 * (1.0 if rope is None else rope.score_factor)
        super().__init__(head_dim, scale=scale, **select_options(options, HeadOptions))
        check_size("num_heads", num_heads, self.tp)
        self.num_heads = num_heads
        self.local_heads: int = shard_sizes(num_heads, self.tp.size)[self.tp.rank]
        check_heads(self.context, self.cp, num_heads // self.tp.size)
        self.qk_dims: tuple[int, int] = (qk_nope_head_dim, qk_rope_head_dim)
        self.kv_dims: tuple[int, int] = (qk_nope_head_dim, v_head_dim)
        self.latent_dims: tuple[int, int] = (kv_lora_rank, qk_rope_head_dim)
        layer, like = select_options(options, LayerOptions), select_options(options, TensorOptions)

        def down(width: int) -> ColumnParallelLinear:
            return replicated_linear(dim, width, bias, **layer)

        def norm(width: int) -> RMSNorm:
            return RMSNorm(width, norm_eps, tp=self.tp, sequence_parallel=self.sequence_parallel, **like)

        def up(width: int, head: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(width, num_heads * head, False, unit=head, **layer)

        self.q_down: ColumnParallelLinear | None = None if q_lora_rank is None else down(q_lora_rank)
        self.q_norm: RMSNorm | None = None if q_lora_rank is None else norm(q_lora_rank)
        self.q_up: ColumnParallelLinear = up(dim if q_lora_rank is None else q_lora_rank, head_dim)
        self.kv_down: ColumnParallelLinear = down(sum(self.latent_dims))
        self.kv_norm: RMSNorm = norm(kv_lora_rank)
        self.kv_up: ColumnParallelLinear = up(kv_lora_rank, sum(self.kv_dims))
        layer = select_options(layer, LayerOptions, init=options.get("output_init"))
        self.output: RowParallelLinear = RowParallelLinear(num_heads * v_head_dim, dim, bias, unit=v_head_dim, **layer)

    def heads(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Project x to latents, and the latents to this rank's heads. All heads share the rotary key."""
        latent, k_rope = self.kv_down(x).split(self.latent_dims, -1)
        q = self.q_up(x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x)))
        kv, k_rope = self.kv_up(self.kv_norm(latent)), self._to_heads(k_rope)
        heads = "t b (h k) -> b t h k" if self.sequence_dim == 0 else "b t (h k) -> b t h k"
        q, kv = (rearrange(t, heads, h=self.local_heads) for t in (q, kv))
        k_rope = rearrange(k_rope, heads, h=1)
        (q_nope, q_rope), (k_nope, v) = q.split(self.qk_dims, -1), kv.split(self.kv_dims, -1)
        if rotary is not None:
            assert self.rope is not None
            q_rope, k_rope = turn(q_rope, k_rope, *rotary, interleaved=self.rope.interleaved)
            assert k_rope is not None
            q = torch.cat([q_nope, q_rope], -1)
        return q, torch.cat([k_nope, k_rope.expand(-1, -1, self.local_heads, -1)], -1), v

    def _to_heads(self, shared: Tensor) -> Tensor:
        """Return a tensor that all heads share, for this rank's heads. Backward sums its gradients over tp."""
        if self.sequence_parallel:
            return collectives.all_gather(shared, self.tp, self.sequence_dim)
        return collectives.copy(shared, self.tp)
