"""GeGLU: an up projection gated by the GELU of another.

    y = f(gate) up,  f = GELU as in `gelu.py`, exact or by tanh,  x = gate | up

Shazeer, "GLU Variants Improve Transformer" (2020), equation 6. The kernels are those of `_activation.py`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ._activation import activate, gelu_function, runs_kernel, widened


def geglu(x: Tensor, *, approximate: str = "tanh", impl: str | None = None) -> Tensor:
    """Multiply the second half of the last dimension by the GELU of the first.

    Args:
        x: `[..., 2F]`, gate and up side by side; dtypes and strides as `gelu` takes them.
        approximate: `"tanh"`, or `"none"` for the exact GELU.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        `y` `[..., F]` in the dtype of `x`.

    Raises:
        ValueError: the width is odd, the dtype is another, `approximate` is unknown, or `impl` can't run here.
    """
    f = gelu_function(approximate)
    if runs_kernel(x, impl, "geglu", gated=True):
        return activate(x, f, True, "geglu")
    return geglu_reference(x, approximate=approximate)


def geglu_reference(x: Tensor, *, approximate: str = "tanh") -> Tensor:
    """`geglu` in plain torch, under torch's own autograd; computes in float32, or float64 for a float64 `x`."""
    gate, up = widened(x).chunk(2, -1)
    return (F.gelu(gate, approximate=approximate) * up).to(x.dtype)
