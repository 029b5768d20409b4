"""SwiGLU: an up projection gated by the SiLU (swish) of another.

    y = f(gate) up,  f(z) = z s(z),  s(z) = 1 / (1 + e^-z),  x = gate | up

    f'(z) = s(z) (1 + z (1 - s(z)))

Shazeer, "GLU Variants Improve Transformer" (2020), equation 6. The kernels are those of `_activation.py`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ._activation import activate, runs_kernel, widened


def swiglu(x: Tensor, *, impl: str | None = None) -> Tensor:
    """Multiply the second half of the last dimension by the SiLU of the first.

    Args:
        x: `[..., 2F]`, gate and up side by side; dtypes and strides as `gelu` takes them.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        `y` `[..., F]` in the dtype of `x`.

    Raises:
        ValueError: the width is odd, the dtype is another, or `impl` can't run here.
    """
    if runs_kernel(x, impl, "swiglu", gated=True):
        return activate(x, "silu", True, "swiglu")
    return swiglu_reference(x)


def swiglu_reference(x: Tensor) -> Tensor:
    """`swiglu` in plain torch, under torch's own autograd; computes in float32, or float64 for a float64 `x`."""
    gate, up = widened(x).chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)
