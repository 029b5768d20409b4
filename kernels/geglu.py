"""GeGLU: an up projection gated by the GELU of another.

    y = f(gate + b) (up + c),  f = GELU as in `gelu.py`, exact or by tanh,  x = gate | up,  bias = b | c

Shazeer, "GLU Variants Improve Transformer" (2020), equation 6. The kernels are those of `_activation.py`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ._activation import activate, add_bias, gelu_function, runs_kernel


def geglu(x: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh", impl: str | None = None) -> Tensor:
    """Multiply the second half of the last dimension by the GELU of the first.

    Args:
        x: `[..., 2F]`, gate and up side by side; dtypes and strides as `gelu` takes them.
        bias: `[2F]`, added to `x` first, in float32; its dtype may differ from that of `x`.
        approximate: `"tanh"`, or `"none"` for the exact GELU.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        `y` `[..., F]` in the dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, `approximate` is unknown, or `impl` can't run here.
    """
    f = gelu_function(approximate)
    if runs_kernel(x, bias, impl, "geglu", gated=True):
        return activate(x, bias, f, True, "geglu")
    return geglu_reference(x, bias, approximate=approximate)


def geglu_reference(x: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """`geglu` in plain torch, under torch's own autograd; computes in float32, or float64 for a float64 `x`."""
    gate, up = add_bias(x, bias).chunk(2, -1)
    return (F.gelu(gate, approximate=approximate) * up).to(x.dtype)
