"""Layer normalisation, with an optional residual addition in front.

    h = x + residual                            (h = x without a residual)
    n = (h - mean(h)) * rstd,  rstd = (mean((h - mean(h))^2) + eps)^(-1/2)
    y = n weight + bias

    dh      = rstd * (weight dy - mean(weight dy) - n mean(weight dy n)) + dresidual_out
    dweight = sum over rows of dy n,  dbias = sum over rows of dy

Ba, Kiros and Hinton, "Layer Normalization" (2016), equation 4. The kernels are those of `_norm.py`.
"""

from __future__ import annotations

import functools
from typing import overload

from torch import Tensor

from ._norm import norm


@overload
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = ..., *, residual: None = ..., impl: str | None = ...
) -> Tensor: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = ..., *, residual: Tensor, impl: str | None = ...
) -> tuple[Tensor, Tensor]: ...
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5, *, residual: Tensor | None = None,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Normalise the last dimension of `x` (of `x + residual`, if given) to mean 0 and variance 1, then scale and shift.

    Args:
        x: `[..., D]`, float32, bfloat16 or float16 (the reference takes float64 too), with any strides.
        weight: gain, `[D]`, of any such dtype.
        bias: shift, `[D]`, of any such dtype, or `None`. If weight and bias both have a `main_grad` (float32), the
            kernel adds their gradients there.
        eps: added to the variance.
        residual: `[..., D]`, added to `x` before the norm; its dtype may differ, as for a float32 residual stream.
        impl: `"triton"` (rows of up to 8192, in half precision 12288, or 16384 without a bias), `"reference"`, or
            `None` to choose by the device and the width of `x`.

    Returns:
        `y` `[..., D]` in the dtype of `x`; with a residual, `(y, x + residual)`.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, or `impl` can't run here.
    """
    return norm("layer_norm", x, weight, bias, residual, eps, impl)  # pyright: ignore[reportReturnType]


layer_norm_reference: functools.partial[Tensor] = functools.partial(layer_norm, impl="reference")
