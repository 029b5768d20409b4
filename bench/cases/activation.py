"""Activations, plain and gated, of 8192 rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.protocol import Function, Inputs, Kernel, Shape, always, compiled, imported
from mpcore.kernels.activation import (
    geglu,
    geglu_reference,
    gelu,
    gelu_reference,
    relu_squared,
    relu_squared_reference,
    swiglu,
    swiglu_reference,
)


def inputs(width: int) -> Callable[[Shape, torch.dtype, torch.device], Inputs]:
    """Make x [M, width F]."""

    def make(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
        return {"x": torch.randn(shape["M"], width * shape["F"], dtype=dtype, device=device)}

    return make


def gated(act: Callable[[Tensor], Tensor]) -> Function:
    """The plain way to write a gated activation."""

    def eager(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return act(gate) * up

    return eager


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by tanh."""
    return F.gelu(x, approximate="tanh")


def relu_squared_eager(x: Tensor) -> Tensor:
    """torch's own."""
    return F.relu(x).square()


def liger(name: str, function: str):
    """Liger's, which takes the halves apart."""

    def adapt(f) -> Function:
        return lambda x: f.apply(*x.chunk(2, -1))

    return imported(f"liger_kernel.ops.{name}", function, adapt)


def megatron(name: str, function: str):
    """Megatron's without a bias."""
    return imported(f"megatron.core.fusions.{name}", function, lambda f: lambda x: f(x, None))


def kernel(name: str, ours: Function, reference: Function, eager: Function, width: int, size: int, peers) -> Kernel:
    """Inputs are read once and outputs written once; backward reads x and dy and writes dx."""
    return Kernel(
        name,
        inputs(width),
        ours,
        reference,
        {"eager": always(eager), "torch.compile": compiled(eager), **peers},
        cost=lambda s, b: ((width + 1) * b * s["M"] * s["F"], (3 * width + 2) * b * s["M"] * s["F"]),
        shapes=[{"M": m, "F": size} for m in (8192, 2048)],
        toy={"M": 5, "F": 40},
    )


KERNELS = [
    kernel(
        *("swiglu", swiglu, swiglu_reference, gated(F.silu), 2, 14336),
        {
            "Liger": liger("swiglu", "LigerSiLUMulFunction"),
            "Megatron": megatron("fused_bias_swiglu", "bias_swiglu_impl"),
        },
    ),
    kernel(
        *("geglu", geglu, geglu_reference, gated(gelu_tanh), 2, 14336),
        {"Liger": liger("geglu", "LigerGELUMulFunction"), "Megatron": megatron("fused_bias_geglu", "bias_geglu_impl")},
    ),
    kernel(*("gelu", gelu, gelu_reference, gelu_tanh, 1, 16384), {}),
    kernel("relu_squared", relu_squared, relu_squared_reference, relu_squared_eager, 1, 16384, {}),
]
