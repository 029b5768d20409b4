"""Measure one mode in the ranks of a pool."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch

from bench.overlap.link import LINK, Event, Link, begin, over
from bench.overlap.modes import MODES

STEPS, PRODUCT_S = 3, 0.02
LATENCY_S, BANDWIDTH = 0.005, 2e6


class Measured(NamedTuple):
    """Of one rank: the step's wall seconds, the seconds in waits, and the events of the last step."""

    step: float
    waited: float
    events: list[Event]


def measure(index: int, overlaps: bool, product: float, latency: float, steps: int = STEPS) -> Measured:
    """In a rank: the medians over a few steps, after two that begin everything."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # decides which rank's experts get more tokens
    begin(f"{index} {overlaps}")
    step = MODES[index].build()
    seconds, waits = [], []
    for turn in range(-2, steps):
        slow = turn >= 0
        speed = (latency, BANDWIDTH) if slow else (0.0, 1e12)
        link = Link(*speed, overlaps, product if slow else 0.0, MODES[index].whole)
        with over(link) as link:
            torch.distributed.barrier()
            link.begin()
            began = time.monotonic()
            step()
            passed = time.monotonic() - began
        if slow:
            seconds.append(passed)
            waits.append(link.waited)
    return Measured(statistics.median(seconds), statistics.median(waits), LINK.events)
