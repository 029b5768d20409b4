"""Compare the numbers of a step over ranks, where one rank would wait for another or stay behind."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mpcore.collectives import all_reduce
from mpcore.mesh.agreement import check_same
from mpcore.mesh.axis import Mesh
from mpcore.parallel.shared import state_of


def smallest_count(mesh: Mesh, stages: Sequence[nn.Module], what: str, count: int) -> int:
    """Return the smallest of the ranks' numbers of forwards. Raise on every rank if one would wait for another."""
    outside = torch.iinfo(torch.int64).min
    each = torch.full((2, mesh.data.size), outside, dtype=torch.int64, device=mesh.device)
    each[0, mesh.data.rank], each[1, mesh.data.rank] = count, -count
    most, least = all_reduce(each, mesh.world, "max").tolist()  # by data rank
    pairs = [*zip(most, (-x for x in least), strict=True)]
    if mesh.cp.size > 1 or mesh.ep.size > 1 or any(state_of(stage).zero > 1 for stage in stages):
        pairs = [(max(most), -max(least))]  # each forward or backward has a collective over the data ranks
    for high, low in pairs:
        if high != low:
            raise ValueError(
                f"ranks have {low} and {high} {what}, and each would wait for the other: give every rank the same "
                f"number; only data ranks may differ, with ZeRO 0 or 1 and without cp and ep"
            )
    return -max(least)


def check_steps(mesh: Mesh, step: int, total: float = 0.0, squares: float = 0.0) -> None:
    """Raise on every data rank if its sums of the ranks' steps and of their squares say that steps differ."""
    if squares * mesh.data.size != total**2:
        check_same("step, so one gave up a step that the others took", {"step": step}, mesh.data)
