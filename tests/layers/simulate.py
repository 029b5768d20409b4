"""Ranks of a ring in one process: a thread each, messages in queues. Any number of ranks, any order of arrival."""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections.abc import Callable

import torch

from mpcore import collectives
from mpcore.mesh.axis import Axis


def simulate(size: int, work: Callable, *, delays: int | None = None) -> list:
    """Call `work(axis)` as each of `size` ranks of an axis, and return what each returned.

    Args:
        size: number of ranks.
        work: uses no collective but `start_send` and `wait`.
        delays: seed of pauses before messages are sent; None: no pauses.
    """
    boxes = {pair: queue.Queue[torch.Tensor]() for pair in itertools.product(range(size), repeat=2)}
    results: list = [None] * size
    draws = random.Random(delays)

    def start_send(x, axis, to, receive):
        if delays is not None:
            time.sleep(draws.random() * 0.01)
        if to is not None:
            boxes[axis.rank, to].put(x.clone())
        return axis.rank, receive, x.new_empty(0)

    def wait(handle):
        rank, receive, empty = handle
        parts = [boxes[source, rank].get(timeout=60) if n else empty for source, n in enumerate(receive)]
        assert [part.numel() for part in parts] == receive
        return torch.cat(parts)

    def run(rank):
        try:
            results[rank] = work(Axis(size, rank, None, "cp"))
        except BaseException as error:  # shown below, where pytest sees it
            results[rank] = error

    real = collectives.start_send, collectives.wait
    collectives.start_send, collectives.wait = start_send, wait  # type: ignore[assignment]
    try:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        collectives.start_send, collectives.wait = real
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
