"""Watch the loss: detect spikes, and count skipped steps."""

from __future__ import annotations

import math
import statistics
from collections import deque
from pathlib import Path
from typing import Any

from mpcore.mesh.log import Logger, get_logger
from mpcore.tools.fault_tolerance.metrics import MetricsWriter

log: Logger = get_logger("mpcore.tools.fault_tolerance")


class Spikes:
    """Detect losses far above the previous ones, by their z-score over a window.

    A spike enters the window with its value cut to the threshold. So a second spike is still detected, and a lasting
    new level of the loss is accepted after some steps.

    Args:
        window: the number of previous losses to compare with.
        threshold: a loss is a spike if it is this number of standard deviations above the mean of the window. The
            standard deviation counts as at least 1 % of the mean.
        least: the number of losses needed before the first spike can be detected.

    Raises:
        ValueError: if `least` is not between 2 and `window`.
    """

    def __init__(self, window: int = 64, threshold: float = 6.0, least: int = 16) -> None:
        if not 2 <= least <= window:
            raise ValueError(f"least {least} is not from 2 to the window of {window}")
        self.threshold = threshold
        self.least = least
        self.before: deque[float] = deque(maxlen=window)

    def score(self, loss: float) -> float | None:
        """Add the next loss. Return its z-score if it is a spike, else None.

        A loss that isn't finite is ignored, because its step is skipped.
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
    """Count consecutive steps whose loss or gradient isn't finite, and record them.

    Args:
        limit: the number of consecutive steps that may be skipped. One more raises.
        path: a file that gets one line of JSON per skipped step. Pass it on one rank only. None: no file.
    """

    def __init__(self, limit: int, path: Path | None) -> None:
        self.limit = limit
        self.row: int = 0
        self.lines: MetricsWriter | None = None if path is None else MetricsWriter(path)

    def step(self, finite: bool, **about: Any) -> None:
        """Count a step.

        Args:
            finite: whether the loss and the gradients of the step were finite. It must be the same on every rank.
            about: values to record, such as the step, its samples and the loss.

        Raises:
            ValueError: if more than `limit` consecutive steps were skipped.
        """
        self.row = 0 if finite else self.row + 1
        if finite:
            return
        if self.lines is not None:
            try:
                self.lines.add({**about, "in_a_row": self.row})
            except OSError as error:  # a full disk must not end the run
                log.error("NOT WRITTEN: %s: %s", self.lines.path, error)
        if self.row > self.limit:
            said = ", ".join(f"{name} {value}" for name, value in about.items())
            raise ValueError(
                f"{self.row} steps in a row had a loss or gradient that isn't finite, {self.limit} are allowed ({said})"
            )
