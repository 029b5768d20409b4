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
    weight, bias = contiguous(weight, bias)  # type: ignore[assignment]
    shared = {
        "x_ptr": x, "residual_ptr": residual, "weight_ptr": weight, "bias_ptr": bias,
        "y_ptr": y, "residual_out_ptr": None if residual is None else residual_out, "stats_ptr": stats,
        "M": M, "eps": eps, "X_STRIDE": x_stride, "RESIDUAL_STRIDE": residual_stride, "D": D,
        "SUBTRACT_MEAN": subtract_mean, "ZERO_CENTERED": zero_centered,
    }  # fmt: skip
    if D <= WIDEST_FORWARD:
        tile = row_tile(D, elements_per_thread=32)
        grid = (ceil_div(M, tile.block_m), 1, 1)
        blocks = {"MAIN": tile.main, "TAIL": tile.tail, "BLOCK_M": tile.block_m}
        launch(forward_kernel, grid, num_warps=tile.num_warps, **shared, **blocks)
    else:
        # 16 warps: few rows at a time, so that all that is read again stays in an L2 cache of 50 MB
        block_d = 16384 // x.element_size()
        depth = stages(block_d, x, residual, weight, bias)
        launch(forward_wide_kernel, (M, 1, 1), num_warps=16, **shared, BLOCK_D=block_d, STAGES=depth)
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
    has_bias = bias is not None
    shared = {
        "dy_ptr": dy, "h_ptr": h, "weight_ptr": weight.contiguous(), "stats_ptr": stats, "M": M,
        "DY_STRIDE": dy_stride, "H_STRIDE": h_stride, "D": D,
        "SUBTRACT_MEAN": subtract_mean, "ZERO_CENTERED": zero_centered,
    }  # fmt: skip
    last = {"dstream_ptr": dstream, "dh_ptr": dh, "DSTREAM_STRIDE": dstream_stride, "HAS_BIAS": has_bias}
    wide = _wide_tile(dy, h, D, has_bias) if D > WIDEST_BACKWARD else None
    if D <= WIDEST_BACKWARD or wide:
        # A power of two needs no mask and no tail, so 16 warps hold both sums: half as many programs and partial sums.
        elements = 8192 if subtract_mean and D & (D - 1) == 0 else 4096
        tile = row_tile(D, elements_per_thread=16, elements=elements)
        main, tail = wide or tile[:2]
        # The sums of a bias take registers: then a multiprocessor holds one program, and more write partial sums alone.
        resident = 1 if has_bias else 16 // tile.num_warps
        programs = min(ceil_div(M, tile.block_m), multiprocessors(h.device) * resident)
        partials = h.new_empty((1 + has_bias, programs, D), dtype=torch.float32)
        launch(
            backward_kernel, (programs, 1, 1), num_warps=tile.num_warps, **shared, **last, partials_ptr=partials,
            MAIN=main, TAIL=tail, BLOCK_M=tile.block_m, NARROW=wide is not None,
            STAGES=3 if wide else stages((main + tail) * tile.block_m, dy, h, dstream),
        )  # fmt: skip
    else:
        means = stats.new_empty((1 + subtract_mean, M))  # of g dy n, of g dy
        launch(backward_rows_kernel, (M, 1, 1), num_warps=8, **shared, means_ptr=means, BLOCK_D=4096)
        columns = ceil_div(D, 1024)
        groups = min(ceil_div(M, 4), max(1, 2 * multiprocessors(h.device) // columns))
        partials = h.new_empty((1 + has_bias, groups, D), dtype=torch.float32)
        launch(
            backward_columns_kernel, (columns, groups, 1), num_warps=8, **shared, **last,
            means_ptr=means, partials_ptr=partials, BLOCK_M=4, BLOCK_D=1024,
        )  # fmt: skip
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
