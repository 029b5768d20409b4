"""Optional tensors as launches pass them to kernels, contiguous or with the strides of heads; `None` stays `None`."""

from __future__ import annotations

from torch import Tensor


def contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return the tensors contiguous."""
    return [None if t is None else t.contiguous() for t in tensors]


def by_heads(*tensors: Tensor | None) -> tuple[list[Tensor | None], list[int]]:
    """Return tensors `[B, T, H, K]`, copied where K is not contiguous, and the strides of B, T and H of each."""
    tensors = tuple(t if t is None or t.stride(3) == 1 else t.contiguous() for t in tensors)
    return list(tensors), [0 if t is None else t.stride(dim) for t in tensors for dim in range(3)]
