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

from mpcore.kernels.attention import attention, check_documents, check_ends
from mpcore.kernels.rope import rope_qkv
from mpcore.layers.attention.context import check_heads, check_mask, context_attention, masked_attention
from mpcore.layers.attention.sequence import KINDS, check_kind, sequence_index
from mpcore.layers.linear import QKVParallelLinear, RowParallelLinear
from mpcore.layers.module import Init
from mpcore.layers.norm import RMSNorm
from mpcore.layers.rope import RotaryEmbedding
from mpcore.mesh.axis import Axis, check_axis

# (device name, dtype, head_dim) of causal and full masks where our kernel was measured to beat the best SDPA backend.
# Empty, because nothing has been timed on a GPU yet: SDPA runs unless `impl` or an option says otherwise.
FASTER_THAN_SDPA: frozenset[tuple[str, torch.dtype, int]] = frozenset()


class HeadAttention(torch.nn.Module):
    """Attention of this rank's heads to the whole sequence, whatever makes their queries, keys and values.

    Args:
        head_dim: K, of queries and keys.
        scale: of the scores; None: K^(-1/2).
        others: as of `ParallelAttention`.

    Attributes:
        kv_repeats: how many query heads each KV head serves, where those are unequal.
    """

    kv_repeats: list[int] | None = None

    def __init__(
        self,
        head_dim: int,
        *,
        scale: float | None = None,
        rope: RotaryEmbedding | None = None,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        impl: str | None = None,
        tp: Axis = Axis(name="tp"),
        context: str | None = None,
        cp: Axis = Axis(name="cp"),
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
    ) -> None:
        super().__init__()
        for axis in (tp, cp):
            check_axis(axis)
        if window is not None and (not causal or window < 1):
            raise ValueError(f"window {window} needs a causal mask and at least 1 token")
        if softcap is not None and softcap <= 0:
            raise ValueError(f"softcap {softcap} is not a positive number; None is none")
        if context is not None:
            check_kind(context, cp)
        elif cp.size > 1:
            raise ValueError(f"the {cp.name} size {cp.size} needs a context, one of {', '.join(map(repr, KINDS))}")
        self.tp, self.sequence_parallel, self.sequence_dim = tp, sequence_parallel and tp.size > 1, sequence_dim
        self.context, self.cp = context or "ring", cp
        self.head_dim, self.causal, self.window = head_dim, causal, window
        self.scale, self.softcap, self.impl = scale, softcap, impl
        self.rope = rope

    def whole_length(self, x: Tensor, cu_seqlens: Tensor | None, length: int | None, mask: Tensor | None) -> int:
        """Tokens of the whole sequence, of which the layer's input x has this rank's; refuses what doesn't fit it."""
        if x.dim() != 3:
            raise ValueError(
                f"x has {x.dim()} dimensions, but attention takes [B, T, D]: unsqueeze(0) one sequence, "
                f"flatten(1, -2) a grid of tokens"
            )
        T, B = x.shape[:2] if self.sequence_dim == 0 else (x.shape[1], x.shape[0])
        if self.sequence_parallel:
            T *= self.tp.size
        if cu_seqlens is not None:
            check_ends(cu_seqlens)
            if B != 1:
                raise ValueError(
                    f"cu_seqlens packs documents in one row, but the batch has {B}: flatten it to [1, B*T]"
                )
        if mask is not None:
            if self.softcap is not None or self.impl is not None or cu_seqlens is not None:
                raise ValueError("a mask of its own goes through torch's attention: no softcap, impl or cu_seqlens")
            check_mask(mask, B, T, self.context, self.cp)
            return mask.shape[-1]
        if length is None and cu_seqlens is not None and self.cp.size > 1 and cu_seqlens.device.type == "cpu":
            length = int(cu_seqlens[-1])
        return T * self.cp.size if length is None else length

    def angles(
        self, rope: RotaryEmbedding, x: Tensor, positions: Tensor | None, cu_seqlens: Tensor | None, whole: int
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines for x [B, T/cp, ...]; positions None: 0 .. T-1, in each document."""
        if positions is None:
            index = sequence_index(whole, self.cp, self.context, x.device)
            positions = document_positions(cu_seqlens, whole, x.device)[index]
        return rope(positions, torch.promote_types(x.dtype, torch.float32))

    def core(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, length: int, mask: Tensor | None = None
    ) -> Tensor:
        """softmax(scale q k^T) v: q [B, T/cp, H/tp, K], k and v of KV heads, v [..., V] -> [B, T/cp, H/tp, V]."""
        if self.kv_repeats is not None:
            k, v = (_repeat_heads(t, self.kv_repeats) for t in (k, v))
        if mask is not None:
            return masked_attention(q, k, v, mask, self.context, self.cp, self.scale)
        if self.cp.size > 1:
            options = {"scale": self.scale, "softcap": self.softcap, "impl": self.impl}
            kind = {"kind": self.context, "cp": self.cp, "causal": self.causal, "window": self.window}
            return context_attention(q, k, v, **kind, cu_seqlens=cu_seqlens, length=length, **options)
        if self.impl is not None or self.window is not None or self.softcap is not None or cu_seqlens is not None:
            return self._kernel(q, k, v, cu_seqlens)
        if FASTER_THAN_SDPA and (torch.cuda.get_device_name(q.device), q.dtype, self.head_dim) in FASTER_THAN_SDPA:
            return self._kernel(q, k, v, cu_seqlens)
        grouped = q.shape[2] > k.shape[2]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        options = {"is_causal": self.causal, "scale": self.scale, "enable_gqa": grouped}
        K, V = q.shape[-1], v.shape[-1]
        if V < K and v.device.type == "cpu":
            # Its fused kernel takes one width alone, and what else there is needs T^2 memory. A GPU gets them narrow:
            # cuDNN (192 beside 128, on Hopper and later, where it is asked first) and the memory-efficient kernel can.
            y = F.scaled_dot_product_attention(q, k, F.pad(v, (0, K - V)), **options)[..., :V]
        else:
            y = F.scaled_dot_product_attention(q, k, v, **options)
        return y.transpose(1, 2)

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(q.device, non_blocking=True)
        mask = {"causal": self.causal, "window": self.window, "cu_seqlens": cu_seqlens}
        return attention(q, k, v, **mask, scale=self.scale, softcap=self.softcap, impl=self.impl)[0]


class ParallelAttention(HeadAttention):
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
        impl: `"triton"` or `"reference"` of `mpcore.kernels.attention`; None: torch's
            `scaled_dot_product_attention` for causal and full masks, where it isn't measured to be slower, and else the
            kernel that the device has.
        tp: the axis.
        context, cp: with cp, input and output are this rank's tokens of `shard_sequence(..., cp, context)`, and
            context says how queries meet the keys of other ranks: "alltoall", "ring", "zigzag", "allgather" or
            "two-level" (`mpcore.layers.attention.context`).
        sequence_parallel, sequence_dim: input and output are this rank's shard of the sequence; of its own part of it
            with cp.
        init, output_init: fill the logical weights of the input and output projections; None: as `torch.nn.Linear`.
        device, dtype: of the parameters.

    Raises:
        ValueError: if D isn't a multiple of H and no head_dim is given, or a window is asked of a full mask, or if
            `context` is unknown, missing, or can't cut these heads over cp.
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
        context: str | None = None,
        cp: Axis = Axis(name="cp"),
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        init: Init | None = None,
        output_init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if head_dim is None:
            if dim % num_heads:
                raise ValueError(f"dim {dim} is not a multiple of num_heads {num_heads}: give head_dim")
            head_dim = dim // num_heads
        mask: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "impl": impl}
        like = {"device": device, "dtype": dtype}
        sp = {"sequence_parallel": sequence_parallel, "sequence_dim": sequence_dim}
        super().__init__(head_dim, rope=rope, tp=tp, context=context, cp=cp, **mask, **sp)
        self.qkv = QKVParallelLinear(
            dim, num_heads, num_kv_heads or num_heads, head_dim, bias, tp=tp, init=init, **sp, **like
        )
        # Kept here, so that `qkv` may be wrapped, as LoRA does, or be any other module of that output.
        self.local_heads, self.local_kv_heads = self.qkv.local_heads, self.qkv.local_kv_heads
        output_bias = bias if output_bias is None else output_bias
        sizes = [len(list(same)) for _, same in groupby(self.qkv.kv_head_of)]  # query heads of each KV head
        self.kv_repeats = sizes if len(set(sizes)) > 1 else None  # uneven shards: groups of unequal sizes
        self.output = RowParallelLinear(
            num_heads * head_dim, dim, output_bias, tp=tp, unit=head_dim, init=output_init or init, **sp, **like
        )
        check_heads(self.context, cp, self.local_heads)
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
        length: int | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """[B, T/cp, D] -> [B, T/cp, D] (dimensions 0 and 1 exchanged with `sequence_dim` 0).

        Args:
            rotary: `rope(positions)` where the caller computes it once for all blocks.
            positions: [T/cp] or [B, T/cp] for the rotation; None: 0 .. T-1, in each document.
            cu_seqlens: [n + 1] ends of packed documents, from 0 to T, for B = 1; tokens see their own document. With
                cp best in CPU memory: blocks of other documents then don't travel.
            length: T, of the whole sequence, where cp's shards are uneven; None: the end of `cu_seqlens` where that is
                in CPU memory, or else all ranks have as many tokens as this one.
            mask: [T, T], or of each sample [B, T, T], or [B, 1, T] of keys alone, as padding has it: booleans, the same
                on every rank of tp and cp, True where a query (row) sees a key. To a query that sees none attention is
                0, without a gradient. It stands for all other masks, also `causal`, and takes memory T^2; of the kinds
                of cp "alltoall" and "allgather" can.
        """
        whole = self.whole_length(x, cu_seqlens, length, mask)
        qkv = self.qkv(x)
        if self.sequence_dim == 0:
            qkv = qkv.transpose(0, 1)
        heads, kv_heads = self.local_heads, self.local_kv_heads
        if self.rope is not None:
            cos, sin = rotary or self.angles(self.rope, qkv, positions, cu_seqlens, whole)
            norm: dict[str, Any] = {}
            if self.q_norm is not None and self.k_norm is not None:
                if _is_rms_norm(self.q_norm) and _is_rms_norm(self.k_norm):
                    norm = {"q_weight": self.q_norm.weight, "k_weight": self.k_norm.weight, "eps": self.q_norm.eps}
                else:
                    q, k, v = qkv.unflatten(2, (-1, self.head_dim)).split([heads, kv_heads, kv_heads], dim=2)
                    qkv = torch.cat([self.q_norm(q), self.k_norm(k), v], 2).flatten(2)
            q, k, v = rope_qkv(qkv, heads, kv_heads, cos, sin, interleaved=self.rope.interleaved, **norm)
        else:
            q, k, v = qkv.unflatten(2, (-1, self.head_dim)).split([heads, kv_heads, kv_heads], dim=2)
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q), self.k_norm(k)
        y = self.core(q, k, v, cu_seqlens, whole, mask)  # [B, T/cp, H/tp, K]
        y = y.flatten(2)
        return self.output(y.transpose(0, 1) if self.sequence_dim == 0 else y)


def _is_rms_norm(norm: torch.nn.Module) -> bool:
    """Whether the fused rotation computes what the module does: a user may have put one of their own in its place."""
    return type(norm).forward is RMSNorm.forward and "forward" not in vars(norm)


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
    cu_seqlens = cu_seqlens.to(device, non_blocking=True)
    return index - cu_seqlens[torch.searchsorted(cu_seqlens, index, right=True) - 1]
