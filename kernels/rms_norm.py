"""Root mean square normalisation, with an optional residual addition in front.

    h = x + residual                            (h = x without a residual)
    y = h * rstd * weight,  rstd = (mean(h^2) + eps)^(-1/2)

    dh      = rstd * (weight dy - n mean(weight dy n)) + dresidual_out,  n = h * rstd
    dweight = sum over rows of dy n

Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4. The kernels are those of `_norm.py`.
"""

from __future__ import annotations

import functools
from typing import overload

from torch import Tensor

from ._norm import norm


@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float = ..., *, residual: None = ..., impl: str | None = ...
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float = ..., *, residual: Tensor, impl: str | None = ...
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, residual: Tensor | None = None, impl: str | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise the last dimension of `x` (of `x + residual`, if given) by its root mean square.

    Args:
        x: `[..., D]`, float32, bfloat16 or float16 (the reference takes float64 too), with any strides.
        weight: gain, `[D]`, of any such dtype. If it has a `main_grad` (float32), the kernel adds its gradient there.
        eps: added to the mean square.
        residual: `[..., D]`, added to `x` before the norm; its dtype may differ, as for a float32 residual stream.
        impl: `"triton"` (rows of up to 8192, in half precision 16384), `"reference"`, or `None` to choose by the device
            and the width of `x`.

    Returns:
        `y` `[..., D]` in the dtype of `x`; with a residual, `(y, x + residual)`.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, or `impl` can't run here.
    """
    return norm("rms_norm", x, weight, None, residual, eps, impl)  # pyright: ignore[reportReturnType]


rms_norm_reference: functools.partial[Tensor] = functools.partial(rms_norm, impl="reference")
