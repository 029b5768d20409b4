"""Layer normalisation, with an optional residual addition in front.

    h = x + residual                            (h = x without a residual)
    n = (h - mean(h)) * rstd,  rstd = (mean((h - mean(h))^2) + eps)^(-1/2)
    y = n g + bias,  g = weight, or 1 + weight if zero-centred

    dh      = rstd * (g dy - mean(g dy) - n mean(g dy n)) + dresidual_out
    dweight = sum over rows of dy n,  dbias = sum over rows of dy

Ba, Kiros and Hinton, "Layer Normalization" (2016), equation 4. The kernels are those of `_norm.py`.
"""

from __future__ import annotations

import functools
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ._dispatch import runs_triton
from ._norm import Norm
from ._rows import check_inputs


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float = ...,
    *,
    residual: None = ...,
    zero_centered: bool = ...,
    impl: str | None = ...,
) -> Tensor: ...
@overload
def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float = ...,
    *,
    residual: Tensor,
    zero_centered: bool = ...,
    impl: str | None = ...,
) -> tuple[Tensor, Tensor]: ...
def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    zero_centered: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise the last dimension of `x` (of `x + residual`, if given) to mean 0 and variance 1, then scale and shift.

    Args:
        x: `[..., D]`, float32, bfloat16 or float16 (the reference takes float64 too), with any strides.
        weight: gain, `[D]`; its dtype may differ from that of `x`.
        bias: shift, `[D]`, of any such dtype, or `None`. If weight and bias both have a `main_grad` (float32), the
            kernel adds their gradients there.
        eps: added to the variance.
        residual: `[..., D]`, added to `x` before the norm; its dtype may differ, as for a float32 residual stream.
        zero_centered: the gain is `1 + weight`.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        `y` `[..., D]` in the dtype of `x`; with a residual, `(y, x + residual)`.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, or `impl` can't run here.
    """
    check_inputs(x, residual, weight=weight, bias=bias)
    if not runs_triton(impl, x, "layer_norm", D=x.shape[-1]):
        return _reference(x, weight, bias, eps, residual, zero_centered)
    return Norm.apply(x, weight, bias, residual, True, zero_centered, eps)


# In plain torch, under torch's own autograd; computes in float32, or float64 for a float64 `x`.
layer_norm_reference = functools.partial(layer_norm, impl="reference")


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None, zero_centered: bool
) -> Tensor | tuple[Tensor, Tensor]:
    h = x if residual is None else x + residual
    exact = torch.promote_types(h.dtype, torch.float32)
    gain = weight.to(exact) + 1 if zero_centered else weight
    if x.dtype == h.dtype == gain.dtype == (gain if bias is None else bias).dtype:
        y = F.layer_norm(h, (h.shape[-1],), gain, bias, eps)
    else:
        shift = None if bias is None else bias.to(exact)
        y = F.layer_norm(h.to(exact), (h.shape[-1],), gain.to(exact), shift, eps).to(x.dtype)
    return y if residual is None else (y, h)
