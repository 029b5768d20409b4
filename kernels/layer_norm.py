"""Layer normalisation, with an optional residual addition in front.

    h = x + residual                            (h = x without a residual)
    n = (h - mean(h)) * rstd,  rstd = (mean((h - mean(h))^2) + eps)^(-1/2)
    y = n g + bias,  g = weight, or 1 + weight if zero-centred

    dh      = rstd * (g dy - mean(g dy) - n mean(g dy n)) + dresidual_out
    dweight = sum over rows of dy n,  dbias = sum over rows of dy

Ba, Kiros and Hinton, "Layer Normalization" (2016), equation 4.

Kernels compute in float32 for every dtype. They compute the variance of the centred row, so a large mean loses no
digits. The forward and the backward kernel keep whole rows in registers; other kernels read wider rows in tiles, three
times forward and twice backward. Backward sums dweight and dbias in two stages of fixed order, a partial sum per
program and then a sum over programs, so gradients repeat bit for bit.
"""

from __future__ import annotations

from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ._dispatch import define, launches, refuse_second_derivative, runs_triton
from ._main_grad import remember_main_grad, take_main_grad
from ._norm import WIDEST_BACKWARD, WIDEST_FORWARD, inverse_root, load_gain, load_stream, store_gradient
from ._rows import as_rows, ceil_div, check_inputs, count_rows, row_tile, sum_partials
from ._triton import launch, multiprocessors, tl, triton


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    residual: None = None,
    zero_centered: bool = False,
    impl: str | None = None,
) -> Tensor: ...
@overload
def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    residual: Tensor,
    zero_centered: bool = False,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]: ...
def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    zero_centered: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise the last dimension of `x` (of `x + residual`, if given) to mean 0 and variance 1, then scale and shift.

    Args:
        x: `[..., D]`, float32, bfloat16 or float16 (the reference takes float64 too), with any strides.
        weight: gain, `[D]`; its dtype may differ from that of `x`.
        bias: shift, `[D]`, of any such dtype, or `None`. If weight and bias both have a `main_grad` (float32), the
            kernel adds their gradients there.
        eps: added to the variance.
        residual: `[..., D]`, added to `x` before the norm; its dtype may differ, as for a float32 residual stream.
        zero_centered: the gain is `1 + weight`.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        `y` `[..., D]` in the dtype of `x`; with a residual, `(y, x + residual)`.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, or `impl` can't run here.
    """
    check_inputs(x, residual, weight=weight, bias=bias)
    if not runs_triton(impl, x):
        return layer_norm_reference(x, weight, bias, eps, residual=residual, zero_centered=zero_centered)
    return _LayerNorm.apply(x, weight, bias, residual, eps, zero_centered)


def layer_norm_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    zero_centered: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`layer_norm` in plain torch, under torch's own autograd; computes in float32, or float64 for a float64 `x`."""
    h = x if residual is None else x + residual
    exact = torch.promote_types(h.dtype, torch.float32)
    gain = weight.to(exact) + 1 if zero_centered else weight
    if x.dtype == h.dtype == gain.dtype == (gain if bias is None else bias).dtype:
        y = F.layer_norm(h, (h.shape[-1],), gain, bias, eps)
    else:
        shift = None if bias is None else bias.to(exact)
        y = F.layer_norm(h.to(exact), (h.shape[-1],), gain.to(exact), shift, eps).to(x.dtype)
    return y if residual is None else (y, h)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, residual, eps, zero_centered):
        y, residual_out, stats = _forward_op(x, weight, bias, residual, eps, zero_centered)
        ctx.set_materialize_grads(False)
        ctx.zero_centered, ctx.main = zero_centered, remember_main_grad(weight, bias)
        if residual is None:
            ctx.dtypes = x.dtype, None
            ctx.save_for_backward(x, weight, bias, stats)
            return y
        ctx.dtypes = x.dtype, residual.dtype
        ctx.save_for_backward(residual_out, weight, bias, stats)
        return y, residual_out

    @staticmethod
    def backward(ctx, dy, dresidual_out=None):
        refuse_second_derivative("layer_norm")
        x_dtype, residual_dtype = ctx.dtypes
        dh, dweight, dbias = dresidual_out, None, None
        if dy is not None:
            h, weight, bias, stats = ctx.saved_tensors
            main = take_main_grad(ctx.main)
            how = (ctx.zero_centered, *(main or ()))
            dh, dweight, dbias = _backward_op(dy, dresidual_out, h, weight, bias, stats, *how)
            dweight, dbias = (None, None) if main else (dweight, None if bias is None else dbias)
        if dh is None or residual_dtype is None:
            return dh, dweight, dbias, None, None, None
        return dh.to(x_dtype), dweight, dbias, dh.to(residual_dtype), None, None


def _empty_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    stats = x.new_empty((2, *x.shape[:-1]), dtype=torch.float32)  # mean, rstd
    if residual is None:
        return y, stats.new_empty(0), stats
    h_dtype = torch.promote_types(x.dtype, residual.dtype)
    return y, torch.empty_like(x, dtype=h_dtype, memory_format=torch.contiguous_format), stats


def _empty_backward(
    dy: Tensor,
    dresidual_out: Tensor | None,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stats: Tensor,
    zero_centered: bool,
    main_grad: Tensor | None = None,
    bias_main_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dh = torch.empty_like(h, memory_format=torch.contiguous_format)
    if main_grad is not None:
        return dh, weight.new_empty(0), weight.new_empty(0)
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if bias is None:
        return dh, dweight, weight.new_empty(0)
    return dh, dweight, torch.empty_like(bias, memory_format=torch.contiguous_format)


_forward_op = define(
    "layer_norm_forward(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, float eps, bool zero_centered)"
    " -> (Tensor y, Tensor residual_out, Tensor stats)",
    _empty_forward,
)
_backward_op = define(
    "layer_norm_backward(Tensor dy, Tensor? dresidual_out, Tensor h, Tensor weight, Tensor? bias, Tensor stats,"
    " bool zero_centered, Tensor(a!)? main_grad=None, Tensor(b!)? bias_main_grad=None)"
    " -> (Tensor dh, Tensor dweight, Tensor dbias)",
    _empty_backward,
)


@launches(_forward_op)
def _launch_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, residual_out, stats = outs = _empty_forward(x, weight, bias, residual, eps, zero_centered)
    if y.numel() == 0:
        return outs
    M, D = count_rows(x), x.shape[-1]
    x, x_stride = as_rows(x)
    residual, residual_stride = (None, 0) if residual is None else as_rows(residual)
    bias = None if bias is None else bias.contiguous()
    tensors = (x, residual, weight.contiguous(), bias, y, None if residual is None else residual_out, stats)
    constants = (x_stride, residual_stride, D, zero_centered)
    if D <= WIDEST_FORWARD:
        *tile, num_warps = row_tile(D, elements_per_thread=32)
        grid = (ceil_div(M, tile[-1]), 1, 1)
        launch(_forward_kernel, grid, tensors, (M, eps), (*constants, *tile), num_warps)
    else:
        launch(_forward_wide_kernel, (M, 1, 1), tensors, (M, eps), (*constants, 8192), num_warps=8)
    return outs


@launches(_backward_op)
def _launch_backward(
    dy: Tensor,
    dresidual_out: Tensor | None,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stats: Tensor,
    zero_centered: bool,
    main_grad: Tensor | None = None,
    bias_main_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dh, dweight, dbias = outs = _empty_backward(
        dy, dresidual_out, h, weight, bias, stats, zero_centered, main_grad, bias_main_grad
    )
    if dh.numel() == 0:
        dweight.zero_()
        dbias.zero_()
        return outs
    M, D = count_rows(h), h.shape[-1]
    h, h_stride = as_rows(h)
    dy, dy_stride = as_rows(dy)
    dresidual_out, dresidual_stride = (None, 0) if dresidual_out is None else as_rows(dresidual_out)
    weight = weight.contiguous()
    sums = (dweight, dbias) if main_grad is None else (main_grad, bias_main_grad)
    sums = sums[:1] if bias is None else sums
    constants = (dy_stride, dresidual_stride, h_stride, D, zero_centered, bias is not None)
    if D <= WIDEST_BACKWARD:
        # A power of two needs no mask and no tail, so 16 warps hold both sums: half as many programs and partial sums.
        *tile, num_warps = row_tile(D, elements_per_thread=16, elements=4096 if D & (D - 1) else 8192)
        programs = min(ceil_div(M, tile[-1]), multiprocessors(h.device) * (16 // num_warps))
        partials = h.new_empty((len(sums), programs, D), dtype=torch.float32)
        tensors = (dy, dresidual_out, h, weight, stats, dh, partials)
        launch(_backward_kernel, (programs, 1, 1), tensors, (M,), (*constants, *tile), num_warps)
    else:
        means = stats.new_empty((2, M))  # of g dy, and of g dy n
        tensors = (dy, h, weight, stats, means)
        launch(_backward_rows_kernel, (M, 1, 1), tensors, (M,), (dy_stride, h_stride, D, zero_centered, 4096), 8)
        columns = ceil_div(D, 1024)
        groups = min(ceil_div(M, 4), max(1, 2 * multiprocessors(h.device) // columns))
        partials = h.new_empty((len(sums), groups, D), dtype=torch.float32)
        tensors = (dy, dresidual_out, h, weight, stats, means, dh, partials)
        launch(_backward_columns_kernel, (columns, groups, 1), tensors, (M,), (*constants, 4, 1024), num_warps=8)
    sum_partials(partials, *sums, accumulate=main_grad is not None)  # pyright: ignore[reportArgumentType]
    return outs


@triton.jit
def _store_forward(
    y_ptr, residual_out_ptr, weight_ptr, bias_ptr, h, mean, rstd, rows, cols, mask, D, ZERO_CENTERED
):  # fmt: skip
    y = (h - mean) * rstd * load_gain(weight_ptr, cols, D, ZERO_CENTERED)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + cols, mask=cols < D, other=0.0, eviction_policy="evict_last").to(tl.float32)
    tl.store(y_ptr + rows * D + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
    if residual_out_ptr is not None:
        tl.store(residual_out_ptr + rows * D + cols, h.to(residual_out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, residual_out_ptr, stats_ptr, M, eps,
    X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, D: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    main = tl.arange(0, MAIN)[None, :]
    main_mask = (rows < M) & (main < D)
    h_main = load_stream(x_ptr, residual_ptr, residual_out_ptr, rows, main, main_mask, X_STRIDE, RESIDUAL_STRIDE)
    mean = tl.sum(h_main, 1, keep_dims=True)
    if TAIL:
        tail = MAIN + tl.arange(0, TAIL)[None, :]
        tail_mask = (rows < M) & (tail < D)
        h_tail = load_stream(x_ptr, residual_ptr, residual_out_ptr, rows, tail, tail_mask, X_STRIDE, RESIDUAL_STRIDE)
        mean += tl.sum(h_tail, 1, keep_dims=True)
    mean = tl.div_rn(mean, D * 1.0)  # a GPU's fast division errs by more than a mean of few may
    centred_main = tl.where(main < D, h_main - mean, 0.0)
    variance = tl.sum(centred_main * centred_main, 1, keep_dims=True)
    if TAIL:
        centred_tail = tl.where(tail < D, h_tail - mean, 0.0)
        variance += tl.sum(centred_tail * centred_tail, 1, keep_dims=True)
    rstd = inverse_root(variance / D + eps)
    tl.store(stats_ptr + rows, mean, mask=rows < M)
    tl.store(stats_ptr + M + rows, rstd, mask=rows < M)
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
    ZERO_CENTERED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    sums = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.range(0, D, BLOCK_D, num_stages=2):
        cols = start + tl.arange(0, BLOCK_D)
        sums += load_stream(x_ptr, residual_ptr, residual_out_ptr, row, cols, cols < D, X_STRIDE, RESIDUAL_STRIDE)
    mean = tl.sum(sums, 0) / D
    squares = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.range(0, D, BLOCK_D, num_stages=2):  # this read and the next come from L2
        cols = start + tl.arange(0, BLOCK_D)
        h = load_stream(x_ptr, residual_ptr, residual_out_ptr, row, cols, cols < D, X_STRIDE, RESIDUAL_STRIDE)
        centred = tl.where(cols < D, h - mean, 0.0)
        squares += centred * centred
    rstd = inverse_root(tl.sum(squares, 0) / D + eps)
    tl.store(stats_ptr + row, mean)
    tl.store(stats_ptr + M + row, rstd)
    for start in tl.range(0, D, BLOCK_D, num_stages=2):
        cols = start + tl.arange(0, BLOCK_D)
        h = load_stream(x_ptr, residual_ptr, residual_out_ptr, row, cols, cols < D, X_STRIDE, RESIDUAL_STRIDE)
        _store_forward(
            y_ptr, residual_out_ptr, weight_ptr, bias_ptr, h, mean, rstd, row, cols, cols < D, D, ZERO_CENTERED
        )


@triton.jit
def _load_backward(dy_ptr, h_ptr, rows, cols, mask, mean, rstd, DY_STRIDE, H_STRIDE):
    dy = tl.load(dy_ptr + rows * DY_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    h = tl.load(h_ptr + rows * H_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    return dy, (h - mean) * rstd


@triton.jit
def _store_sums(partials_ptr, dweight, dbias, program, programs, cols, D, HAS_BIAS):
    partials_ptr += program.to(tl.int64) * D
    tl.store(partials_ptr + cols, tl.sum(dweight, 0, keep_dims=True), mask=cols < D)
    if HAS_BIAS:
        partials_ptr += programs.to(tl.int64) * D
        tl.store(partials_ptr + cols, tl.sum(dbias, 0, keep_dims=True), mask=cols < D)


@triton.jit
def _backward_kernel(
    dy_ptr, dresidual_out_ptr, h_ptr, weight_ptr, stats_ptr, dh_ptr, partials_ptr, M,
    DY_STRIDE: tl.constexpr, DRESIDUAL_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, D: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, HAS_BIAS: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    main = tl.arange(0, MAIN)[None, :]
    tail = MAIN + tl.arange(0, TAIL if TAIL else 1)[None, :]
    gain_main = load_gain(weight_ptr, main, D, ZERO_CENTERED)
    dweight_main = tl.zeros((BLOCK_M, MAIN), tl.float32)
    dbias_main = tl.zeros((BLOCK_M, MAIN), tl.float32)
    if TAIL:
        gain_tail = load_gain(weight_ptr, tail, D, ZERO_CENTERED)
        dweight_tail = tl.zeros((BLOCK_M, TAIL), tl.float32)
        dbias_tail = tl.zeros((BLOCK_M, TAIL), tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=2):
        rows = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        mean = tl.load(stats_ptr + rows, mask=rows < M, other=0.0)
        rstd = tl.load(stats_ptr + M + rows, mask=rows < M, other=0.0)
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
        mean_g /= D
        mean_gn /= D
        dh_main = rstd * (g_main - mean_g - n_main * mean_gn)
        store_gradient(dh_ptr, dresidual_out_ptr, dh_main, rows, main, main_mask, DRESIDUAL_STRIDE, D)
        dweight_main += dy_main * n_main
        dbias_main += dy_main
        if TAIL:
            dh_tail = rstd * (g_tail - mean_g - n_tail * mean_gn)
            store_gradient(dh_ptr, dresidual_out_ptr, dh_tail, rows, tail, tail_mask, DRESIDUAL_STRIDE, D)
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
    ZERO_CENTERED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    mean = tl.load(stats_ptr + row)
    rstd = tl.load(stats_ptr + M + row)
    sum_g = tl.zeros((BLOCK_D,), tl.float32)
    sum_gn = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.range(0, D, BLOCK_D, num_stages=2):
        cols = start + tl.arange(0, BLOCK_D)
        dy, n = _load_backward(dy_ptr, h_ptr, row, cols, cols < D, mean, rstd, DY_STRIDE, H_STRIDE)
        g = dy * load_gain(weight_ptr, cols, D, ZERO_CENTERED)
        sum_g += g
        sum_gn += g * n
    tl.store(means_ptr + row, tl.sum(sum_g, 0) / D)
    tl.store(means_ptr + M + row, tl.sum(sum_gn, 0) / D)


@triton.jit
def _backward_columns_kernel(
    dy_ptr, dresidual_out_ptr, h_ptr, weight_ptr, stats_ptr, means_ptr, dh_ptr, partials_ptr, M,
    DY_STRIDE: tl.constexpr, DRESIDUAL_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, D: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    gain = load_gain(weight_ptr, cols, D, ZERO_CENTERED)
    dweight = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for block in tl.range(tl.program_id(1), tl.cdiv(M, BLOCK_M), tl.num_programs(1), num_stages=2):
        rows = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        mask = (rows < M) & (cols < D)
        mean = tl.load(stats_ptr + rows, mask=rows < M, other=0.0)
        rstd = tl.load(stats_ptr + M + rows, mask=rows < M, other=0.0)
        mean_g = tl.load(means_ptr + rows, mask=rows < M, other=0.0)
        mean_gn = tl.load(means_ptr + M + rows, mask=rows < M, other=0.0)
        dy, n = _load_backward(dy_ptr, h_ptr, rows, cols, mask, mean, rstd, DY_STRIDE, H_STRIDE)
        dh = rstd * (dy * gain - mean_g - n * mean_gn)
        store_gradient(dh_ptr, dresidual_out_ptr, dh, rows, cols, mask, DRESIDUAL_STRIDE, D)
        dweight += dy * n
        dbias += dy
    _store_sums(partials_ptr, dweight, dbias, tl.program_id(1), tl.num_programs(1), cols, D, HAS_BIAS)
