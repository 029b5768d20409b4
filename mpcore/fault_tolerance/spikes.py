"""Watch the loss: spikes, and steps that are skipped."""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from pathlib import Path
from typing import Any

from mpcore.fault_tolerance.metrics import MetricsWriter


class Spikes:
    """Finds losses that lie far above those before them, by their z-score over a window.

    A spike enters the window only as far as the threshold, so that a second one is found too, while a new level is
    accepted in the end.

    Args:
        window: how many losses before are looked at.
        threshold: standard deviations above their mean that are a spike; one counts as 1 % of the mean at least.
        least: how many there must be before any is.
    """

    def __init__(self, window: int = 64, threshold: float = 6.0, least: int = 16) -> None:
        if not 2 <= least <= window:
            raise ValueError(f"least {least} is not from 2 to the window of {window}")
        self.threshold, self.least = threshold, least
        self.before: deque[float] = deque(maxlen=window)

    def score(self, loss: float) -> float | None:
        """Take the next loss; the standard deviations it lies above the window, if it is a spike.

        One that isn't finite is none, and is left out: such a step is skipped.
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
    """Counts the steps in a row whose loss or gradient isn't finite, and writes down what they were fed.

    Args:
        limit: how many in a row are skipped; the next one stops the run.
        path: a file that gets a line of JSON for each; None: none. One rank writes.
    """

    def __init__(self, limit: int, path: Path | None) -> None:
        self.limit, self.row = limit, 0
        self.lines = None if path is None else MetricsWriter(path)

    def step(self, finite: bool, **about: Any) -> None:
        """Take note of a step. Ranks that hand in the same `finite` all decide alike.

        Args:
            finite: whether it was done.
            about: what is written down: the step, its samples, the loss.

        Raises:
            ValueError: if it is one too many.
        """
        self.row = 0 if finite else self.row + 1
        if finite:
            return
        if self.lines is not None:
            try:
                self.lines.add({**about, "in_a_row": self.row})
            except OSError as error:  # a full disk ends no run
                print(f"NOT WRITTEN: {self.lines.path}: {error}", file=sys.stderr, flush=True)
        if self.row > self.limit:
            said = ", ".join(f"{name} {value}" for name, value in about.items())
            raise ValueError(
                f"{self.row} steps in a row had a loss or gradient that isn't finite, {self.limit} are allowed ({said})"
            )
