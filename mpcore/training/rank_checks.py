"""Compare the numbers of a step over ranks, where one rank would wait for another or stay behind."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpcore._torch import fsdp
from mpcore.collectives import all_reduce
from mpcore.mesh.agreement import check_same, merged, raise_together
from mpcore.mesh.axis import Mesh
from mpcore.parallel.shared import state_of
from mpcore.sharding.declarations import ModelTree
from mpcore.training.block_order import BlockOrder


def smallest_count(mesh: Mesh, stages: Sequence[nn.Module], what: str, count: int) -> int:
    """Return the smallest of the ranks' numbers of forwards. Raise on every rank if one would wait for another."""
    each = torch.full((2, mesh.data.size), torch.iinfo(torch.int64).min, dtype=torch.int64, device=mesh.device)
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
    """Compare small values on all ranks by numbers, whose sums over the ranks the caller puts into `sums`."""

    def __init__(self, mesh: Mesh, tree: ModelTree, blocks: BlockOrder) -> None:
        self.mesh = mesh
        self.blocks = blocks
        self.tree = tree
        self.trained = 0
        self.values: dict[str, object] = {}
        self.options: list[dict[str, object]] = []
        self.order: list[int] = []
        self.sums: list[Tensor] = []

    def begin(self, values: dict[str, object], groups: list[dict[str, Any]]) -> list[int]:
        """Return numbers of the blocks' order, the values, and each stage's groups and gathers, for the sums of `end`.

        Raises:
            ValueError: if the optimizer got a parameter that the model did not have in `prepare`.
        """
        before, self.trained = self.trained, sum(len(group["params"]) for group in groups)
        if before != self.trained:
            new = {p for group in groups for p in group["params"]}.difference(self.tree.parameters)
            if new and self.mesh.world.size > 1:
                raise ValueError(
                    f"the optimizer got parameters that the model lacked in prepare, such as one of shape "
                    f"{tuple(next(iter(new)).shape)}, and nothing sums their gradients over the ranks: add modules "
                    f"before prepare, frozen, and give them to add_param_group later"
                )
        self.values, pp = values, self.mesh.pp
        self.options = [{k: x for k, x in group.items() if isinstance(x, int | float | tuple)} for group in groups]
        self.order = fsdp.take_order(self.tree.units)
        both = repr(sorted(values.items())), repr((self.options, self.order))
        first, second = (zlib.crc32(text.encode()) % 2**20 for text in both)  # the sums stay exact
        slots = [0] * 2 * pp.size  # stages may have groups of their own
        slots[2 * pp.rank : 2 * pp.rank + 2] = second, second**2
        return [self.blocks.take(), first, first**2, *slots]

    def end(self, blocks: float, total: float, squares: float, *slots: float) -> None:
        """Raise ValueError on every rank if the sums say that ranks have different values, or replicas others."""
        replaced = ValueError(self.values["parameters"]) if self.values.get("parameters") else None
        if squares * self.mesh.world.size != total**2:
            raise_together(replaced, self.mesh.world)
            check_same("step, tokens, lr or max_norm: replicas would drift apart", self.values, self.mesh.world)
        replicas = self.mesh.world.size // self.mesh.pp.size
        if any(square * replicas != of**2 for of, square in zip(slots[::2], slots[1::2], strict=True)):
            merged(self.mesh.world, lambda: (self.mesh.pp.rank, self.options, self.order), _refuse)
        if blocks:
            raise ValueError(
                f"ranks of {self.blocks.names} ran other blocks in this step, or in another order, and the collectives "
                f"of different blocks met: let these ranks skip the same blocks (layerdrop)"
            )
        if replaced is not None:
            raise replaced


def _refuse(found: list[tuple[int, list[dict[str, object]], list[int]]]) -> None:
    first = {stage: rank for rank, (stage, *_) in reversed([*enumerate(found)])}
    a, b = next((first[stage], rank) for rank, (stage, *_) in enumerate(found) if found[first[stage]] != found[rank])
    if found[a][2] != found[b][2]:
        raise ValueError(
            f"ranks {a} and {b} ran other blocks in this step, or in another order, and their collectives mixed the "
            f"blocks' weights or gradients: let all ranks skip the same blocks (layerdrop), or use zero=0"
        )
    groups = [*zip(found[a][1], found[b][1], strict=False)]
    differ = [f"{name} {x.get(name)} and {y.get(name)}" for x, y in groups for name in {**x, **y}
              if x.get(name) != y.get(name)]  # fmt: skip
    raise ValueError(
        f"ranks {a} and {b} have other options in the optimizer's groups, so replicas would drift apart: "
        f"{', '.join(differ) or f'{len(found[a][1])} and {len(found[b][1])} groups'}"
    )
