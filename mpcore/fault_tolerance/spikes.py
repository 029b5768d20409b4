"""Watch the loss: spikes, and steps that are skipped."""

from __future__ import annotations

import math
import statistics
from collections import deque
from pathlib import Path
from typing import Any

from mpcore.fault_tolerance.metrics import MetricsWriter
from mpcore.mesh.log import get_logger

log = get_logger("mpcore.fault_tolerance")


class Spikes:
    """Find losses far above those before them, by their z-score over a window.

    A spike enters the window as a loss at the threshold: so a second spike is found, and a new level is accepted later.

    Args:
        window: how many losses before count.
        threshold: standard deviations above their mean that are a spike. A deviation is at least 1 % of the mean.
        least: how many losses there must be before the first spike.
    """

    def __init__(self, window: int = 64, threshold: float = 6.0, least: int = 16) -> None:
        if not 2 <= least <= window:
            raise ValueError(f"least {least} is not from 2 to the window of {window}")
        self.threshold, self.least = threshold, least
        self.before: deque[float] = deque(maxlen=window)

    def score(self, loss: float) -> float | None:
        """Take the next loss; if it is a spike, return the standard deviations by which it exceeds the mean.

        A loss that isn't finite is left out: such a step is skipped.
        """
        if not math.isfinite(loss):
            return None
        if len(self.before) < self.least:
            self.before.append(loss)
            return None
        mean = statistics.fmean(self.before)
        spread = max(statistics.pstdev(self.before, mean), 1e-2 * abs(mean), 1e-12)
        score = (loss - mean) / spread
        self.before.append(min(loss, mean + self.threshold * spread))
        return score if score > self.threshold else None


class Skips:
    """Count the steps in a row whose loss or gradient isn't finite, and record them.

    Args:
        limit: how many steps in a row may be skipped; the next one stops the run.
        path: a file that gets a line of JSON for each, on one rank; None: none.
    """

    def __init__(self, limit: int, path: Path | None) -> None:
        self.limit, self.row = limit, 0
        self.lines = None if path is None else MetricsWriter(path)

    def step(self, finite: bool, **about: Any) -> None:
        """Count a step.

        Args:
            finite: whether its loss and gradients were finite; the same on every rank.
            about: what is recorded: the step, its samples, the loss.

        Raises:
            ValueError: if more than `limit` steps in a row were skipped.
        """
        self.row = 0 if finite else self.row + 1
        if finite:
            return
        if self.lines is not None:
            try:
                self.lines.add({**about, "in_a_row": self.row})
            except OSError as error:  # a full disk ends no run
                log.error("NOT WRITTEN: %s: %s", self.lines.path, error)
        if self.row > self.limit:
            said = ", ".join(f"{name} {value}" for name, value in about.items())
            raise ValueError(
                f"{self.row} steps in a row had a loss or gradient that isn't finite, {self.limit} are allowed ({said})"
            )
