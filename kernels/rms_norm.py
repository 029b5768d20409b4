"""Root mean square normalisation, with an optional residual addition in front.

    h = x + residual                            (h = x without a residual)
    y = h * rstd * g,  rstd = (mean(h^2) + eps)^(-1/2),  g = weight, or 1 + weight if zero-centred

    dh      = rstd * (g dy - n mean(g dy n)) + dresidual_out,  n = h * rstd
    dweight = sum over rows of dy n

Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4.

Kernels compute in float32 for every dtype. The forward and the backward kernel keep whole rows in registers; other
kernels read wider rows twice, in tiles. Backward sums dweight in two stages of fixed order, a partial sum per program
and then a sum over programs, so gradients repeat bit for bit.
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
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    residual: None = None,
    zero_centered: bool = False,
    impl: str | None = None,
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    residual: Tensor,
    zero_centered: bool = False,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    zero_centered: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise the last dimension of `x` (of `x + residual`, if given) by its root mean square.

    Args:
        x: `[..., D]`, float32, bfloat16 or float16 (the reference takes float64 too), with any strides.
        weight: gain, `[D]`; its dtype may differ from that of `x`. If `weight.main_grad` exists (float32), the kernel
            adds the gradient there, and post-accumulate hooks see a `.grad` of None. The reference uses `.grad`.
        eps: added to the mean square.
        residual: `[..., D]`, added to `x` before the norm; its dtype may differ, as for a float32 residual stream.
        zero_centered: the gain is `1 + weight`.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        `y` `[..., D]` in the dtype of `x`; with a residual, `(y, x + residual)`.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, or `impl` can't run here.
    """
    check_inputs(x, residual, weight=weight)
    if not runs_triton(impl, x):
        return rms_norm_reference(x, weight, eps, residual=residual, zero_centered=zero_centered)
    return _RMSNorm.apply(x, weight, residual, eps, zero_centered)


def rms_norm_reference(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    zero_centered: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`rms_norm` in plain torch, under torch's own autograd; computes in float32, or float64 for a float64 `x`."""
    h = x if residual is None else x + residual
    exact = torch.promote_types(h.dtype, torch.float32)
    gain = weight.to(exact) + 1 if zero_centered else weight
    if x.dtype == h.dtype == gain.dtype:
        y = F.rms_norm(h, (h.shape[-1],), gain, eps)
    else:
        n = h.to(exact)
        y = (n * torch.rsqrt(n.square().mean(-1, keepdim=True) + eps) * gain.to(exact)).to(x.dtype)
    return y if residual is None else (y, h)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, residual, eps, zero_centered):
        y, residual_out, rstd = _forward_op(x, weight, residual, eps, zero_centered)
        ctx.set_materialize_grads(False)
        ctx.zero_centered, ctx.main = zero_centered, remember_main_grad(weight)
        if residual is None:
            ctx.dtypes = x.dtype, None
            ctx.save_for_backward(x, weight, rstd)
            return y
        ctx.dtypes = x.dtype, residual.dtype
        ctx.save_for_backward(residual_out, weight, rstd)
        return y, residual_out

    @staticmethod
    def backward(ctx, dy, dresidual_out=None):
        refuse_second_derivative("rms_norm")
        x_dtype, residual_dtype = ctx.dtypes
        dh, dweight = dresidual_out, None
        if dy is not None:
            main = take_main_grad(ctx.main)
            dh, dweight = _backward_op(dy, dresidual_out, *ctx.saved_tensors, ctx.zero_centered, *(main or ()))
            dweight = dweight if main is None else None
        if dh is None or residual_dtype is None:
            return dh, dweight, None, None, None
        return dh.to(x_dtype), dweight, dh.to(residual_dtype), None, None


def _empty_forward(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if residual is None:
        return y, rstd.new_empty(0), rstd
    h_dtype = torch.promote_types(x.dtype, residual.dtype)
    return y, torch.empty_like(x, dtype=h_dtype, memory_format=torch.contiguous_format), rstd


def _empty_backward(
    dy: Tensor,
    dresidual_out: Tensor | None,
    h: Tensor,
    weight: Tensor,
    rstd: Tensor,
    zero_centered: bool,
    main_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    dh = torch.empty_like(h, memory_format=torch.contiguous_format)
    if main_grad is not None:
        return dh, weight.new_empty(0)
    return dh, torch.empty_like(weight, memory_format=torch.contiguous_format)


_forward_op = define(
    "rms_norm_forward(Tensor x, Tensor weight, Tensor? residual, float eps, bool zero_centered)"
    " -> (Tensor y, Tensor residual_out, Tensor rstd)",
    _empty_forward,
)
_backward_op = define(
    "rms_norm_backward(Tensor dy, Tensor? dresidual_out, Tensor h, Tensor weight, Tensor rstd, bool zero_centered,"
    " Tensor(a!)? main_grad=None) -> (Tensor dh, Tensor dweight)",
    _empty_backward,
)


@launches(_forward_op)
def _launch_forward(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, residual_out, rstd = outs = _empty_forward(x, weight, residual, eps, zero_centered)
    if y.numel() == 0:
        return outs
    M, D = count_rows(x), x.shape[-1]
    x, x_stride = as_rows(x)
    residual, residual_stride = (None, 0) if residual is None else as_rows(residual)
    tensors = (x, residual, weight.contiguous(), y, None if residual is None else residual_out, rstd)
    constants = (x_stride, residual_stride, D, zero_centered)
    if D <= WIDEST_FORWARD:
        *tile, num_warps = row_tile(D, elements_per_thread=32)
        grid = (ceil_div(M, tile[-1]), 1, 1)
        launch(_forward_kernel, grid, tensors, (M, eps), (*constants, *tile), num_warps)
    else:
        launch(_forward_wide_kernel, (M, 1, 1), tensors, (eps,), (*constants, 8192), num_warps=8)
    return outs


@launches(_backward_op)
def _launch_backward(
    dy: Tensor,
    dresidual_out: Tensor | None,
    h: Tensor,
    weight: Tensor,
    rstd: Tensor,
    zero_centered: bool,
    main_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    dh, dweight = outs = _empty_backward(dy, dresidual_out, h, weight, rstd, zero_centered, main_grad)
    if dh.numel() == 0:
        dweight.zero_()
        return outs
    M, D = count_rows(h), h.shape[-1]
    h, h_stride = as_rows(h)
    dy, dy_stride = as_rows(dy)
    dresidual_out, dresidual_stride = (None, 0) if dresidual_out is None else as_rows(dresidual_out)
    weight = weight.contiguous()
    constants = (dy_stride, dresidual_stride, h_stride, D, zero_centered)
    if D <= WIDEST_BACKWARD:
        *tile, num_warps = row_tile(D, elements_per_thread=16)
        programs = min(ceil_div(M, tile[-1]), multiprocessors(h.device) * (16 // num_warps))
        partials = h.new_empty((1, programs, D), dtype=torch.float32)
        tensors = (dy, dresidual_out, h, weight, rstd, dh, partials)
        launch(_backward_kernel, (programs, 1, 1), tensors, (M,), (*constants, *tile), num_warps)
    else:
        dot = rstd.new_empty(M)
        tensors = (dy, h, weight, rstd, dot)
        launch(_backward_rows_kernel, (M, 1, 1), tensors, (), (dy_stride, h_stride, D, zero_centered, 4096), 8)
        columns = ceil_div(D, 1024)
        groups = min(ceil_div(M, 4), max(1, 2 * multiprocessors(h.device) // columns))
        partials = h.new_empty((1, groups, D), dtype=torch.float32)
        tensors = (dy, dresidual_out, h, weight, rstd, dot, dh, partials)
        launch(_backward_columns_kernel, (columns, groups, 1), tensors, (M,), (*constants, 4, 1024), num_warps=8)
    sum_partials(partials, dweight if main_grad is None else main_grad, accumulate=main_grad is not None)
    return outs


@triton.jit
def _store_forward(y_ptr, residual_out_ptr, weight_ptr, h, rstd, rows, cols, mask, D, ZERO_CENTERED):
    y = h * rstd * load_gain(weight_ptr, cols, D, ZERO_CENTERED)
    tl.store(y_ptr + rows * D + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
    if residual_out_ptr is not None:
        tl.store(residual_out_ptr + rows * D + cols, h.to(residual_out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _forward_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, residual_out_ptr, rstd_ptr, M, eps,
    X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, D: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    main = tl.arange(0, MAIN)[None, :]
    main_mask = (rows < M) & (main < D)
    h_main = load_stream(x_ptr, residual_ptr, residual_out_ptr, rows, main, main_mask, X_STRIDE, RESIDUAL_STRIDE)
    square = tl.sum(h_main * h_main, 1, keep_dims=True)
    if TAIL:
        tail = MAIN + tl.arange(0, TAIL)[None, :]
        tail_mask = (rows < M) & (tail < D)
        h_tail = load_stream(x_ptr, residual_ptr, residual_out_ptr, rows, tail, tail_mask, X_STRIDE, RESIDUAL_STRIDE)
        square += tl.sum(h_tail * h_tail, 1, keep_dims=True)
    rstd = inverse_root(square / D + eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    _store_forward(y_ptr, residual_out_ptr, weight_ptr, h_main, rstd, rows, main, main_mask, D, ZERO_CENTERED)
    if TAIL:
        _store_forward(y_ptr, residual_out_ptr, weight_ptr, h_tail, rstd, rows, tail, tail_mask, D, ZERO_CENTERED)


@triton.jit
def _forward_wide_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, residual_out_ptr, rstd_ptr, eps,
    X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, D: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.range(0, D, BLOCK_D, num_stages=2):
        cols = start + tl.arange(0, BLOCK_D)
        h = load_stream(x_ptr, residual_ptr, residual_out_ptr, row, cols, cols < D, X_STRIDE, RESIDUAL_STRIDE)
        squares += h * h
    rstd = inverse_root(tl.sum(squares, 0) / D + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in tl.range(0, D, BLOCK_D, num_stages=2):  # the second read comes from L2
        cols = start + tl.arange(0, BLOCK_D)
        h = load_stream(x_ptr, residual_ptr, residual_out_ptr, row, cols, cols < D, X_STRIDE, RESIDUAL_STRIDE)
        _store_forward(y_ptr, residual_out_ptr, weight_ptr, h, rstd, row, cols, cols < D, D, ZERO_CENTERED)


@triton.jit
def _load_backward(dy_ptr, h_ptr, rows, cols, mask, DY_STRIDE, H_STRIDE):
    dy = tl.load(dy_ptr + rows * DY_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    h = tl.load(h_ptr + rows * H_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    return dy, h


@triton.jit
def _backward_kernel(
    dy_ptr, dresidual_out_ptr, h_ptr, weight_ptr, rstd_ptr, dh_ptr, partials_ptr, M,
    DY_STRIDE: tl.constexpr, DRESIDUAL_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, D: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    main = tl.arange(0, MAIN)[None, :]
    tail = MAIN + tl.arange(0, TAIL if TAIL else 1)[None, :]
    gain_main = load_gain(weight_ptr, main, D, ZERO_CENTERED)
    dweight_main = tl.zeros((BLOCK_M, MAIN), tl.float32)
    if TAIL:
        gain_tail = load_gain(weight_ptr, tail, D, ZERO_CENTERED)
        dweight_tail = tl.zeros((BLOCK_M, TAIL), tl.float32)
    for block in tl.range(program, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=2):
        rows = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        main_mask = (rows < M) & (main < D)
        dy_main, n_main = _load_backward(dy_ptr, h_ptr, rows, main, main_mask, DY_STRIDE, H_STRIDE)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        n_main *= rstd
        dot = tl.sum(dy_main * gain_main * n_main, 1, keep_dims=True)
        if TAIL:
            tail_mask = (rows < M) & (tail < D)
            dy_tail, n_tail = _load_backward(dy_ptr, h_ptr, rows, tail, tail_mask, DY_STRIDE, H_STRIDE)
            n_tail *= rstd
            dot += tl.sum(dy_tail * gain_tail * n_tail, 1, keep_dims=True)
        dot /= D
        dh_main = rstd * (dy_main * gain_main - n_main * dot)
        store_gradient(dh_ptr, dresidual_out_ptr, dh_main, rows, main, main_mask, DRESIDUAL_STRIDE, D)
        dweight_main += dy_main * n_main
        if TAIL:
            dh_tail = rstd * (dy_tail * gain_tail - n_tail * dot)
            store_gradient(dh_ptr, dresidual_out_ptr, dh_tail, rows, tail, tail_mask, DRESIDUAL_STRIDE, D)
            dweight_tail += dy_tail * n_tail
    partials_ptr += program.to(tl.int64) * D
    tl.store(partials_ptr + main, tl.sum(dweight_main, 0, keep_dims=True), mask=main < D)
    if TAIL:
        tl.store(partials_ptr + tail, tl.sum(dweight_tail, 0, keep_dims=True), mask=tail < D)


@triton.jit
def _backward_rows_kernel(
    dy_ptr, h_ptr, weight_ptr, rstd_ptr, dot_ptr,
    DY_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, D: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    dots = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.range(0, D, BLOCK_D, num_stages=2):
        cols = start + tl.arange(0, BLOCK_D)
        dy, h = _load_backward(dy_ptr, h_ptr, row, cols, cols < D, DY_STRIDE, H_STRIDE)
        dots += dy * load_gain(weight_ptr, cols, D, ZERO_CENTERED) * (h * rstd)
    tl.store(dot_ptr + row, tl.sum(dots, 0) / D)


@triton.jit
def _backward_columns_kernel(
    dy_ptr, dresidual_out_ptr, h_ptr, weight_ptr, rstd_ptr, dot_ptr, dh_ptr, partials_ptr, M,
    DY_STRIDE: tl.constexpr, DRESIDUAL_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, D: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    gain = load_gain(weight_ptr, cols, D, ZERO_CENTERED)
    dweight = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for block in tl.range(group, tl.cdiv(M, BLOCK_M), tl.num_programs(1), num_stages=2):
        rows = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        mask = (rows < M) & (cols < D)
        dy, n = _load_backward(dy_ptr, h_ptr, rows, cols, mask, DY_STRIDE, H_STRIDE)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        dot = tl.load(dot_ptr + rows, mask=rows < M, other=0.0)
        n *= rstd
        dh = rstd * (dy * gain - n * dot)
        store_gradient(dh_ptr, dresidual_out_ptr, dh, rows, cols, mask, DRESIDUAL_STRIDE, D)
        dweight += dy * n
    tl.store(partials_ptr + group.to(tl.int64) * D + cols, tl.sum(dweight, 0, keep_dims=True), mask=cols < D)
