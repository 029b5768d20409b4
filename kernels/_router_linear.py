"""A router's logits: the product of bfloat16 tokens and weights in float32, without float32 copies of the tokens.

    y = x W^T,  dx = dy W,  dW = dy^T x

The product of two bfloat16 numbers is exact in float32, in which a GPU's tensor cores sum. There backward splits dy, in
float32, into three bfloat16 matrices with 8 of its 24 bits each: side by side they are one factor of both products.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._dispatch import operator, refuse_second_derivative
from ._main_grad import add_product
from ._torch import has_no_values

_BF16 = torch.bfloat16


def router_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the logits of each token in float32; in float64 for float64.

    Args:
        x: `[N, D]`.
        weight: `[E, D]`. If both are bfloat16, x itself is kept for backward; otherwise a float32 copy.

    Returns:
        `[N, E]`.

    Example:
        >>> router_linear(torch.ones(2, 3).bfloat16(), torch.ones(4, 3).bfloat16()).dtype
        torch.float32
    """
    if x.dtype == weight.dtype == _BF16:
        return _RouterLinear.apply(x, weight)
    return router_linear_reference(x, weight)


def router_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `router_linear` under torch's own autograd."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide))


class _RouterLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return _forward_op(x, weight)

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative("router_linear", "float32 weights")
        x, weight = ctx.saved_tensors
        dx = _input_op(dy, weight) if ctx.needs_input_grad[0] else None
        return dx, _weight_op(dy, x).to(_BF16) if ctx.needs_input_grad[1] else None


def _parts(x: Tensor) -> Tensor:
    """Split float32 `[N, E]` into three bfloat16 matrices `[N, 3 E]`, whose sum it is."""
    high = x.to(_BF16)
    middle = (x - high).to(_BF16)
    return torch.cat([high, middle, (x - high - middle).to(_BF16)], 1)


@operator(
    "router_linear(Tensor x, Tensor weight) -> Tensor y", router_linear_reference,
    lambda x, weight, **_: 2 * x[0] * x[1] * weight[0],
)  # fmt: skip
def _forward_op(x: Tensor, weight: Tensor) -> Tensor:
    if has_no_values(x):
        return x.new_empty((len(x), len(weight)), dtype=torch.float32)
    return add_product(None, x, weight.t(), torch.float32)


@operator(
    "router_linear_input(Tensor dy, Tensor weight) -> Tensor dx", lambda dy, weight: (dy @ weight.float()).to(_BF16),
    lambda dy, weight, **_: 2 * dy[0] * dy[1] * weight[1],
)  # fmt: skip
def _input_op(dy: Tensor, weight: Tensor) -> Tensor:
    if has_no_values(dy):
        return weight.new_empty((len(dy), weight.shape[1]))
    return _parts(dy) @ weight.repeat(3, 1)


@operator(
    "router_linear_weight(Tensor dy, Tensor x) -> Tensor dweight", lambda dy, x: dy.t() @ x.float(),
    lambda dy, x, **_: 2 * dy[0] * dy[1] * x[1],
)  # fmt: skip
def _weight_op(dy: Tensor, x: Tensor) -> Tensor:
    if has_no_values(dy):
        return dy.new_empty((dy.shape[1], x.shape[1]))
    return add_product(None, _parts(dy).t(), x, torch.float32).view(3, dy.shape[1], -1).sum(0)
