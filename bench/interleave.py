"""Time several ways to do the same thing, so that a busy neighbour slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import pytest


class Times(dict[str, list[float]]):
    """Seconds a call, by name, a list of one for each round; the rounds of all names belong together."""

    def median(self, name: str) -> float:
        """Median seconds a call."""
        return statistics.median(self[name])

    def ratio(self, above: str, below: str) -> float:
        """How many times as long `above` takes as `below`: the median over rounds of the quotient in each round."""
        return statistics.median(a / b for a, b in zip(self[above], self[below], strict=True))


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


def at_most(what: str, value: float, bound: float) -> None:
    """Fail where a number misses its bound from above."""
    if value > bound:
        pytest.fail(f"{what} is {value:.3f}, more than {bound}", pytrace=False)


def at_least(what: str, value: float, bound: float) -> None:
    """Fail where a number misses its bound from below."""
    if value < bound:
        pytest.fail(f"{what} is {value:.3f}, less than {bound}", pytrace=False)
