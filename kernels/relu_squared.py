"""Squared ReLU, with an optional bias inside.

    y = f(x + bias),  f(z) = max(z, 0)^2,  f'(z) = 2 max(z, 0)

So et al., "Primer: Searching for Efficient Transformers for Language Modeling" (2021), section 3.
The kernels are those of `_activation.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._activation import add_bias, empty_backward, empty_forward, run_backward, run_forward
from ._dispatch import define, launches, refuse_second_derivative, runs_triton, tl, triton
from ._rows import check_inputs


def relu_squared(x: Tensor, bias: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """Apply the square of ReLU to `x + bias`, element by element.

    Args:
        x: `[..., F]`, float32, bfloat16 or float16 (the reference takes float64 too), with any strides.
        bias: `[F]`, added to `x` first, in float32; its dtype may differ from that of `x`.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        `y` `[..., F]` in the dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, or `impl` can't run here.
    """
    check_inputs(x, bias=bias)
    if not runs_triton(impl, x):
        return relu_squared_reference(x, bias)
    return _ReluSquared.apply(x, bias)


def relu_squared_reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """`relu_squared` in plain torch, under torch's own autograd; computes in float32, or float64 for a float64 `x`."""
    return F.relu(add_bias(x, bias)).square().to(x.dtype)


class _ReluSquared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x, bias)
        return _forward_op(x, bias)

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative("relu_squared")
        x, bias = ctx.saved_tensors
        dx, dbias = _backward_op(dy, x, bias)
        return dx, None if bias is None else dbias


def _empty_forward(x: Tensor, bias: Tensor | None) -> Tensor:
    return empty_forward(x, gated=False)


def _empty_backward(dy: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return empty_backward(x, bias)


_forward_op = define("relu_squared_forward(Tensor x, Tensor? bias) -> Tensor y", _empty_forward)
_backward_op = define(
    "relu_squared_backward(Tensor dy, Tensor x, Tensor? bias) -> (Tensor dx, Tensor dbias)", _empty_backward
)


@launches(_forward_op)
def _launch_forward(x: Tensor, bias: Tensor | None) -> Tensor:
    return run_forward(squared, x, bias, gated=False)


@launches(_backward_op)
def _launch_backward(dy: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return run_backward(squared, dy, x, bias, gated=False)


@triton.jit
def squared(z):
    r = tl.where(z < 0.0, 0.0, z)  # a maximum would turn NaN into 0
    return r * r, 2.0 * r
