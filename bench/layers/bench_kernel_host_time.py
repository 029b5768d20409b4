"""What a kernel costs the host: rms_norm forward and backward, launches and all, beside an empty autograd function."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from bench.interleave import interleave, judge
from mpcore.kernels import _dispatch
from mpcore.kernels.rms_norm import rms_norm, rms_norm_reference

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "kernels"))
from fake_gpu import fake_gpu  # pyright: ignore[reportMissingImports]

ROWS, D = 4, 64


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
@pytest.mark.benchmark(group="host time of rms_norm, forward and backward, launched on a GPU that does nothing")
def test_rms_norm_host_time(benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 4 times an empty `autograd.Function` of the same arity."""
    monkeypatch.setattr(_dispatch, "INTERPRETING", True)  # the fake GPU's tensors are on the CPU
    x, weight = torch.ones(ROWS, D, requires_grad=True), torch.ones(D, requires_grad=True)
    dy = torch.ones(ROWS, D)
    calls = {
        "rms_norm": lambda: torch.autograd.grad(rms_norm(x, weight, impl="triton"), (x, weight), dy),
        "empty function": lambda: torch.autograd.grad(Empty.apply(x, weight, None, 1e-6), (x, weight), dy),
        "torch on the CPU": lambda: torch.autograd.grad(rms_norm_reference(x, weight), (x, weight), dy),
    }
    with fake_gpu(record=False):
        times = interleave(calls, rounds=100, iterations=20, warmup=5)
        benchmark.pedantic(calls["rms_norm"], rounds=50, iterations=20, warmup_rounds=2)
    pair = "rms_norm", "empty function"
    ratio = times.ratio(*pair)
    benchmark.extra_info |= {
        "shape": f"[{ROWS}, {D}]",
        "microseconds": {name: round(1e6 * times.median(name), 1) for name in times},
        "ratios": {"host time / empty autograd.Function (at most 4)": round(ratio, 2)},
    }
    judge(benchmark.extra_info, "host time over an empty autograd.Function's", times.ratios(*pair), at_most=4.0)
