"""Where the seconds of a step go: data, communication, and compute."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mpcore import Mesh
from mpcore._torch.simulated import simulated_rank
from mpcore.tools.analysis import CommunicationClock


class StepTimes:
    """The seconds of a step on this rank: in all, and in data; on a CPU also in communication and compute.

    Communication is what the rank waits for collectives and messages, for slower ranks too. Compute is the rest. On a
    GPU the host doesn't wait, and a compiled graph hides its collectives: there the two are not measured.
    """

    def __init__(self, args: argparse.Namespace, mesh: Mesh) -> None:
        self.seconds = self.data_seconds = 0.0
        seen = mesh.device_type == "cpu" and not args.compile and simulated_rank() is None
        self.clock = CommunicationClock() if seen else None

    def __enter__(self) -> StepTimes:
        if self.clock is not None:
            self.clock.__enter__()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._began
        if self.clock is not None:
            self.clock.__exit__(*error)

    @contextmanager
    def data(self) -> Iterator[None]:
        """Count the seconds within as those of data."""
        began = time.perf_counter()
        yield
        self.data_seconds = time.perf_counter() - began

    def record(self) -> dict[str, float]:
        """Return the seconds by name, for metrics.jsonl."""
        found = {"seconds": self.seconds, "data_seconds": self.data_seconds}
        if self.clock is not None:
            found["communication_seconds"] = self.clock.seconds
            found["compute_seconds"] = self.seconds - self.data_seconds - self.clock.seconds
        return found
