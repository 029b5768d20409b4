"""Random words that depend only on the place of an element, drawn by torch and by Triton kernels.

Source: Philox4x32-10, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3 and table 2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ._dispatch import operator
from ._triton import tl, triton

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(key: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute Philox4x32-10 of a key of 64 bits, the low word first, and a counter of four words.

    Words are int64 tensors with values in [0, 2^32). The four results have the shape to which the counter broadcasts.
    """
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # int64 wraps; the low 64 bits are exact
        c0, c1, c2, c3 = (((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK)
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.broadcast_tensors(c0, c1, c2, c3)  # pyright: ignore[reportReturnType]


def random_words(key: int, samples: Tensor, tokens: Tensor, features: range) -> Tensor:
    """Draw one random word for each element of an activation; it depends only on the element's global place.

    Feature d is word d % 4 of the counter (d // 4, token, low word of sample, high word of sample).

    Args:
        key: 64 bits.
        samples: `[B]` int64, the global index of the sample in each row.
        tokens: `[T]` int64, the index of each token in its sequence, or `[B, T]` where rows differ.
        features: the run of feature indices.

    Returns:
        `[B, T, len(features)]` int64 in [0, 2^32).
    """
    return _words_op(samples, tokens, key if key < 2**63 else key - 2**64, features.start, features.stop)


# One operator, because Inductor's C++ computes wrong words for keys whose products overflow and can't take a symbolic
# key, and because a mode that inspects each operation, as selective recomputation does, would see 150 of them.
@operator("random_words(Tensor samples, Tensor tokens, SymInt key, SymInt start, SymInt stop) -> Tensor")
def _words_op(samples: Tensor, tokens: Tensor, key: int, start: int, stop: int) -> Iterator[Tensor]:
    out = samples.new_empty((samples.shape[0], tokens.shape[-1], stop - start))
    yield out
    first, last = start // 4, (stop + 3) // 4
    c0 = torch.arange(first, last, device=samples.device)
    words = philox(key, c0, tokens[..., None], samples[:, None, None] & _MASK, (samples[:, None, None] >> 32) & _MASK)
    out.copy_(torch.stack(words, dim=-1).flatten(-2)[..., start - 4 * first : stop - 4 * first])


def threshold_of(p: float) -> int:
    """Return the threshold: a word below it drops its element, with probability `p`."""
    return int(p * 2**32)


def as_int32(word: int) -> int:
    """Return the signed number with the same low 32 bits, so that kernels get every word in the same type."""
    return (word + 2**31) % 2**32 - 2**31


@triton.jit
def keep_mask(key_low, key_high, threshold, sample, token, counter):
    """Return [M, 4 C] booleans, true for kept elements, for samples (int64) and tokens [M, 1] and counters [1, C].

    Element 4 j + i takes word i of counter j. The key and the threshold are signed words of 32 bits.
    """
    key = (key_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | key_low.to(tl.uint32, bitcast=True).to(tl.uint64)
    c0, c1, c2 = counter.to(tl.uint32), token.to(tl.uint32), sample.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(key, c0, c1, c2, (sample >> 32).to(tl.uint32))  # pyright: ignore
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    words = tl.reshape(words, (words.shape[0], words.shape[1] * 4))
    return words >= threshold.to(tl.uint32, bitcast=True)
