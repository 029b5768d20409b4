"""Self-attention with its heads cut over the tensor-parallel axis.

Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), figure 3b; grouped queries: Ainslie et al. 2023
(arXiv:2305.13245).
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpcore.kernels.attention import attention, check_documents
from mpcore.kernels.rope import rope_qkv
from mpcore.layers.linear import QKVParallelLinear, RowParallelLinear
from mpcore.layers.module import Init
from mpcore.layers.norm import RMSNorm
from mpcore.layers.rope import RotaryEmbedding
from mpcore.mesh import Axis

# (device name, dtype, head_dim) of causal and full masks where our kernel was measured to beat the best SDPA backend.
# Empty, because nothing has been timed on a GPU yet: SDPA runs unless `impl` or an option says otherwise.
FASTER_THAN_SDPA: frozenset[tuple[str, torch.dtype, int]] = frozenset()


class ParallelAttention(torch.nn.Module):
    """Multi-head, grouped-query or multi-query self-attention; each rank computes its share of the query heads.

    Args:
        dim: D, the model width.
        num_heads: H, logical; at least the tp size, shards may be uneven.
        num_kv_heads: KV heads; None: H. Fewer than the tp size are replicated as needed.
        head_dim: K; None: D / H.
        bias: biases of the projections.
        output_bias: that of the output projection; None: as `bias`.
        rope: the rotary table; None: no rotation.
        qk_norm: RMSNorm of each query and key head, before the rotation.
        norm_eps: of that norm.
        causal: each token sees itself and what is before it; False: all of its document.
        window: with causal, the number of tokens each one sees, itself counted; None: all.
        softcap: c of scores c tanh(s / c); None: scores as they are.
        impl: `"triton"` or `"reference"` of `mpcore.kernels.attention`; None: torch's `scaled_dot_product_attention`
            for causal and full masks, where it isn't measured to be slower, and else the kernel that the device has.
        tp: the axis.
        sequence_parallel, sequence_dim: input and output are this rank's shard of the sequence.
        init, output_init: fill the logical weights of the input and output projections; None: as `torch.nn.Linear`.
        device, dtype: of the parameters.

    Raises:
        ValueError: if D isn't a multiple of H and no head_dim is given, or a window is asked of a full mask.
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
        rope: RotaryEmbedding | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        impl: str | None = None,
        tp: Axis = Axis(name="tp"),
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        init: Init | None = None,
        output_init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if head_dim is None:
            if dim % num_heads:
                raise ValueError(f"dim {dim} is not a multiple of num_heads {num_heads}: give head_dim")
            head_dim = dim // num_heads
        if window is not None and (not causal or window < 1):
            raise ValueError(f"window {window} needs a causal mask and at least 1 token")
        if softcap is not None and softcap <= 0:
            raise ValueError(f"softcap {softcap} is not a positive number; None is none")
        self.head_dim, self.causal, self.window, self.sequence_dim = head_dim, causal, window, sequence_dim
        self.softcap, self.impl = softcap, impl
        self.rope = rope
        like = {"device": device, "dtype": dtype}
        sp = {"sequence_parallel": sequence_parallel, "sequence_dim": sequence_dim}
        self.qkv = QKVParallelLinear(
            dim, num_heads, num_kv_heads or num_heads, head_dim, bias, tp=tp, init=init, **sp, **like
        )
        output_bias = bias if output_bias is None else output_bias
        sizes = [len(list(same)) for _, same in groupby(self.qkv.kv_head_of)]  # query heads of each KV head
        self.kv_repeats = sizes if len(set(sizes)) > 1 else None  # uneven shards: groups of unequal sizes
        self.output = RowParallelLinear(
            num_heads * head_dim, dim, output_bias, tp=tp, unit=head_dim, init=output_init or init, **sp, **like
        )
        if qk_norm:  # one weight for all heads, of which this rank sees its own: its gradient is one term of a sum
            self.q_norm = RMSNorm(head_dim, norm_eps, partial=(tp,), **like)
            self.k_norm = RMSNorm(head_dim, norm_eps, partial=(tp,), **like)
        else:
            self.q_norm = self.k_norm = None

    def forward(
        self,
        x: Tensor,
        *,
        rotary: tuple[Tensor, Tensor] | None = None,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """[B, T, D] -> [B, T, D] (dimensions 0 and 1 exchanged with `sequence_dim` 0).

        Args:
            rotary: `rope(positions)` where the caller computes it once for all blocks.
            positions: [T] or [B, T] for the rotation; None: 0 .. T-1, in each document.
            cu_seqlens: [n + 1] ends of packed documents, from 0 to T, for B = 1; tokens see their own document.
        """
        qkv = self.qkv(x)
        if self.sequence_dim == 0:
            qkv = qkv.transpose(0, 1)
        B, T, _ = qkv.shape
        if cu_seqlens is not None and B != 1:
            raise ValueError(f"cu_seqlens packs documents in one row, but the batch has {B}: flatten it to [1, B*T]")
        heads, kv_heads = self.qkv.local_heads, self.qkv.local_kv_heads
        if self.rope is not None:
            where = document_positions(cu_seqlens, T, x.device) if positions is None and rotary is None else positions
            cos, sin = rotary or self.rope(where, torch.promote_types(qkv.dtype, torch.float32))
            norm: dict[str, Any] = {}
            if self.q_norm is not None and self.k_norm is not None:
                norm = {"q_weight": self.q_norm.weight, "k_weight": self.k_norm.weight, "eps": self.q_norm.eps}
            q, k, v = rope_qkv(qkv, heads, kv_heads, cos, sin, interleaved=self.rope.interleaved, **norm)
        else:
            q, k, v = qkv.unflatten(2, (-1, self.head_dim)).split([heads, kv_heads, kv_heads], dim=2)
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q), self.k_norm(k)
        y = self.core(q, k, v, cu_seqlens)  # [B, T, H/tp, K]
        y = y.flatten(2)
        return self.output(y.transpose(0, 1) if self.sequence_dim == 0 else y)

    def core(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """softmax(q k^T / sqrt(K)) v over this rank's heads: [B, T, H/tp, K] and KV heads -> [B, T, H/tp, K]."""
        if self.kv_repeats is not None:
            k, v = (_repeat_heads(t, self.kv_repeats) for t in (k, v))
        if self.impl is not None or self.window is not None or self.softcap is not None or cu_seqlens is not None:
            return self._kernel(q, k, v, cu_seqlens)
        if FASTER_THAN_SDPA and (torch.cuda.get_device_name(q.device), q.dtype, self.head_dim) in FASTER_THAN_SDPA:
            return self._kernel(q, k, v, cu_seqlens)
        grouped = q.shape[2] > k.shape[2]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped).transpose(1, 2)

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        mask = {"causal": self.causal, "window": self.window, "cu_seqlens": cu_seqlens}
        return attention(q, k, v, **mask, softcap=self.softcap, impl=self.impl)[0]


def _repeat_heads(x: Tensor, repeats: list[int]) -> Tensor:
    """[B, T, Hkv, K] -> [B, T, H, K], head i `repeats[i]` times; without an index, which would go to the GPU anew."""
    heads = zip(x.split(1, dim=2), repeats, strict=True)
    return torch.cat([head.expand(-1, -1, n, -1) for head, n in heads], dim=2)


def document_positions(cu_seqlens: Tensor | None, T: int, device: torch.device) -> Tensor:
    """[T] position of each token in its document; without documents 0 .. T-1."""
    index = torch.arange(T, device=device)
    if cu_seqlens is None:
        return index
    check_documents(cu_seqlens, T)
    return index - cu_seqlens[torch.searchsorted(cu_seqlens, index, right=True) - 1]
