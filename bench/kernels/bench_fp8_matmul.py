"""The product of eight-bit floats in blocks of 1 x 128 with a weight in blocks of 128 x 128."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.protocol import FORWARD, Function, Inputs, Kernel, NotHereError, Shape, always, compare
from mpcore.kernels._rows import ceil_div
from mpcore.kernels.fp8_matmul import fp8_matmul, fp8_matmul_reference
from mpcore.kernels.quantize_fp8 import BLOCK, Quantized, quantize_fp8


def factors(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """x [M, K] and weight [N, K] as they were and quantized, and the weight's scales as cuBLAS reads them."""
    M, N, K = (shape[name] for name in "MNK")
    x, weight = (torch.randn(size, K, dtype=dtype, device=device) for size in (M, N))
    (a, _), (b, _) = quantize_fp8(x), quantize_fp8(weight, square=True)
    assert a is not None
    assert b is not None
    padded = b.scales.new_zeros(ceil_div(N, BLOCK), ceil_div(ceil_div(K, BLOCK), 4) * 4)
    padded[:, : b.scales.shape[1]] = b.scales
    held = {"a": a.values, "a_scales": a.scales, "b": b.values, "b_scales": b.scales, "padded": padded.t()}
    return {"x": x, "weight": weight, **held}


def product(multiply: Callable[..., Tensor]) -> Function:
    """Of the quantized factors."""

    def run(x: Tensor, weight: Tensor, a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, padded: Tensor):
        return multiply(Quantized(a, a_scales), Quantized(b, b_scales), torch.bfloat16)

    return run


def bfloat16(x: Tensor, weight: Tensor, **_: Tensor) -> Tensor:
    """The product without any of this."""
    return F.linear(x, weight).bfloat16()


def scaled_mm(shape: Shape) -> Function:
    """torch's own, of cuBLAS."""
    if not torch.cuda.is_available():
        raise NotHereError("runs on CUDA only")
    if not hasattr(F, "scaled_mm"):
        raise NotHereError("this torch has no scaled_mm")
    recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    call = functools.partial(F.scaled_mm, scale_recipe_a=recipes[0], scale_recipe_b=recipes[1])

    def run(x: Tensor, weight: Tensor, a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, padded: Tensor):
        return call(a, b.t(), scale_a=a_scales, scale_b=padded, output_dtype=torch.bfloat16)

    return run


MATMUL = Kernel(
    "fp8_matmul",
    factors,
    product(fp8_matmul),
    product(fp8_matmul_reference),
    {"bfloat16": always(bfloat16), "torch scaled_mm": scaled_mm},
    cost=lambda s, b: (2.0 * s["M"] * s["N"] * s["K"], 0),
    shapes=[{"M": 8192, "N": n, "K": 4096} for n in (4096, 14336)],
    toy={"M": 20, "N": 130, "K": 140},
    unit="TFLOP/s",
    passes=(FORWARD,),
    in_float64=False,
)


@pytest.mark.parametrize(("kernel", "shape", "dtype", "which"), MATMUL.cases())
def test_fp8_matmul(request, kernel, shape, dtype, which) -> None:
    """Right, and on CUDA as fast as it is."""
    compare(request, kernel, shape, dtype, which)
