"""Floor 2: randomness that no layout changes.

Nothing here has a state. A parameter's first value depends on (seed, its full name), a dropout mask on (seed, the
module's full name, global sample index, token index, feature index): which rank computes it, and when, is no part
of it. So recomputation needs no saved generator, and there is nothing to restore on resume.

Source: Philox4x32-10, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3 and table 2.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def stream_key(seed: int, name: str) -> int:
    """A 63-bit key for the stream called `name`: by a hash, so that no two names fall together as sums of ranks do."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator for the stream called `name`."""
    return torch.Generator().manual_seed(stream_key(seed, name))


def philox(key: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of a 64-bit key and a counter of four words.

    Args:
        key: 64 bits, the low word first.
        c0, c1, c2, c3: int64 tensors with values in [0, 2^32), shapes that broadcast.

    Returns:
        Four int64 tensors of the broadcast shape, uniform in [0, 2^32).
    """
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # int64 wraps, and the low 64 bits are right
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    shape = torch.broadcast_shapes(c0.shape, c1.shape, c2.shape, c3.shape)
    return c0.expand(shape), c1.expand(shape), c2.expand(shape), c3.expand(shape)


def random_words(key: int, samples: Tensor, tokens: Tensor, features: range) -> Tensor:
    """One random word for each element of an activation, from the element's global place alone.

    Feature d is word d % 4 of the counter (d // 4, token, low word of sample, high word of sample).

    Args:
        key: as `stream_key` gives it.
        samples: [B] int64, global sample index of each row of the batch.
        tokens: [T] int64, index in the sequence of each token.
        features: the run of feature indices.

    Returns:
        [B, T, len(features)] int64 in [0, 2^32).
    """
    first, last = features.start // 4, (features.stop + 3) // 4
    c0 = torch.arange(first, last, device=samples.device)
    words = philox(key, c0, tokens[:, None], samples[:, None, None] & _MASK, (samples[:, None, None] >> 32) & _MASK)
    flat = torch.stack(words, dim=-1).flatten(-2)
    return flat[..., features.start - 4 * first : features.stop - 4 * first]


def dropout(
    x: Tensor,
    p: float,
    *,
    key: int,
    samples: Tensor,
    tokens: Tensor | None = None,
    first_feature: int = 0,
) -> Tensor:
    """Dropout whose mask is the same for every layout, batch size and order of computation.

    Args:
        x: [B, T, D], any floating dtype; D may be this rank's run of the features.
        p: probability of zero, in [0, 1).
        key: as `stream_key` gives it.
        samples: [B] int64, global sample index of each row.
        tokens: [T] int64, index in the whole sequence of each token here; None: 0 .. T-1.
        first_feature: index of the first feature here.

    Returns:
        [B, T, D], the kept elements times 1 / (1 - p).
    """
    if not 0 <= p < 1:
        raise ValueError(f"dropout probability {p} is not in [0, 1)")
    if samples.shape != x.shape[:1]:
        raise ValueError(f"samples has shape {tuple(samples.shape)}, but x {tuple(x.shape)} has {x.shape[0]} rows")
    if p == 0:
        return x
    if tokens is None:
        tokens = torch.arange(x.shape[1], device=x.device)
    words = random_words(key, samples, tokens, range(first_feature, first_feature + x.shape[2]))
    keep = words >= int(p * 2**32)
    return x * keep.to(x.dtype) * (1 / (1 - p))
