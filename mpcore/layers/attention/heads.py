"""Self-attention with its heads cut over the tensor-parallel axis.

Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), figure 3b; grouped queries: Ainslie et al. 2023
(arXiv:2305.13245).
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpcore.collectives import shard_sizes
from mpcore.kernels._dispatch import can_read
from mpcore.kernels.attention import check_ends
from mpcore.kernels.rope import rope_qkv
from mpcore.layers.attention.context import (
    check_heads,
    check_mask,
    context_attention,
    masked_attention,
    packed_attention,
)
from mpcore.layers.attention.documents import document_positions, visible_keys
from mpcore.layers.attention.sequence import KINDS, check_kind, sequence_index
from mpcore.layers.linear import QKVParallelLinear, RowParallelLinear
from mpcore.layers.module import (
    Init,
    LayerOptions,
    ParallelLayer,
    TensorOptions,
    TensorParallelOptions,
    check_names,
    pick,
)
from mpcore.layers.norm import RMSNorm
from mpcore.layers.rope import RotaryEmbedding
from mpcore.mesh.axis import Axis, check_axis

if TYPE_CHECKING:
    from typing_extensions import Unpack


class HeadOptions(TensorParallelOptions, total=False):
    """Keyword arguments of every attention layer, of its heads.

    Attributes:
        rope: the rotary table; None: no rotation.
        causal: each token sees itself and the tokens before it; False: all of its document.
        window: with causal, the number of tokens each one sees, itself counted; None: all.
        softcap: c of scores c tanh(s / c); None: scores as they are.
        impl: `"triton"` or `"reference"` of `mpcore.kernels.attention`; None: torch's `scaled_dot_product_attention`
            for causal and full masks, and else the kernel that the device has.
        context, cp: with cp, input and output are this rank's tokens of `shard_sequence(..., cp, context)`, and
            context says how queries meet the keys of other ranks: "alltoall", "ring", "zigzag", "allgather" or
            "two-level" (`mpcore.layers.attention.context`). Sequence parallel shards this rank's part once more.
    """

    rope: RotaryEmbedding | None
    causal: bool
    window: int | None
    softcap: float | None
    impl: str | None
    context: str | None
    cp: Axis


class AttentionOptions(HeadOptions, LayerOptions, total=False):
    """Keyword arguments of every attention layer: `HeadOptions`, `LayerOptions`, and of its output projection.

    Attributes:
        output_init: fills the weight of the output projection; None: as `init`.
    """

    output_init: Init | None


class HeadAttention(ParallelLayer):
    """Attention of this rank's heads to the whole sequence. A subclass makes q, k and v, and has an `output`.

    Args:
        head_dim: K, of queries and keys.
        scale: of the scores; None: K^(-1/2).
        others: `HeadOptions`.

    Attributes:
        kv_repeats: how many query heads each KV head serves, where those are unequal.
    """

    kv_repeats: list[int] | None = None
    output: torch.nn.Module

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
        context: str | None = None,
        cp: Axis = Axis(name="cp"),
        **others: Unpack[TensorParallelOptions],
    ) -> None:
        super().__init__(**others)
        check_axis(cp)
        if window is not None and (not causal or window < 1):
            raise ValueError(f"window {window} needs a causal mask and at least 1 token")
        if softcap is not None and softcap <= 0:
            raise ValueError(f"softcap {softcap} is not a positive number; None is none")
        if context is not None:
            check_kind(context, cp)
        elif cp.size > 1:
            raise ValueError(f"the {cp.name} size {cp.size} needs a context, one of {', '.join(map(repr, KINDS))}")
        self.context, self.cp = context or "ring", cp
        self.head_dim, self.causal, self.window, self.rope = head_dim, causal, window, rope
        self.scale, self.softcap, self.impl = scale, softcap, impl

    def heads(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, T/cp, heads, width] of the layer's input, rotated where there is a `rope`."""
        raise NotImplementedError

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
            cu_seqlens: [n + 1] ends of packed documents in the whole rows one after another, from 0 to B T, the same on
                every rank of tp and cp; tokens see their own document. `document_ends` makes them of token ids or
                document ids. With cp best in CPU memory: blocks of other documents then don't travel.
            length: T, of the whole sequence, where cp's shards are uneven; None: from the end of `cu_seqlens` where
                that is in CPU memory, or else all ranks have as many tokens as this one.
            mask: [T, T], or of each sample [B, T, T], or [B, 1, T] of keys alone, as padding has it: booleans, the same
                on every rank of tp and cp, True where a query (row) sees a key. To a query that sees none attention is
                0, without a gradient. A query sees a key that this mask and all others (`causal`, `window`,
                `cu_seqlens`) let it see. Takes memory T^2. Under cp "alltoall" and "allgather" support it.
        """
        whole = self._whole_length(x, cu_seqlens, length, mask)
        if self.rope is None:
            rotary = None
        elif rotary is None:
            if positions is None:
                positions = sequence_index(whole, self.cp, self.context, x.device)
                if cu_seqlens is not None:
                    rows = x.shape[1 if self.sequence_dim == 0 else 0]
                    positions = document_positions(cu_seqlens, rows, whole, x.device)[:, positions]
            rotary = self.rope(positions, torch.promote_types(x.dtype, torch.float32))
        y = self.core(*self.heads(x, rotary), cu_seqlens, whole, mask)
        y = y.flatten(2)  # b t h v -> b t (h v)
        return self.output(y.transpose(0, 1) if self.sequence_dim == 0 else y)

    def _whole_length(self, x: Tensor, cu_seqlens: Tensor | None, length: int | None, mask: Tensor | None) -> int:
        """T of the whole sequence, of which x is this rank's part; refuses what doesn't fit it."""
        if x.dim() != 3:
            raise ValueError(
                f"x has {x.dim()} dimensions, but attention takes [B, T, D]: unsqueeze(0) one sequence, "
                f"flatten(1, -2) a grid of tokens"
            )
        tokens, B = x.shape[:2] if self.sequence_dim == 0 else (x.shape[1], x.shape[0])
        T = tokens * self.tp.size if self.sequence_parallel else tokens
        if cu_seqlens is not None:
            check_ends(cu_seqlens)
        if mask is not None:
            if self.softcap is not None or self.impl is not None:
                raise ValueError("a mask of its own goes through torch's attention: no softcap or impl")
            check_mask(mask, B, T, self.context, self.cp)
            return mask.shape[-1]
        if length is None and cu_seqlens is not None and self.cp.size > 1 and can_read(cu_seqlens):
            length = _length_from_documents(
                int(cu_seqlens[-1]), tokens, B, self.cp, self.tp if self.sequence_parallel else None
            )
        return T * self.cp.size if length is None else length

    def core(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, length: int, mask: Tensor | None = None
    ) -> Tensor:
        """softmax(scale q k^T) v: q [B, T/cp, H/tp, K], k and v of KV heads, v [..., V] -> [B, T/cp, H/tp, V]."""
        if self.kv_repeats is not None:
            k, v = (_repeat_heads(t, self.kv_repeats) for t in (k, v))
        cu_seqlens = cu_seqlens if q.shape[0] else None  # no rows have no documents
        if mask is not None:
            if self.causal or cu_seqlens is not None:
                mask = mask & visible_keys(q.shape[0], length, mask.device, cu_seqlens, self.causal, self.window)
            return masked_attention(q, k, v, mask, self.context, self.cp, self.scale)
        how = {"causal": self.causal, "window": self.window, "softcap": self.softcap, "impl": self.impl}
        if self.cp.size > 1:
            how |= {"cu_seqlens": cu_seqlens, "length": length, "scale": self.scale}
            return context_attention(q, k, v, self.context, self.cp, **how)
        if self.impl is not None or self.window is not None or self.softcap is not None or cu_seqlens is not None:
            cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(q.device, non_blocking=True)
            return packed_attention(q, k, v, cu_seqlens=cu_seqlens, scale=self.scale, **how)
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


def _length_from_documents(end: int, tokens: int, B: int, cp: Axis, tp: Axis | None) -> int:
    """Length of the whole sequence, from the end of `cu_seqlens`; `tp` shards a rank's part of it once more.

    Raises ValueError if x, with `tokens` on this rank, is another part.
    """
    length = end // max(B, 1)
    mine = shard_sizes(length, cp.size)[cp.rank]
    if tp is not None:
        mine = shard_sizes(mine, tp.size)[tp.rank]
    if B and mine != tokens:
        raise ValueError(
            f"cu_seqlens ends at {end}, so rank {cp.rank} of {cp.name} {cp.size} holds {mine} tokens of each of {B} "
            f"rows, but x has {tokens}: give the cu_seqlens of the whole sequence, and x as shard_sequence cuts it"
        )
    return length


class ParallelAttention(HeadAttention):
    """Multi-head, grouped-query or multi-query self-attention; each rank computes its share of the query heads.

    Args:
        dim: D, the model width.
        num_heads: H, logical; at least the tp size, shards may be uneven.
        num_kv_heads: KV heads; None: H. Fewer than the tp size are replicated as needed.
        head_dim: K; None: D / H.
        bias: biases of the projections.
        output_bias: that of the output projection; None: as `bias`.
        qk_norm: RMSNorm of each query and key head, before the rotation.
        norm_eps: of that norm.
        options: rope, causal, window, softcap, impl, context, cp: see `HeadOptions`; tp, sequence_parallel,
            sequence_dim, init, device, dtype: see `LayerOptions`; output_init fills the output projection's weight.

    Raises:
        ValueError: if D isn't a multiple of H and no head_dim is given, a window is asked of a full mask, or
            `context` is unknown, missing, or can't cut these heads over cp.

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
        **options: Unpack[AttentionOptions],
    ) -> None:
        check_names(options, AttentionOptions)
        if head_dim is None:
            if dim % num_heads:
                raise ValueError(f"dim {dim} is not a multiple of num_heads {num_heads}: give head_dim")
            head_dim = dim // num_heads
        super().__init__(head_dim, **pick(options, HeadOptions))
        layer = pick(options, LayerOptions)
        self.qkv = QKVParallelLinear(dim, num_heads, num_kv_heads or num_heads, head_dim, bias, **layer)
        # Kept here, so that `qkv` may be wrapped, as LoRA does, or be any other module of that output.
        self.local_heads, self.local_kv_heads = self.qkv.local_heads, self.qkv.local_kv_heads
        sizes = [len(list(same)) for _, same in groupby(self.qkv.kv_head_of)]  # query heads of each KV head
        self.kv_repeats = sizes if len(set(sizes)) > 1 else None  # uneven shards: groups of unequal sizes
        output_bias = bias if output_bias is None else output_bias
        layer = pick(layer, LayerOptions, init=options.get("output_init"))
        self.output = RowParallelLinear(num_heads * head_dim, dim, output_bias, unit=head_dim, **layer)
        check_heads(self.context, self.cp, self.local_heads)
        self.q_norm = self.k_norm = None
        if qk_norm:  # one weight for all heads, of which this rank sees its own: its gradient is one term of a sum
            norm: dict[str, Any] = {"partial": (self.tp,), **pick(options, TensorOptions)}
            self.q_norm, self.k_norm = RMSNorm(head_dim, norm_eps, **norm), RMSNorm(head_dim, norm_eps, **norm)

    def heads(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Project x to this rank's heads, normalize q and k where asked, and rotate them."""
        qkv = self.qkv(x)
        if self.sequence_dim == 0:
            qkv = qkv.transpose(0, 1)
        sizes = [self.local_heads, self.local_kv_heads, self.local_kv_heads]
        norms = () if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        fused: dict[str, Any] = {}
        if norms and rotary is not None and all(_is_rms_norm(norm) for norm in norms):
            fused = {"q_weight": norms[0].weight, "k_weight": norms[1].weight, "eps": norms[0].eps}
        if rotary is None or (norms and not fused):
            q, k, v = qkv.unflatten(2, (-1, self.head_dim)).split(sizes, dim=2)  # b t (h k) -> b t h k
            if norms:
                q, k = norms[0](q), norms[1](k)
            if rotary is None:
                return q, k, v
            qkv = torch.cat([q, k, v], 2).flatten(2)
        assert self.rope is not None
        cos, sin = rotary
        return rope_qkv(
            qkv, self.local_heads, self.local_kv_heads, cos, sin, interleaved=self.rope.interleaved, **fused
        )


def _is_rms_norm(norm: torch.nn.Module) -> bool:
    """Whether the fused rotation computes this norm: a user may have put one of their own in its place."""
    return type(norm).forward is RMSNorm.forward and "forward" not in vars(norm)


def _repeat_heads(x: Tensor, repeats: list[int]) -> Tensor:
    """Repeat head i `repeats[i]` times; without an index tensor, which would be copied to the GPU each time."""
    heads = zip(x.split(1, dim=2), repeats, strict=True)
    return torch.cat([head.expand(-1, -1, n, -1) for head, n in heads], dim=2)
