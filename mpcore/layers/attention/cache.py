"""The keys and values of past tokens, so that decoding computes each token once."""

from __future__ import annotations

import torch
from torch import Tensor

from mpcore.layers.module import input_error


class LayerCache:
    """Base of the caches: each belongs to the layer that it was first passed to."""

    _layer: int | None = None

    def check_layer(self, layer: torch.nn.Module, rows: int, held: Tensor | None) -> None:
        """Raise ValueError if the cache is another layer's, or the batch size of what it holds differs."""
        self._layer = id(layer) if self._layer is None else self._layer
        if self._layer != id(layer):
            raise input_error("this cache is another layer's: make one for each, by its new_cache")
        if held is not None and held.shape[0] != rows:
            raise input_error(f"the cache holds {len(held)} rows, but x has {rows}: choose them by cache.select")


class KVCache(LayerCache):
    """The keys and values of one attention layer, for this rank's KV heads, on the layer's device and in its dtype.

    Create a cache with `attention.new_cache(max_length)` and pass it to each call of that layer. The first call
    allocates it; each call appends its tokens.

    Args:
        max_length: the number of tokens of the longest sequence, including the prompt. For a cross-attention layer: the
            number of tokens of its memory.

    Attributes:
        length: the number of tokens held. Set it to a smaller number to drop the last tokens, as in speculative
            decoding.
        keys, values: [B, max_length, heads, width]; only the first `length` tokens are valid. None before the first
            call.

    Example:
        >>> attention = mpcore.ParallelAttention(16, num_heads=4, num_kv_heads=2)
        >>> cache, prompt = attention.new_cache(max_length=8), torch.randn(1, 5, 16)
        >>> with torch.inference_mode():
        ...     y, last = attention(prompt[:, :4], cache=cache), attention(prompt[:, 4:], cache=cache)
        >>> cache.length, torch.allclose(last, attention(prompt)[:, 4:], atol=1e-6)
        (5, True)
    """

    def __init__(self, max_length: int) -> None:
        if max_length < 1:
            raise ValueError(f"max_length {max_length} holds no token: give the tokens of the longest sequence")
        self.max_length = max_length
        self.length: int = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def check(self, layer: torch.nn.Module, rows: int, tokens: int) -> None:
        """Raise ValueError if the cache is another layer's, the batch size differs, or `max_length` is exceeded."""
        self.check_layer(layer, rows, self.keys)
        if self.length + tokens > self.max_length:
            raise input_error(
                f"{tokens} tokens after {self.length} don't fit a cache of max_length {self.max_length}: make it longer"
            )

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values [B, T, heads, width] of T tokens. Return those of all tokens, as views."""
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise input_error("a cache passes no gradients: decode under torch.inference_mode() or torch.no_grad()")
        if self.keys is None or self.values is None:
            self.keys, self.values = (t.new_zeros(t.shape[0], self.max_length, *t.shape[2:]) for t in (keys, values))
        start = self.length
        self.length = self.length + keys.shape[1]
        self.keys[:, start : self.length] = keys
        self.values[:, start : self.length] = values
        return self.held()

    def held(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all tokens held, as views."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[:, : self.length], self.values[:, : self.length]

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order. Use it to choose beams or to drop finished sequences."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]
