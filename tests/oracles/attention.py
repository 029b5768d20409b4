"""Attention written out: a mask, one pair of tokens at a time, and a softmax over the keys that are seen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sees(
    T: int,
    causal: bool = True,
    window: int | None = None,
    ends: Sequence[int] | Tensor | None = None,
    keys: int | None = None,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the mask [T, keys] of packed documents with these ends, or of each query's `bounds` alone."""

    def is_seen(q: int, k: int) -> bool:
        if bounds is not None:
            return bool(bounds[0][q] <= k < bounds[1][q])
        alike = ends is None or sum(int(end) <= q for end in ends) == sum(int(end) <= k for end in ends)
        return alike and (not causal or k <= q) and (window is None or q - k < window)

    keys = T if keys is None else keys
    return torch.tensor([[is_seen(q, k) for k in range(keys)] for q in range(T)], dtype=torch.bool).view(T, keys)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    see: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, T, H, V] and the log of the softmax's denominator [B, H, T]; 0 of what sees nothing.

    Args:
        query, key, value: [B, T, H, K], [B, S, G, K] and [B, S, G, V].
        see: which keys a query sees, broadcast to [B, H, T, S].
        scale: of the scores; None: K^-1/2.
        softcap: the largest score.
        bias: added to the scores, broadcast to [B, H, T, S].
        sinks: a score of each head [H] that no value belongs to.
    """
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (key, value))
    z = torch.einsum("bihk,bjhk->bhij", query, key) * (query.shape[3] ** -0.5 if scale is None else scale)
    z = (softcap * torch.tanh(z / softcap) if softcap else z) + bias
    e = torch.where(see, z.exp(), 0)
    total = e.sum(-1) + (0 if sinks is None else sinks.exp()[:, None])
    total = torch.where(total == 0, 1, total)
    return torch.einsum("bhij,bjhv->bihv", e / total.unsqueeze(-1), value), total.log()
