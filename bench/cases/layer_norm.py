"""Layer norm of 8192 rows."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.protocol import Inputs, Kernel, Shape, always, compiled, imported
from mpcore.kernels.layer_norm import layer_norm, layer_norm_reference


def inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """x [M, D], gain and shift [D]."""
    like = {"dtype": dtype, "device": device}
    D = shape["D"]
    return {
        "x": torch.randn(shape["M"], D, **like),
        "weight": torch.rand(D, **like) + 1,
        "bias": torch.randn(D, **like),
    }


def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """torch's own."""
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, 1e-5)


LAYER_NORM = Kernel(
    "layer_norm",
    inputs,
    layer_norm,
    layer_norm_reference,
    {
        "eager": always(eager),
        "torch.compile": compiled(eager),
        "Liger": imported(
            "liger_kernel.ops.layer_norm",
            "LigerLayerNormFunction",
            lambda f: lambda x, weight, bias: f.apply(x, weight, bias, 1e-5),
        ),
        "apex": imported(
            "apex.contrib.layer_norm.layer_norm",
            "FastLayerNormFN",
            lambda f: lambda x, weight, bias: f.apply(x, weight, bias, 1e-5),
        ),
    },
    cost=lambda s, b: (2 * b * s["M"] * s["D"], 5 * b * s["M"] * s["D"]),
    shapes=[{"M": 8192, "D": d} for d in (4096, 5120, 8192)],
    toy={"M": 5, "D": 96},
)
