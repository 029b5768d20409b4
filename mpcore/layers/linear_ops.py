"""The matrix products of linear layers, overlapped with the communication of the tensor-parallel axis.

Backward computes the input's gradient first. Its all-reduce (or reduce-scatter) runs while the weight's gradient is
computed. Products may run in half precision or in FP8; the parameter keeps its dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from mpcore import collectives
from mpcore._torch.autograd import will_run
from mpcore._torch.dispatch import unsafe_view
from mpcore.collectives import start_all_gather, start_all_reduce, start_reduce_scatter, wait
from mpcore.kernels._main_grad import MainGradState, main_grad, mark_main_grad, will_accumulate
from mpcore.kernels._torch import is_on_gpu
from mpcore.kernels.fp8_matmul import fp8_matmul
from mpcore.kernels.quantize_fp8 import Quantized, quantize_fp8
from mpcore.layers.module import refuse_second_derivative
from mpcore.mesh.axis import Axis

_ALONE = Axis()


def copy_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, split: bool = False, fp8: bool = False
) -> Tensor:
    """`linear(copy(x))`: in backward, all-reduce the input's gradient while the weight's gradient is computed.

    Args:
        x: [..., D], the same on every rank.
        weight: [F/tp, D], this rank's rows.
        bias: [F/tp] or None.
        tp: the tensor-parallel axis.
        split: let backward compute the two gradients in separate passes. The product is then torch's own, and
            communication does not overlap with it.
        fp8: compute the forward product and both backward products in FP8.

    Returns:
        [..., F/tp], in the dtype of `torch.autocast` if it is on.
    """
    main, dtype = _main_gradients(weight, bias), autocast_dtype(x)
    x = cast(x, dtype)
    if fp8:
        x, tp = (collectives.copy(x, tp), _ALONE) if split else (x, tp)
        return _Fp8Linear.apply(x, weight, bias, tp, None, False, main, split)
    if split:
        return F.linear(collectives.copy(x, tp), cast(weight, dtype), cast(bias, dtype))
    if tp.size == 1 and main is None and dtype in (None, weight.dtype):
        return F.linear(x, weight, bias)
    return _ColumnLinear.apply(x, weight, bias, tp, None, False, main, dtype)


def all_gather_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int, regather: bool = False, split: bool = False,
    fp8: bool = False,
) -> Tensor:  # fmt: skip
    """`linear(all_gather(x, dim))`: in backward, the reduce-scatter runs while the weight's gradient is computed.

    Args:
        x: [..., T/tp, ..., D], this rank's equal shard of dimension `dim`, the sequence.
        weight, bias, tp, fp8: see `copy_linear`.
        dim: the sequence dimension.
        regather: keep only the shard for backward and all-gather it again there: one more all-gather, 1/tp of the
            memory.
        split: see `copy_linear`. The full input is then kept for backward.

    Returns:
        [..., T, ..., F/tp], in the dtype of `torch.autocast` if it is on.
    """
    main, dtype = _main_gradients(weight, bias), autocast_dtype(x)
    x = cast(x, dtype)
    if split:
        return copy_linear(collectives.all_gather(x, tp, dim), weight, bias, _ALONE, split, fp8)
    if fp8:
        return _Fp8Linear.apply(x, weight, bias, tp, dim, regather, main, split)
    return _ColumnLinear.apply(x, weight, bias, tp, dim, regather, main, dtype)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast computes the product, or None if autocast is off."""
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def cast(x: Any, dtype: torch.dtype | None) -> Any:
    """Convert a tensor (or None) to `dtype`; a `dtype` of None leaves it unchanged."""
    return x if x is None or dtype is None else x.to(dtype)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """Compute the product in `dtype`. Backward casts the parameter again, so no copy per micro-batch is kept."""
    weight, bias = cast(weight, dtype), cast(bias, dtype)
    if bias is None or x.dim() == 2:
        return F.linear(x, weight, bias)
    flat = F.linear(flat_tokens(x), weight, bias)
    return unsafe_view(flat, (*x.shape[:-1], weight.shape[0]))


Main = tuple[Tensor, Tensor | None]


def _main_gradients(weight: Tensor, bias: Tensor | None) -> Main | None:
    """Return weight and bias if backward must add to their main gradients (`mpcore.main_gradients`), else None."""
    if main_grad(weight) is None or torch.compiler.is_compiling():
        return None
    return weight, bias


def _weight_gradients(ctx, dy: Tensor, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    dy = flat_tokens(dy)
    weight, bias = ctx.main or (None, None)
    dweight = _add_or_give(weight, _weight_product, dy, flat_tokens(x)) if ctx.needs_input_grad[1] else None
    dbias = _add_or_give(bias, _column_sum, dy) if ctx.needs_input_grad[2] else None
    return None if dweight is None else dweight.to(ctx.dtype), None if dbias is None else dbias.to(ctx.dtype)


def _add_or_give(parameter: Tensor | None, gradient: Callable[..., Tensor], *of: Tensor) -> Tensor | None:
    """Return the gradient for autograd; or add it to the parameter's main gradient and return None."""
    main = main_grad(parameter)
    wanted = None if parameter is None or main is None else will_accumulate(parameter)
    if parameter is None or main is None or wanted is None:
        return gradient(None, *of)
    if wanted:  # a zero-bubble pipeline runs backward in two passes: add in the pass that wants this gradient
        gradient(main, *of)
        mark_main_grad(parameter, MainGradState.ADDED)
    return None


def _weight_product(main: Tensor | None, dy: Tensor, x: Tensor) -> Tensor:
    if main is None:
        return dy.t() @ x
    if dy.dtype == main.dtype:
        return main.addmm_(dy.t(), x)
    if is_on_gpu(dy):
        return main.add_(torch.mm(dy.t(), x, out_dtype=main.dtype))
    return main.addmm_(dy.t().to(main.dtype), x.to(main.dtype))


def _column_sum(main: Tensor | None, dy: Tensor) -> Tensor:
    return dy.sum(0) if main is None else main.add_(dy.sum(0, dtype=main.dtype))


_NO_SECOND = "a column-parallel linear on tp > 1 or with main gradients, unless its mode has split_backward,"


class _ColumnLinear(Function):
    """The product of an x that all ranks share, or of a sequence that is all-gathered over dimension `dim`."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None, regather: bool,
        main: Main | None, dtype: torch.dtype | None,
    ) -> Tensor:  # fmt: skip
        whole = x if dim is None else _gather(start_all_gather(x, tp), tp, dim)
        ctx.save_for_backward((x if regather else whole) if ctx.needs_input_grad[1] else None, weight)
        ctx.tp, ctx.dim, ctx.regather, ctx.main, ctx.dtype = tp, dim, regather, main, weight.dtype
        return _forward(whole, weight, bias, dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        if ctx.tp.size > 1 or ctx.main is not None:
            refuse_second_derivative(_NO_SECOND)
        x, weight = ctx.saved_tensors
        gathering = start_all_gather(x, ctx.tp) if ctx.regather and ctx.needs_input_grad[1] else None
        dx = dy @ weight.to(dy.dtype) if ctx.needs_input_grad[0] else None
        summing = None if dx is None else _start_sum(dx, ctx.tp, ctx.dim)
        if gathering is not None:
            x = _gather(gathering, ctx.tp, ctx.dim)
        dweight, dbias = _weight_gradients(ctx, dy, x)
        return dx if summing is None else wait(summing), dweight, dbias, *[None] * 5


def _gather(flying: Tensor, tp: Axis, dim: int) -> Tensor:
    """Wait for shards of a sequence, and lay them along its dimension."""
    return collectives.shards_along(wait(flying), tp.size, dim)


def _start_sum(dx: Tensor, tp: Axis, dim: int | None) -> Tensor | None:
    """Start the all-reduce of the input's gradient, or its reduce-scatter over `dim`; None if tp has one rank."""
    if dim is not None:
        return start_reduce_scatter(collectives.shards_in_front(dx, tp.size, dim), tp)
    return start_all_reduce(dx, tp) if tp.size > 1 else None


class _Fp8Linear(Function):
    """`_ColumnLinear` in FP8. The input kept for backward is in FP8 too."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None, regather: bool,
        main: Main | None, split: bool,
    ) -> Tensor:  # fmt: skip
        whole = x if dim is None else _gather(start_all_gather(x, tp), tp, dim)
        wanted = ctx.needs_input_grad[1]
        rows, columns = quantize_fp8(flat_tokens(whole), columns=wanted and not regather)
        y = fp8_matmul(_given(rows), _given(quantize_fp8(weight, square=True)[0]), x.dtype)
        if bias is not None:
            y += bias.to(y.dtype)
        kept = (None, None) if columns is None else columns
        ctx.save_for_backward(x if wanted and regather else None, *kept, weight)
        ctx.tp, ctx.dim, ctx.main, ctx.dtype, ctx.split = tp, dim, main, weight.dtype, split
        return unsafe_view(y, (*whole.shape[:-1], len(weight)))

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        refuse_second_derivative("a linear layer in eight bits")
        x, values, scales, weight = ctx.saved_tensors
        tp, dim = ctx.tp, ctx.dim
        for_x, for_weight, for_bias = (_wanted(ctx, i) for i in range(3))
        gathering = None if x is None or not for_weight else start_all_gather(x, tp)
        flat = flat_tokens(dy)
        rows, columns = quantize_fp8(flat, rows=for_x, columns=for_weight)
        dx = summing = dweight = None
        if rows is not None:
            transposed = _given(quantize_fp8(weight, square=True, rows=False, columns=True)[1])
            dx = fp8_matmul(rows, transposed, dy.dtype).view(*dy.shape[:-1], weight.shape[1])
            summing = _start_sum(dx, tp, dim)
        weight_main, bias_main = ctx.main or (None, None)
        if columns is not None:
            if gathering is not None:
                whole = flat_tokens(_gather(gathering, tp, dim))
                values, scales = _given(quantize_fp8(whole, rows=False, columns=True)[1])
            product = partial(_fp8_weight_product, ctx.dtype)
            dweight = _add_or_give(weight_main, product, *columns, values, scales)
        dbias = _add_or_give(bias_main, _column_sum, flat) if for_bias else None
        return dx if summing is None else wait(summing), dweight, cast(dbias, ctx.dtype), *[None] * 5


def _fp8_weight_product(
    dtype: torch.dtype, main: Tensor | None, dy: Tensor, dy_scales: Tensor, x: Tensor, x_scales: Tensor
) -> Tensor:
    y = fp8_matmul(Quantized(dy, dy_scales), Quantized(x, x_scales), dtype if main is None else main.dtype)
    return y if main is None else main.add_(y)


def _wanted(ctx, which: int) -> bool:
    """Return whether this backward pass needs the gradient of input `which`. A split backward runs two passes."""
    if not ctx.needs_input_grad[which] or not ctx.split:
        return ctx.needs_input_grad[which]
    return will_run(ctx.next_functions[which][0])


def flat_tokens(x: Tensor) -> Tensor:
    """[..., D] -> [T, D]."""
    return x.reshape(-1, x.shape[-1])


def _given(x: Quantized | None) -> Quantized:
    assert x is not None
    return x
