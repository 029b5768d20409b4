"""The operators and kernels of layer_norm, and of rms_norm, which subtracts no mean and adds no bias.

Kernels compute in float32 for every dtype. They compute the variance of the centred row, so a large mean loses no
digits. The forward and the backward kernel keep whole rows in registers. Other kernels read wider rows in tiles: twice,
and forward a third time to subtract a mean. Backward sums dweight and dbias in two stages of fixed order, a partial sum
per program and then a sum over programs, so gradients repeat bit for bit.

`dstream` is the gradient of the residual stream that forward returns. `None` in place of a mean subtracts nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._dispatch import operator, refuse_second_derivative
from ._main_grad import remember_main_grad, take_main_grad
from ._rows import as_rows, ceil_div, contiguous, count_rows, optional_rows, row_tile, sum_partials
from ._torch import has_no_values
from ._triton import launch, multiprocessors, stages, tl, triton

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
        launch(_forward_kernel, (ceil_div(M, tile[-1]), 1, 1), tensors, (M, eps), (*constants, *tile), num_warps)
    else:
        # 16 warps: few rows at a time, so that all that is read again stays in an L2 cache of 50 MB
        block_d = 16384 // x.element_size()
        tile = block_d, stages(block_d, *tensors[:4])
        launch(_forward_wide_kernel, (M, 1, 1), tensors, (M, eps), (*constants, *tile), num_warps=16)
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
    if D <= WIDEST_BACKWARD:
        # A power of two needs no mask and no tail, so 16 warps hold both sums: half as many programs and partial sums.
        elements = 8192 if subtract_mean and D & (D - 1) == 0 else 4096
        *tile, num_warps = row_tile(D, elements_per_thread=16, elements=elements)
        programs = min(ceil_div(M, tile[-1]), multiprocessors(h.device) * (16 // num_warps))
        partials = h.new_empty((1 + has_bias, programs, D), dtype=torch.float32)
        tensors = (dy, dstream, h, weight, stats, dh, partials)
        *columns, block_m = tile
        tile.append(stages(sum(columns) * block_m, dy, h, dstream))
        launch(_backward_kernel, (programs, 1, 1), tensors, (M,), (*constants, *tile), num_warps)
    else:
        means = stats.new_empty((1 + subtract_mean, M))  # of g dy n, of g dy
        rows = (dy_stride, h_stride, D, subtract_mean, zero_centered, 4096)
        launch(_backward_rows_kernel, (M, 1, 1), (dy, h, weight, stats, means), (M,), rows, num_warps=8)
        columns = ceil_div(D, 1024)
        groups = min(ceil_div(M, 4), max(1, 2 * multiprocessors(h.device) // columns))
        partials = h.new_empty((1 + has_bias, groups, D), dtype=torch.float32)
        tensors = (dy, dstream, h, weight, stats, means, dh, partials)
        launch(_backward_columns_kernel, (columns, groups, 1), tensors, (M,), (*constants, 4, 1024), num_warps=8)
    first, second = (dweight, dbias) if main_grad is None else (main_grad, bias_main_grad)
    sum_partials(partials, first, second if has_bias else None, accumulate=main_grad is not None)
    return outs


@triton.jit
def _load_stream(x_ptr, residual_ptr, residual_out_ptr, rows, cols, mask, X_STRIDE, RESIDUAL_STRIDE):
    h = tl.load(x_ptr + rows * X_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        h += tl.load(residual_ptr + rows * RESIDUAL_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
        h = h.to(residual_out_ptr.dtype.element_ty).to(tl.float32)  # the norm sees h as it is stored
    return h


@triton.jit
def _load_gain(weight_ptr, cols, D, ZERO_CENTERED):
    gain = tl.load(weight_ptr + cols, mask=cols < D, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if ZERO_CENTERED:
        gain += 1.0
    return gain


@triton.jit
def _normalized(h, mean, rstd):
    """Return n. Without a mean (`None`) nothing is subtracted."""
    if mean is not None:
        h -= mean
    return h * rstd


@triton.jit
def _sum_of_squares(h, mean, cols, D):
    """Return the sum over the row of its squared distances from the mean."""
    if mean is not None:
        h = tl.where(cols < D, h - mean, 0.0)
    return tl.sum(h * h, 1, keep_dims=True)


@triton.jit
def _inverse_root(x):
    """Return 1 / sqrt(x), both rounded to nearest, unlike a GPU's `rsqrt`; once a row, that costs nothing."""
    return tl.div_rn(1.0, tl.sqrt_rn(x))


@triton.jit
def _store_stats(stats_ptr, first, second, rows, M):
    """Store rstd and the mean, or the means of g dy n and of g dy; a second of `None` has no place."""
    tl.store(stats_ptr + rows, first, mask=rows < M)
    if second is not None:
        tl.store(stats_ptr + M + rows, second, mask=rows < M)


@triton.jit
def _store_forward(y_ptr, residual_out_ptr, weight_ptr, bias_ptr, h, mean, rstd, rows, cols, mask, D, ZERO_CENTERED):
    y = _normalized(h, mean, rstd) * _load_gain(weight_ptr, cols, D, ZERO_CENTERED)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + cols, mask=cols < D, other=0.0, eviction_policy="evict_last").to(tl.float32)
    tl.store(y_ptr + rows * D + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
    if residual_out_ptr is not None:
        tl.store(residual_out_ptr + rows * D + cols, h.to(residual_out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, residual_out_ptr, stats_ptr, M, eps,
    X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, D: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    main = tl.arange(0, MAIN)[None, :]
    main_mask = (rows < M) & (main < D)
    h_main = _load_stream(x_ptr, residual_ptr, residual_out_ptr, rows, main, main_mask, X_STRIDE, RESIDUAL_STRIDE)
    mean = tl.sum(h_main, 1, keep_dims=True)
    if TAIL:
        tail = MAIN + tl.arange(0, TAIL)[None, :]
        tail_mask = (rows < M) & (tail < D)
        h_tail = _load_stream(x_ptr, residual_ptr, residual_out_ptr, rows, tail, tail_mask, X_STRIDE, RESIDUAL_STRIDE)
        mean += tl.sum(h_tail, 1, keep_dims=True)
    # a GPU's fast division errs by more than a mean of few may
    mean = tl.div_rn(mean, D * 1.0) if SUBTRACT_MEAN else None
    squares = _sum_of_squares(h_main, mean, main, D)
    if TAIL:
        squares += _sum_of_squares(h_tail, mean, tail, D)
    rstd = _inverse_root(squares / D + eps)
    _store_stats(stats_ptr, rstd, mean, rows, M)
    _store_forward(
        y_ptr, residual_out_ptr, weight_ptr, bias_ptr, h_main, mean, rstd, rows, main, main_mask, D, ZERO_CENTERED
    )
    if TAIL:
        _store_forward(
            y_ptr, residual_out_ptr, weight_ptr, bias_ptr, h_tail, mean, rstd, rows, tail, tail_mask, D, ZERO_CENTERED
        )


@triton.jit
def _forward_wide_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, residual_out_ptr, stats_ptr, M, eps,
    X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, D: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr, ZERO_CENTERED: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    sums = tl.zeros((BLOCK_D,), tl.float32)
    if SUBTRACT_MEAN:
        for start in tl.range(0, D, BLOCK_D, num_stages=STAGES):
            cols = start + tl.arange(0, BLOCK_D)
            sums += _load_stream(x_ptr, residual_ptr, residual_out_ptr, row, cols, cols < D, X_STRIDE, RESIDUAL_STRIDE)
    mean = tl.sum(sums, 0) / D if SUBTRACT_MEAN else None
    squares = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.range(0, D, BLOCK_D, num_stages=STAGES):  # what is read again comes from L2
        cols = start + tl.arange(0, BLOCK_D)
        h = _load_stream(x_ptr, residual_ptr, residual_out_ptr, row, cols, cols < D, X_STRIDE, RESIDUAL_STRIDE)
        centred = tl.where(cols < D, h - mean, 0.0) if SUBTRACT_MEAN else h
        squares += centred * centred
    rstd = _inverse_root(tl.sum(squares, 0) / D + eps)
    _store_stats(stats_ptr, rstd, mean, row, M)
    for start in tl.range(0, D, BLOCK_D, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_D)
        h = _load_stream(x_ptr, residual_ptr, residual_out_ptr, row, cols, cols < D, X_STRIDE, RESIDUAL_STRIDE)
        _store_forward(
            y_ptr, residual_out_ptr, weight_ptr, bias_ptr, h, mean, rstd, row, cols, cols < D, D, ZERO_CENTERED
        )


@triton.jit
def _load_backward(dy_ptr, h_ptr, rows, cols, mask, mean, rstd, DY_STRIDE, H_STRIDE):
    """Return dy and n."""
    dy = tl.load(dy_ptr + rows * DY_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    h = tl.load(h_ptr + rows * H_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    return dy, _normalized(h, mean, rstd)


@triton.jit
def _store_gradient(dh_ptr, dstream_ptr, g, n, mean_g, mean_gn, rstd, rows, cols, mask, DSTREAM_STRIDE, D):
    if mean_g is not None:
        g -= mean_g
    dh = rstd * (g - n * mean_gn)
    if dstream_ptr is not None:
        dh += tl.load(dstream_ptr + rows * DSTREAM_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(dh_ptr + rows * D + cols, dh.to(dh_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_sums(partials_ptr, dweight, dbias, program, programs, cols, D, HAS_BIAS):
    partials_ptr += program.to(tl.int64) * D
    tl.store(partials_ptr + cols, tl.sum(dweight, 0, keep_dims=True), mask=cols < D)
    if HAS_BIAS:
        partials_ptr += programs.to(tl.int64) * D
        tl.store(partials_ptr + cols, tl.sum(dbias, 0, keep_dims=True), mask=cols < D)


@triton.jit
def _backward_kernel(
    dy_ptr, dstream_ptr, h_ptr, weight_ptr, stats_ptr, dh_ptr, partials_ptr, M,
    DY_STRIDE: tl.constexpr, DSTREAM_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, D: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr, ZERO_CENTERED: tl.constexpr, HAS_BIAS: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    main = tl.arange(0, MAIN)[None, :]
    tail = MAIN + tl.arange(0, TAIL if TAIL else 1)[None, :]
    gain_main = _load_gain(weight_ptr, main, D, ZERO_CENTERED)
    dweight_main = tl.zeros((BLOCK_M, MAIN), tl.float32)
    dbias_main = tl.zeros((BLOCK_M, MAIN), tl.float32)
    if TAIL:
        gain_tail = _load_gain(weight_ptr, tail, D, ZERO_CENTERED)
        dweight_tail = tl.zeros((BLOCK_M, TAIL), tl.float32)
        dbias_tail = tl.zeros((BLOCK_M, TAIL), tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        rstd = tl.load(stats_ptr + rows, mask=rows < M, other=0.0)
        mean = tl.load(stats_ptr + M + rows, mask=rows < M, other=0.0) if SUBTRACT_MEAN else None
        main_mask = (rows < M) & (main < D)
        dy_main, n_main = _load_backward(dy_ptr, h_ptr, rows, main, main_mask, mean, rstd, DY_STRIDE, H_STRIDE)
        g_main = dy_main * gain_main
        mean_g = tl.sum(g_main, 1, keep_dims=True)
        mean_gn = tl.sum(g_main * n_main, 1, keep_dims=True)
        if TAIL:
            tail_mask = (rows < M) & (tail < D)
            dy_tail, n_tail = _load_backward(dy_ptr, h_ptr, rows, tail, tail_mask, mean, rstd, DY_STRIDE, H_STRIDE)
            g_tail = dy_tail * gain_tail
            mean_g += tl.sum(g_tail, 1, keep_dims=True)
            mean_gn += tl.sum(g_tail * n_tail, 1, keep_dims=True)
        mean_g = mean_g / D if SUBTRACT_MEAN else None
        mean_gn /= D
        _store_gradient(
            dh_ptr, dstream_ptr, g_main, n_main, mean_g, mean_gn, rstd, rows, main, main_mask, DSTREAM_STRIDE, D
        )
        dweight_main += dy_main * n_main
        dbias_main += dy_main
        if TAIL:
            _store_gradient(
                dh_ptr, dstream_ptr, g_tail, n_tail, mean_g, mean_gn, rstd, rows, tail, tail_mask, DSTREAM_STRIDE, D
            )
            dweight_tail += dy_tail * n_tail
            dbias_tail += dy_tail
    program, programs = tl.program_id(0), tl.num_programs(0)
    _store_sums(partials_ptr, dweight_main, dbias_main, program, programs, main, D, HAS_BIAS)
    if TAIL:
        _store_sums(partials_ptr, dweight_tail, dbias_tail, program, programs, tail, D, HAS_BIAS)


@triton.jit
def _backward_rows_kernel(
    dy_ptr, h_ptr, weight_ptr, stats_ptr, means_ptr, M,
    DY_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, D: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr, ZERO_CENTERED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(stats_ptr + row)
    mean = tl.load(stats_ptr + M + row) if SUBTRACT_MEAN else None
    sum_g = tl.zeros((BLOCK_D,), tl.float32)
    sum_gn = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.range(0, D, BLOCK_D, num_stages=3):
        cols = start + tl.arange(0, BLOCK_D)
        dy, n = _load_backward(dy_ptr, h_ptr, row, cols, cols < D, mean, rstd, DY_STRIDE, H_STRIDE)
        g = dy * _load_gain(weight_ptr, cols, D, ZERO_CENTERED)
        sum_g += g
        sum_gn += g * n
    mean_g = tl.sum(sum_g, 0) / D if SUBTRACT_MEAN else None
    _store_stats(means_ptr, tl.sum(sum_gn, 0) / D, mean_g, row, M)


@triton.jit
def _backward_columns_kernel(
    dy_ptr, dstream_ptr, h_ptr, weight_ptr, stats_ptr, means_ptr, dh_ptr, partials_ptr, M,
    DY_STRIDE: tl.constexpr, DSTREAM_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, D: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr, ZERO_CENTERED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    gain = _load_gain(weight_ptr, cols, D, ZERO_CENTERED)
    dweight = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for block in tl.range(tl.program_id(1), tl.cdiv(M, BLOCK_M), tl.num_programs(1), num_stages=3):
        rows = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        live = rows < M
        rstd, mean_gn = tl.load(stats_ptr + rows, mask=live, other=0.0), tl.load(means_ptr + rows, mask=live, other=0.0)
        mean = tl.load(stats_ptr + M + rows, mask=live, other=0.0) if SUBTRACT_MEAN else None
        mean_g = tl.load(means_ptr + M + rows, mask=live, other=0.0) if SUBTRACT_MEAN else None
        mask = live & (cols < D)
        dy, n = _load_backward(dy_ptr, h_ptr, rows, cols, mask, mean, rstd, DY_STRIDE, H_STRIDE)
        _store_gradient(dh_ptr, dstream_ptr, dy * gain, n, mean_g, mean_gn, rstd, rows, cols, mask, DSTREAM_STRIDE, D)
        dweight += dy * n
        dbias += dy
    _store_sums(partials_ptr, dweight, dbias, tl.program_id(1), tl.num_programs(1), cols, D, HAS_BIAS)
