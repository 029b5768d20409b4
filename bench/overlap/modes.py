"""For each way of parallelism a tiny model on two ranks, and a step of it to measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.experimental import overlap_experts, overlap_halves
from mpcore.gradients import overlap
from mpcore.layers.overlap import overlap_communication
from mpcore.pipeline import Pipeline

WIDTH, ROWS, BLOCKS, MICRO_BATCHES = 64, 128, 4, 4
Step = Callable[[], object]


@dataclass(frozen=True)
class Mode:
    """A line of the table.

    Attributes:
        name: what is parallel.
        hidden: which messages run beside which work.
        build: on each of two ranks, returns a step.
        whole: the multiplications of a product that takes the whole time; smaller products take their share of it.
    """

    name: str
    hidden: str
    build: Callable[[], Step]
    whole: int = 1


def squares(y: Tensor, target: Tensor) -> Tensor:
    """A loss that sums."""
    return (y - target).square().sum()


def data(zero: int) -> Step:
    """Blocks of two plain linear layers, whose weights count as large: ZeRO-0 sums each by itself."""
    overlap.ALONE = WIDTH * WIDTH
    mesh = mp.build_mesh(device_type="cpu")
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))) for _ in range(BLOCKS)))
    how: dict[str, Any] = {"blocks": list(model), "loss": squares, "initialize": False, "data": mp.Zero(zero)}
    run = mp.prepare(model, mesh, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3), **how)
    x = torch.ones(ROWS, WIDTH)

    def step() -> None:
        run.forward_backward(x, x)
        run.clip_gradients(1.0)
        run.optimizer_step()

    return step


def layers(model: nn.Module, shape: tuple[int, ...]) -> Step:
    """Forward and backward alone, whose gradients go on to a layer before."""
    x = torch.ones(shape, requires_grad=True)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return step


def tensor(sequence_parallel: bool, overlapped: bool = False) -> Step:
    """MLPs without biases."""
    tp = mp.build_mesh(tp=2, device_type="cpu").tp
    like = {"bias": False, "tp": tp, "sequence_parallel": sequence_parallel}
    mlps = nn.Sequential(*(mp.ParallelMLP(WIDTH, 2 * WIDTH, "relu", **like) for _ in range(BLOCKS)))
    if overlapped:
        overlap_communication(mlps, smallest=ROWS * WIDTH // 2)  # halves: chunks of an all-reduce, steps of a ring
    return layers(mlps, (1, ROWS, WIDTH))


def dense(sequence_parallel: bool) -> Step:
    """Blocks that compute two halves of their rows, with as many messages as the MLPs of `tensor`, for each half."""
    like = {"bias": False, "tp": mp.build_mesh(tp=2, device_type="cpu").tp, "sequence_parallel": sequence_parallel}
    model = nn.Sequential(*(mp.TransformerBlock(
        mp.ParallelAttention(WIDTH, 2, **like), mp.ParallelMLP(WIDTH, 2 * WIDTH, "relu", **like), nn.Identity(),
        nn.Identity()) for _ in range(BLOCKS // 2)))  # fmt: skip
    overlap_halves(model)
    return layers(model, (2, ROWS // 2, WIDTH))


def context() -> Step:
    """Attention on a ring, with the reference on CPUs, whose products are torch's."""
    cp = mp.build_mesh(cp=2, device_type="cpu").cp
    return layers(nn.Sequential(*(mp.ParallelAttention(WIDTH, 2, cp=cp, context="ring") for _ in range(2))),
                  (1, ROWS, WIDTH))  # fmt: skip


def experts(shared: int, halves: bool = False) -> Step:
    """Experts on both ranks, each for all tokens, beside shared ones; or blocks that compute two halves of their rows.

    With a capacity, as in a `Run`, no message is for the sizes of the others.
    """
    mesh = mp.build_mesh(ep=2, device_type="cpu")
    like = {"shared_experts": shared, "capacity_factor": 1.0, "ep": mesh.ep, "etp": mesh.etp}
    model = nn.Sequential(*(mp.ParallelMoE(WIDTH, WIDTH, 2, 2, "gelu", **like) for _ in range(2)))
    if halves:
        model = nn.Sequential(*(mp.TransformerBlock(mp.ParallelAttention(WIDTH, 2), moe, nn.Identity(), nn.Identity())
                                for moe in model))  # fmt: skip
        overlap_experts(model)
    return layers(model, (2, ROWS // 2, WIDTH))


def pipeline(schedule: str, stages: int) -> Step:
    """Two linear layers a stage."""
    mesh = mp.build_mesh(pp=2, device_type="cpu")
    held = [nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))) for _ in range(stages)]
    run = Pipeline(held, mesh, MICRO_BATCHES, squares, schedule)
    x = torch.ones(32 * MICRO_BATCHES, WIDTH)
    return lambda: run.forward_backward(x, x)


MODES = [
    Mode("ZeRO-0 on dp 2", "large gradients are all-reduced while backward computes others", partial(data, 0)),
    Mode("ZeRO-1 on dp 2", "on a CPU nothing; on a GPU reduce-scatters in backward, gathers ahead", partial(data, 1)),
    Mode("ZeRO-2 on dp 2", "the same, each micro-batch", partial(data, 2)),
    Mode("ZeRO-3 on dp 2", "the same, gathers ahead in both passes", partial(data, 3)),
    Mode("tensor parallel, tp 2", "in backward the input's gradient is summed while the weight's is computed",
         partial(tensor, False)),
    Mode("the same with sequence parallel", "the same with reduce-scatters; forward's gathers are exposed",
         partial(tensor, True)),
    Mode("tensor parallel, `overlap_communication`",
         "and half of each all-reduce in forward, under the other half's product",
         partial(tensor, False, True), ROWS * WIDTH * WIDTH),
    Mode("tensor parallel, `overlap_halves`", "and three of four all-reduces in forward, beside other rows",
         partial(dense, False), ROWS * WIDTH * WIDTH),
    Mode("sequence parallel, `overlap_communication`", "gathers and reduce-scatters in both passes, in parts",
         partial(tensor, True, True), 2 * ROWS * WIDTH * WIDTH),
    Mode("sequence parallel, `overlap_halves`", "and six of eight messages of a block, beside other rows",
         partial(dense, True), 2 * ROWS * WIDTH * WIDTH),
    Mode("ring attention on cp 2", "the next keys are sent while attention runs", context),
    Mode("experts on ep 2, one shared", "the shared expert computes beside both all-to-alls, in both passes",
         partial(experts, 1)),
    Mode("experts on ep 2, none shared", "nothing", partial(experts, 0)),
    Mode("experts on ep 2, none shared, `overlap_experts`", "three of four messages, beside the other half of the rows",
         partial(experts, 0, True), ROWS * WIDTH * WIDTH),
    Mode("1F1B on pp 2", "sends beside the work of other micro-batches", partial(pipeline, "1f1b", 1)),
    Mode("GPipe on pp 2", "the same; receives are posted two computations early", partial(pipeline, "gpipe", 1)),
    Mode("DualPipeV on pp 2", "sends beside the work of other micro-batches", partial(pipeline, "dualpipev", 2)),
]  # fmt: skip
