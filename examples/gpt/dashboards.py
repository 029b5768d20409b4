"""Send a run's records to TensorBoard and to Weights & Biases, and profile some of its steps."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from mpcore import Mesh


def check_installed(kinds: list[str]) -> None:
    """Raise ValueError for a `log_to` whose package is missing."""
    for kind in kinds:
        if importlib.util.find_spec(kind) is None:
            raise ValueError(f"log_to {kind} needs the package {kind}: pip install {kind}")


class Dashboards:
    """TensorBoard's files in OUT/tensorboard, and a run of Weights & Biases, offline unless WANDB_MODE says otherwise.

    Args:
        config: what Weights & Biases shows of the run.
        first_step: the step that the run begins with: what TensorBoard's files have of it and of later ones is hidden.
    """

    def __init__(self, kinds: list[str], out: Path, config: dict, first_step: int) -> None:
        self.adders: list[Callable[[int, dict[str, float]], Any]] = []
        self.closers: list[Callable[[], Any]] = []
        if "tensorboard" in kinds:
            from torch.utils.tensorboard import SummaryWriter

            board = SummaryWriter(out / "tensorboard", purge_step=first_step or None)
            write = partial(board.add_scalar, new_style=True, double_precision=True)
            self.adders.append(lambda step, values: [write(name, value, step) for name, value in values.items()])
            self.closers.append(board.close)
        if "wandb" in kinds:
            import wandb

            mode = os.environ.get("WANDB_MODE", "offline")
            run = wandb.init(project="mpcore", dir=out, config=config, mode=mode)  # type: ignore[arg-type]
            self.adders.append(lambda step, values: run.log(values, step=step))
            self.closers.append(run.finish)

    def add(self, entry: dict) -> None:
        """Send the numbers of a record."""
        values = {name: value for name, value in numbers(entry) if name != "step"}
        for add in self.adders:
            add(entry["step"], values)

    def close(self) -> None:
        """Write what is not yet written."""
        for close in self.closers:
            close()


def numbers(entry: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """List the numbers in a record, each with its path, such as `experts/dropped/0`."""
    if isinstance(entry, dict | list):
        for key, value in entry.items() if isinstance(entry, dict) else enumerate(entry):
            yield from numbers(value, f"{name}/{key}" if name else str(key))
    elif isinstance(entry, int | float):
        yield name, entry


class Profile:
    """Profiles the steps of `profile` on the first rank of each pipeline stage and of each shard of tp and cp.

    Each writes OUT/profile/rank-N.json, which ui.perfetto.dev opens, and on a GPU rank-N.pickle, which
    pytorch.org/memory_viz opens.
    """

    def __init__(self, steps: range, mesh: Mesh, out: Path) -> None:
        self.steps = steps if mesh.dp.rank == 0 and mesh.worlds.rank == 0 else range(0)
        self.path, self.cuda = out / "profile" / f"rank-{mesh.world.rank}", mesh.device_type == "cuda"
        self.running: profile | None = None

    def before(self, step: int) -> None:
        """Begin, if this is the first step."""
        if step in self.steps and self.running is None:
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
            if self.cuda:
                torch.cuda.memory._record_memory_history()
            self.running = profile(activities=kinds, profile_memory=True)
            self.running.start()

    def after(self, step: int) -> None:
        """End and write, if this was the last step."""
        if step + 1 not in self.steps:
            self.close()

    def close(self) -> None:
        """End and write what is profiled, also where the run ends before the last step."""
        if self.running is not None:
            self.running.stop()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.running.export_chrome_trace(f"{self.path}.json")
            if self.cuda:
                torch.cuda.memory._dump_snapshot(f"{self.path}.pickle")
                torch.cuda.memory._record_memory_history(enabled=None)
            self.running = None
