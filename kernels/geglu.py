"""GeGLU: an up projection gated by the GELU of another.

    y = f(gate + b) (up + c),  f = GELU as in `gelu.py`, exact or by tanh,  x = gate | up,  bias = b | c

Shazeer, "GLU Variants Improve Transformer" (2020), equation 6. The kernels are those of `_activation.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._activation import add_bias, check_gated, empty_backward, empty_forward, run_backward, run_forward
from ._dispatch import define, launches, refuse_second_derivative, runs_triton
from .gelu import check_approximate, gelu_erf, gelu_tanh


def geglu(x: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh", impl: str | None = None) -> Tensor:
    """Multiply the second half of the last dimension by the GELU of the first.

    Args:
        x: `[..., 2F]`, gate and up side by side; float32, bfloat16 or float16 (the reference takes float64 too), with
            any strides.
        bias: `[2F]`, added to `x` first, in float32; its dtype may differ from that of `x`.
        approximate: `"tanh"`, or `"none"` for the exact GELU.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        `y` `[..., F]` in the dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, `approximate` is unknown, or `impl` can't run here.
    """
    check_gated(x, bias)
    check_approximate(approximate)
    if not runs_triton(impl, x):
        return geglu_reference(x, bias, approximate=approximate)
    return _GeGLU.apply(x, bias, approximate)


def geglu_reference(x: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """`geglu` in plain torch, under torch's own autograd; computes in float32, or float64 for a float64 `x`."""
    gate, up = add_bias(x, bias).chunk(2, -1)
    return (F.gelu(gate, approximate=approximate) * up).to(x.dtype)


class _GeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, approximate):
        ctx.approximate = approximate
        ctx.save_for_backward(x, bias)
        return _forward_op(x, bias, approximate)

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative("geglu")
        x, bias = ctx.saved_tensors
        dx, dbias = _backward_op(dy, x, bias, ctx.approximate)
        return dx, None if bias is None else dbias, None


def _empty_forward(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    return empty_forward(x, gated=True)


def _empty_backward(dy: Tensor, x: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
    return empty_backward(x, bias)


_forward_op = define("geglu_forward(Tensor x, Tensor? bias, str approximate) -> Tensor y", _empty_forward)
_backward_op = define(
    "geglu_backward(Tensor dy, Tensor x, Tensor? bias, str approximate) -> (Tensor dx, Tensor dbias)", _empty_backward
)


@launches(_forward_op)
def _launch_forward(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    return run_forward(gelu_tanh if approximate == "tanh" else gelu_erf, x, bias, gated=True)


@launches(_backward_op)
def _launch_backward(dy: Tensor, x: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
    return run_backward(gelu_tanh if approximate == "tanh" else gelu_erf, dy, x, bias, gated=True)
