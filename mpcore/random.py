"""Floor 2: randomness that no layout changes.

Nothing here has a state. A parameter's first value depends on (seed, its full name), a dropout mask on (seed, the
module's full name, global sample index, token index, feature index): which rank computes it, and when, is no part
of it. So recomputation needs no saved generator, and there is nothing to restore on resume.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from mpcore.kernels._philox import philox, random_words
from mpcore.kernels.dropout_add import dropout_add

__all__ = ["dropout", "generator", "philox", "random_words", "stream_key"]


def stream_key(seed: int, name: str) -> int:
    """A 63-bit key for the stream called `name`: by a hash, so that no two names fall together as sums of ranks do."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator for the stream called `name`."""
    return torch.Generator().manual_seed(stream_key(seed, name))


def dropout(
    x: Tensor, p: float, *, key: int, samples: Tensor, tokens: Tensor | None = None, first_feature: int = 0
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
    return dropout_add(x, None, p, key=key, samples=samples, tokens=tokens, first_feature=first_feature)
