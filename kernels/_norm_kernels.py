"""The Triton kernels of `_norm.py`: forward, and backward with its sums over rows.

`dstream` is the gradient of the residual stream that forward returns. `None` in place of a mean subtracts nothing.
"""

from __future__ import annotations

from ._triton import tl, triton


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
def _store_stats(stats_ptr, rstd, mean, rows, M):
    """Store rstd and the mean; a mean of `None` has no place."""
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
