"""The operators of layer_norm, and of rms_norm, which subtracts no mean and adds no bias.

Kernels compute in float32 for every dtype. They compute the variance of the centred row, so a large mean loses no
digits. They keep whole rows in registers; backward keeps wide rows of half precision as they were loaded. Wider rows
run plain torch. Backward sums dweight and dbias in two stages of fixed order, a partial sum per program and then a sum
over programs, so gradients repeat bit for bit.

`dstream` is the gradient of the residual stream that forward returns. `None` in place of a mean subtracts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ._dispatch import operator, refuse_second_derivative, runs_triton
from ._main_grad import remember_main_grad, take_main_grad
from ._norm_kernels import backward_kernel, forward_kernel
from ._rows import (
    as_rows,
    ceil_div,
    check_inputs,
    contiguous,
    count_rows,
    next_power_of_2,
    optional_rows,
    row_tile,
    sum_partials,
)
from ._triton import launch, multiprocessors, stages

# What a program's registers hold of a row and the sums of backward: tests/kernels/golden_compile.json shows no spills.
WIDEST = 8192
WIDEST_NARROW, WIDEST_BIASED = 16384, 12288  # in half precision, and with a bias: 128 bytes a thread would spill


def norm(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, eps: float,
    impl: str | None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Compute "rms_norm" or "layer_norm", which document the parameters; raises `ValueError` as they do."""
    check_inputs(x, residual, weight=weight, bias=bias)
    D, widest = x.shape[-1], WIDEST
    stream = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    if stream.itemsize == 2 and torch.version.hip is None:
        widest = WIDEST_NARROW if bias is None else WIDEST_BIASED
    if impl == "triton" and widest < D:
        raise ValueError(f"impl='triton' has no kernel of rows of {D} here, only of up to {widest}")
    runs = runs_triton(impl, x, name, D=D) and widest >= D
    return (Norm.apply if runs else _reference)(x, weight, bias, residual, name == "layer_norm", eps)


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, subtract_mean: bool, eps: float
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    h = x if residual is None else x + residual
    exact = torch.promote_types(h.dtype, torch.float32)
    n = h
    if any(t is not None and t.dtype != x.dtype for t in (h, weight, bias)):
        n, weight, bias = h.to(exact), weight.to(exact), None if bias is None else bias.to(exact)
    y = F.layer_norm(n, h.shape[-1:], weight, bias, eps) if subtract_mean else F.rms_norm(n, h.shape[-1:], weight, eps)
    return y.to(x.dtype) if residual is None else (y.to(x.dtype), h)


class Norm(torch.autograd.Function):
    """`Norm.apply(x, weight, bias, residual, subtract_mean, eps)`: y, or y and the residual stream h."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, subtract_mean, eps):
        y, residual_out, stats = _forward_op(x, weight, bias, residual, subtract_mean, eps)
        ctx.set_materialize_grads(False)
        ctx.subtract_mean, ctx.main = subtract_mean, remember_main_grad(weight, bias)
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        ctx.save_for_backward(x if residual is None else residual_out, weight, bias, stats)
        return y if residual is None else (y, residual_out)

    @staticmethod
    def backward(ctx, dy, dstream=None):
        refuse_second_derivative("layer_norm" if ctx.subtract_mean else "rms_norm")
        x_dtype, residual_dtype = ctx.dtypes
        dh, dweight, dbias = dstream, None, None
        if dy is not None:
            h, weight, bias, stats = ctx.saved_tensors
            main = take_main_grad(ctx.main)
            grads = main or (None, None)
            dh, dweight, dbias = _backward_op(dy, dstream, h, weight, bias, *grads, stats, ctx.subtract_mean)
            dweight, dbias = (None, None) if main else (dweight, None if bias is None else dbias)
        if dh is None or residual_dtype is None:
            return dh, dweight, dbias, None, None, None
        return dh.to(x_dtype), dweight, dbias, dh.to(residual_dtype), None, None


@operator(
    "norm_forward(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, bool subtract_mean, float eps)"
    " -> (Tensor y, Tensor residual_out, Tensor stats)"
)
def _forward_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    subtract_mean: bool,
    eps: float,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    y = x.new_empty(x.shape)
    stats = x.new_empty((1 + subtract_mean, *x.shape[:-1]), dtype=torch.float32)  # rstd, mean
    residual_out = stats.new_empty(0)
    if residual is not None:
        residual_out = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    yield y, residual_out, stats
    M, D = count_rows(x), x.shape[-1]
    x, x_stride = as_rows(x)
    residual, residual_stride = optional_rows(residual)
    weight, bias = contiguous(weight, bias)  # type: ignore[assignment]
    tile = row_tile(D, elements_per_thread=32)
    launch(
        forward_kernel, (ceil_div(M, tile.block_m), 1, 1), num_warps=tile.num_warps,
        x_ptr=x, residual_ptr=residual, weight_ptr=weight, bias_ptr=bias, y_ptr=y,
        residual_out_ptr=None if residual is None else residual_out, stats_ptr=stats, M=M, eps=eps, X_STRIDE=x_stride,
        RESIDUAL_STRIDE=residual_stride, D=D, SUBTRACT_MEAN=subtract_mean,
        MAIN=tile.main, TAIL=tile.tail, BLOCK_M=tile.block_m,
    )  # fmt: skip


@operator(
    "norm_backward(Tensor dy, Tensor? dstream, Tensor h, Tensor weight, Tensor? bias, Tensor(a!)? main_grad,"
    " Tensor(b!)? bias_main_grad, Tensor stats, bool subtract_mean)"
    " -> (Tensor dh, Tensor dweight, Tensor dbias)"
)
def _backward_op(
    dy: Tensor,
    dstream: Tensor | None,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    bias_main_grad: Tensor | None,
    stats: Tensor,
    subtract_mean: bool,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    returned = main_grad is None
    dh = h.new_empty(h.shape)
    dweight = weight.new_empty(weight.shape if returned else 0)
    dbias = weight.new_empty(0) if bias is None else bias.new_empty(bias.shape if returned else 0)
    yield dh, dweight, dbias
    M, D = count_rows(h), h.shape[-1]
    h, h_stride = as_rows(h)
    dy, dy_stride = as_rows(dy)
    dstream, dstream_stride = optional_rows(dstream)
    has_bias = bias is not None
    # A power of two needs no mask and no tail, so 16 warps hold both sums: half as many programs and partial sums.
    elements = 8192 if subtract_mean and D & (D - 1) == 0 else 4096
    tile, narrow = row_tile(D, elements_per_thread=16, elements=elements), D > WIDEST
    main, tail = (WIDEST, next_power_of_2(D - WIDEST)) if narrow else tile[:2]
    # The sums of a bias take registers: then a multiprocessor holds one program, and more write partial sums alone.
    resident = 1 if has_bias else 16 // tile.num_warps
    programs = min(ceil_div(M, tile.block_m), multiprocessors(h.device) * resident)
    partials = h.new_empty((1 + has_bias, programs, D), dtype=torch.float32)
    launch(
        backward_kernel, (programs, 1, 1), num_warps=tile.num_warps,
        dy_ptr=dy, dstream_ptr=dstream, h_ptr=h, weight_ptr=weight.contiguous(), stats_ptr=stats, dh_ptr=dh,
        partials_ptr=partials, M=M, DY_STRIDE=dy_stride, DSTREAM_STRIDE=dstream_stride, H_STRIDE=h_stride, D=D,
        SUBTRACT_MEAN=subtract_mean, HAS_BIAS=has_bias, MAIN=main, TAIL=tail,
        BLOCK_M=tile.block_m, NARROW=narrow,
        STAGES=stages((main + tail) * tile.block_m, dy, h, None if narrow else dstream),
    )  # fmt: skip
    first, second = (dweight, dbias) if main_grad is None else (main_grad, bias_main_grad)
    sum_partials(partials, first, second if has_bias else None, accumulate=main_grad is not None)
