"""What a step costs the host: a tiny MLP on tp 8 beside plain torch and DTensor; a kernel beside an empty function."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from bench.interleave import device_clock, interleave, judge
from bench.machine import ROOT
from mpcore import (
    ColumnParallelLinear,
    Mesh,
    ParallelAttention,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
    TransformerBlock,
)
from mpcore.kernels import _dispatch
from mpcore.kernels.rms_norm import rms_norm, rms_norm_reference
from mpcore.layers.overlap import overlap_communication

D, HIDDEN, BATCH, LENGTH = 64, 256, 2, 8


class MLP(nn.Module):
    """Two linear layers of any make, GELU between."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


def step(model: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
    """Forward and backward, gradients thrown away."""
    parameters = list(model.parameters())

    def call() -> None:
        y = model(x)
        y.backward(dy)
        for result in (y, x.grad):
            if isinstance(result, AsyncCollectiveTensor):  # DTensor leaves the waiting to whoever reads
                result.wait()
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    return call


def compare(benchmark: Any, shape: str, calls: Mapping[str, Callable[[], object]], bounds: dict[Any, Any]) -> None:
    """Time all calls in turn. `bounds` has the bound of each judged ratio: of the first name over the second."""
    times = interleave(calls, rounds=100, iterations=20, warmup=5)
    microseconds = {name: round(1e6 * times.median(name), 1) for name in times}
    ratios = {f"host time of {a} / {b}": round(times.ratio(a, b), 3) for a, b in bounds}
    benchmark.extra_info |= {"shape": shape, "microseconds": microseconds, "ratios": ratios}
    for (a, b), bound in bounds.items():
        if bound:
            judge(benchmark.extra_info, f"host time of {a} over {b}", times.ratios(a, b), **bound)
    device_clock.hand(benchmark, times[next(iter(calls))])


@pytest.mark.benchmark(group="host time of an MLP on tp 8, forward and backward", timer=device_clock)
def test_mlp_host_time(benchmark, tp8: Mesh) -> None:
    """At most 1.35 times plain `nn.Linear`; at least 6 times as fast as DTensor."""
    tp = tp8.tp
    assert tp8.device_mesh is not None
    ours = MLP(ColumnParallelLinear(D, HIDDEN, tp=tp), RowParallelLinear(HIDDEN, D, tp=tp))
    local = MLP(nn.Linear(D, HIDDEN // tp.size), nn.Linear(HIDDEN // tp.size, D))
    full = MLP(nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D))
    dtensor = MLP(nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D))
    dtensor = parallelize_module(dtensor, tp8.device_mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x, dy = torch.randn(BATCH, LENGTH, D, requires_grad=True), torch.randn(BATCH, LENGTH, D)

    local.load_state_dict(ours.state_dict())
    for mlp in (ours, local):  # the fake group sums nothing, so one rank's share is what plain torch computes
        mlp.zero_grad()
        mlp(x).backward(dy)
    torch.testing.assert_close(ours(x), local(x))
    for mine, other in zip(ours.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)

    models = {"mpcore": ours, "nn.Linear of the local sizes": local, "nn.Linear": full, "DTensor": dtensor}
    calls = {name: step(model, x, dy) for name, model in models.items()}
    bounds = {("mpcore", "nn.Linear of the local sizes"): {}, ("mpcore", "nn.Linear"): {"at_most": 1.35},
              ("DTensor", "mpcore"): {"at_least": 6.0}}  # fmt: skip
    compare(benchmark, f"[{BATCH}, {LENGTH}, {D}] -> {HIDDEN}", calls, bounds)


@pytest.mark.benchmark(group="host time of a block on tp 8 with sequence parallelism", timer=device_clock)
def test_overlapped_block_host_time(benchmark, tp8: Mesh) -> None:
    """Forward and backward with hidden messages: at most 1.3 times those without."""
    like = {"tp": tp8.tp, "sequence_parallel": True}
    blocks = {}
    for name in ("hidden messages", "plain"):
        mlp, norms = ParallelMLP(D, HIDDEN, "gelu", **like), [RMSNorm(D, **like) for _ in range(2)]
        blocks[name] = TransformerBlock(ParallelAttention(D, 8, **like), mlp, *norms)
    overlap_communication(blocks["hidden messages"], smallest=1)
    x, dy = torch.randn(1, BATCH, D, requires_grad=True), torch.randn(1, BATCH, D)
    calls = {name: step(block, x, dy) for name, block in blocks.items()}
    compare(benchmark, f"[1, {8 * BATCH}, {D}]", calls, {("hidden messages", "plain"): {"at_most": 1.3}})


class Empty(torch.autograd.Function):
    """As many inputs and gradients as rms_norm's, and nothing else."""

    @staticmethod
    def forward(ctx, x, weight, residual, eps):
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        return *map(torch.empty_like, ctx.saved_tensors), None, None


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no launch path to time")
@pytest.mark.benchmark(group="host time of rms_norm, launched on a GPU that does nothing", timer=device_clock)
def test_rms_norm_host_time(benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, launches too: at most 4 times an empty `autograd.Function` of the same arity."""
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(ROOT / "tests" / "kernels")
    from fake_gpu import fake_gpu  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(_dispatch, "INTERPRETING", True)  # the fake GPU's tensors are on the CPU
    x, weight, dy = torch.ones(4, 64, requires_grad=True), torch.ones(64, requires_grad=True), torch.ones(4, 64)
    calls = {
        "rms_norm": lambda: torch.autograd.grad(rms_norm(x, weight, impl="triton"), (x, weight), dy),
        "an empty function": lambda: torch.autograd.grad(Empty.apply(x, weight, None, 1e-6), (x, weight), dy),
        "torch on the CPU": lambda: torch.autograd.grad(rms_norm_reference(x, weight), (x, weight), dy),
    }
    with fake_gpu(record=False):
        compare(benchmark, "[4, 64]", calls, {("rms_norm", "an empty function"): {"at_most": 4.0}})
