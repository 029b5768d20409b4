"""The operators of layer_norm, and of rms_norm, which subtracts no mean and adds no bias.

Kernels compute in float32 for every dtype. They compute the variance of the centred row, so a large mean loses no
digits. The forward and the backward kernel keep whole rows in registers; backward keeps wide rows of half precision as
they were loaded. Other kernels read wider rows in tiles: twice, and forward a third time to subtract a mean. Backward
sums dweight and dbias in two stages of fixed order, a partial sum per program and then a sum over programs, so
gradients repeat bit for bit.

`dstream` is the gradient of the residual stream that forward returns. `None` in place of a mean subtracts nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._dispatch import operator, refuse_second_derivative
from ._main_grad import remember_main_grad, take_main_grad
from ._norm_kernels import (
    backward_columns_kernel,
    backward_kernel,
    backward_rows_kernel,
    forward_kernel,
    forward_wide_kernel,
)
from ._rows import as_rows, ceil_div, contiguous, count_rows, next_power_of_2, optional_rows, row_tile, sum_partials
from ._torch import has_no_values
from ._triton import launch, multiprocessors, stages

# Wider rows do not fit in a program's registers: up to here tests/kernels/golden_compile.json shows no spills.
WIDEST_FORWARD = 16384
WIDEST_BACKWARD = 8192


class Norm(torch.autograd.Function):
    """`Norm.apply(x, weight, bias, residual, subtract_mean, zero_centered, eps)`: y, or y and the residual stream h."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, subtract_mean, zero_centered, eps):
        y, residual_out, stats = _forward_op(x, weight, bias, residual, subtract_mean, zero_centered, eps)
        ctx.set_materialize_grads(False)
        ctx.how, ctx.main = (subtract_mean, zero_centered), remember_main_grad(weight, bias)
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        ctx.save_for_backward(x if residual is None else residual_out, weight, bias, stats)
        return y if residual is None else (y, residual_out)

    @staticmethod
    def backward(ctx, dy, dstream=None):
        refuse_second_derivative("layer_norm" if ctx.how[0] else "rms_norm")
        x_dtype, residual_dtype = ctx.dtypes
        dh, dweight, dbias = dstream, None, None
        if dy is not None:
            h, weight, bias, stats = ctx.saved_tensors
            main = take_main_grad(ctx.main)
            dh, dweight, dbias = _backward_op(dy, dstream, h, weight, bias, *(main or (None, None)), stats, *ctx.how)
            dweight, dbias = (None, None) if main else (dweight, None if bias is None else dbias)
        if dh is None or residual_dtype is None:
            return dh, dweight, dbias, None, None, None, None
        return dh.to(x_dtype), dweight, dbias, dh.to(residual_dtype), None, None, None


@operator(
    "norm_forward(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, bool subtract_mean, bool zero_centered,"
    " float eps) -> (Tensor y, Tensor residual_out, Tensor stats)"
)
def _forward_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    subtract_mean: bool,
    zero_centered: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty(x.shape)
    stats = x.new_empty((1 + subtract_mean, *x.shape[:-1]), dtype=torch.float32)  # rstd, mean
    residual_out = stats.new_empty(0)
    if residual is not None:
        residual_out = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    outs = y, residual_out, stats
    if has_no_values(x) or y.numel() == 0:
        return outs
    M, D = count_rows(x), x.shape[-1]
    x, x_stride = as_rows(x)
    residual, residual_stride = optional_rows(residual)
    tensors = (x, residual, *contiguous(weight, bias), y, None if residual is None else residual_out, stats)
    constants = (x_stride, residual_stride, D, subtract_mean, zero_centered)
    if D <= WIDEST_FORWARD:
        *tile, num_warps = row_tile(D, elements_per_thread=32)
        launch(forward_kernel, (ceil_div(M, tile[-1]), 1, 1), tensors, (M, eps), (*constants, *tile), num_warps)
    else:
        # 16 warps: few rows at a time, so that all that is read again stays in an L2 cache of 50 MB
        block_d = 16384 // x.element_size()
        tile = block_d, stages(block_d, *tensors[:4])
        launch(forward_wide_kernel, (M, 1, 1), tensors, (M, eps), (*constants, *tile), num_warps=16)
    return outs


@operator(
    "norm_backward(Tensor dy, Tensor? dstream, Tensor h, Tensor weight, Tensor? bias, Tensor(a!)? main_grad,"
    " Tensor(b!)? bias_main_grad, Tensor stats, bool subtract_mean, bool zero_centered)"
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
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    returned = main_grad is None
    dh = h.new_empty(h.shape)
    dweight = weight.new_empty(weight.shape if returned else 0)
    dbias = weight.new_empty(0) if bias is None else bias.new_empty(bias.shape if returned else 0)
    outs = dh, dweight, dbias
    if has_no_values(h):
        return outs
    if dh.numel() == 0:
        dweight.zero_()
        dbias.zero_()
        return outs
    M, D = count_rows(h), h.shape[-1]
    h, h_stride = as_rows(h)
    dy, dy_stride = as_rows(dy)
    dstream, dstream_stride = optional_rows(dstream)
    weight = weight.contiguous()
    has_bias = bias is not None
    constants = (dy_stride, dstream_stride, h_stride, D, subtract_mean, zero_centered, has_bias)
    wide = _wide_tile(dy, h, D, has_bias) if D > WIDEST_BACKWARD else None
    if D <= WIDEST_BACKWARD or wide:
        # A power of two needs no mask and no tail, so 16 warps hold both sums: half as many programs and partial sums.
        elements = 8192 if subtract_mean and D & (D - 1) == 0 else 4096
        *tile, num_warps = row_tile(D, elements_per_thread=16, elements=elements)
        tile[:2] = wide or tile[:2]
        programs = min(ceil_div(M, tile[-1]), multiprocessors(h.device) * (16 // num_warps))
        partials = h.new_empty((1 + has_bias, programs, D), dtype=torch.float32)
        tensors = (dy, dstream, h, weight, stats, dh, partials)
        *columns, block_m = tile
        tile += [wide is not None, 3 if wide else stages(sum(columns) * block_m, dy, h, dstream)]
        launch(backward_kernel, (programs, 1, 1), tensors, (M,), (*constants, *tile), num_warps)
    else:
        means = stats.new_empty((1 + subtract_mean, M))  # of g dy n, of g dy
        rows = (dy_stride, h_stride, D, subtract_mean, zero_centered, 4096)
        launch(backward_rows_kernel, (M, 1, 1), (dy, h, weight, stats, means), (M,), rows, num_warps=8)
        columns = ceil_div(D, 1024)
        groups = min(ceil_div(M, 4), max(1, 2 * multiprocessors(h.device) // columns))
        partials = h.new_empty((1 + has_bias, groups, D), dtype=torch.float32)
        tensors = (dy, dstream, h, weight, stats, means, dh, partials)
        launch(backward_columns_kernel, (columns, groups, 1), tensors, (M,), (*constants, 4, 1024), num_warps=8)
    first, second = (dweight, dbias) if main_grad is None else (main_grad, bias_main_grad)
    sum_partials(partials, first, second if has_bias else None, accumulate=main_grad is not None)
    return outs


def _wide_tile(dy: Tensor, h: Tensor, D: int, has_bias: bool) -> tuple[int, int] | None:
    """Return how to cover a wide row that fits into a program in the dtypes of memory, or `None` if it doesn't.

    Registers hold one row and its sums in float32, and shared memory the next two rows. With a bias, wider rows spill
    128 bytes a thread; rows of 4 bytes would need 256 KB of shared memory.
    """
    widest = 12288 if has_bias else 16384
    if widest < D or max(dy.element_size(), h.element_size()) > 2:
        return None
    tail = next_power_of_2(D - WIDEST_BACKWARD)
    return (WIDEST_BACKWARD, tail) if stages(WIDEST_BACKWARD + tail, dy, h) == 3 else None
