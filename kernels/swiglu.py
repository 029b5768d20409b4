"""SwiGLU: an up projection gated by the SiLU (swish) of another.

    y = f(gate + b) (up + c),  f(z) = z s(z),  s(z) = 1 / (1 + e^-z),  x = gate | up,  bias = b | c

    f'(z) = s(z) (1 + z (1 - s(z)))

Shazeer, "GLU Variants Improve Transformer" (2020), equation 6. The kernels are those of `_activation.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._activation import add_bias, check_gated, empty_backward, empty_forward, run_backward, run_forward, sigmoids
from ._dispatch import (
    define,
    launches,
    refuse_second_derivative,
    runs_triton,
    tl,  # noqa: F401, Triton's interpreter wants it beside every kernel
    triton,
)


def swiglu(x: Tensor, bias: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """Multiply the second half of the last dimension by the SiLU of the first.

    Args:
        x: `[..., 2F]`, gate and up side by side; float32, bfloat16 or float16 (the reference takes float64 too), with
            any strides.
        bias: `[2F]`, added to `x` first, in float32; its dtype may differ from that of `x`.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        `y` `[..., F]` in the dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, or `impl` can't run here.
    """
    check_gated(x, bias)
    if not runs_triton(impl, x):
        return swiglu_reference(x, bias)
    return _SwiGLU.apply(x, bias)


def swiglu_reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """`swiglu` in plain torch, under torch's own autograd; computes in float32, or float64 for a float64 `x`."""
    gate, up = add_bias(x, bias).chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x, bias)
        return _forward_op(x, bias)

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative("swiglu")
        x, bias = ctx.saved_tensors
        dx, dbias = _backward_op(dy, x, bias)
        return dx, None if bias is None else dbias


def _empty_forward(x: Tensor, bias: Tensor | None) -> Tensor:
    return empty_forward(x, gated=True)


def _empty_backward(dy: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return empty_backward(x, bias)


_forward_op = define("swiglu_forward(Tensor x, Tensor? bias) -> Tensor y", _empty_forward)
_backward_op = define(
    "swiglu_backward(Tensor dy, Tensor x, Tensor? bias) -> (Tensor dx, Tensor dbias)", _empty_backward
)


@launches(_forward_op)
def _launch_forward(x: Tensor, bias: Tensor | None) -> Tensor:
    return run_forward(silu, x, bias, gated=True)


@launches(_backward_op)
def _launch_backward(dy: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return run_backward(silu, dy, x, bias, gated=True)


@triton.jit
def silu(z):
    s, complement = sigmoids(z)  # pyright: ignore[reportGeneralTypeIssues]
    return z * s, s * (1.0 + z * complement)
