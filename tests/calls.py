"""The operators that run within a context, or the collectives alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = ("_c10d_functional", "c10d", "c10d_functional", "_dtensor")


class Calls(TorchDispatchMode):
    """Record the name, the arguments and the result of each operator in `found`; if asked, of collectives alone."""

    def __init__(self, collectives: bool = False) -> None:
        super().__init__()
        self.collectives = collectives
        self.found: list[tuple[str, tuple[Any, ...], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if not self.collectives or (func.namespace in COLLECTIVES and name != "wait_tensor"):
            self.found.append((name, args, out))
        return out

    def counts(self) -> Counter[str]:
        """How often each operator ran."""
        return Counter(name for name, *_ in self.found)
