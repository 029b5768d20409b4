"""Stop a run before its end, on all ranks alike, after a signal to any rank."""

from __future__ import annotations

from contextlib import suppress

import torch

from examples.gpt.checkpoints import Checkpoints
from examples.gpt.policies import local_updates
from mpcore import Run
from mpcore.collectives import all_reduce
from mpcore.tools.fault_tolerance.signals import StopSignals, Wishes


class Stop:
    """Decides whether to stop after a step.

    Attributes:
        signals: catches signals; None before somebody sets it.
        stopped: whether the ranks have agreed to stop.
    """

    def __init__(self, run: Run, checkpoints: Checkpoints) -> None:
        self.run, self.checkpoints, self.updates = run, checkpoints, local_updates(run)
        self.signals: StopSignals | None = None
        self.asked = self.stopped = False
        self.wishes = Wishes(run.mesh.world)

    def ask(self) -> None:
        """Save and leave after this step, as on a signal."""
        self.asked = True

    def after_step(self) -> bool:
        """Return whether any rank was asked to stop. Print the error of a background save that failed on any rank.

        Ranks hear of each other a step late (`Wishes`).

        Workers ask each other in the last step before a merge, because a merge waits for every worker.
        """
        asked = self.asked or (self.signals is not None and self.signals.asked)
        granted = self.wishes.after_step(self.run.step, stop=asked, failed=self.checkpoints.failed)
        stop = "stop" in granted
        if "failed" in granted:
            self.checkpoints.tell_failed()
        self.stopped = self._any_worker(stop) if self._before_merge() else stop
        return self.stopped

    def tell_workers(self) -> None:
        """Tell the other workers that this one stops, before they wait for it in a merge."""
        if self.stopped and self.updates is not None and not self._before_merge():
            with suppress(RuntimeError):  # other workers may have reached their end
                self._any_worker(True)

    def _before_merge(self) -> bool:
        return self.updates is not None and self.updates.optimizer.due(self.run.step + 1) is not None

    def _any_worker(self, stop: bool) -> bool:
        """Return whether any worker stops. Each worker asks once between two merges."""
        mesh = self.run.mesh
        return bool(all_reduce(torch.tensor(int(stop), device=mesh.device), mesh.worlds, "max"))
