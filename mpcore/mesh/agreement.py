"""Agreement between ranks: compare a value on all of them, or fail on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from mpcore._torch.fake import real_tensors
from mpcore.mesh.axis import Axis

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Give a Python value of each rank to all ranks of a group, in rank order; None: this process alone."""
    if group is None or group.size() == 1 or dist.get_backend() == "fake":
        return [value]
    values: list = [None] * group.size()
    with real_tensors():  # the values are real, also where the model is fake
        dist.all_gather_object(values, value, group=group)
    return values


def check_same(what: str, value: Mapping[str, object] | str, axis: Axis | None = None) -> None:
    """Refuse to go on when ranks disagree about something that must be the same on all of them.

    Args:
        what: its name, for the message.
        value: its value on this rank: a text, or a mapping, of which the message names only the entries that differ.
        axis: the ranks to ask; None asks the whole job.

    Raises:
        ValueError: on every rank, naming two ranks that differ and both values.
    """
    mine = {what: value} if isinstance(value, str) else {key: repr(entry) for key, entry in value.items()}
    first, *others = gather_objects(mine, dist.group.WORLD if axis is None else axis.group)
    for rank, other in enumerate(others, 1):
        differing = sorted(key for key in first.keys() | other.keys() if first.get(key) != other.get(key))
        if differing:
            entries = "; ".join(f"{key}: {first.get(key)} and {other.get(key)}" for key in differing)
            raise ValueError(f"ranks 0 and {rank} disagree about the {what} ({entries})")


def raise_together(error: Exception | None) -> None:
    """Fail on every rank of the job when one rank has failed, so that none waits for it.

    Args:
        error: what went wrong on this rank; None: nothing.

    Raises:
        ValueError: on every rank, with the message of the first rank that failed.
    """
    exchange(error, None, dist.group.WORLD)


@contextmanager
def raising_together(kinds: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
    """Run a block on every rank of the job. What it raises on one rank is raised on all of them, at its end.

    Args:
        kinds: the exceptions to hold until then. Others are raised on their rank at once.

    Raises:
        ValueError: as `raise_together`.
    """
    error = None
    try:
        yield
    except kinds as problem:
        error = problem
    raise_together(error)


def exchange(error: Exception | None, value: T, group: dist.ProcessGroup | None) -> list[T]:
    """As `gather_objects`, or raise one rank's error on all ranks of the group.

    Raises:
        ValueError: on every rank, with the message of the first that failed; from its own error on one that did.
    """
    answers = gather_objects((None if error is None else _say(error), value), group)
    failed = [rank for rank, (message, _) in enumerate(answers) if message is not None]
    if failed:
        where = "" if len(failed) == len(answers) else f" (on rank {', '.join(map(str, failed))} of {len(answers)})"
        raise ValueError(f"{answers[failed[0]][0]}{where}") from error
    return [value for _, value in answers]


def _say(error: Exception) -> str:
    return str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
