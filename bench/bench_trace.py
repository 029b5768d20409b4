"""What the log of collectives costs the host, beside a training step of a small GPT on tp 8 and a block alone."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import pytest
import torch

from bench.interleave import interleave, judge
from examples.gpt.config import GPTConfig
from examples.gpt.model import GPT
from mpcore import (
    AdamW,
    LayerNorm,
    Mesh,
    ParallelAttention,
    ParallelMLP,
    TransformerBlock,
    vocab_parallel_cross_entropy,
)
from mpcore.gradients import clip_gradients, grad_norm, reduce_gradients
from mpcore.tools.analysis.counts import CommunicationCounter
from mpcore.tools.fault_tolerance.trace import read_log, record
from mpcore.tools.verify.pool import Pool, mesh

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


def block_step(on: Mesh) -> Callable[[], None]:
    """Forward and backward of one block: the part of a training step that has the most collectives for its size."""
    tp = on.tp
    layers = ParallelAttention(D, HEADS, tp=tp), ParallelMLP(D, 4 * D, "swiglu", tp=tp)
    block = TransformerBlock(*layers, LayerNorm(D, tp=tp), LayerNorm(D, tp=tp), tp=tp)
    x, dy = torch.randn(BATCH, LENGTH, D, requires_grad=True), torch.randn(BATCH, LENGTH, D)

    def step() -> None:
        block(x).backward(dy)
        block.zero_grad()
        x.grad = None

    return step


def training_step(on: Mesh) -> Callable[[], None]:
    """What the example does in a step, with such blocks."""
    config = GPTConfig(vocab_size=257, seq_len=LENGTH, layers=4, d_model=D, heads=HEADS, kv_heads=HEADS, d_ff=4 * D)
    model = GPT(config, on)
    optimizer = AdamW(model)
    tokens, targets = torch.randint(257, (2, BATCH, LENGTH))

    def step() -> None:
        vocab_parallel_cross_entropy(model(tokens), targets, tp=on.tp, vocab_size=257).backward()
        reduce_gradients(model)
        clip_gradients(model, 1.0, grad_norm(model, on))
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.benchmark(group="host time on tp 8 with the log of collectives")
def test_log_host_time(benchmark, tp8: Mesh) -> None:
    """At most 1.02 times the host time of a training step without a log, of which nothing is kept.

    One log can't be turned on and off, so two processes take turns at all-reduces alone. What logging adds to one is
    laid on a step, whose own time is that of one process in which collectives return at once.
    """
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
    added = statistics.quantiles((a - b for a, b in zip(times["logged"], times["off"], strict=True)), n=4)
    steps = {"training step": training_step(tp8), "block alone": block_step(tp8)}
    calls, ratios = {}, {}
    for name, step in steps.items():
        step()
        with CommunicationCounter(tp8) as ledger:
            step()
        calls[name] = sum(count.calls for count in ledger.counts.values())
    whole = interleave(steps, rounds=100, iterations=3, warmup=5)
    for name in steps:
        ratios[name] = [1 + calls[name] * part / whole.median(name) for part in added]
    benchmark.extra_info |= {
        "shape": f"[{BATCH}, {LENGTH}, {D}], all-reduces a step: {calls}",
        "microseconds": {name: round(1e6 * statistics.median(found), 2) for name, found in times.items()}
        | {name: round(1e6 * whole.median(name), 1) for name in steps},
        "ratios": {
            "host time of a training step logged / off (at most 1.02)": round(ratios["training step"][1], 4),
            "its lower quartile (no bound)": round(ratios["training step"][0], 4),
            "its upper quartile (no bound)": round(ratios["training step"][2], 4),
            "a block alone (no bound)": round(ratios["block alone"][1], 4),
        },
    }
    benchmark.pedantic(steps["training step"], rounds=20, iterations=5, warmup_rounds=2)
    step = whole.median("training step")
    pairs = zip(times["logged"], times["off"], strict=True)
    each = [1 + calls["training step"] * (a - b) / step for a, b in pairs]
    judge(benchmark.extra_info, "host time of a training step with the log over none", each, at_most=1.02)
