"""The products of experts, rows of each in a run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bench.kernels.protocol import Function, Inputs, Kernel, NotHereError, Shape, always, compare
from mpcore.kernels.grouped_linear import grouped_linear, grouped_linear_reference


def inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """x [R, D], weight [E, F, D] and counts [E], uneven, of R rows in all."""
    R, D, F, E = (shape[name] for name in ("R", "D", "F", "E"))
    counts = torch.bincount(torch.randint(E, (R,)), minlength=E)
    like = {"dtype": dtype, "device": device}
    return {
        "x": torch.randn(R, D, **like),
        "weight": torch.randn(E, F, D, **like) * D**-0.5,
        "counts": counts.to(device, torch.int32),
    }


def grouped_mm(shape: Shape) -> Function:
    """torch's own grouped product."""
    if not torch.cuda.is_available():
        raise NotHereError("a kernel of CUDA")

    def run(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        return torch._grouped_mm(x, weight.transpose(-2, -1), offs=counts.cumsum(0, dtype=torch.int32))

    return run


def liger(shape: Shape) -> Function:
    """None that takes runs of rows."""
    raise NotHereError("has no grouped product of its own: its MoE function is the whole expert MLP")


GROUPED_LINEAR = Kernel(
    "grouped_linear",
    inputs,
    grouped_linear,
    grouped_linear_reference,
    {"eager": always(grouped_linear_reference), "torch._grouped_mm": grouped_mm, "Liger": liger},
    cost=lambda s, b: (2.0 * s["R"] * s["D"] * s["F"], 6.0 * s["R"] * s["D"] * s["F"]),
    shapes=[{"R": 65536, "D": 2048, "F": 1408, "E": 64}],
    toy={"R": 20, "D": 8, "F": 12, "E": 3},
    unit="TFLOP/s",
    check={"R": 8192},
)


@pytest.mark.parametrize(("kernel", "shape", "dtype", "which"), GROUPED_LINEAR.cases())
def test_grouped_linear(request, kernel, shape, dtype, which) -> None:
    """Right, and on CUDA as fast as it is."""
    compare(request, kernel, shape, dtype, which)
