"""Attention with its heads sharded over the tensor-parallel axis.

Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), figure 3b; grouped queries: Ainslie et al. 2023
(arXiv:2305.13245).
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from typing_extensions import Unpack

from mpcore._torch.module import has_hooks
from mpcore.kernels.rope import rope_qkv
from mpcore.layers.attention.cache import KVCache
from mpcore.layers.attention.context import check_heads
from mpcore.layers.attention.heads import AttentionOptions, HeadAttention, HeadOptions
from mpcore.layers.attention.scores import AttentionSinks
from mpcore.layers.fused_linear import KVParallelLinear, QKVParallelLinear
from mpcore.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpcore.layers.module import LayerOptions, TensorOptions, check_names, select_options
from mpcore.layers.norm import RMSNorm


class ParallelAttention(HeadAttention):
    """Multi-head, grouped-query or multi-query attention, with the query heads sharded over tp.

    Args:
        dim: D, the model width.
        num_heads: H of the unsharded layer, at least the tp size. Shards may be uneven.
        num_kv_heads: the number of KV heads; None: H. If there are fewer KV heads than tp ranks, they are replicated.
        head_dim: K; None: D / H.
        bias: whether the projections have biases.
        output_bias: whether the output projection has a bias; None: use `bias`.
        qk_norm: apply RMSNorm to each query and key head, before RoPE.
        norm_eps: eps of that RMSNorm.
        alibi: add ALiBi to the scores: minus the distance of query and key, times a fixed slope per head. Needs O(T^2)
            memory.
        sinks: add one learned logit per head to the softmax, without a value (an attention sink).
        memory_dim: make this a cross-attention layer: keys and values are projected from the `memory` [B, S,
            memory_dim] passed to `forward`. Each token sees the full memory, and `causal` is False.
        options: rope, causal, window, softcap, impl, context, cp: see `HeadOptions`; tp, sequence_parallel,
            sequence_dim, init, device, dtype: see `LayerOptions`; output_init fills the output projection's weight.

    Raises:
        ValueError: if D is not a multiple of H and no head_dim is given; if `window` is given without `causal`; if
            `context` is unknown, missing, or can't shard these heads over cp; or if two options exclude each other: cp
            excludes alibi, sinks and memory_dim, and memory_dim excludes causal, rope and alibi.

    Example:
        >>> rope = mpcore.RotaryEmbedding(4)
        >>> attention = mpcore.ParallelAttention(16, num_heads=4, num_kv_heads=2, rope=rope)
        >>> attention(torch.zeros(1, 3, 16)).shape
        torch.Size([1, 3, 16])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = True,
        output_bias: bool | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        alibi: bool = False,
        sinks: bool = False,
        memory_dim: int | None = None,
        **options: Unpack[AttentionOptions],
    ) -> None:
        check_names(options, AttentionOptions)
        if memory_dim is not None:
            asked = {"causal": options.get("causal"), "rope": options.get("rope"), "alibi": alibi}
            for name in (name for name, value in asked.items() if value):
                raise ValueError(f"memory_dim {memory_dim} has no {name}: tokens have no place among those of a memory")
            options["causal"] = False
        if head_dim is None:
            if dim % num_heads:
                raise ValueError(f"dim {dim} is not a multiple of num_heads {num_heads}: give head_dim")
            head_dim = dim // num_heads
        super().__init__(head_dim, **select_options(options, HeadOptions))
        self.num_heads = num_heads
        self.memory_dim = memory_dim
        self.alibi = alibi
        if self.cp.size > 1 and (alibi or sinks or memory_dim is not None):
            what = "alibi" if alibi else "sinks" if sinks else "memory_dim"
            raise ValueError(f"{what} can't go with {self.cp.name} size {self.cp.size}: take cp 1 and a larger tp")
        if alibi and self.impl is not None:
            raise ValueError(f"alibi goes through torch's attention: leave out impl {self.impl!r}")
        layer = select_options(options, LayerOptions)
        heads = (num_heads, num_heads if num_kv_heads is None else num_kv_heads, head_dim, bias)
        # Users may wrap a projection, as adapters do, or replace it by a module with the same output shape.
        if memory_dim is None:
            projection: QKVParallelLinear | KVParallelLinear = QKVParallelLinear(dim, *heads, **layer)
            self.qkv: QKVParallelLinear = projection
        else:
            self.q: ColumnParallelLinear = ColumnParallelLinear(dim, num_heads * head_dim, bias, unit=head_dim, **layer)
            projection = KVParallelLinear(memory_dim, *heads, **layer)
            self.kv: KVParallelLinear = projection
        self.local_heads: int = projection.local_heads
        self.local_kv_heads: int = projection.local_kv_heads
        sizes = [len(list(same)) for _, same in groupby(projection.kv_head_of)]  # query heads of each KV head
        self.kv_repeats: list[int] | None = sizes if len(set(sizes)) > 1 else None  # None: unequal groups
        output_bias = bias if output_bias is None else output_bias
        layer = select_options(layer, LayerOptions, init=options.get("output_init"))
        self.output: RowParallelLinear = RowParallelLinear(
            num_heads * head_dim, dim, output_bias, unit=head_dim, **layer
        )
        check_heads(self.context, self.cp, num_heads // self.tp.size)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm:  # all heads share one weight and this rank has some of them: the gradient is partial over tp
            norm: dict[str, Any] = {"partial": (self.tp,), **select_options(options, TensorOptions)}
            self.q_norm = RMSNorm(head_dim, norm_eps, **norm)
            self.k_norm = RMSNorm(head_dim, norm_eps, **norm)
        if sinks:
            self.sinks: AttentionSinks | None = AttentionSinks(
                num_heads, tp=self.tp, **select_options(options, TensorOptions)
            )

    def heads(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Project x to this rank's heads, normalize q and k if `qk_norm` is set, and apply RoPE."""
        qkv = self.qkv(x)
        sizes = [self.local_heads, self.local_kv_heads, self.local_kv_heads]
        norms = () if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        fused: dict[str, Any] = {}
        if norms and rotary is not None and all(_is_rms_norm(norm) for norm in norms):
            fused = {"q_weight": norms[0].weight, "k_weight": norms[1].weight, "eps": norms[0].eps}
        if rotary is None or (norms and not fused):
            q, k, v = self._to_heads(qkv).split(sizes, dim=2)
            if norms:
                q, k = norms[0](q), norms[1](k)
            if rotary is None:
                return q, k, v
            qkv = rearrange(torch.cat([q, k, v], 2), "b t h k -> b t (h k)")
        elif self.sequence_dim == 0:
            qkv = rearrange(qkv, "t b d -> b t d")
        assert self.rope is not None
        cos, sin = rotary
        return rope_qkv(
            qkv, self.local_heads, self.local_kv_heads, cos, sin, interleaved=self.rope.interleaved, **fused
        )

    def cross_heads(self, x: Tensor, memory: Tensor | None, cache: KVCache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Project x to this rank's queries and `memory` to its keys and values; normalize q and k with `qk_norm`."""
        q = self._to_heads(self.q(x))
        q = q if self.q_norm is None else self.q_norm(q)
        if cache is not None and cache.length:
            return q, *cache.held()
        k, v = self._to_heads(self.kv(memory)).chunk(2, 2)
        k = k if self.k_norm is None else self.k_norm(k)
        k, v = (k, v) if cache is None else cache.append(k, v)
        return q, k, v

    def _to_heads(self, x: Tensor, width: int | None = None) -> Tensor:
        pattern = "t b (h k) -> b t h k" if self.sequence_dim == 0 else "b t (h k) -> b t h k"
        return rearrange(x, pattern, k=width or self.head_dim)


def _is_rms_norm(norm: torch.nn.Module) -> bool:
    """Return whether the fused RoPE kernel may compute this norm. Not if a user replaced or hooked the module."""
    return type(norm).forward is RMSNorm.forward and "forward" not in vars(norm) and not has_hooks(norm, "mpcore")
