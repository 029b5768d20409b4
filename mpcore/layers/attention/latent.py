"""Self-attention whose keys and values all come from one narrow latent of each token, its heads cut over tp.

    c_q  = norm(W_dq x)                          [q_lora_rank]      or x itself
    c_kv = norm(W_dkv x),  k_r = turn(W_kr x)    [kv_lora_rank], [qk_rope_head_dim]: one rotary key for all heads
    q = [W_uq c_q, turn(W_qr c_q)],  k = [W_uk c_kv, k_r],  v = W_uv c_kv           of each head
    y = W_o softmax(q k^T / sqrt(qk_nope_head_dim + qk_rope_head_dim)) v

The projections down and their norms are whole on each rank; those up are cut by heads, and the output's with them. So
between the ranks go latents: q_lora_rank + kv_lora_rank + qk_rope_head_dim numbers a token (2,112 of DeepSeek-V3, whose
x has 7,168), each message once in forward and once in backward:

    sequence parallel   each rank makes the latents of its own tokens; all-gather, and in backward reduce-scatter
    without             each rank makes those of all tokens; in backward their gradients are summed, so that all before
                        them, the weights and x, has its whole gradient on each rank

Without a q_lora_rank x stands in the place of c_q, D numbers.

Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1 and appendix C; DeepSeek-V3 (arXiv:2412.19437), section 2.1.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import Tensor

from mpcore import collectives
from mpcore.collectives import shard_sizes
from mpcore.kernels.rope import rope as turn
from mpcore.layers.attention.context import check_heads
from mpcore.layers.attention.heads import AttentionOptions, HeadAttention, HeadOptions
from mpcore.layers.linear import ColumnParallelLinear, RowParallelLinear, check_size
from mpcore.layers.module import LayerOptions, TensorOptions, check_names, pick
from mpcore.layers.norm import RMSNorm
from mpcore.sharding.declarations import add_partial

if TYPE_CHECKING:
    from typing_extensions import Unpack


class MultiLatentAttention(HeadAttention):
    """Multi-head latent attention of DeepSeek-V2 and V3, Kimi K2 and others; each rank computes its share of the heads.

    The logical weights are those of Hugging Face's `DeepseekV3Attention`, row by row: `kv_down` is [kv_lora_rank +
    qk_rope_head_dim, D], and `q_up` and `kv_up` go head by head, [nope | rope] and [keys | values] in each.

    Args:
        dim: D, the model width.
        num_heads: H, logical; at least the tp size, shards may be uneven.
        kv_lora_rank: width of the latent that keys and values are computed from.
        qk_nope_head_dim, qk_rope_head_dim: features of each query and key head without rotation, and with RoPE.
        v_head_dim: features of each value head; may differ from those of a key.
        q_lora_rank: width of the latent that queries are computed from; None: queries are computed from x.
        bias: biases of the projections down and of the output.
        norm_eps: of the latents' norms.
        options: `AttentionOptions`. `rope` is a table of `qk_rope_head_dim`, whose `score_factor` multiplies the
            scores. All kinds of `context` take values narrower than keys.

    Raises:
        ValueError: if there are fewer heads than ranks, `rope` rotates another number of dimensions, a window is asked
            of a full mask, or `context` is unknown, missing, or can't cut these heads over cp.

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
        super().__init__(head_dim, scale=scale, **pick(options, HeadOptions))
        check_size("num_heads", num_heads, self.tp)
        self.num_heads = num_heads
        self.local_heads = shard_sizes(num_heads, self.tp.size)[self.tp.rank]
        check_heads(self.context, self.cp, self.local_heads)
        self.qk_dims, self.kv_dims = (qk_nope_head_dim, qk_rope_head_dim), (qk_nope_head_dim, v_head_dim)
        self.latent_dims = (kv_lora_rank, qk_rope_head_dim)
        layer, like = pick(options, LayerOptions), pick(options, TensorOptions)

        def down(width: int) -> ColumnParallelLinear:
            """Replicated; with sequence parallel each rank sees its own tokens, so its gradient is a term of a sum."""
            linear = ColumnParallelLinear(dim, width, bias, init=options.get("init"), **like)
            for leaf, _ in linear.named_parameters() if self.sequence_parallel else ():
                add_partial(linear, leaf, self.tp)
            return linear

        def norm(width: int) -> RMSNorm:
            return RMSNorm(width, norm_eps, tp=self.tp, sequence_parallel=self.sequence_parallel, **like)

        def up(width: int, head: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(width, num_heads * head, False, unit=head, **layer)

        self.q_down, self.q_norm = (None, None) if q_lora_rank is None else (down(q_lora_rank), norm(q_lora_rank))
        self.q_up = up(dim if q_lora_rank is None else q_lora_rank, head_dim)
        self.kv_down, self.kv_norm = down(sum(self.latent_dims)), norm(kv_lora_rank)
        self.kv_up = up(kv_lora_rank, sum(self.kv_dims))
        layer = pick(layer, LayerOptions, init=options.get("output_init"))
        self.output = RowParallelLinear(num_heads * v_head_dim, dim, bias, unit=v_head_dim, **layer)

    def heads(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Project x to latents, and these to this rank's heads; the rotary key is the same for all heads."""
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
        """What all heads share, for this rank's heads; in backward the ranks' gradients are summed."""
        if self.sequence_parallel:
            return collectives.all_gather(shared, self.tp, self.sequence_dim)
        return collectives.copy(shared, self.tp)
