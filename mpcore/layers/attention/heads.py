"""The base class of all attention layers: attention of this rank's heads over the full sequence, and its options."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from mpcore import collectives
from mpcore.collectives import shard_range, shard_sizes
from mpcore.kernels._checks import can_read
from mpcore.kernels._dispatch import runs_triton
from mpcore.kernels.attention import check_ends, key_bounds
from mpcore.layers.attention.cache import KVCache
from mpcore.layers.attention.context import check_mask, context_attention, masked_attention, packed_attention
from mpcore.layers.attention.documents import document_positions, visible_keys
from mpcore.layers.attention.scores import AttentionSinks, alibi_bias, check_bias, check_scores_mask, scored_attention
from mpcore.layers.attention.sequence import KINDS, check_kind, sequence_index
from mpcore.layers.linear import RowParallelLinear
from mpcore.layers.module import Init, LayerOptions, ParallelLayer, TensorParallelOptions, input_error
from mpcore.layers.rope import RotaryEmbedding
from mpcore.mesh.agreement import together
from mpcore.mesh.axis import Axis, check_axis


class HeadOptions(TensorParallelOptions, total=False):
    """Keyword arguments of every attention layer, except those of its projections.

    Attributes:
        rope: the `RotaryEmbedding`; None: no rotation.
        causal: each token sees itself and earlier tokens. False: each token sees its whole document.
        window: with `causal`, the number of tokens that each token sees, including itself; None: no limit.
        softcap: c, replaces each score s by c tanh(s / c); None: no soft cap.
        impl: `"triton"`, `"torch"` or `"reference"` of `mpcore.kernels.attention`. None: torch's
            `scaled_dot_product_attention` for causal and full masks without cp, and the device's default otherwise.
        context: how queries reach keys of other cp ranks: "alltoall", "ring", "zigzag", "allgather" or "two-level" (see
            `mpcore.layers.attention.context`). Required if cp has more than one rank.
        cp: the context-parallel axis. Input and output are the tokens that `shard_sequence(..., cp, context)` gives
            this rank. Sequence parallelism shards these tokens again over tp.
    """

    rope: RotaryEmbedding | None
    causal: bool
    window: int | None
    softcap: float | None
    impl: str | None
    context: str | None
    cp: Axis


class AttentionOptions(HeadOptions, LayerOptions, total=False):
    """Keyword arguments of every attention layer: `HeadOptions`, `LayerOptions` and `output_init`.

    Attributes:
        output_init: fills the weight of the output projection; None: use `init`.
    """

    output_init: Init | None


class HeadAttention(ParallelLayer):
    """Attention of this rank's heads over the full sequence. A subclass computes q, k and v and defines `output`.

    Args:
        head_dim: K, the width of queries and keys.
        scale: factor on the scores; None: K^(-1/2).
        others: the other fields of `HeadOptions`.

    Attributes:
        num_heads, local_heads: the number of query heads of the unsharded layer, and of this rank.
        kv_repeats: how many query heads each local KV head serves; None if all serve the same number.
        alibi, sinks, memory_dim: see `ParallelAttention`. A subclass without them leaves the defaults.
    """

    exchanges_tokens = True
    num_heads: int
    local_heads: int
    kv_repeats: list[int] | None = None
    alibi: bool = False
    sinks: AttentionSinks | None
    memory_dim: int | None = None
    output: RowParallelLinear

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
        self.context: str = context or "ring"
        self.cp = cp
        self.head_dim = head_dim
        self.causal = causal
        self.window = window
        self.rope = rope
        self.scale = scale
        self.softcap = softcap
        self.impl = impl
        self.sinks = None

    def heads(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [B, T/cp, heads, width] of the layer's input, after RoPE if there is one."""
        raise NotImplementedError

    def cross_heads(self, x: Tensor, memory: Tensor | None, cache: KVCache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries of the input, and keys and values of `memory` (or of the cache). Only with `memory_dim`."""
        raise NotImplementedError

    def new_cache(self, max_length: int) -> KVCache:
        """Create an empty cache for decoding.

        Args:
            max_length: the largest number of tokens, including the prompt. For a cross-attention layer: tokens of the
                memory.

        Raises:
            ValueError: if the layer is not causal, cp has more than one rank, or sequence parallelism is on.
        """
        self._refuse_cache()
        return KVCache(max_length)

    def _refuse_cache(self) -> None:
        if not self.causal and self.memory_dim is None:
            raise ValueError("a cache needs causal=True: here earlier tokens would see the later ones too")
        if self.cp.size > 1:
            raise ValueError(f"a cache needs cp 1, not {self.cp.size}: load the weights into a model with a larger tp")
        if self.sequence_parallel:
            raise ValueError(
                f"a cache needs sequence_parallel=False, as tp {self.tp.size} can't shard one token: load the weights "
                f"into a model built without it"
            )

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
        cache: KVCache | None = None,
    ) -> Tensor:
        """[B, T/cp, D] -> [B, T/cp, D]. With `sequence_dim=0`: [T/cp, B, D] -> [T/cp, B, D].

        Args:
            memory: [B, S, memory_dim], the input of keys and values in a layer with `memory_dim`. With sequence
                parallelism it is this rank's shard of the S tokens.
            rotary: the result of `rope(positions)`. Pass it to compute the table once for all blocks.
            positions: [T/cp] or [B, T/cp], the positions for RoPE. None: 0 .. T-1, restarting in each document.
            cu_seqlens: [n + 1] document ends from 0 to B T, counted over the concatenated full rows; the same on every
                rank of tp and cp. Tokens see only their own document. `document_ends` computes it. With cp keep it in
                CPU memory: keys that no query sees are then not sent.
            length: T, needed if the shards of cp are uneven. None: T is taken from `cu_seqlens` if that is in CPU
                memory; otherwise every rank has as many tokens as this one.
            mask: bool [T, T], [B, T, T] or [B, 1, T] (a padding mask over keys), the same on every rank of tp and cp.
                True lets a query (row) see a key. With a `memory`: [T, S], [B, T, S] or [B, 1, S]. The mask is combined
                (and) with `causal`, `window` and `cu_seqlens`. A query that sees no key gets 0 and no gradient. Needs
                O(T^2) memory. With cp, only "alltoall" and "allgather" support masks.
            bias: [H, T, T] or [B, H, T, T], added to the scores after the soft cap. With a `memory` the last dimension
                is S. Pass all H heads, the same on every rank of tp: the gradient then covers all heads. Or pass this
                rank's heads, as `ColumnParallelEmbedding` returns them. Needs O(T^2) memory. Hide keys with `mask`,
                because a row of -inf gives NaN.
            cache: a `KVCache` from `new_cache`. x continues the tokens in the cache, sees them, and is appended.
                Positions continue from the cache's length; masks and biases are over all keys: [T, past + T]. For a
                cross-attention layer the cache holds one memory: give it in the first call, and leave it out later. A
                call with a `memory` replaces it.

        Raises:
            ValueError: before any collective, if an argument doesn't fit x, this layer or cp.
        """
        past = 0 if cache is None else self._check_cache(x, cache, memory, cu_seqlens, length)
        given = [name for name, value in (("rotary", rotary), ("positions", positions)) if value is not None]
        if given and (self.rope is None or memory is not None or self.memory_dim is not None):
            raise ValueError(
                f"{given[0]} is given to an attention that doesn't rotate: pass no {given[0]}, or make it with "
                "rope=RotaryEmbedding(..) and without memory"
            )
        if len(given) > 1:
            raise ValueError("rotary and positions are given, but rotary is already that of positions: pass one")
        if memory is None and self.memory_dim is None:
            whole = self._whole_length(x, cu_seqlens, length, mask, bias, past)
            if self.rope is not None and rotary is None:
                if positions is None:
                    positions = sequence_index(whole, self.cp, self.context, x.device)[past:]
                    if cu_seqlens is not None:
                        rows = x.shape[1 - self.sequence_dim]
                        positions = document_positions(cu_seqlens, rows, whole, x.device)[:, positions]
                rotary = self.rope(positions, torch.promote_types(x.dtype, torch.float32))
            q, k, v = self.heads(x, rotary)
            if cache is not None:
                k, v = cache.append(k, v)
        else:
            whole = past if past and self.memory_dim else self._memory_length(x, memory, cu_seqlens, length)
            self._check_scores(x, mask, bias, whole)
            q, k, v = self.cross_heads(x, memory, cache)
        return self.output(self.merge_heads(self.core(q, k, v, cu_seqlens, whole, mask, bias), x))

    def merge_heads(self, y: Tensor, x: Tensor) -> Tensor:
        """Return the heads [B, T, H/tp, V] of the layer's input x as the output projection's input."""
        return rearrange(y, "b t h v -> t b (h v)" if self.sequence_dim == 0 else "b t h v -> b t (h v)")

    def _rows_and_tokens(self, x: Tensor, name: str = "x") -> tuple[int, int]:
        """Return B, and the number of tokens over all ranks of tp."""
        if x.dim() != 3:
            raise input_error(
                f"{name} has {x.dim()} dimensions, but attention takes [B, T, D]: unsqueeze(0) one sequence, "
                f"flatten(1, -2) a grid of tokens"
            )
        tokens, B = x.shape[:2] if self.sequence_dim == 0 else (x.shape[1], x.shape[0])
        return B, tokens * self.tp.size if self.sequence_parallel else tokens

    def _check_cache(
        self, x: Tensor, cache: KVCache, memory: Tensor | None, cu_seqlens: Tensor | None, length: int | None
    ) -> int:
        """Return the number of tokens in the cache; raise ValueError if it can't take the new ones."""
        self._refuse_cache()
        if cu_seqlens is not None or length is not None:
            raise input_error("a cache has one sequence a row: give no cu_seqlens or length; pad, and give a mask")
        B, T = self._rows_and_tokens(x)
        if self.memory_dim is not None:
            cache.length = cache.length if memory is None else 0
            T = 0 if memory is None else memory.shape[self.sequence_dim]
        cache.check(self, B, T)
        return cache.length

    def _whole_length(
        self, x: Tensor, cu_seqlens: Tensor | None, length: int | None, mask: Tensor | None, bias: Tensor | None,
        past: int,
    ) -> int:  # fmt: skip
        """Return T of the full sequence; raise ValueError if x or another argument doesn't fit it."""
        B, T = self._rows_and_tokens(x)
        if cu_seqlens is not None:
            check_ends(cu_seqlens)
        if mask is not None or bias is not None or self.cp.size == 1:
            self._check_scores(x, mask, bias, past + T)
            whole = past + T if mask is None else mask.shape[-1]
            if length not in (None, whole):
                raise input_error(f"length is {length}, but the whole sequence has {whole} tokens: leave length out")
            return whole
        if length is None and cu_seqlens is not None and can_read(cu_seqlens):
            length = _length_from_documents(
                int(cu_seqlens[-1]), x.shape[self.sequence_dim], B, self.cp, self.tp if self.sequence_parallel else None
            )
        return T * self.cp.size if length is None else length

    def _memory_length(self, x: Tensor, memory: Tensor | None, cu_seqlens: Tensor | None, length: int | None) -> int:
        """Return S of the memory; raise ValueError if the memory doesn't fit x or the layer."""
        if self.memory_dim is None:
            raise input_error("this layer attends to x alone: build it with memory_dim, the width of `memory`")
        if memory is None:
            raise input_error(f"this layer makes keys and values of a `memory` [B, S, {self.memory_dim}]: give it")
        if cu_seqlens is not None or length is not None:
            raise input_error("cu_seqlens and length are of x, and not of a `memory`: give a mask [B, T, S]")
        (B, _), (rows, keys) = self._rows_and_tokens(x), self._rows_and_tokens(memory, "memory")
        if rows != B or memory.shape[-1] != self.memory_dim:
            raise input_error(
                f"memory {tuple(memory.shape)} has {rows} rows of width {memory.shape[-1]}, but x has {B} rows and "
                f"memory_dim is {self.memory_dim}"
            )
        return keys

    def _check_scores(self, x: Tensor, mask: Tensor | None, bias: Tensor | None, keys: int) -> None:
        """Raise ValueError if a mask or a bias doesn't fit x and `keys` keys, or this layer does not support it."""
        B, T = self._rows_and_tokens(x)
        if self.impl is not None and (mask is not None or bias is not None):
            raise input_error(f"a mask or a bias goes through torch's attention: leave out impl {self.impl!r}")
        if bias is not None:
            if self.cp.size > 1:
                raise input_error(f"a bias can't go with {self.cp.name} size {self.cp.size}: use rope, or cp 1")
            check = partial(check_bias, bias, B, (self.num_heads, self.local_heads), T, keys)
            if self.num_heads % self.tp.size and not torch.compiler.is_compiling():
                together(self.tp, check)  # it may fit some ranks' heads alone
            else:
                check()
        if mask is not None and keys == T and self.memory_dim is None:
            check_mask(mask, B, T, self.context, self.cp)
        elif mask is not None:
            check_scores_mask(mask, B, T, keys)

    def core(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, length: int, mask: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """softmax(scale q k^T) v: queries [B, T/cp, H/tp, K] -> [B, T/cp, H/tp, V], with this rank's KV heads."""
        if self.kv_repeats is not None:
            k, v = (_repeat_heads(t, self.kv_repeats) for t in (k, v))
        cu_seqlens = cu_seqlens if q.shape[0] else None  # no rows have no documents
        if mask is not None or bias is not None or self.alibi:
            return self._scored(q, k, v, cu_seqlens, length, mask, bias)
        how = {"causal": self.causal, "window": self.window, "softcap": self.softcap, "impl": self.impl}
        if self.cp.size > 1:
            how |= {"cu_seqlens": cu_seqlens, "length": length, "scale": self.scale}
            return context_attention(q, k, v, self.context, self.cp, **how)
        if self.causal and q.shape[1] < k.shape[1]:
            return self._decode(q, k, v, **how)
        plain = self.impl is None and self.window is None and self.softcap is None and self.sinks is None
        triton = plain and runs_triton(None, q, "plain_attention")
        if triton or not plain or cu_seqlens is not None:
            cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(q.device, non_blocking=True)
            return packed_attention(q, k, v, cu_seqlens=cu_seqlens, scale=self.scale, sinks=self.sinks, **how)
        grouped = q.shape[2] > k.shape[2]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        options = {"is_causal": self.causal, "scale": self.scale, "enable_gqa": grouped}
        K, V = q.shape[-1], v.shape[-1]
        if V < K and v.device.type == "cpu":
            # The CPU's fused kernel needs equal widths, and its other kernel O(T^2) memory: pad v. On a GPU, cuDNN
            # (widths 192 and 128, on Hopper and later, tried first) and the memory-efficient kernel take a narrow v.
            y = F.scaled_dot_product_attention(q, k, F.pad(v, (0, K - V)), **options)[..., :V]
        else:
            y = F.scaled_dot_product_attention(q, k, v, **options)
        return y.transpose(1, 2)

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        if q.shape[1] == 1 and self.impl is None:  # it sees all keys, or those in its window
            k, v = (t if self.window is None else t[:, -self.window :] for t in (k, v))
            return scored_attention(q, k, v, scale=self.scale, softcap=self.softcap, sinks=self.sinks)
        low, high = key_bounds(k.shape[1], causal=True, window=self.window, device=q.device)
        how |= {"bounds": (low[-q.shape[1] :], high[-q.shape[1] :]), "window": None}
        return packed_attention(q, k, v, cu_seqlens=None, scale=self.scale, sinks=self.sinks, **how)

    def _scored(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, length: int, mask: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Compute `core` with a mask, a bias or ALiBi, where a query does not simply see one run of keys."""
        if self.causal or cu_seqlens is not None:
            see = visible_keys(q.shape[0], length, q.device, cu_seqlens, self.causal, self.window)
            if self.cp.size == 1:
                see = see[:, length - q.shape[1] :]  # the last tokens alone, behind a cache
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


def _length_from_documents(end: int, tokens: int, B: int, cp: Axis, tp: Axis | None) -> int | None:
    """Return the length that `cu_seqlens` ends with, or None. Raise ValueError if this rank's share isn't `tokens`."""
    if B == 0:
        return None
    mine = shard_sizes(length := end // B, cp.size)[cp.rank]
    if tp is not None:
        mine = shard_sizes(mine, tp.size)[tp.rank]
    if mine != tokens:
        raise input_error(
            f"cu_seqlens ends at {end}, so rank {cp.rank} of {cp.name} {cp.size} holds {mine} tokens of each of {B} "
            f"rows, but x has {tokens}: give the cu_seqlens of the whole sequence, and x as shard_sequence cuts it"
        )
    return length


def _repeat_heads(x: Tensor, repeats: list[int]) -> Tensor:
    """Repeat head i `repeats[i]` times. Uses no index tensor, which would be copied to the GPU in each call."""
    return torch.cat([head.expand(-1, -1, n, -1) for head, n in zip(x.split(1, 2), repeats, strict=True)], dim=2)
