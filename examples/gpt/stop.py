"""When a run stops before its end: on a signal to any rank, agreed on by all."""

from __future__ import annotations

from contextlib import suppress

import torch

from examples.gpt.checkpoints import Checkpoints
from mpcore import Run
from mpcore.collectives import all_reduce
from mpcore.fault_tolerance.signals import StopSignals


class Stop:
    """Whether to stop after a step.

    Attributes:
        signals: what catches signals, once somebody has begun to.
        stopped: whether a stop was agreed on.
    """

    def __init__(self, run: Run, checkpoints: Checkpoints) -> None:
        self.run, self.checkpoints = run, checkpoints
        self.signals: StopSignals | None = None
        self.asked = self.stopped = False

    def ask(self) -> None:
        """Save and leave after this step, as on a signal."""
        self.asked = True

    def after_step(self) -> bool:
        """Whether any rank was asked to stop; tells of a save in the background that failed on any.

        Workers hear of each other at the last step before a merge, which would wait for one that has left.
        """
        asked = self.asked or (self.signals is not None and self.signals.asked)
        flags = torch.tensor([int(asked), int(self.checkpoints.failed)])  # on the host, which needn't wait then
        stop, failed = (bool(flag) for flag in all_reduce(flags, self.run.mesh.world, "max").tolist())
        if failed:
            self.checkpoints.tell_failed()
        self.stopped = self._any_worker(stop) if self._before_merge() else stop
        return self.stopped

    def tell_workers(self) -> None:
        """Tell the other workers of a stop before they wait for this one in a merge."""
        if self.stopped and self.run.workers is not None and not self._before_merge():
            with suppress(RuntimeError):  # of workers that have reached their end
                self._any_worker(True)

    def _before_merge(self) -> bool:
        return self.run.workers is not None and self.run.workers.due(self.run.step + 1) is not None

    def _any_worker(self, stop: bool) -> bool:
        """Whether any worker stops: each asks once between two merges."""
        mesh = self.run.mesh
        return bool(all_reduce(torch.tensor(int(stop), device=mesh.device), mesh.workers, "max"))
