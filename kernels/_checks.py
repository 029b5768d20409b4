"""Checks of inputs: each raises `ValueError` with what was given and what is needed."""

from __future__ import annotations

import torch
from torch import Tensor

from ._torch import is_tracing

REFERENCE_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


def check_inputs(x: Tensor, residual: Tensor | None = None, **columns: Tensor | None) -> None:
    """Raise `ValueError` unless every input fits `x` `[..., D]`: the residual `[..., D]`, each column `[D]`."""
    if x.dim() == 0:
        raise ValueError("x is a scalar; it needs at least one dimension")
    check_dtype("x", x.dtype)
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}, but x has {tuple(x.shape)}")
    for name, column in columns.items():
        if column is not None and column.shape != x.shape[-1:]:
            raise ValueError(f"{name} has shape {tuple(column.shape)}, but the last dimension of x is {x.shape[-1]}")
    check_beside("x", x, residual=residual, **columns)


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise `ValueError` unless the references compute in the dtype."""
    if dtype not in REFERENCE_DTYPES:
        raise ValueError(f"{name} is {dtype}; it must be float64, float32, bfloat16 or float16")


def check_beside(of: str, x: Tensor, **others: Tensor | None) -> None:
    """Raise `ValueError` unless the others fit the device and the dtype of `x`, which is named `of`."""
    for name, other in others.items():
        if other is None:
            continue
        if other.device != x.device:
            raise ValueError(f"{name} is on {other.device}, but {of} is on {x.device}")
        if other.dtype not in REFERENCE_DTYPES or (other.dtype == torch.float64) > (x.dtype == torch.float64):
            raise ValueError(f"{name} is {other.dtype}, which does not go with {of} of {x.dtype}")


def check_shapes(**tensors: tuple[Tensor | None, str]) -> dict[str, int]:
    """Raise `ValueError` unless tensors have the shapes that their letters spell; return the size of each letter.

    `check_shapes(x=(x, "N D"), weight=(weight, "V D"))` returns N, D and V. A tensor that is `None` fits.
    """
    sizes: dict[str, int] = {}
    for x, letters in tensors.values():
        if x is None:
            continue
        names = letters.split()
        fits = x.dim() == len(names)
        for name, size in zip(names, x.shape, strict=False):
            fits = fits and sizes.setdefault(name, size) == size
        if not fits:
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, (x, _) in tensors.items() if x is not None)
            wanted = ", ".join(f"[{letters.replace(' ', ', ')}]" for x, letters in tensors.values() if x is not None)
            raise ValueError(f"{shapes} are not {wanted}")
    return sizes


def can_read(ids: Tensor) -> bool:
    """Return whether the values of `ids` can be read now: on a CPU, in no graph that is traced, and in no dry run."""
    known = type(ids) is Tensor and ids.device.type == "cpu" and ids.numel() > 0
    return known and not torch.compiler.is_compiling() and not is_tracing()


def outside(ids: Tensor, size: int, ignore_index: int | None = None) -> int | None:
    """Return one index that is neither in [0, size) nor `ignore_index`; `None` if none is, or if none can be read."""
    if not can_read(ids):
        return None
    if ignore_index is not None:
        ids = ids.masked_fill(ids == ignore_index, 0)
    low, high = ids.aminmax()
    return int(low) if low < 0 else int(high) if high >= size else None
