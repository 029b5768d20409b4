"""Compare the numbers of a step over ranks, where one rank would wait for another or stay behind."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

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


class AlikeCheck:
    """Compare small values on all ranks by two numbers, whose sums over the ranks the caller puts into `sums`."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.values: dict[str, object] = {}
        self.sums: list[Tensor] = []

    def begin(self, values: dict[str, object]) -> tuple[int, int]:
        """Return a number of the values, and its square."""
        self.values = values
        number = zlib.crc32(repr(sorted(values.items())).encode()) % 2**20  # the sums stay exact
        return number, number**2

    def end(self, total: float, squares: float) -> None:
        """Raise ValueError on every rank if the sums say that ranks have different values."""
        if squares * self.mesh.world.size != total**2:
            check_same("step, lr or max_norm, so that replicas would drift apart", self.values, self.mesh.world)
