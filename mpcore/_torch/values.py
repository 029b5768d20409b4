"""Tensors without values, as torch traces with. Checked with torch 2.11 and 2.13: no difference."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily


def has_values(x: Tensor) -> bool:
    """Return whether a tensor has values. Meta and fake tensors have a shape, a dtype and a device only."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def real_tensors() -> AbstractContextManager[object]:
    """Return a context in which new tensors have values, also inside of `fake_tensors`."""
    return unset_fake_temporarily()
