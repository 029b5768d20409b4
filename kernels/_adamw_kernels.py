"""The Triton kernel of `adamw.py`: the step of one tile of a list of tensors."""

from __future__ import annotations

from ._triton import tl, triton


@triton.jit
def _round_at_random(x, bits):
    raised = (x.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
    return tl.where(x == x, raised.to(tl.float32, bitcast=True), x)


@triton.jit
def _address(table_ptr, column: tl.constexpr, like_ptr, ALIGNED: tl.constexpr):
    """Return an address of the table as a pointer to elements of the type that `like_ptr` points to."""
    ptr = tl.load(table_ptr + column).to(like_ptr.dtype)
    return tl.multiple_of(ptr, 16) if ALIGNED else ptr


@triton.jit
def _load(ptr, at, N, EDGE: tl.constexpr):
    if EDGE:
        return tl.load(ptr + at, mask=at < N, other=0)
    else:
        return tl.load(ptr + at)


@triton.jit
def _store(ptr, at, x, N, EDGE: tl.constexpr):
    if EDGE:
        tl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=at < N)
    else:
        tl.store(ptr + at, x.to(ptr.dtype.element_ty))


@triton.jit
def adamw_kernel(
    tiles_ptr, table_ptr, param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, master_ptr, rows_ptr, scale_ptr,
    weight1, beta2, weight2, eps, weight_decay, ROUND: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step one tile. The pointers from `param_ptr` on give types alone; the addresses are in the table."""
    table_ptr += tl.load(tiles_ptr + tl.program_id(0)) * 12
    N, C, key = tl.load(table_ptr + 8), tl.load(table_ptr + 9), tl.load(table_ptr + 10)
    start = (tl.program_id(0) - tl.load(table_ptr + 11)) * BLOCK
    if start + BLOCK <= N:  # without a mask every access is wide, whatever N is
        _step(
            table_ptr, param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, master_ptr, rows_ptr, scale_ptr,
            weight1, beta2, weight2, eps, weight_decay, start, N, C, key, ROUND, ALIGNED, False, BLOCK,
        )  # fmt: skip
    else:
        for part in range(start, N, BLOCK // 8):  # narrow accesses of few elements: of many they take registers
            _step(
                table_ptr, param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, master_ptr, rows_ptr, scale_ptr,
                weight1, beta2, weight2, eps, weight_decay, part, N, C, key, ROUND, ALIGNED, True, BLOCK // 8,
            )  # fmt: skip


@triton.jit
def _step(
    table_ptr, param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, master_ptr, rows_ptr, scale_ptr,
    weight1, beta2, weight2, eps, weight_decay, start, N, C, key,
    ROUND: tl.constexpr, ALIGNED: tl.constexpr, EDGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = start + tl.arange(0, BLOCK)
    now_ptr = tl.load(table_ptr + 4).to(tl.pointer_type(tl.float64))
    param_ptr = _address(table_ptr, 0, param_ptr, ALIGNED)
    grad_ptr = _address(table_ptr, 1, grad_ptr, ALIGNED)
    exp_avg_ptr = _address(table_ptr, 2, exp_avg_ptr, ALIGNED)
    exp_avg_sq_ptr = _address(table_ptr, 3, exp_avg_sq_ptr, ALIGNED)
    lr = tl.load(now_ptr).to(tl.float32)
    correction1 = tl.load(now_ptr + 1).to(tl.float32)
    correction2 = tl.load(now_ptr + 2).to(tl.float32)
    g = _load(grad_ptr, at, N, EDGE).to(tl.float32)
    m = _load(exp_avg_ptr, at, N, EDGE).to(tl.float32)
    v = _load(exp_avg_sq_ptr, at, N, EDGE).to(tl.float32)
    p = _load(param_ptr, at, N, EDGE)
    w = p.to(tl.float32)
    if master_ptr is not None:
        master_ptr = _address(table_ptr, 5, master_ptr, ALIGNED)
        master = _load(master_ptr, at, N, EDGE)
        w = tl.where(master.to(p.dtype) == p, master, w)  # else somebody wrote to the parameter
    if scale_ptr is not None:
        g *= tl.load(scale_ptr).to(tl.float32)
    w -= lr * weight_decay * w
    m += (g - m) * weight1
    v = v * beta2 + g * g * weight2
    w -= tl.div_rn(lr, correction1) * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), correction2) + eps)
    narrow = w
    if ROUND:
        index = at
        if rows_ptr is not None:
            row_ptrs = _address(table_ptr, 6, rows_ptr, False) + at // C
            column_ptrs = _address(table_ptr, 7, rows_ptr, False) + at % C
            if EDGE:
                index = tl.load(row_ptrs, mask=at < N, other=0) + tl.load(column_ptrs, mask=at < N, other=0)
            else:
                index = tl.load(row_ptrs) + tl.load(column_ptrs)
        low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32)
        t = low * 0 + tl.load(now_ptr + 3).to(tl.int64).to(tl.uint32)
        first, second, _, _ = tl.philox(key, low, high, t, low * 0)  # pyright: ignore[reportGeneralTypeIssues]
        if param_ptr.dtype.element_ty == tl.bfloat16 and master_ptr is None:
            narrow = _round_at_random(w, first & 0xFFFF)
        if exp_avg_ptr.dtype.element_ty == tl.bfloat16:
            m = _round_at_random(m, first >> 16)
        if exp_avg_sq_ptr.dtype.element_ty == tl.bfloat16:
            v = _round_at_random(v, second & 0xFFFF)
    _store(param_ptr, at, narrow, N, EDGE)
    _store(exp_avg_ptr, at, m, N, EDGE)
    _store(exp_avg_sq_ptr, at, v, N, EDGE)
    if master_ptr is not None:
        _store(master_ptr, at, w, N, EDGE)
