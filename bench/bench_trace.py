"""What the log of collectives costs the host, beside a step of a small transformer block on tp 8."""

from __future__ import annotations

import os
import statistics
import time

import pytest
import torch

from bench.interleave import at_most, interleave
from mpcore import LayerNorm, Mesh, ParallelAttention, ParallelMLP, TransformerBlock
from mpcore.trace import read_log, record
from mpcore.verify.pool import Pool, mesh

D, HEADS, BATCH, LENGTH = 64, 8, 2, 16
CALLS, WARMUP, ROUNDS = 200, 20, 300
DEPTH = 30  # of Python's stack, as a layer in a model in a training loop has it


def off() -> None:
    """Nothing is logged."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"


def seconds(depth: int = DEPTH) -> float:
    """Of the calling thread for one all-reduce over a gloo group of one rank, as `mpcore.collectives` calls it."""
    if depth:
        return seconds(depth - 1)
    group = mesh().world.group_name
    x, ops = torch.ones(BATCH, LENGTH, D), torch.ops._c10d_functional
    began = time.thread_time()
    for _ in range(CALLS):
        ops.wait_tensor(ops.all_reduce(x, "sum", group))
    return (time.thread_time() - began) / CALLS


def kept() -> int:
    """How many collectives the log has."""
    return len(read_log(mesh()).calls)


@pytest.mark.benchmark(group="host time of a block on tp 8, forward and backward, with the log of collectives")
def test_log_host_time(benchmark, tp8: Mesh) -> None:
    """At most 1.02 times the host time without a log, of which nothing is kept.

    One log can't be turned on and off, so two processes take turns at all-reduces alone. What logging adds to one is
    laid on a step, whose own time is that of one process in which collectives return at once.
    """
    tp = tp8.tp
    layers = ParallelAttention(D, HEADS, tp=tp), ParallelMLP(D, 4 * D, "swiglu", tp=tp)
    block = TransformerBlock(*layers, LayerNorm(D, tp=tp), LayerNorm(D, tp=tp), tp=tp)
    x, dy = torch.randn(BATCH, LENGTH, D, requires_grad=True), torch.randn(BATCH, LENGTH, D)

    def step() -> None:
        block(x).backward(dy)
        block.zero_grad()
        x.grad = None

    pools = {"logged": Pool(1, prepare=record), "off": Pool(1, prepare=off)}
    times: dict[str, list[float]] = {name: [] for name in pools}
    try:
        for i in range(-WARMUP, ROUNDS):
            for name in list(pools)[:: 1 if i % 2 else -1]:
                (took,) = pools[name](1, seconds)
                if i >= 0:
                    times[name].append(took)
        counts = {name: pool(1, kept)[0] for name, pool in pools.items()}
    finally:
        for pool in pools.values():
            pool.stop()
            pool.folder.cleanup()
    assert counts["off"] == 0 < counts["logged"]
    whole = interleave({"step": step}, rounds=100, iterations=5, warmup=5).median("step")
    added = [a - b for a, b in zip(times["logged"], times["off"], strict=True)]
    low, middle, high = (1 + 4 * part / whole for part in statistics.quantiles(added, n=4))
    benchmark.extra_info |= {
        "shape": f"[{BATCH}, {LENGTH}, {D}], 4 all-reduces a step",
        "microseconds": {name: round(1e6 * statistics.median(found), 2) for name, found in times.items()}
        | {"step": round(1e6 * whole, 1)},
        "ratios": {
            "host time logged / off (at most 1.02)": round(middle, 4),
            "lower quartile of the rounds (no bound)": round(low, 4),
            "upper quartile of the rounds (no bound)": round(high, 4),
        },
    }
    benchmark.pedantic(step, rounds=20, iterations=5, warmup_rounds=2)
    at_most("host time with the log over none", middle, 1.02)
