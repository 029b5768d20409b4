"""Count the bytes held in memory from the storages that are alive.

It works also on tensors without values, whose storages have the same sizes but no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mpcore._torch.dispatch import TorchDispatchMode
from mpcore._torch.storage import StorageWeakRef, address, alive
from mpcore.sharding.local import local_tensor


class StorageTracker(TorchDispatchMode):
    """Record every storage that operators make inside this context, and which of them are still alive.

    with StorageTracker() as storages:
        y = model(x)
    storages.held()  # bytes that y and its graph keep, without the parameters and x, which existed before
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, StorageWeakRef] = {}
        self.given: dict[int, StorageWeakRef] = {}  # what was there before, of which operators only make views

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note(self.given, (args, kwargs))
        out = func(*args, **(kwargs or {}))
        self._note(self.made, out)
        return out

    def _note(self, where: dict[int, StorageWeakRef], tree: Any) -> None:
        for x in tensors_in(tree):
            storage = x.untyped_storage()
            key = address(storage)
            if key not in self.made and key not in self.given:  # held weakly, no address is used twice
                where[key] = StorageWeakRef(storage)

    def held(self, but: Iterable[Tensor] = ()) -> int:
        """Return the bytes of the storages made inside the context that are still alive, each counted once."""
        others = {address(x.untyped_storage()) for x in but}
        return sum(s.nbytes() for s in self._alive() if address(s) not in others)

    def _alive(self) -> Iterator[torch.UntypedStorage]:
        for key, weak in list(self.made.items()):
            storage = alive(weak)  # fully_shard keeps some of size 0
            if storage is None:
                del self.made[key]
            else:
                yield storage


class PeakTracker(StorageTracker):
    """Track the peak of the held bytes, measured after each operator that makes a storage.

    Attributes:
        most: the peak since `begin`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most: int = 0

    def begin(self) -> int:
        """Reset the peak, and return the bytes held now."""
        self.most = self.held()
        return self.most

    def _note(self, where: dict[int, StorageWeakRef], tree: Any) -> None:
        known = len(where)
        super()._note(where, tree)
        if where is self.made and len(where) > known:
            self.most = max(self.most, self.held())


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in an operator's arguments or results. For a DTensor, yield its local tensor."""
    if isinstance(tree, Tensor):
        if not tree.is_sparse:
            yield local_tensor(tree)
    elif isinstance(tree, (tuple, list, dict)):  # what schemas know of; torch's pytree looks for more, and is slower
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(part)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    storages = {address(x.untyped_storage()): x.untyped_storage() for x in tensors}
    return sum(storage.nbytes() for storage in storages.values())
