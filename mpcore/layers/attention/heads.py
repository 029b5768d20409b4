"""Attention with its heads cut over the tensor-parallel axis.

Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), figure 3b; grouped queries: Ainslie et al. 2023
(arXiv:2305.13245).
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpcore import collectives
from mpcore.collectives import shard_range, shard_sizes
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
from mpcore.layers.attention.scores import (
    AttentionSinks,
    alibi_bias,
    check_bias,
    check_scores_mask,
    scored_attention,
)
from mpcore.layers.attention.sequence import KINDS, check_kind, sequence_index
from mpcore.layers.linear import ColumnParallelLinear, KVParallelLinear, QKVParallelLinear, RowParallelLinear
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
        num_heads, local_heads: query heads, of all ranks and of this one.
        kv_repeats: how many query heads each KV head serves, where those are unequal.
        alibi, sinks, memory_dim: of a subclass that has them.
    """

    num_heads: int
    local_heads: int
    kv_repeats: list[int] | None = None
    alibi: bool = False
    sinks: AttentionSinks | None
    memory_dim: int | None = None
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
        self.scale, self.softcap, self.impl, self.sinks = scale, softcap, impl, None

    def heads(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, T/cp, heads, width] of the layer's input, rotated where there is a `rope`."""
        raise NotImplementedError

    def cross_heads(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the layer's input, keys and values of `memory`, where there is a `memory_dim`."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        rotary: tuple[Tensor, Tensor] | None = None,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        length: int | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """[B, T/cp, D] -> [B, T/cp, D] (dimensions 0 and 1 exchanged with `sequence_dim` 0).

        Args:
            memory: [B, S, memory_dim], for a layer with `memory_dim`: keys and values are made of it. With sequence
                parallel it is this rank's shard, as x is.
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
                `cu_seqlens`) let it see. Takes memory T^2. Under cp "alltoall" and "allgather" support it. With a
                `memory` it is [T, S], [B, T, S] or [B, 1, S].
            bias: [H, T, T] or [B, H, T, T] (with a `memory`, S keys), added to the scores after the soft cap. It has
                all H heads, the same on every rank of tp, and gets its whole gradient; or it has this rank's heads, as
                a `ColumnParallelEmbedding` makes them. Takes memory T^2. Hide keys with `mask`: a row of -inf is NaN.

        Raises:
            ValueError: before any collective, if an argument doesn't fit x, this layer or cp.
        """
        if memory is None and self.memory_dim is None:
            whole = self._whole_length(x, cu_seqlens, length, mask, bias)
            if self.rope is None:
                rotary = None
            elif rotary is None:
                if positions is None:
                    positions = sequence_index(whole, self.cp, self.context, x.device)
                    if cu_seqlens is not None:
                        rows = x.shape[1 if self.sequence_dim == 0 else 0]
                        positions = document_positions(cu_seqlens, rows, whole, x.device)[:, positions]
                rotary = self.rope(positions, torch.promote_types(x.dtype, torch.float32))
            q, k, v = self.heads(x, rotary)
        else:
            whole = self._memory_length(x, memory, cu_seqlens, mask, bias)
            assert memory is not None
            q, k, v = self.cross_heads(x, memory)
        y = self.core(q, k, v, cu_seqlens, whole, mask, bias)
        y = y.flatten(2)  # b t h v -> b t (h v)
        return self.output(y.transpose(0, 1) if self.sequence_dim == 0 else y)

    def _rows_and_tokens(self, x: Tensor, name: str = "x") -> tuple[int, int]:
        """B, and the tokens on all ranks of tp."""
        if x.dim() != 3:
            raise ValueError(
                f"{name} has {x.dim()} dimensions, but attention takes [B, T, D]: unsqueeze(0) one sequence, "
                f"flatten(1, -2) a grid of tokens"
            )
        tokens, B = x.shape[:2] if self.sequence_dim == 0 else (x.shape[1], x.shape[0])
        return B, tokens * self.tp.size if self.sequence_parallel else tokens

    def _whole_length(
        self, x: Tensor, cu_seqlens: Tensor | None, length: int | None, mask: Tensor | None, bias: Tensor | None
    ) -> int:
        """T of the whole sequence, of which x is this rank's part; refuses what doesn't fit it."""
        B, T = self._rows_and_tokens(x)
        if cu_seqlens is not None:
            check_ends(cu_seqlens)
        if mask is not None or bias is not None:
            self._check_scores(bias, B, T, T)
            if mask is None:
                return T
            check_mask(mask, B, T, self.context, self.cp)
            return mask.shape[-1]
        if length is None and cu_seqlens is not None and self.cp.size > 1 and can_read(cu_seqlens):
            length = _length_from_documents(
                int(cu_seqlens[-1]), x.shape[self.sequence_dim], B, self.cp, self.tp if self.sequence_parallel else None
            )
        return T * self.cp.size if length is None else length

    def _memory_length(
        self, x: Tensor, memory: Tensor | None, cu_seqlens: Tensor | None, mask: Tensor | None, bias: Tensor | None
    ) -> int:
        """S of the memory; refuses what doesn't fit it."""
        if self.memory_dim is None:
            raise ValueError("this layer attends to x alone: build it with memory_dim, the width of `memory`")
        if memory is None:
            raise ValueError(
                f"this layer needs a `memory` [B, S, {self.memory_dim}], of which it makes keys and values"
            )
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens packs documents of x, and `memory` has its own: give a mask [B, T, S]")
        (B, T), (rows, keys) = self._rows_and_tokens(x), self._rows_and_tokens(memory, "memory")
        if rows != B or memory.shape[-1] != self.memory_dim:
            raise ValueError(
                f"memory {tuple(memory.shape)} has {rows} rows of width {memory.shape[-1]}, but x has {B} rows and "
                f"memory_dim is {self.memory_dim}"
            )
        self._check_scores(bias, B, T, keys)
        if mask is not None:
            check_scores_mask(mask, B, T, keys)
        return keys

    def _check_scores(self, bias: Tensor | None, rows: int, queries: int, keys: int) -> None:
        if self.impl is not None:
            raise ValueError(f"a mask or a bias goes through torch's attention: leave out impl {self.impl!r}")
        if bias is not None:
            if self.cp.size > 1:
                raise ValueError(
                    f"a bias can't follow tokens over {self.cp.name} size {self.cp.size}: use rope, or cp 1"
                )
            check_bias(bias, rows, (self.num_heads, self.local_heads), queries, keys)

    def core(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor | None,
        length: int,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """softmax(scale q k^T) v: q [B, T/cp, H/tp, K], k and v of KV heads, v [..., V] -> [B, T/cp, H/tp, V]."""
        if self.kv_repeats is not None:
            k, v = (_repeat_heads(t, self.kv_repeats) for t in (k, v))
        cu_seqlens = cu_seqlens if q.shape[0] else None  # no rows have no documents
        if mask is not None or bias is not None or self.alibi:
            return self._scored(q, k, v, cu_seqlens, length, mask, bias)
        how = {"causal": self.causal, "window": self.window, "softcap": self.softcap, "impl": self.impl}
        if self.cp.size > 1:
            how |= {"cu_seqlens": cu_seqlens, "length": length, "scale": self.scale}
            return context_attention(q, k, v, self.context, self.cp, **how)
        plain = self.impl is None and self.window is None and self.softcap is None and self.sinks is None
        if not plain or cu_seqlens is not None:
            cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(q.device, non_blocking=True)
            return packed_attention(q, k, v, cu_seqlens=cu_seqlens, scale=self.scale, sinks=self.sinks, **how)
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

    def _scored(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor | None,
        length: int,
        mask: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        """`core` where scores have more than one run of keys says."""
        if self.causal or cu_seqlens is not None:
            see = visible_keys(q.shape[0], length, q.device, cu_seqlens, self.causal, self.window)
            mask = see if mask is None else mask & see
        scores: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}
        if self.cp.size > 1:
            assert mask is not None
            return masked_attention(q, k, v, mask, self.context, self.cp, **scores)
        if bias is not None and bias.shape[-3] != self.local_heads:
            bias = collectives.split(bias, self.tp, -3)
        if self.alibi:
            heads, queries = range(*shard_range(self.num_heads, self.tp)), range(length - q.shape[1], length)
            distance = alibi_bias(heads, self.num_heads, queries, length, q)
            bias = distance if bias is None else distance + bias
        return scored_attention(q, k, v, mask=mask, bias=bias, **scores)


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
    """Multi-head, grouped-query or multi-query attention; each rank computes its share of the query heads.

    Args:
        dim: D, the model width.
        num_heads: H, logical; at least the tp size, shards may be uneven.
        num_kv_heads: KV heads; None: H. Fewer than the tp size are replicated as needed.
        head_dim: K; None: D / H.
        bias: biases of the projections.
        output_bias: that of the output projection; None: as `bias`.
        qk_norm: RMSNorm of each query and key head, before the rotation.
        norm_eps: of that norm.
        alibi: add minus the distance of query and key to the scores, times a fixed slope of each head. Takes memory
            T^2.
        sinks: one learned logit a head takes part in the softmax, and has no value.
        memory_dim: cross-attention: keys and values are made of the `memory` [B, S, memory_dim] given to `forward`.
            Then each token sees all of it, and `causal` is False.
        options: rope, causal, window, softcap, impl, context, cp: see `HeadOptions`; tp, sequence_parallel,
            sequence_dim, init, device, dtype: see `LayerOptions`; output_init fills the output projection's weight.

    Raises:
        ValueError: if D isn't a multiple of H and no head_dim is given, a window is asked of a full mask,
            `context` is unknown, missing, or can't cut these heads over cp, or two options can't go together: cp has
            no alibi, sinks or memory, and a memory has no causal mask, rope or alibi.

    Note:
        - Twelve parameters: the sizes of the layer, and what changes its scores.

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
        super().__init__(head_dim, **pick(options, HeadOptions))
        self.num_heads, self.memory_dim, self.alibi = num_heads, memory_dim, alibi
        if self.cp.size > 1 and (alibi or sinks or memory_dim is not None):
            what = "alibi" if alibi else "sinks" if sinks else "memory_dim"
            raise ValueError(f"{what} can't go with {self.cp.name} size {self.cp.size}: take cp 1 and a larger tp")
        if alibi and self.impl is not None:
            raise ValueError(f"alibi goes through torch's attention: leave out impl {self.impl!r}")
        layer = pick(options, LayerOptions)
        heads = (num_heads, num_kv_heads or num_heads, head_dim, bias)
        # Each may be wrapped, as LoRA does, or be any other module of that output.
        if memory_dim is None:
            projection = self.qkv = QKVParallelLinear(dim, *heads, **layer)
        else:
            self.q = ColumnParallelLinear(dim, num_heads * head_dim, bias, unit=head_dim, **layer)
            projection = self.kv = KVParallelLinear(memory_dim, *heads, **layer)
        self.local_heads, self.local_kv_heads = projection.local_heads, projection.local_kv_heads
        sizes = [len(list(same)) for _, same in groupby(projection.kv_head_of)]  # query heads of each KV head
        self.kv_repeats = sizes if len(set(sizes)) > 1 else None  # uneven shards: groups of unequal sizes
        output_bias = bias if output_bias is None else output_bias
        layer = pick(layer, LayerOptions, init=options.get("output_init"))
        self.output = RowParallelLinear(num_heads * head_dim, dim, output_bias, unit=head_dim, **layer)
        check_heads(self.context, self.cp, self.local_heads)
        self.q_norm = self.k_norm = None
        if qk_norm:  # one weight for all heads, of which this rank sees its own: its gradient is one term of a sum
            norm: dict[str, Any] = {"partial": (self.tp,), **pick(options, TensorOptions)}
            self.q_norm, self.k_norm = RMSNorm(head_dim, norm_eps, **norm), RMSNorm(head_dim, norm_eps, **norm)
        if sinks:
            self.sinks = AttentionSinks(num_heads, tp=self.tp, **pick(options, TensorOptions))

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

    def cross_heads(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x to this rank's queries and `memory` to its keys and values; normalize q and k where asked."""
        q, kv = self.q(x), self.kv(memory)
        if self.sequence_dim == 0:
            q, kv = q.transpose(0, 1), kv.transpose(0, 1)
        q, kv = (t.unflatten(2, (-1, self.head_dim)) for t in (q, kv))
        k, v = kv.chunk(2, 2)
        return q if self.q_norm is None else self.q_norm(q), k if self.k_norm is None else self.k_norm(k), v


def _is_rms_norm(norm: torch.nn.Module) -> bool:
    """Whether the fused rotation computes this norm: a user may have put one of their own in its place."""
    return type(norm).forward is RMSNorm.forward and "forward" not in vars(norm)


def _repeat_heads(x: Tensor, repeats: list[int]) -> Tensor:
    """Repeat head i `repeats[i]` times; without an index tensor, which would be copied to the GPU each time."""
    heads = zip(x.split(1, dim=2), repeats, strict=True)
    return torch.cat([head.expand(-1, -1, n, -1) for head, n in heads], dim=2)
