"""GELU: the Gaussian error linear unit, exact or by its tanh approximation, with an optional bias inside.

    y = f(x + bias)

    "none":  f(z) = z P(z),   P(z) = (1 + erf(z / sqrt 2)) / 2
             f'(z) = P(z) + z p(z),   p(z) = e^(-z^2 / 2) / sqrt(2 pi)
    "tanh":  f(z) = z (1 + tanh u) / 2 = z s(2 u),   u = sqrt(2 / pi) (z + 0.044715 z^3),   s(v) = 1 / (1 + e^-v)
             f'(z) = s + z s (1 - s) 2 du/dz

Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), section 2. The kernels are those of `_activation.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._activation import add_bias, empty_backward, empty_forward, run_backward, run_forward, sigmoids
from ._dispatch import define, launches, refuse_second_derivative, runs_triton, tl, triton
from ._rows import check_inputs


def gelu(x: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh", impl: str | None = None) -> Tensor:
    """Apply GELU to `x + bias`, element by element.

    Args:
        x: `[..., F]`, float32, bfloat16 or float16 (the reference takes float64 too), with any strides.
        bias: `[F]`, added to `x` first, in float32; its dtype may differ from that of `x`.
        approximate: `"tanh"`, or `"none"` for the exact function.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        `y` `[..., F]` in the dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, `approximate` is unknown, or `impl` can't run here.
    """
    check_inputs(x, bias=bias)
    check_approximate(approximate)
    if not runs_triton(impl, x):
        return gelu_reference(x, bias, approximate=approximate)
    return _GELU.apply(x, bias, approximate)


def gelu_reference(x: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """`gelu` in plain torch, under torch's own autograd; computes in float32, or float64 for a float64 `x`."""
    return F.gelu(add_bias(x, bias), approximate=approximate).to(x.dtype)


def check_approximate(approximate: str) -> None:
    """Raise `ValueError` unless `approximate` names one of the two functions."""
    if approximate not in ("tanh", "none"):
        raise ValueError(f"approximate {approximate!r} is neither 'tanh' nor 'none'")


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, approximate):
        ctx.approximate = approximate
        ctx.save_for_backward(x, bias)
        return _forward_op(x, bias, approximate)

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative("gelu")
        x, bias = ctx.saved_tensors
        dx, dbias = _backward_op(dy, x, bias, ctx.approximate)
        return dx, None if bias is None else dbias, None


def _empty_forward(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    return empty_forward(x, gated=False)


def _empty_backward(dy: Tensor, x: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
    return empty_backward(x, bias)


_forward_op = define("gelu_forward(Tensor x, Tensor? bias, str approximate) -> Tensor y", _empty_forward)
_backward_op = define(
    "gelu_backward(Tensor dy, Tensor x, Tensor? bias, str approximate) -> (Tensor dx, Tensor dbias)", _empty_backward
)


@launches(_forward_op)
def _launch_forward(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    return run_forward(gelu_tanh if approximate == "tanh" else gelu_erf, x, bias, gated=False)


@launches(_backward_op)
def _launch_backward(dy: Tensor, x: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
    return run_backward(gelu_tanh if approximate == "tanh" else gelu_erf, dy, x, bias, gated=False)


@triton.jit
def gelu_tanh(z):
    twice_u = 1.5957691216057308 * (z + 0.044715 * z * z * z)  # 2 sqrt(2 / pi)
    s, complement = sigmoids(twice_u)  # pyright: ignore[reportGeneralTypeIssues]
    return z * s, s + z * s * complement * 1.5957691216057308 * (1.0 + 0.134145 * z * z)


@triton.jit
def gelu_erf(z):
    cumulative = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
    return z * cumulative, cumulative + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
