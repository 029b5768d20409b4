"""Time several ways to do the same thing, so that a busy neighbour slows all of them alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


class Times(dict[str, list[float]]):
    """Seconds a call, by name, a list of one for each round; the rounds of all names belong together."""

    def median(self, name: str) -> float:
        """Median seconds a call."""
        return statistics.median(self[name])

    def ratio(self, above: str, below: str) -> float:
        """How many times as long `above` takes as `below`: the median over rounds of the quotient in each round."""
        return statistics.median(self.ratios(above, below))

    def ratios(self, above: str, below: str) -> list[float]:
        """How many times as long `above` takes as `below` in each round."""
        return [a / b for a, b in zip(self[above], self[below], strict=True)]


class Clock:
    """A timer of pytest-benchmark that advances by given seconds from each reading to the next."""

    def __init__(self) -> None:
        self.steps: Iterator[float] = iter(())
        self.now = 0.0

    def hand(self, benchmark: Any, seconds: Sequence[float]) -> None:
        """Make the rounds of a benchmark that has this timer last for these seconds."""
        self.steps = (step for s in seconds for step in (0.0, s))
        benchmark.pedantic(lambda: None, rounds=len(seconds), iterations=1)

    def __call__(self) -> float:
        """Return the time."""
        self.now += next(self.steps, 1e-9)
        return self.now


device_clock = Clock()


def interleave(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    iterations: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.process_time,
) -> Times:
    """Call each in turn, `iterations` times a round, in an order that turns round from one round to the next.

    The clock is the processor time of this process: what it is on one thread with nothing to wait for is the time on
    a machine of its own, whatever else runs.

    Args:
        calls: what to time, by name; each on one thread.
        rounds: how often each has its turn.
        iterations: calls in a turn.
        warmup: turns that don't count.
        clock: `time.thread_time` where threads of a library, such as gloo's, should not count.
    """
    times = Times({name: [] for name in calls})
    for turn in range(-warmup, rounds):
        for name in list(calls) if turn % 2 else reversed(list(calls)):
            call, began = calls[name], clock()
            for _ in range(iterations):
                call()
            if turn >= 0:
                times[name].append((clock() - began) / iterations)
    return times


def judge(
    info: dict[str, Any], what: str, ratios: Sequence[float], *, at_most: float = math.inf, at_least: float = -math.inf
) -> str:
    """Judge a target by the median of interleaved rounds and its spread, and keep the line in `info["targets"]`.

    A busy machine makes single rounds slow, so a missed target is a line of the report, and no failure.

    Args:
        info: a bench's `extra_info`.
        what: what the ratio is.
        ratios: one for each round.
        at_most, at_least: the bound.

    Returns:
        "met"; "missed", where 80 % of the rounds lie beyond the bound; or "unclear", where only the median does.
    """
    low, middle, high = spread(ratios)
    beyond = middle > at_most or middle < at_least
    missed = low > at_most or high < at_least
    found = "missed" if missed else "unclear" if beyond else "met"
    bound = f"at most {at_most:g}" if at_most < math.inf else f"at least {at_least:g}"
    info.setdefault("targets", []).append(f"{found}: {what} is {middle:.3f} ({low:.3f}-{high:.3f}), {bound}")
    return found


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the 20th percentile, the median and the 80th percentile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return fifths[0], statistics.median(values), fifths[3]
