"""The products of linear layers, with the communication of the tensor-parallel axis beside them.

Each forward is one product, and each backward two, of the input's gradient and of the weight's: the sum of the first
over ranks runs while the second is computed. In half precision, or in eight bits, the parameter stays as it is.
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
from mpcore.collectives import start_all_gather, start_all_reduce, start_reduce_scatter, wait
from mpcore.kernels._main_grad import MainGradState, main_grad, mark_main_grad, will_accumulate
from mpcore.kernels.fp8_matmul import fp8_matmul
from mpcore.kernels.quantize_fp8 import Quantized, quantize_fp8
from mpcore.layers.module import refuse_second_derivative
from mpcore.mesh.axis import Axis

_ALONE = Axis()
_unsafe_view = torch.ops.aten._unsafe_view.default


def copy_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, split: bool = False, fp8: bool = False
) -> Tensor:
    """`linear(copy(x))`: the sum of the input's gradient runs while the weight's gradient is computed.

    Args:
        x: [..., D], the same on every rank.
        weight: [F/tp, D], this rank's rows.
        bias: [F/tp] or None.
        tp: the axis.
        split: the two gradients are asked for apart, so the product must be torch's own: nothing overlaps.
        fp8: compute all three products in eight bits.

    Returns:
        [..., F/tp], in the dtype of `torch.autocast` where that is on.
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
    return _CopyLinear.apply(x, weight, bias, tp, main, dtype)


def all_gather_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int, regather: bool = False, split: bool = False,
    fp8: bool = False,
) -> Tensor:  # fmt: skip
    """`linear(all_gather(x, dim))`: in backward the reduce-scatter runs while the weight's gradient is computed.

    Args:
        x: [..., T/tp, ..., D], this rank's equal shard of dimension `dim`.
        weight: [F/tp, D], this rank's rows.
        bias: [F/tp] or None.
        tp: the axis.
        dim: the sequence dimension of `x`.
        regather: keep the shard for backward and gather it again there: a gather more, 1/tp of the memory.
        split: the two gradients are asked for apart, so the product must be torch's own, which keeps the whole input.
        fp8: compute all three products in eight bits.

    Returns:
        [..., T, ..., F/tp], in the dtype of `torch.autocast` where that is on.
    """
    main, dtype = _main_gradients(weight, bias), autocast_dtype(x)
    x = cast(x, dtype)
    if fp8 and split:
        return copy_linear(collectives.all_gather(x, tp, dim), weight, bias, _ALONE, split, fp8)
    if fp8:
        return _Fp8Linear.apply(x, weight, bias, tp, dim, regather, main, split)
    if split:
        return F.linear(collectives.all_gather(x, tp, dim), cast(weight, dtype), cast(bias, dtype))
    return _AllGatherLinear.apply(x, weight, bias, tp, dim, regather, main, dtype)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast has the product computed in; None where it is off."""
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def cast(x: Any, dtype: torch.dtype | None) -> Any:
    """A tensor, or None, in `dtype`; None: as it is."""
    return x if x is None or dtype is None else x.to(dtype)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """The product in `dtype`. Backward casts the weight again and keeps the parameter itself: copies, one for each
    micro-batch in flight and of what ZeRO-3 and offload have let go, would be the model over again."""
    weight, bias = cast(weight, dtype), cast(bias, dtype)
    if bias is None or x.dim() == 2:
        return F.linear(x, weight, bias)
    flat = F.linear(_flat(x), weight, bias)
    return _unsafe_view(flat, (*x.shape[:-1], weight.shape[0]))  # a view could not be written to in place


Main = tuple[Tensor, Tensor | None]


def _main_gradients(weight: Tensor, bias: Tensor | None) -> Main | None:
    """The parameters themselves, where backward shall add to their main gradients (`mpcore.main_gradients`)."""
    if main_grad(weight) is None or torch.compiler.is_compiling():
        return None
    return weight, bias


def _weight_gradients(ctx, dy: Tensor, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    dy = _flat(dy)
    weight, bias = ctx.main or (None, None)
    dweight = _give(weight, _weight_product, dy, _flat(x)) if ctx.needs_input_grad[1] else None
    dbias = _give(bias, _column_sum, dy) if ctx.needs_input_grad[2] else None
    return None if dweight is None else dweight.to(ctx.dtype), None if dbias is None else dbias.to(ctx.dtype)


def _give(parameter: Tensor | None, gradient: Callable[..., Tensor], *of: Tensor) -> Tensor | None:
    """The gradient, for autograd; or added to the parameter's main gradient, and nothing left to give."""
    main = main_grad(parameter)
    if parameter is None or main is None:
        return gradient(None, *of)
    wanted = will_accumulate(parameter)
    if wanted is None:
        return gradient(None, *of)
    if wanted:  # in this backward: one in two passes, as zero-bubble pipelines run it, comes here twice
        gradient(main, *of)
        mark_main_grad(parameter, MainGradState.ADDED)
    return None


def _weight_product(main: Tensor | None, dy: Tensor, x: Tensor) -> Tensor:
    if main is None:
        return dy.t() @ x
    if dy.dtype == main.dtype:
        return main.addmm_(dy.t(), x)
    if dy.is_cuda:
        return main.add_(torch.mm(dy.t(), x, out_dtype=main.dtype))
    return main.addmm_(dy.t().to(main.dtype), x.to(main.dtype))


def _column_sum(main: Tensor | None, dy: Tensor) -> Tensor:
    return dy.sum(0) if main is None else main.add_(dy.sum(0, dtype=main.dtype))


_NO_SECOND = "a column-parallel linear on tp > 1 or with main gradients, unless its mode has split_backward,"


class _CopyLinear(Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, main: Main | None, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.tp, ctx.main, ctx.dtype = tp, main, weight.dtype
        return _forward(x, weight, bias, dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        if ctx.tp.size > 1 or ctx.main is not None:
            refuse_second_derivative(_NO_SECOND)
        x, weight = ctx.saved_tensors
        dx = dy @ weight.to(dy.dtype) if ctx.needs_input_grad[0] else None
        summed = None if dx is None or ctx.tp.size == 1 else start_all_reduce(dx, ctx.tp)
        dweight, dbias = _weight_gradients(ctx, dy, x)
        return dx if summed is None else wait(summed), dweight, dbias, None, None, None


class _AllGatherLinear(Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int, regather: bool, main: Main | None,
        dtype: torch.dtype | None,
    ) -> Tensor:  # fmt: skip
        whole = _unmove(wait(start_all_gather(x.movedim(dim, 0), tp)), dim)
        ctx.save_for_backward((x if regather else whole) if ctx.needs_input_grad[1] else None, weight)
        ctx.tp, ctx.dim, ctx.regather, ctx.main, ctx.dtype = tp, dim, regather, main, weight.dtype
        return _forward(whole, weight, bias, dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        refuse_second_derivative(_NO_SECOND)
        x, weight = ctx.saved_tensors
        tp, dim = ctx.tp, ctx.dim
        gathering = start_all_gather(x.movedim(dim, 0), tp) if ctx.regather and ctx.needs_input_grad[1] else None
        dx = start_reduce_scatter((dy @ weight.to(dy.dtype)).movedim(dim, 0), tp) if ctx.needs_input_grad[0] else None
        if gathering is not None:
            x = _unmove(wait(gathering), dim)
        dweight, dbias = _weight_gradients(ctx, dy, x)
        return None if dx is None else _unmove(wait(dx), dim), dweight, dbias, None, None, None, None, None


def _unmove(x: Tensor, dim: int) -> Tensor:
    return x.movedim(0, dim).contiguous()


class _Fp8Linear(Function):
    """Column-parallel, of a sequence to be gathered where `dim` names one. What is kept of the input has eight bits."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None, regather: bool,
        main: Main | None, split: bool,
    ) -> Tensor:  # fmt: skip
        whole = x if dim is None else _unmove(wait(start_all_gather(x.movedim(dim, 0), tp)), dim)
        wanted = ctx.needs_input_grad[1]
        rows, columns = quantize_fp8(_flat(whole), columns=wanted and not regather)
        y = fp8_matmul(_given(rows), _given(quantize_fp8(weight, square=True)[0]), x.dtype)
        if bias is not None:
            y += bias.to(y.dtype)
        kept = (None, None) if columns is None else columns
        ctx.save_for_backward(x if wanted and regather else None, *kept, weight)
        ctx.tp, ctx.dim, ctx.main, ctx.dtype, ctx.split = tp, dim, main, weight.dtype, split
        return _unsafe_view(y, (*whole.shape[:-1], len(weight)))

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        refuse_second_derivative("a linear layer in eight bits")
        x, values, scales, weight = ctx.saved_tensors
        tp, dim = ctx.tp, ctx.dim
        for_x, for_weight, for_bias = (_wanted(ctx, i) for i in range(3))
        gathering = None if x is None or not for_weight else start_all_gather(x.movedim(dim, 0), tp)
        shape, flat = dy.shape, _flat(dy)
        rows, columns = quantize_fp8(flat, rows=for_x, columns=for_weight)
        dx = summing = dweight = None
        if rows is not None:
            turned = _given(quantize_fp8(weight, square=True, rows=False, columns=True)[1])
            dx = fp8_matmul(rows, turned, dy.dtype).view(*shape[:-1], weight.shape[1])
            if dim is not None:
                summing = start_reduce_scatter(dx.movedim(dim, 0), tp)
            elif tp.size > 1:
                summing = start_all_reduce(dx, tp)
        weight_main, bias_main = ctx.main or (None, None)
        if columns is not None:
            if gathering is not None:
                whole = _flat(_unmove(wait(gathering), dim or 0))
                values, scales = _given(quantize_fp8(whole, rows=False, columns=True)[1])
            product = partial(_fp8_weight_product, ctx.dtype)
            dweight = _give(weight_main, product, *columns, values, scales)
        dbias = _give(bias_main, _column_sum, flat) if for_bias else None
        if summing is not None:
            dx = _unmove(wait(summing), dim or 0)
        return dx, dweight, cast(dbias, ctx.dtype), None, None, None, None, None


def _fp8_weight_product(
    dtype: torch.dtype, main: Tensor | None, dy: Tensor, dy_scales: Tensor, x: Tensor, x_scales: Tensor
) -> Tensor:
    return fp8_matmul(Quantized(dy, dy_scales), Quantized(x, x_scales), dtype, out=main)


def _wanted(ctx, which: int) -> bool:
    """Whether this pass over the graph wants the gradient of an input: a split backward comes here twice."""
    if not ctx.needs_input_grad[which] or not ctx.split:
        return ctx.needs_input_grad[which]
    return will_run(ctx.next_functions[which][0])


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _given(x: Quantized | None) -> Quantized:
    assert x is not None
    return x
