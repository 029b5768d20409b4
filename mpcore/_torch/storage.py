"""The memory of a tensor. Checked with torch 2.11 and 2.13: no difference.

Views share a storage. `StorageWeakRef` is a weak reference to one: while the reference exists, no other storage gets
the same address.
"""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["StorageWeakRef", "address", "alive", "holders"]


def address(storage: torch.UntypedStorage) -> int:
    """Return a number that no other living storage has."""
    return storage._cdata


def alive(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """Return the storage of a weak reference, or None if its memory is freed."""
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def holders(x: torch.Tensor) -> int:
    """Return the number of tensors that share the memory of `x`, including those that autograd saved."""
    storage = x.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # minus `storage` itself
