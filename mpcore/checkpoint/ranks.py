"""How the ranks of a checkpoint agree: none goes on where another one failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mpcore.mesh.agreement import exchange, raise_together
from mpcore.mesh.axis import Axis

T = TypeVar("T")
R = TypeVar("R")


def together(world: Axis, work: Callable[[], T], line: str = "") -> T:
    """Do this rank's work, then wait for the others: its result, or one error on all of them.

    Args:
        world: the ranks that hold the model together.
        work: what this rank does.
        line: as of `mpcore.mesh.agreement.exchange`.

    Raises:
        ValueError: on every rank, with the message of the first that failed; from its own error on one that did.
    """
    result, error = _try(work)
    raise_together(error, world, line)
    return result


def merged(world: Axis, work: Callable[[], T], merge: Callable[[list[T]], R], line: str = "") -> R:
    """As `together`, but give all ranks what rank 0 makes of the results, in rank order."""
    result, error = _try(work)
    return exchange(error, result, world.group, merge, line)


def _try(work: Callable[[], T]) -> tuple[T, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # whatever it is, the others must not wait for this rank
        return None, error  # type: ignore[return-value]
