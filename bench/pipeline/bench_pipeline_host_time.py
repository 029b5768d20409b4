"""What a micro-batch costs the host in a pipeline of two gloo ranks, beside torch's runtime for the same schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from bench.interleave import at_least, interleave
from mpcore.pipeline import Pipeline
from mpcore.verify.pool import Pool, mesh

MICRO_BATCHES, D = 32, 16
SCHEDULES: dict[str, tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
}


def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A sum, whose backward is as short as it can be."""
    return (y * target).sum()


def time_both(name: str) -> dict[str, list[float]]:
    """Microseconds of processor time a micro-batch on this rank, by runtime, a number each round."""
    torch.set_num_threads(1)
    on = mesh(pp=2)
    kind, virtual = SCHEDULES[name]
    ours = [nn.Linear(D, D) for _ in range(virtual)]
    numbers = range(on.pp.rank, 2 * virtual, 2)
    theirs = [nn.Linear(D, D) for _ in numbers]
    pipeline = Pipeline(ours, on, MICRO_BATCHES, loss, name)
    stages = [
        PipelineStage(module, i, 2 * virtual, torch.device("cpu"), group=on.pp.group)
        for i, module in zip(numbers, theirs, strict=True)
    ]
    schedule = kind(stages if virtual > 1 else stages[0], MICRO_BATCHES, loss_fn=loss, scale_grads=False)
    x = torch.ones(2 * MICRO_BATCHES, D)

    def torchs() -> None:
        inputs = (x,) if on.pp.rank == 0 else ()
        keywords = {"target": x} if on.pp.rank == pipeline.last_rank else {}
        schedule.step(*inputs, return_outputs=False, **keywords)

    calls: dict[str, Callable[[], object]] = {"mpcore": lambda: pipeline.forward_backward(x, x), "torch": torchs}
    times = interleave(calls, rounds=20, iterations=4, warmup=3)
    for mine, other in zip(ours, theirs, strict=True):
        if name != "interleaved":  # both summed the gradients of as many steps
            torch.testing.assert_close(mine.bias.grad, other.bias.grad) if on.pp.rank == 1 else None
    return {key: [1e6 * t / MICRO_BATCHES for t in each] for key, each in times.items()}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.benchmark(group="host time of a micro-batch on pp 2, forward and backward")
def test_pipeline_host_time(benchmark, name: str) -> None:
    """At least as fast as torch's runtime."""
    pool = Pool()
    try:
        ranks = benchmark.pedantic(pool, args=(2, time_both, name), rounds=1, iterations=1)
    finally:
        pool.stop()
        pool.folder.cleanup()
    pairs = [pair for rank in ranks for pair in zip(rank["torch"], rank["mpcore"], strict=True)]
    ratio = sorted(theirs / ours for theirs, ours in pairs)[len(pairs) // 2]
    benchmark.extra_info |= {
        "microseconds a micro-batch": {
            key: round(sorted(t for rank in ranks for t in rank[key])[len(pairs) // 2], 1)
            for key in ("mpcore", "torch")
        },
        "ratios": {"torch's runtime / host time (at least 1)": round(ratio, 3)},
    }
    print(benchmark.extra_info["microseconds a micro-batch"], round(ratio, 3))
    at_least(f"host time of torch's runtime over ours, {name}", ratio, 1.0)
