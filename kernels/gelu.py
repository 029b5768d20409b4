"""GELU: the Gaussian error linear unit, exact or by its tanh approximation.

    y = f(x)

    "none":  f(z) = z P(z),   P(z) = (1 + erf(z / sqrt 2)) / 2
             f'(z) = P(z) + z p(z),   p(z) = e^(-z^2 / 2) / sqrt(2 pi)
    "tanh":  f(z) = z (1 + tanh u) / 2 = z s(2 u),   u = sqrt(2 / pi) (z + 0.044715 z^3),   s(v) = 1 / (1 + e^-v)
             f'(z) = s + z s (1 - s) 2 du/dz

Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), section 2. The kernels are those of `_activation.py`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ._activation import activate, gelu_function, runs_kernel, widened


def gelu(x: Tensor, *, approximate: str = "tanh", impl: str | None = None) -> Tensor:
    """Apply GELU to `x`, element by element.

    Args:
        x: `[..., F]`, float32, bfloat16 or float16 (the reference takes float64 too), with any strides.
        approximate: `"tanh"`, or `"none"` for the exact function.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        `y` `[..., F]` in the dtype of `x`.

    Raises:
        ValueError: the dtype is another, `approximate` is unknown, or `impl` can't run here.
    """
    f = gelu_function(approximate)
    if runs_kernel(x, impl, "gelu"):
        return activate(x, f, False, "gelu")
    return gelu_reference(x, approximate=approximate)


def gelu_reference(x: Tensor, *, approximate: str = "tanh") -> Tensor:
    """`gelu` in plain torch, under torch's own autograd; computes in float32, or float64 for a float64 `x`."""
    return F.gelu(widened(x), approximate=approximate).to(x.dtype)
