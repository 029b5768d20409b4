"""Squared ReLU, with an optional bias inside.

    y = f(x + bias),  f(z) = max(z, 0)^2,  f'(z) = 2 max(z, 0)

So et al., "Primer: Searching for Efficient Transformers for Language Modeling" (2021), section 3.
The kernels are those of `_activation.py`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ._activation import activate, add_bias, runs_kernel


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
    if runs_kernel(x, bias, impl, "relu_squared"):
        return activate(x, bias, "squared", False, "relu_squared")
    return relu_squared_reference(x, bias)


def relu_squared_reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """`relu_squared` in plain torch, under torch's own autograd; computes in float32, or float64 for a float64 `x`."""
    return F.relu(add_bias(x, bias)).square().to(x.dtype)
