"""Check each step of a run for bad numbers, spikes, slow ranks and corrupt replicas."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any

from mpcore.mesh.agreement import exchange
from mpcore.mesh.axis import Mesh
from mpcore.sharding.replicas import compare_replicas
from mpcore.tools.fault_tolerance.spikes import Skips, Spikes
from mpcore.tools.fault_tolerance.stragglers import Stragglers
from mpcore.training.run import Run

TIMED = 5  # steps before each check of speed


class Faults:
    """Runs the detectors of faults after each step.

    Args:
        records: on rank 0, the records of the steps before the one that this run begins with.
        out: the folder for the list of skipped steps.
        max_skips: the most steps in a row that may be skipped.
        check_replicas, check_speed: steps between two comparisons of replicas, and of the ranks' speed; 0: never.
    """

    def __init__(
        self, mesh: Mesh, records: list[Any], out: Path, *, max_skips: int, check_replicas: int, check_speed: int
    ) -> None:
        self.mesh = mesh
        self.check_replicas = check_replicas
        self.check_speed = check_speed
        self.skips: Skips = Skips(max_skips, out / "skipped.jsonl" if mesh.world.rank == 0 else None)
        self.spikes: Spikes = Spikes()
        for entry in (entry for entry in records if "loss" in entry):  # null: it was not finite, the step was skipped
            self.skips.row = self.skips.row + 1 if None in (entry["loss"], entry.get("grad_norm", 0.0)) else 0
            if entry["loss"] is not None:
                self.spikes.score(entry["loss"])
        mine = self.skips.row, [*self.spikes.before]  # all ranks raise and report the same
        self.skips.row, before = exchange(None, mine, mesh.world.group, lambda of_ranks: of_ranks[0])
        self.spikes.before.extend(before if mesh.world.rank else ())

    def after(self, entry: dict[str, Any], samples: range, run: Run, stragglers: Stragglers) -> list[str]:
        """Check a step.

        Args:
            entry: the record of the step.
            samples: the global indices of its samples, over all workers.
            stragglers: has timed how long this rank took to load the batch.

        Returns:
            The lines to print, the same on all ranks of the worker.

        Raises:
            ValueError: on every rank, if the run must not go on.
        """
        step, found = entry["step"], []
        each = len(samples) // self.mesh.worlds.size
        first = samples.start + self.mesh.worlds.rank * each
        own = [first, first + each - 1]
        finite = math.isfinite(entry["loss"]) and math.isfinite(entry["grad_norm"])
        if not finite:
            whose = "" if self.mesh.worlds.size == 1 else " of the worker"
            found.append(
                f"step {step}: the loss or the gradient is not finite, the step was skipped on all ranks{whose}"
            )
        self.skips.step(finite, step=step, samples=own, loss=entry["loss"], grad_norm=entry["grad_norm"])
        loss = entry["loss"]
        score = self.spikes.score(loss)
        if score is not None:
            found.append(
                f"step {step}: loss {loss:.4g} is a spike, {score:.0f} standard deviations above those before; "
                f"its samples are {own[0]} to {own[1]}"
            )
        if self._due(self.check_replicas, step):
            with run.parameters() as model:  # offloaded ones too
                compare_replicas(model, self.mesh)
        if is_timed(self.check_speed, self.mesh, step):
            stragglers.probe()
            if self._due(self.check_speed, step):
                found += [f"step {step}: {late}" for late in stragglers.check()]
        return found

    @staticmethod
    def _due(every: int, step: int) -> bool:
        return every > 0 and (step + 1) % every == 0


def is_timed(every: int, mesh: Mesh, step: int) -> bool:
    """Return whether to time this step. Only the last steps before a check are timed: timing waits for the device."""
    return every > 0 and mesh.world.size > 1 and step % every >= every - TIMED


def was_restarted() -> bool:
    """Return whether torchrun has restarted this process after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def check_writable(folder: Path, rank: int) -> None:
    """Fail now, and not at the first checkpoint, if this rank can't write.

    Raises:
        ValueError: naming the folder.
    """
    try:
        tempfile.TemporaryFile(prefix=f".rank{rank}.", dir=folder).close()
    except OSError as problem:
        raise ValueError(f"{folder} can't be written: {problem}") from problem
