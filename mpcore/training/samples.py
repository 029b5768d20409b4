"""Which samples of a step a rank has, and a warning if dropout gets the same samples in every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpcore.collectives import all_reduce
from mpcore.layers.dropout import Dropout
from mpcore.mesh.axis import Mesh
from mpcore.mesh.log import Logger, get_logger
from mpcore.training.observers import Observer

if TYPE_CHECKING:
    from mpcore.training.run import Run

log: Logger = get_logger(__name__)


def share_of(mesh: Mesh, micro_batches: int, count: int) -> range:
    """Return the indices of this rank's samples among the `count` samples of a step."""
    worlds, dp = mesh.worlds, mesh.dp
    parts = worlds.size * dp.size * micro_batches
    if count % parts:
        sizes = f"dp x micro-batches = {dp.size} x {micro_batches} = {parts}"
        if worlds.size > 1:
            sizes = f"worlds x dp x micro-batches = {worlds.size} x {dp.size} x {micro_batches} = {parts}"
        raise ValueError(f"{count} samples a step are not a multiple of {sizes}: take {-(-count // parts) * parts}")
    size = count // (worlds.size * dp.size)
    first = (worlds.rank * dp.size + dp.rank) * size
    return range(first, first + size)


class SampleCheck(Observer):
    """Warn if a model with `Dropout` gets the same `samples` in two steps: it would draw the same masks.

    Only the first two steps are compared, so that the host waits for the device at most once.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.is_due: bool = any(isinstance(module, Dropout) and module.p for module in model.modules())
        self.tells: bool = mesh.tp.rank == mesh.data.rank == 0
        self.before: tuple[int, Tensor] | None = None

    def before_forward(self, run: Run, tokens: Tensor | int, arguments: Mapping[str, Any]) -> None:
        """Keep the samples of a step, or compare them with those of the step before."""
        step, samples = run.step, arguments.get("samples")
        if not self.is_due or samples is None:
            return
        given = samples if isinstance(samples, Tensor) else torch.cat([*samples])
        if self.before is None or self.before[0] == step:
            if self.before is None and run.mesh.dp.size > 1:
                mark = given.double().sin().sum()
                most, least = all_reduce(torch.stack([mark, -mark]).to(run.mesh.device), run.mesh.dp, "max").tolist()
                if self.tells and most == -least:
                    log.warning(
                        "all %d ranks of dp have the same sample indices, so dropout draws the same masks for other "
                        "samples: pass samples=run.samples(B)", run.mesh.dp.size
                    )  # fmt: skip
            self.before = step, given.clone()
            return
        self.is_due = False
        if self.tells and torch.equal(given, self.before[1]):
            log.warning(
                "step %d has the same samples as step %d, so dropout draws the same masks: pass "
                "samples=run.samples(B), whose indices differ in each step", step, self.before[0]
            )  # fmt: skip
        self.before = None
