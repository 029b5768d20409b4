"""What a micro-batch costs the host in a pipeline of two gloo ranks, beside torch's runtime for the same schedule."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from bench.interleave import Times, interleave, judge
from mpcore.pipeline import Pipeline
from mpcore.tools.verify.pool import Pool, mesh

MICRO_BATCHES, D = 32, 16
SCHEDULES: dict[str, tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
}


def loss(y: Tensor, target: Tensor) -> Tensor:
    """A sum, whose backward is as short as it can be."""
    return (y * target).sum()


def time_both(name: str) -> Times:
    """Seconds of the main thread a step on this rank."""
    torch.set_num_threads(1)
    on = mesh(pp=2)
    kind, virtual = SCHEDULES[name]
    numbers = range(on.pp.rank, 2 * virtual, 2)
    pipeline = Pipeline([nn.Linear(D, D) for _ in numbers], on, MICRO_BATCHES, loss, name)
    stages = [PipelineStage(nn.Linear(D, D), i, 2 * virtual, torch.device("cpu"), group=on.pp.group) for i in numbers]
    schedule = kind(stages if virtual > 1 else stages[0], MICRO_BATCHES, loss_fn=loss, scale_grads=False)
    x = torch.ones(2 * MICRO_BATCHES, D)

    def torchs() -> None:
        inputs = (x,) if 0 in numbers else ()
        keywords = {"target": x} if on.pp.rank == pipeline.last_rank else {}
        schedule.step(*inputs, return_outputs=False, **keywords)

    calls = {"mpcore": lambda: pipeline.forward_backward(x, x), "torch": torchs}
    return interleave(calls, rounds=20, iterations=2, warmup=3, clock=time.thread_time)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.benchmark(group="host time of steps of 32 micro-batches on pp 2, forward and backward")
def test_pipeline_host_time(benchmark, name: str) -> None:
    """At least as fast as torch's runtime, on the slower rank."""
    pool = Pool()
    try:
        ranks = benchmark.pedantic(pool, args=(2, time_both, name), rounds=1, iterations=1)
    finally:
        pool.stop()
        pool.folder.cleanup()
    micro = {key: [round(1e6 * rank.median(key) / MICRO_BATCHES, 1) for rank in ranks] for key in ranks[0]}
    slower = min(ranks, key=lambda rank: rank.ratio("torch", "mpcore"))
    ratio = slower.ratio("torch", "mpcore")
    benchmark.extra_info |= {
        "microseconds a micro-batch, by rank": micro,
        "ratios": {"torch's runtime / host time (at least 1)": round(ratio, 3)},
    }
    print(name, micro, round(ratio, 3))
    what = f"host time of torch's runtime over ours, {name}"
    judge(benchmark.extra_info, what, slower.ratios("torch", "mpcore"), at_least=1.0)
