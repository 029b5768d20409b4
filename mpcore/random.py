"""Random numbers that do not depend on the layout.

Nothing here has state. A parameter's initial value depends on (seed, its full name); a dropout mask depends on (seed,
the module's full name, global sample index, token index, feature index). The computing rank and the time do not
matter. Recomputation therefore needs no saved generator, and a resume has nothing to restore.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from mpcore.kernels._philox import philox, random_words
from mpcore.kernels.dropout_add import dropout_add

__all__ = ["dropout", "generator", "philox", "random_state", "random_words", "stream_key"]


def stream_key(seed: int, name: str) -> int:
    """Return a 63-bit key for the stream `name`. It is a hash, so two names do not collide as sums of ranks would."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator for the stream `name`."""
    return torch.Generator().manual_seed(stream_key(seed, name))


def random_state(device: torch.device) -> Tensor:
    """Return the state of torch's default generator of `device`: uint8, on the CPU."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def dropout(
    x: Tensor, p: float, *, key: int, samples: Tensor, tokens: Tensor | None = None, first_feature: int = 0
) -> Tensor:
    """Apply dropout whose mask is the same for every layout, batch size and order of computation.

    Args:
        x: [B, T, D], any floating dtype. D may be this rank's run of the features.
        p: probability of zeroing an element, in [0, 1).
        key: the stream's key, from `stream_key`.
        samples: int64 [B], the global sample index of each row.
        tokens: int64 [T], the position of each token in the full sequence; None: 0 .. T-1.
        first_feature: the index of the first local feature among all features.

    Returns:
        [B, T, D]: kept elements times 1 / (1 - p), the others 0.
    """
    return dropout_add(x, None, p, key=key, samples=samples, tokens=tokens, first_feature=first_feature)
