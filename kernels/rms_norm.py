"""Root mean square normalisation, with an optional residual addition in front.

    h = x + residual                            (h = x without a residual)
    y = h * rstd * g,  rstd = (mean(h^2) + eps)^(-1/2),  g = weight, or 1 + weight if zero-centred

    dh      = rstd * (g dy - n mean(g dy n)) + dresidual_out,  n = h * rstd
    dweight = sum over rows of dy n

Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4. The kernels are those of `_norm.py`.
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
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = ...,
    *,
    residual: None = ...,
    zero_centered: bool = ...,
    impl: str | None = ...,
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float = ..., *, residual: Tensor, zero_centered: bool = ..., impl: str | None = ...
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    zero_centered: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise the last dimension of `x` (of `x + residual`, if given) by its root mean square.

    Args:
        x: `[..., D]`, float32, bfloat16 or float16 (the reference takes float64 too), with any strides.
        weight: gain, `[D]`; its dtype may differ from that of `x`. If `weight.main_grad` exists (float32), the kernel
            adds the gradient there, and post-accumulate hooks see a `.grad` of None. The reference uses `.grad`.
        eps: added to the mean square.
        residual: `[..., D]`, added to `x` before the norm; its dtype may differ, as for a float32 residual stream.
        zero_centered: the gain is `1 + weight`.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        `y` `[..., D]` in the dtype of `x`; with a residual, `(y, x + residual)`.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, or `impl` can't run here.
    """
    check_inputs(x, residual, weight=weight)
    if not runs_triton(impl, x, "rms_norm", D=x.shape[-1]):
        return _reference(x, weight, eps, residual, zero_centered)
    return Norm.apply(x, weight, None, residual, False, zero_centered, eps)


# In plain torch, under torch's own autograd; computes in float32, or float64 for a float64 `x`.
rms_norm_reference = functools.partial(rms_norm, impl="reference")


def _reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, zero_centered: bool
) -> Tensor | tuple[Tensor, Tensor]:
    h = x if residual is None else x + residual
    exact = torch.promote_types(h.dtype, torch.float32)
    gain = weight.to(exact) + 1 if zero_centered else weight
    if x.dtype == h.dtype == gain.dtype:
        y = F.rms_norm(h, (h.shape[-1],), gain, eps)
    else:
        n = h.to(exact)
        y = (n * torch.rsqrt(n.square().mean(-1, keepdim=True) + eps) * gain.to(exact)).to(x.dtype)
    return y if residual is None else (y, h)
