"""The head and its cross-entropy, never all logits in memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.protocol import Inputs, Kernel, Shape, always, compare, compiled, imported
from mpcore.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference


def inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """x [M, D], the head [V, D], targets and their weights [M]."""
    M, D, V = shape["M"], shape["D"], shape["V"]
    like = {"dtype": dtype, "device": device}
    return {
        "x": torch.randn(M, D, **like),
        "weight": torch.randn(V, D, **like) * D**-0.5,
        "target": torch.randint(V, (M,), device=device),
        "scale": torch.ones(M, device=device),
    }


def eager(x: Tensor, weight: Tensor, target: Tensor, scale: Tensor) -> Tensor:
    """All logits at once."""
    return F.cross_entropy((x @ weight.t()).float(), target, reduction="sum")


LINEAR_CROSS_ENTROPY = Kernel(
    "linear_cross_entropy",
    inputs,
    linear_cross_entropy,
    linear_cross_entropy_reference,
    {
        "eager": always(eager),
        "torch.compile": compiled(eager),
        "Liger": imported(
            "liger_kernel.transformers.functional",
            "liger_fused_linear_cross_entropy",
            lambda f: lambda x, weight, target, scale: f(x, weight, target, reduction="sum"),
        ),
        "quack": imported(
            "quack.linear_cross_entropy",
            "chunked_linear_cross_entropy",
            lambda f: lambda x, weight, target, scale: f(x, weight, target, reduction="sum"),
        ),
        "cut-cross-entropy": imported(
            "cut_cross_entropy",
            "linear_cross_entropy",
            lambda f: lambda x, weight, target, scale: f(x, weight, target, reduction="sum"),
        ),
    },
    cost=lambda s, b: (2.0 * s["M"] * s["D"] * s["V"], 6.0 * s["M"] * s["D"] * s["V"]),
    shapes=[{"M": 8192, "D": 4096, "V": 128256}],
    toy={"M": 6, "D": 8, "V": 37},
    unit="TFLOP/s",
    check={"M": 1024},
    constants=("scale",),
)


@pytest.mark.parametrize(("kernel", "shape", "dtype", "which"), LINEAR_CROSS_ENTROPY.cases())
def test_linear_cross_entropy(request, kernel, shape, dtype, which) -> None:
    """Right, and on CUDA as fast as it is."""
    compare(request, kernel, shape, dtype, which)
