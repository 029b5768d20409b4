"""How the ranks of a checkpoint agree: none goes on where another one failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from mpcore.mesh.axis import Mesh

T = TypeVar("T")


def world_group(mesh: Mesh) -> dist.ProcessGroup | None:
    """The ranks that hold the model together; None: this process alone."""
    return mesh.world.group if mesh.world.size > 1 else None


def together(group: dist.ProcessGroup | None, work: Callable[[], T]) -> T:
    """Do this rank's work, then wait for the others: its result, or one error on all of them.

    As `mpcore.mesh.raise_together`, on a group of choice: a save in the background has its own.

    Raises:
        ValueError: on every rank, with the message of the first that failed; from its own error on one that did.
    """
    return _together(group, work, lambda result: None)[0]


def collect(group: dist.ProcessGroup | None, work: Callable[[], T]) -> list[T]:
    """As `together`, but gives what the work returned on every rank, in rank order."""
    return _together(group, work, lambda result: result)[1]


def _together(group: dist.ProcessGroup | None, work: Callable[[], T], told: Callable) -> tuple[Any, list]:
    result, error = None, None
    try:
        result = work()
    except Exception as problem:  # whatever it is, the others must not wait for this rank
        error = problem
    answers: list = [(None if error is None else _say(error), told(result))]
    if group is not None:
        mine, answers = answers[0], [None] * group.size()
        dist.all_gather_object(answers, mine, group=group)
    failed = [rank for rank, (message, _) in enumerate(answers) if message is not None]
    if failed:
        where = "" if len(failed) == len(answers) else f" (on rank {', '.join(map(str, failed))} of {len(answers)})"
        raise ValueError(f"{answers[failed[0]][0]}{where}") from error
    return result, [value for _, value in answers]


def _say(error: Exception) -> str:
    return str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
