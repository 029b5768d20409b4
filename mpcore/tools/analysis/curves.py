"""Record the norm of each tensor along a run, and round the first weights of a run anew, for its twins.

`mpcore compare RUN_A RUN_B --twins ..` reads what is written here.
"""

from __future__ import annotations

from pathlib import Path

import torch

from mpcore.gradients import TensorNorms, gradient_of
from mpcore.random import generator
from mpcore.sharding.declarations import declarations
from mpcore.sharding.state_dict import copy_part
from mpcore.tools.fault_tolerance.metrics import MetricsWriter
from mpcore.training.run import Run

FILE = "tensors.jsonl"


class TensorCurves:
    """Writes the norm of each parameter and of its gradient, as clipped, to OUT/tensors.jsonl."""

    def __init__(self, run: Run, every: int, out: Path) -> None:
        self.run = run
        self.every = every
        self.writer: MetricsWriter = MetricsWriter(out / FILE)
        self.norms: TensorNorms | None = None

    def measure(self) -> dict[str, dict[str, float]]:
        with self.run.parameters() as model:
            self.norms = self.norms or TensorNorms(model, self.run.mesh)
            return {"gradient": self.norms(gradient_of), "weight": self.norms(lambda p: p)}

    def after_backward(self) -> None:
        if self.every and self.run.step % self.every == 0:
            found = {"step": self.run.step, **self.measure()}
            if self.run.mesh.world.rank == 0:
                self.writer.add(found)


@torch.no_grad()
def round_anew(run: Run, twin: int, dtype: torch.dtype) -> None:
    """Change each first weight by up to half a unit in the last place of `dtype`: the same on every layout."""
    with run.parameters() as model:
        for name, p, sharding in declarations(model):
            if not p.requires_grad:  # what routers count
                continue
            part = torch.empty_like(p)
            copy_part(part, sharding, torch.rand(sharding.shape, generator=generator(twin, name)))
            p.mul_(1 + (part - 0.5) * torch.finfo(dtype).eps)
