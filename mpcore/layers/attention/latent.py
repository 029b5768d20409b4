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

import torch
from torch import Tensor

from mpcore import collectives
from mpcore.collectives import shard_sizes
from mpcore.kernels.rope import rope as turn
from mpcore.layers.attention.context import check_heads
from mpcore.layers.attention.heads import HeadAttention
from mpcore.layers.linear import ColumnParallelLinear, RowParallelLinear, check_size
from mpcore.layers.module import Init
from mpcore.layers.norm import RMSNorm
from mpcore.layers.rope import RotaryEmbedding
from mpcore.mesh.axis import Axis
from mpcore.sharding.declarations import add_partial


class MultiLatentAttention(HeadAttention):
    """Multi-head latent attention of DeepSeek-V2 and V3, Kimi K2 and others; each rank computes its share of the heads.

    The logical weights are those of Hugging Face's `DeepseekV3Attention`, row by row: `kv_down` is [kv_lora_rank +
    qk_rope_head_dim, D], and `q_up` and `kv_up` go head by head, [nope | rope] and [keys | values] in each.

    Args:
        dim: D, the model width.
        num_heads: H, logical; at least the tp size, shards may be uneven.
        kv_lora_rank: width of the latent that keys and values are made of.
        qk_nope_head_dim, qk_rope_head_dim: what of each query and key head has no rotation, and what turns.
        v_head_dim: of each value head, narrower than a key or not.
        q_lora_rank: width of the latent that queries are made of; None: they are made of x.
        bias: biases of the projections down and of the output.
        rope: the rotary table, of `qk_rope_head_dim`; None: no rotation. Its `score_factor` multiplies the scores.
        norm_eps: of the latents' norms.
        causal, window, softcap, impl: as of `ParallelAttention`.
        tp: the axis.
        context, cp: as of `ParallelAttention`; all kinds take values narrower than keys.
        sequence_parallel, sequence_dim: input and output are this rank's shard of the sequence; of its own part of it
            with cp.
        init, output_init: fill the logical weights of the input and output projections; None: as `torch.nn.Linear`.
        device, dtype: of the parameters.

    Raises:
        ValueError: if there are fewer heads than ranks, `rope` turns another number of dimensions, a window is asked of
            a full mask, or `context` is unknown, missing, or can't cut these heads over cp.
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
        rope: RotaryEmbedding | None = None,
        norm_eps: float = 1e-6,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        impl: str | None = None,
        tp: Axis = Axis(name="tp"),
        context: str | None = None,
        cp: Axis = Axis(name="cp"),
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        init: Init | None = None,
        output_init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_size("num_heads", num_heads, tp)
        if rope is not None and rope.dim != qk_rope_head_dim:
            raise ValueError(f"rope turns {rope.dim} dimensions, but qk_rope_head_dim is {qk_rope_head_dim}")
        head_dim = qk_nope_head_dim + qk_rope_head_dim
        super().__init__(
            head_dim, scale=head_dim**-0.5 * (1.0 if rope is None else rope.score_factor), rope=rope, causal=causal,
            window=window, softcap=softcap, impl=impl, tp=tp, context=context, cp=cp,
            sequence_parallel=sequence_parallel, sequence_dim=sequence_dim,
        )  # fmt: skip
        self.local_heads = shard_sizes(num_heads, tp.size)[tp.rank]
        check_heads(self.context, cp, self.local_heads)
        self.qk_dims, self.kv_dims = (qk_nope_head_dim, qk_rope_head_dim), (qk_nope_head_dim, v_head_dim)
        self.latent_dims = (kv_lora_rank, qk_rope_head_dim)
        like = {"device": device, "dtype": dtype}
        sp = {"tp": tp, "sequence_parallel": sequence_parallel}
        heads = {**sp, "sequence_dim": sequence_dim, "init": init, **like}

        def down(width: int) -> ColumnParallelLinear:
            """Whole on each rank; with sequence parallel of its own tokens: then its gradient is a term of a sum."""
            linear = ColumnParallelLinear(dim, width, bias, init=init, **like)
            for leaf, _ in linear.named_parameters() if self.sequence_parallel else ():
                add_partial(linear, leaf, tp)
            return linear

        if q_lora_rank is None:
            self.q_down = self.q_norm = None
        else:
            self.q_down, self.q_norm = down(q_lora_rank), RMSNorm(q_lora_rank, norm_eps, **sp, **like)
        q_dim = dim if q_lora_rank is None else q_lora_rank
        self.q_up = ColumnParallelLinear(q_dim, num_heads * head_dim, False, unit=head_dim, **heads)
        self.kv_down, self.kv_norm = down(sum(self.latent_dims)), RMSNorm(kv_lora_rank, norm_eps, **sp, **like)
        unit = sum(self.kv_dims)
        self.kv_up = ColumnParallelLinear(kv_lora_rank, num_heads * unit, False, unit=unit, **heads)
        heads["init"] = output_init or init
        self.output = RowParallelLinear(num_heads * v_head_dim, dim, bias, unit=v_head_dim, **heads)

    def forward(
        self,
        x: Tensor,
        *,
        rotary: tuple[Tensor, Tensor] | None = None,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        length: int | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """[B, T/cp, D] -> [B, T/cp, D] (dimensions 0 and 1 exchanged with `sequence_dim` 0).

        Args:
            rotary, positions, cu_seqlens, length, mask: as of `ParallelAttention.forward`.
        """
        whole = self.whole_length(x, cu_seqlens, length, mask)
        latent, k_rope = self.kv_down(x).split(self.latent_dims, -1)
        q = self.q_up(x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x)))
        kv, k_rope = self.kv_up(self.kv_norm(latent)), self._to_heads(k_rope)
        if self.sequence_dim == 0:
            q, kv, k_rope = (t.transpose(0, 1) for t in (q, kv, k_rope))
        q, kv = (t.unflatten(2, (self.local_heads, -1)) for t in (q, kv))
        k_rope = k_rope.unsqueeze(2)
        (q_nope, q_rope), (k_nope, v) = q.split(self.qk_dims, -1), kv.split(self.kv_dims, -1)
        if self.rope is not None:
            cos, sin = rotary or self.angles(self.rope, q, positions, cu_seqlens, whole)
            q_rope, k_rope = turn(q_rope, k_rope, cos, sin, interleaved=self.rope.interleaved)
            assert k_rope is not None
            q = torch.cat([q_nope, q_rope], -1)
        k = torch.cat([k_nope, k_rope.expand(-1, -1, self.local_heads, -1)], -1)
        y = self.core(q, k, v, cu_seqlens, whole, mask).flatten(2)  # [B, T/cp, H/tp * v_head_dim]
        return self.output(y.transpose(0, 1) if self.sequence_dim == 0 else y)

    def _to_heads(self, shared: Tensor) -> Tensor:
        """What all heads share, for this rank's: whole, and in backward the ranks' gradients are summed."""
        if self.sequence_parallel:
            return collectives.all_gather(shared, self.tp, self.sequence_dim)
        return collectives.copy(shared, self.tp)
