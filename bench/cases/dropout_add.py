"""Bias, dropout of a tenth and residual addition of 8192 tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.protocol import Inputs, Kernel, Shape, always, compiled, imported
from mpcore.kernels.dropout_add import dropout_add, dropout_add_reference

P, KEY = 0.1, 7


def inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """x and residual [B, T, D], bias [D], samples [B]."""
    B, T, D = shape["B"], shape["T"], shape["D"]
    like = {"dtype": dtype, "device": device}
    return {
        "x": torch.randn(B, T, D, **like),
        "residual": torch.randn(B, T, D, **like),
        "bias": torch.randn(D, **like),
        "samples": torch.arange(B, device=device),
    }


def eager(x: Tensor, residual: Tensor, bias: Tensor, samples: Tensor) -> Tensor:
    """torch's own three steps, with a mask of torch's."""
    return residual + F.dropout(x + bias, P)


DROPOUT_ADD = Kernel(
    "dropout_add",
    inputs,
    lambda x, residual, bias, samples: dropout_add(x, residual, P, key=KEY, samples=samples, bias=bias),
    lambda x, residual, bias, samples: dropout_add_reference(x, residual, P, key=KEY, samples=samples, bias=bias),
    {
        "eager": always(eager),
        "torch.compile": compiled(eager),
        "Megatron": imported(
            "megatron.core.fusions.fused_bias_dropout",
            "get_bias_dropout_add",
            lambda f: lambda x, residual, bias, samples: f(True, True)((x, bias), residual, P),
        ),
    },
    # backward reads dy and writes dx; the gradient of the residual is dy itself
    cost=lambda s, b: (3 * b * s["B"] * s["T"] * s["D"], 5 * b * s["B"] * s["T"] * s["D"]),
    shapes=[{"B": 4, "T": 2048, "D": 4096}, {"B": 4, "T": 2048, "D": 8192}],
    toy={"B": 2, "T": 5, "D": 24},
    random=True,
)
