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

from ._checks import check_inputs
from ._dispatch import operator, refuse_second_derivative, runs_triton
from ._main_grad import remember_main_grad, take_main_grad
from ._rows import as_rows, ceil_div, contiguous, count_rows, next_power_of_2, row_tile, sum_partials
from ._triton import launch, multiprocessors, stages, tl, triton

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
    runs = runs_triton(impl, x, name) and widest >= D
    return (Norm.apply if runs else _reference)(x, weight, bias, residual, name == "layer_norm", eps)


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, subtract_mean: bool, eps: float
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    h = x if residual is None else x + residual
    exact = torch.promote_types(h.dtype, torch.float32)
    n = h
    if x.dtype != h.dtype or x.dtype != weight.dtype or (bias is not None and x.dtype != bias.dtype):
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
def _forward_op(x, weight, bias, residual, subtract_mean, eps) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    y = x.new_empty(x.shape)
    stats = x.new_empty((1 + subtract_mean, *x.shape[:-1]), dtype=torch.float32)  # rstd, mean
    residual_out = stats.new_empty(0)
    if residual is not None:
        residual_out = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    yield y, residual_out, stats
    M, D = count_rows(x), x.shape[-1]
    x, x_stride = as_rows(x)
    residual, residual_stride = as_rows(residual)
    weight, bias = contiguous(weight, bias)
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
    dy, dstream, h, weight, bias, main_grad, bias_main_grad, stats, subtract_mean
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    returned = main_grad is None
    dh = h.new_empty(h.shape)
    dweight = weight.new_empty(weight.shape if returned else 0)
    dbias = weight.new_empty(0) if bias is None else bias.new_empty(bias.shape if returned else 0)
    yield dh, dweight, dbias
    M, D = count_rows(h), h.shape[-1]
    h, h_stride = as_rows(h)
    dy, dy_stride = as_rows(dy)
    dstream, dstream_stride = as_rows(dstream)
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


@triton.jit
def _load_stream(x_ptr, residual_ptr, residual_out_ptr, rows, cols, mask, X_STRIDE, RESIDUAL_STRIDE):
    h = tl.load(x_ptr + rows * X_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        h += tl.load(residual_ptr + rows * RESIDUAL_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
        h = h.to(residual_out_ptr.dtype.element_ty).to(tl.float32)  # the norm sees h as it is stored
    return h


@triton.jit
def _load_gain(weight_ptr, cols, D):
    return tl.load(weight_ptr + cols, mask=cols < D, other=0.0, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def _normalized(h, mean, rstd):
    """Return n; a mean of `None` subtracts nothing."""
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
def _store_stats(stats_ptr, rstd, mean, rows, M):
    tl.store(stats_ptr + rows, rstd, mask=rows < M)
    if mean is not None:
        tl.store(stats_ptr + M + rows, mean, mask=rows < M)


@triton.jit
def _store_forward(y_ptr, residual_out_ptr, weight_ptr, bias_ptr, h, mean, rstd, rows, cols, mask, D):
    y = _normalized(h, mean, rstd) * _load_gain(weight_ptr, cols, D)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + cols, mask=cols < D, other=0.0, eviction_policy="evict_last").to(tl.float32)
    tl.store(y_ptr + rows * D + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
    if residual_out_ptr is not None:
        tl.store(residual_out_ptr + rows * D + cols, h.to(residual_out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, residual_out_ptr, stats_ptr, M, eps,
    X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, D: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
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
    _store_forward(y_ptr, residual_out_ptr, weight_ptr, bias_ptr, h_main, mean, rstd, rows, main, main_mask, D)
    if TAIL:
        _store_forward(y_ptr, residual_out_ptr, weight_ptr, bias_ptr, h_tail, mean, rstd, rows, tail, tail_mask, D)


@triton.jit
def _nothing(x, M):
    """Return int32 zeros that the compiler can't know before it knows x: M is never negative.

    A load at this offset waits for x, and is not staged in shared memory, as its alignment isn't known either.
    """
    return x.to(tl.int32, bitcast=True) & (M >> 31)


@triton.jit
def _read_again(x, nothing):
    """Return x of 16 bits, which the compiler does not know before it knows those of `nothing`, which are 0.

    So it converts a row to float32 once before a sum over the row and once after, and holds it narrow in between.
    """
    return (x.to(tl.int16, bitcast=True) ^ nothing.to(tl.int16)).to(x.dtype, bitcast=True)


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
def _load_raw(dy_ptr, h_ptr, rows, cols, mask, DY_STRIDE, H_STRIDE):
    dy = tl.load(dy_ptr + rows * DY_STRIDE + cols, mask=mask, other=0.0)
    return dy, tl.load(h_ptr + rows * H_STRIDE + cols, mask=mask, other=0.0)


@triton.jit
def backward_kernel(
    dy_ptr, dstream_ptr, h_ptr, weight_ptr, stats_ptr, dh_ptr, partials_ptr, M,
    DY_STRIDE: tl.constexpr, DSTREAM_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, D: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr, HAS_BIAS: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr, NARROW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """With `NARROW`, registers hold a row as it was loaded, and no gains."""
    main = tl.arange(0, MAIN)[None, :]
    tail = MAIN + tl.arange(0, TAIL if TAIL else 1)[None, :]
    gain_main = _load_gain(weight_ptr, main, D)
    dweight_main = tl.zeros((BLOCK_M, MAIN), tl.float32)
    dbias_main = tl.zeros((BLOCK_M, MAIN), tl.float32)
    if TAIL:
        gain_tail = _load_gain(weight_ptr, tail, D)
        dweight_tail = tl.zeros((BLOCK_M, TAIL), tl.float32)
        dbias_tail = tl.zeros((BLOCK_M, TAIL), tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        rstd = tl.load(stats_ptr + rows, mask=rows < M, other=0.0)
        mean = tl.load(stats_ptr + M + rows, mask=rows < M, other=0.0) if SUBTRACT_MEAN else None
        main_mask = (rows < M) & (main < D)
        dy_main, h_main = _load_raw(dy_ptr, h_ptr, rows, main, main_mask, DY_STRIDE, H_STRIDE)
        if NARROW:
            gain_main = _load_gain(weight_ptr + _nothing(rstd, M), main, D)
        g_main = dy_main.to(tl.float32) * gain_main
        n_main = _normalized(h_main.to(tl.float32), mean, rstd)
        mean_g = tl.sum(g_main, 1, keep_dims=True)
        mean_gn = tl.sum(g_main * n_main, 1, keep_dims=True)
        if TAIL:
            tail_mask = (rows < M) & (tail < D)
            dy_tail, h_tail = _load_raw(dy_ptr, h_ptr, rows, tail, tail_mask, DY_STRIDE, H_STRIDE)
            if NARROW:
                gain_tail = _load_gain(weight_ptr + _nothing(rstd, M), tail, D)
            g_tail = dy_tail.to(tl.float32) * gain_tail
            n_tail = _normalized(h_tail.to(tl.float32), mean, rstd)
            mean_g += tl.sum(g_tail, 1, keep_dims=True)
            mean_gn += tl.sum(g_tail * n_tail, 1, keep_dims=True)
        mean_g = mean_g / D if SUBTRACT_MEAN else None
        mean_gn /= D
        if NARROW:
            nothing = _nothing(mean_gn, M)
            dy_main, h_main = _read_again(dy_main, nothing), _read_again(h_main, nothing)
            g_main = dy_main.to(tl.float32) * _load_gain(weight_ptr + nothing, main, D)
            n_main = _normalized(h_main.to(tl.float32), mean, rstd)
            stream_ptr = None if dstream_ptr is None else dstream_ptr + nothing
        else:
            stream_ptr = dstream_ptr
        _store_gradient(
            dh_ptr, stream_ptr, g_main, n_main, mean_g, mean_gn, rstd, rows, main, main_mask, DSTREAM_STRIDE, D
        )
        dweight_main += dy_main.to(tl.float32) * n_main
        dbias_main += dy_main.to(tl.float32)
        if TAIL:
            if NARROW:
                dy_tail, h_tail = _read_again(dy_tail, nothing), _read_again(h_tail, nothing)
                g_tail = dy_tail.to(tl.float32) * _load_gain(weight_ptr + nothing, tail, D)
                n_tail = _normalized(h_tail.to(tl.float32), mean, rstd)
            _store_gradient(
                dh_ptr, stream_ptr, g_tail, n_tail, mean_g, mean_gn, rstd, rows, tail, tail_mask, DSTREAM_STRIDE, D
            )
            dweight_tail += dy_tail.to(tl.float32) * n_tail
            dbias_tail += dy_tail.to(tl.float32)
    program, programs = tl.program_id(0), tl.num_programs(0)
    _store_sums(partials_ptr, dweight_main, dbias_main, program, programs, main, D, HAS_BIAS)
    if TAIL:
        _store_sums(partials_ptr, dweight_tail, dbias_tail, program, programs, tail, D, HAS_BIAS)
