"""How many bytes are held, counted from the storages that are alive.

Works on real tensors and on fake ones, which have storages of the same sizes and no memory.
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
    """Knows every storage that an operator makes while this context is entered, and which of them are still alive.

    with StorageTracker() as storages:
        y = model(x)
    storages.held()  # what y and its graph keep, without parameters and x, which were there before
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, StorageWeakRef] = {}
        self.given: dict[int, StorageWeakRef] = {}  # what was there before, of which operators only make views

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
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
        """Bytes of the storages that were made here and are alive, each counted once.

        Args:
            but: tensors whose storages don't count.
        """
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
    """Notes the most bytes that are held at once, asked after each operator that makes a storage.

    Attributes:
        most: since `begin`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def begin(self) -> int:
        """Begin to note anew; the bytes that are held now."""
        self.most = self.held()
        return self.most

    def _note(self, where: dict[int, StorageWeakRef], tree: Any) -> None:
        known = len(where)
        super()._note(where, tree)
        if where is self.made and len(where) > known:
            self.most = max(self.most, self.held())


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors of an operator's arguments or results, of DTensors the local ones, which alone take memory."""
    if isinstance(tree, Tensor):
        if not tree.is_sparse:
            yield local_tensor(tree)
    elif isinstance(tree, (tuple, list, dict)):  # what schemas know of; torch's pytree looks for more, and is slower
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(part)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of some tensors, each counted once."""
    storages = {address(x.untyped_storage()): x.untyped_storage() for x in tensors}
    return sum(storage.nbytes() for storage in storages.values())
