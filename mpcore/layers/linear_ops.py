"""The products of linear layers: `y = x W^T + b`, overlapped with the communication of the tensor-parallel axis.

A layer computes with its `product`, an object of `Product` or of a subclass. Backward computes the input's gradient
first. Its all-reduce (or reduce-scatter) runs while the weight's gradient is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from mpcore import collectives
from mpcore._torch.dispatch import unsafe_view
from mpcore.collectives import start_all_gather, start_all_reduce, start_reduce_scatter, wait
from mpcore.kernels._main_grad import add_or_return, add_product
from mpcore.layers.module import refuse_second_derivative
from mpcore.mesh.axis import Axis

_ALONE = Axis()


@dataclass(frozen=True)
class Product:
    """How a linear layer computes. This class computes in the weight's dtype, or in the dtype of `torch.autocast`.

    A product is never changed: hand the layer another one. A subclass overrides `column`, which `row` calls.

    Args:
        split_backward: let backward compute the gradients of input and weight in two passes, as zero-bubble pipelines
            do. The product is then torch's own, without overlap, and the whole input is kept for backward.
    """

    split_backward: bool = False

    def column(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None = None, regather: bool = False
    ) -> Tensor:
        """Compute `linear(copy(x))`, or `linear(all_gather(x, dim))` if `dim` is given.

        Args:
            x: [..., D], the same on every rank; with `dim` this rank's equal shard of dimension `dim`, the sequence.
            weight, bias: [F/tp, D] and [F/tp] or None, this rank's rows.
            regather: keep only the shard for backward, 1/tp of the memory, and all-gather it again there.

        Returns:
            [..., F/tp], with the full sequence.
        """
        dtype = autocast_dtype(x)
        main = None if getattr(weight, "main_grad", None) is None or torch.compiler.is_compiling() else (weight, bias)
        x = x if dtype is None else x.to(dtype)
        if self.split_backward:
            return F.linear(share(x, tp, dim), cast(weight, dtype), cast(bias, dtype))
        if tp.size == 1 and main is None and dtype in (None, weight.dtype):
            return F.linear(x, weight, bias)
        return _ColumnLinear.apply(x, weight, bias, (tp, dim, regather and dim is not None, main, dtype))

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None = None) -> Tensor:
        """Compute `reduce(linear(x)) + bias`, or `reduce_scatter(linear(x), dim) + bias` if `dim` is given.

        Args:
            x, weight: [..., D/tp] and [F, D/tp], this rank's features.
            bias: [F] or None.

        Returns:
            [..., F], the same on every rank; with `dim` this rank's shard of the sequence.
        """
        if tp.size == 1:  # adds the bias inside the product: bitwise equal to torch.nn.Linear
            return self.column(x, weight, bias, tp)
        y = self.column(x, weight, None, _ALONE)
        y = collectives.reduce(y, tp) if dim is None else collectives.reduce_scatter(y, tp, dim)
        return y if bias is None else y + bias.to(y.dtype)

    def change(self, change: Callable[[Product], Product]) -> Product:
        """Return `change(self)`; a `WrappedProduct` changes the product that it wraps."""
        return change(self)

    def gather_form(self, name: str, rows: int, zero: int, shards: int) -> Any:
        """Return the `GatherForm` in which ZeRO gathers the weight; None: as it is.

        Raises:
            ValueError: if ZeRO may not shard these rows of layer `name` into so many shards.
        """

    def split(self, on: bool) -> Product:
        """Return this product with `split_backward` on or off."""
        return self.change(lambda product: replace(product, split_backward=on))


@dataclass(frozen=True)
class WrappedProduct(Product):
    """A product that computes with another one, and changes its weight or its result."""

    split_backward: bool = field(init=False, default=False)
    base: Product

    def __post_init__(self) -> None:
        object.__setattr__(self, "split_backward", self.base.split_backward)

    def change(self, change: Callable[[Product], Product]) -> Product:
        """Return this product around `change(base)`."""
        return replace(self, base=self.base.change(change))

    def gather_form(self, name: str, rows: int, zero: int, shards: int) -> Any:
        """Return the form of the product that this one wraps."""
        return self.base.gather_form(name, rows, zero, shards)


class _ColumnLinear(Function):
    """The product of an x that all ranks share, or of a sequence that is all-gathered over dimension `dim`."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[Any, ...]) -> Tensor:
        ctx.how = tp, dim, regather, _, dtype = how
        whole = x if dim is None else gathered(start_all_gather(x, tp), tp, dim)
        ctx.save_for_backward((x if regather else whole) if ctx.needs_input_grad[1] else None, weight)
        if dtype is not None:  # backward casts the parameter again, so no copy per micro-batch is kept
            weight, bias = cast(weight, dtype), cast(bias, dtype)
        if bias is None or x.dim() == 2:
            return F.linear(whole, weight, bias)
        y = F.linear(whole.reshape(-1, whole.shape[-1]), weight, bias)
        return unsafe_view(y, (*whole.shape[:-1], weight.shape[0]))  # no view: callers may write to the output

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        return column_backward(ctx, dy)


def column_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    """Compute the gradients of `_ColumnLinear`, and sum the input's while the weight's is computed."""
    (x, weight), (tp, dim, regather, main, dtype) = ctx.saved_tensors, ctx.how
    if tp.size > 1 or main is not None:
        refuse_second_derivative("a column-parallel linear on tp > 1 or with main gradients, unless it is split,")
    gathering = start_all_gather(x, tp) if regather and ctx.needs_input_grad[1] else None
    dx = dy @ weight.to(dy.dtype) if ctx.needs_input_grad[0] else None
    summing = None if dx is None else start_sum(dx, tp, dim)
    x = x if gathering is None else gathered(gathering, tp, dim)
    dy, dweight, dbias = dy.reshape(-1, dy.shape[-1]), None, None
    if ctx.needs_input_grad[1]:
        x = x.reshape(-1, x.shape[-1])
        dweight = dy.t() @ x if main is None else add_or_return(main[0], weight_product, dy, x)
    if ctx.needs_input_grad[2]:
        dbias = dy.sum(0) if main is None else add_or_return(main[1], column_sum, dy)
    if dtype is not None:
        dweight, dbias = cast(dweight, weight.dtype), cast(dbias, weight.dtype)
    return dx if summing is None else wait(summing), dweight, dbias, None


def share(x: Tensor, tp: Axis, dim: int | None) -> Tensor:
    """Call `copy(x)`, or `all_gather(x, dim)`: their backward sums the input's gradient."""
    return collectives.copy(x, tp) if dim is None else collectives.all_gather(x, tp, dim)


def gathered(flying: Tensor, tp: Axis, dim: int) -> Tensor:
    """Wait for shards of a sequence, and lay them along its dimension."""
    return collectives.shards_along(wait(flying), tp.size, dim)


def start_sum(dx: Tensor, tp: Axis, dim: int | None) -> Tensor | None:
    """Start the all-reduce of the input's gradient, or its reduce-scatter over `dim`; None if tp has one rank."""
    if dim is not None:
        return start_reduce_scatter(collectives.shards_in_front(dx, tp.size, dim), tp)
    return start_all_reduce(dx, tp) if tp.size > 1 else None


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast computes the product, or None if autocast is off."""
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def cast(x: Any, dtype: torch.dtype | None) -> Any:
    """Convert a tensor (or None) to `dtype`; a `dtype` of None leaves it unchanged."""
    return x if x is None or dtype is None else x.to(dtype)


def flat_tokens(x: Tensor) -> Tensor:
    """[..., D] -> [T, D]."""
    return x.reshape(-1, x.shape[-1])


def weight_product(main: Tensor | None, dy: Tensor, x: Tensor) -> Tensor:
    return dy.t() @ x if main is None else add_product(main, dy.t(), x, main.dtype)


def column_sum(main: Tensor | None, dy: Tensor) -> Tensor:
    return dy.sum(0) if main is None else main.add_(dy.sum(0, dtype=main.dtype))
