"""Parameters that several stages of a rank share, such as tied embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mpcore.parallel.fsdp import UnitWrapper


@dataclass(frozen=True)
class DataParallel:
    """How a stage is sharded over data: `stage.data_parallel`.

    Attributes:
        zero: what is sharded, see `shard_data_parallel`.
        replicate: over how many groups of ranks the shards are replicated.
        shared: units of the parameters that several stages of this rank share.
        gathered: whether a forward without gradients leaves parameters gathered, see `gathered`.
    """

    zero: int
    replicate: int = 1
    shared: tuple[SharedUnit, ...] = ()
    gathered: bool = False


class SharedUnit(nn.Module):
    """Parameters that several stages of a rank share, such as a tied table, as a unit of `fully_shard` of its own.

    A unit belongs to one root, and each stage is a root. So this one is none of the stages' submodules; it is gathered
    before the first stage runs, and its gradients are summed when all stages are done.
    """

    def __init__(self, places: Iterable[tuple[nn.Module, str]]) -> None:
        super().__init__()
        self.places = list(places)
        self.owners = {module for module, _ in self.places}
        self.held = nn.ModuleList(self.owners)

    @property
    def shared(self) -> set[nn.Parameter]:
        """The parameters, as they are now: whole or shards."""
        return {getattr(module, leaf) for module, leaf in self.places}

    def forward(self, x: Tensor) -> Tensor:
        """The input."""
        return x * 1

    @torch.no_grad()
    def gather(self) -> None:
        """Hold the parameters whole, if they are not."""
        self(torch.zeros(()))

    def finish(self) -> None:
        """Sum the gradients over data and hold shards again."""
        with torch.enable_grad():
            self(torch.zeros((), requires_grad=True)).backward()


def share_parameters(stages: list[nn.Module], whole: set[nn.Parameter], wrap: UnitWrapper) -> list[SharedUnit]:
    seen: dict[nn.Parameter, set[int]] = {}
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for i, stage in enumerate(stages):
        for module in stage.modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                seen.setdefault(parameter, set()).add(i)
                places.setdefault(parameter, []).append((module, leaf))
    shared = {p for p, where in seen.items() if len(where) > 1 and p not in whole}
    if not shared:
        return []
    unit = SharedUnit(place for p, held in places.items() if p in shared for place in held)
    wrap(unit, set(unit.parameters()) - shared, zero=1)
    return [unit]


def state_of(stage: nn.Module) -> DataParallel | None:
    """How `shard_data_parallel` sharded a stage; None: it did not see it."""
    state = getattr(stage, "data_parallel", None)
    return state if isinstance(state, DataParallel) else None


def zero_of(stage: nn.Module) -> int:
    """The ZeRO stage that `shard_data_parallel` gave a stage; 0 where it did not see it."""
    state = state_of(stage)
    return 0 if state is None else state.zero


def shared_units(stages: Iterable[nn.Module]) -> Iterator[SharedUnit]:
    seen = set()
    for stage in stages:
        state = state_of(stage)
        for unit in () if state is None else state.shared:
            if id(unit) not in seen:
                seen.add(id(unit))
                yield unit
