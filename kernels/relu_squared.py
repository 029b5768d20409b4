"""Squared ReLU.

    y = f(x),  f(z) = max(z, 0)^2,  f'(z) = 2 max(z, 0)

So et al., "Primer: Searching for Efficient Transformers for Language Modeling" (2021), section 3.
The kernels are those of `_activation.py`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ._activation import activate, runs_kernel, widened


def relu_squared(x: Tensor, *, impl: str | None = None) -> Tensor:
    """Apply the square of ReLU to `x`, element by element.

    Args:
        x: `[..., F]`, float32, bfloat16 or float16 (the reference takes float64 too), with any strides.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        `y` `[..., F]` in the dtype of `x`.

    Raises:
        ValueError: the dtype is another, or `impl` can't run here.
    """
    if runs_kernel(x, impl, "relu_squared"):
        return activate(x, "squared", False, "relu_squared")
    return relu_squared_reference(x)


def relu_squared_reference(x: Tensor) -> Tensor:
    """`relu_squared` in plain torch, under torch's own autograd; computes in float32, or float64 for a float64 `x`."""
    return F.relu(widened(x)).square().to(x.dtype)
