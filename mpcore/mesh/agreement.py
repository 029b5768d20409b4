"""Agreement between ranks: compare a value on all of them, or fail on all of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from mpcore._torch.fake import real_tensors
from mpcore.mesh.axis import Axis


def check_same(what: str, value: Mapping[str, object] | str, axis: Axis | None = None) -> None:
    """Refuse to go on when the ranks disagree about something that must be the same on all of them.

    Args:
        what: the name of the thing, for the message.
        value: it on this rank; a text, or a mapping of which only the entries that differ are named.
        axis: the ranks to ask; None asks the whole job.

    Raises:
        ValueError: on every rank, naming two ranks that differ and both values.
    """
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return
    group = axis.group if axis is not None else dist.group.WORLD
    if group is None or group.size() == 1:
        return
    mine = {what: value} if isinstance(value, str) else {key: repr(entry) for key, entry in value.items()}
    values: list = [None] * group.size()
    with real_tensors():  # what is compared is real, also of fake models
        dist.all_gather_object(values, mine, group=group)
    for rank, other in enumerate(values):
        differing = sorted(key for key in values[0].keys() | other.keys() if values[0].get(key) != other.get(key))
        if differing:
            entries = "; ".join(f"{key}: {values[0].get(key)} and {other.get(key)}" for key in differing)
            raise ValueError(f"ranks 0 and {rank} disagree about the {what} ({entries})")


def raise_together(error: Exception | None) -> None:
    """Fail on every rank when one rank has failed, so that none waits for it.

    Args:
        error: what went wrong on this rank; None: nothing.

    Raises:
        ValueError: on every rank, with the messages of the ranks that failed.
    """
    errors: list = [str(error) if error else None]
    if dist.is_initialized() and dist.get_backend() != "fake":
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, str(error) if error else None)
    failed = [rank for rank, message in enumerate(errors) if message]
    if failed:
        where = "" if len(failed) == len(errors) else f" (on rank {', '.join(map(str, failed))} of {len(errors)})"
        raise ValueError(f"{errors[failed[0]]}{where}") from error
