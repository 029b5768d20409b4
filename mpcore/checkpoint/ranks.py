"""Make all ranks fail together: if one rank fails, every rank raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mpcore.mesh.agreement import exchange, raise_together
from mpcore.mesh.axis import Axis

T = TypeVar("T")
R = TypeVar("R")


def together(world: Axis, work: Callable[[], T], line: str = "") -> T:
    """Run `work` on every rank and wait for all ranks. If it fails on one rank, raise on all ranks.

    Raises:
        ValueError: on every rank, with the message of the first rank that failed. On a rank that failed, the cause is
            its own exception.
    """
    result, error = _try(work)
    raise_together(error, world, line)
    return result


def merged(world: Axis, work: Callable[[], T], merge: Callable[[list[T]], R], line: str = "") -> R:
    """Run `work` on every rank, merge the results on rank 0, and return the merged result on every rank.

    Args:
        world: the ranks that hold the model together.
        work: what this rank does. Its result is sent as JSON (`mpcore.mesh.secret.encode`).
        merge: called on rank 0 with the results in rank order.
        line: a name for calls from a background thread (see `mpcore.mesh.agreement.exchange`).

    Raises:
        ValueError: on every rank, if `work` failed on any rank or `merge` failed.
    """
    result, error = _try(work)
    return exchange(error, result, world.group, merge, line)


def _try(work: Callable[[], T]) -> tuple[T, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # catch every error: the other ranks must not wait for this rank
        return None, error  # type: ignore[return-value]
