"""How the ranks of a checkpoint agree: none goes on where another one failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from mpcore.mesh.agreement import exchange
from mpcore.mesh.axis import Mesh

T = TypeVar("T")


def world_group(mesh: Mesh) -> dist.ProcessGroup | None:
    """The ranks that hold the model together; None: this process alone."""
    return mesh.world.group if mesh.world.size > 1 else None


def together(group: dist.ProcessGroup | None, work: Callable[[], T]) -> T:
    """Do this rank's work, then wait for the others: its result, or one error on all of them.

    Raises:
        ValueError: on every rank, with the message of the first that failed; from its own error on one that did.
    """
    result: list[T] = []
    collect(group, lambda: result.append(work()))
    return result[0]


def collect(group: dist.ProcessGroup | None, work: Callable[[], T]) -> list[T]:
    """As `together`, but gives what the work returned on every rank, in rank order."""
    result, error = None, None
    try:
        result = work()
    except Exception as caught:  # whatever it is, the others must not wait for this rank
        error = caught
    return exchange(error, result, group)  # type: ignore[return-value]
