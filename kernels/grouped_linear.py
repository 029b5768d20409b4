"""Grouped linear layers of many experts in one call: rows are ordered by expert, and each expert has its own weight.

    y[r] = W[e(r)] x[r]
    dx[r] = W[e(r)]^T dy[r],  dW[e] = sum over the rows of e of dy[r] x[r]^T

On a GPU torch's `grouped_mm` computes the three products in bfloat16, where rows are multiples of 16 bytes: the host
never reads how many rows each expert has. Elsewhere each expert has a product of its own.

Source: Gale et al. 2022, "MegaBlocks" (arXiv:2211.15841), for products of groups without padding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import check_shapes
from ._dispatch import operator, refuse_second_derivative, runs_torch
from ._main_grad import add_or_return, remember_main_grad
from ._torch import has_no_values
from .moe_permute import zero_rows


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, *, impl: str | None = None) -> Tensor:
    """Multiply each group of rows by its expert's weight.

    Args:
        x: `[R, D]`, the rows of expert 0 first.
        weight: `[E, F, D]`, of x's dtype or wider: products are in x's dtype, and backward saves the weight uncast.
        counts: `[E]` integers, the number of rows of each expert; their sum is at most R.
        impl: `"torch"` for `grouped_mm`, `"reference"`, or `None` to choose by the device and the dtype of `x`.

    Returns:
        `[R, F]`; rows after those of the last expert are zero.

    Raises:
        ValueError: shapes or dtypes don't go together, or `impl` can't run here.
    """
    check_shapes(x=(x, "R D"), weight=(weight, "E F D"), counts=(counts, "E"))
    if counts.dtype.is_floating_point or counts.device != x.device:
        raise ValueError(f"counts are {counts.dtype} on {counts.device}; they must be integers on {x.device}, as x is")
    if torch.promote_types(x.dtype, weight.dtype) != weight.dtype:
        raise ValueError(f"x is {x.dtype}, but weight is {weight.dtype}")
    if runs_torch(impl, x, "grouped_linear", _fits(x, weight)) or has_no_values(x):
        return _GroupedLinear.apply(x, weight, counts)  # the reference would read the counts
    return grouped_linear_reference(x, weight, counts)


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Return whether `grouped_mm` takes the factors without reading counts: bfloat16, in multiples of 16 bytes."""
    aligned = has_no_values(weight) or weight.data_ptr() % 16 == 0
    sizes = (*weight.shape[1:], *(n for n in weight.stride() if n != 1))
    return x.dtype == torch.bfloat16 and aligned and weight.numel() > 0 and not any(n % 8 for n in sizes)


def grouped_linear_reference(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Compute `grouped_linear` under torch's own autograd: a loop over experts that reads the counts."""
    groups = _groups(x, counts)
    products = [F.linear(group, w.to(x.dtype)) for group, w in zip(groups, weight.unbind(), strict=False)]
    return torch.cat([*products, groups[-1].new_zeros(len(groups[-1]), weight.shape[1])])


def _groups(x: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of each expert, and the rows after those of the last."""
    sizes = counts.tolist()
    return x.split([*sizes, len(x) - sum(sizes)])


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, counts):
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, counts)
        (ctx.main,) = remember_main_grad(weight) or (None,)
        return _forward_op(x, weight.to(x.dtype), counts)

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative("grouped_linear")
        x, weight, counts = ctx.saved_tensors
        dx = _forward_op(dy, weight.to(dy.dtype).transpose(1, 2), counts) if ctx.needs_input_grad[0] else None

        def dweight(main: Tensor | None) -> Tensor:
            return _weight_op(dy, x, counts).to(weight.dtype) if main is None else main.add_(_weight_op(dy, x, counts))

        return dx, add_or_return(ctx.main, dweight) if ctx.needs_input_grad[1] else None, None


@operator(
    "grouped_linear_forward(Tensor x, Tensor weight, Tensor counts) -> Tensor y", grouped_linear_reference,
    lambda x, weight, counts, **_: 2 * x[0] * weight[1] * weight[2],  # of all rows: the device knows how many are used
)  # fmt: skip
def _forward_op(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    if has_no_values(x) or x.shape[0] == 0:
        return x.new_empty((x.shape[0], weight.shape[1]))
    if not _fits(x, weight):
        return grouped_linear_reference(x, weight, counts)
    ends = counts.cumsum(0, dtype=torch.int32)
    y = F.grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=ends)
    return zero_rows(y, (torch.arange(len(y), device=y.device) < ends[-1]).int())  # torch left them uninitialised


def _weight_reference(dy: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    terms = [rows.t() @ group for rows, group in zip(_groups(dy, counts), _groups(x, counts), strict=True)]
    return torch.stack(terms[:-1]) if len(terms) > 1 else x.new_empty((0, dy.shape[1], x.shape[1]))


@operator(
    "grouped_linear_weight(Tensor dy, Tensor x, Tensor counts) -> Tensor dweight", _weight_reference,
    lambda dy, x, counts, **_: 2 * x[0] * dy[1] * x[1],
)  # fmt: skip
def _weight_op(dy: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    dweight = x.new_empty((counts.shape[0], dy.shape[1], x.shape[1]))
    if has_no_values(x) or x.shape[0] == 0:
        return dweight.zero_()
    if not _fits(x, dweight):
        return _weight_reference(dy, x, counts)
    return F.grouped_mm(dy.contiguous().t(), x.contiguous(), offs=counts.cumsum(0, dtype=torch.int32))
