"""The data-parallel state of a stage, and the parameters that several stages of a rank share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mpcore.gradients.overlap import OverlappedAllReduce
from mpcore.layers.moe.router import Router
from mpcore.parallel.fsdp import UnitWrapper


@dataclass(frozen=True)
class DataParallel:
    """How `shard_data_parallel` sharded a stage. Read it with `state_of`, write it with `set_state`."""

    zero: int
    units: tuple[FSDPModule, ...] = ()  # with zero 1 to 3: the stage, then its blocks
    shared: tuple[SharedUnit, ...] = ()  # of the parameters that several stages of this rank share
    gathered: bool = False  # whether a forward without gradients leaves parameters gathered; see `gathered`
    leaves: bool = False  # keep each micro-batch's gradients until the step's last, as `mpcore.tools.invariant` does
    early: OverlappedAllReduce | None = None  # with zero 0: the all-reduces that start during backward
    replicate: int = 1  # with zero 1 to 3: the number of replicas of the shards (HSDP)

    @property
    def last_differs(self) -> bool:
        """Whether the backward of a step's last micro-batch sums other gradients over data than the others do."""
        once = bool(self.units) and (self.zero < 3 or self.replicate > 1)
        return once or bool(self.shared) or self.leaves or self.early is not None

    @property
    def root(self) -> FSDPModule | None:
        return self.units[0] if self.units else None


UNSEEN = DataParallel(0)
"""The state of a stage that `shard_data_parallel` did not see."""


def state_of(stage: nn.Module) -> DataParallel:
    """Return how a stage is sharded over the data-parallel ranks."""
    state = getattr(stage, "data_parallel", None)
    return state if isinstance(state, DataParallel) else UNSEEN


def set_state(stage: nn.Module, state: DataParallel) -> None:
    stage.data_parallel = state  # pyright: ignore[reportArgumentType]


def router_statistics(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that `update_routers` changes between steps. They stay replicated and keep their dtype."""
    return {p for module in model.modules() if isinstance(module, Router) for p in module.statistics}


class SharedUnit(nn.Module):
    """Parameters that several stages of a rank share, such as a tied table, as a separate unit of `fully_shard`.

    A unit belongs to one root, and each stage is a root, so this unit is not a submodule of any stage. It is gathered
    before the first stage runs, and its gradients are summed when all stages are done.
    """

    def __init__(self, places: Iterable[tuple[nn.Module, str]]) -> None:
        super().__init__()
        self.places: list[tuple[nn.Module, str]] = list(places)
        self.owners: dict[nn.Module, None] = dict.fromkeys(module for module, _ in self.places)  # alike on all ranks
        self.held: nn.ModuleList = nn.ModuleList(self.owners)

    @property
    def shared(self) -> set[nn.Parameter]:
        return {module.get_parameter(leaf) for module, leaf in self.places}

    def forward(self, x: Tensor) -> Tensor:
        return x * 1

    @torch.no_grad()
    def gather(self) -> None:
        self(torch.zeros(()))

    def finish(self) -> None:
        with torch.enable_grad():
            self(torch.zeros((), requires_grad=True)).backward()


def share_parameters(stages: list[nn.Module], whole: set[nn.Parameter], wrap: UnitWrapper) -> list[SharedUnit]:
    """Make a unit of the parameters that several stages share, except those in `whole`; return [] if there are none."""
    places: dict[nn.Parameter, list[tuple[int, nn.Module, str]]] = {}
    for i, stage in enumerate(stages):
        for module in stage.modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                places.setdefault(parameter, []).append((i, module, leaf))
    shared = {p: held for p, held in places.items() if len({i for i, _, _ in held}) > 1 and p not in whole}
    if not shared:
        return []
    unit = SharedUnit((module, leaf) for held in shared.values() for _, module, leaf in held)
    wrap(unit, set(unit.parameters()) - shared.keys(), zero=1)
    return [unit]


def shared_units(stages: Iterable[nn.Module]) -> Iterator[SharedUnit]:
    yield from dict.fromkeys(unit for stage in stages for unit in state_of(stage).shared)
