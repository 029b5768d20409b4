"""The Triton kernels of `rope.py`: one rotates forward and backward, one computes the backward pass of the norm.

A program takes some tokens, loads their cosines and sines once, and loops over the heads. Program id 1 is 0 for
queries, 1 for keys and 2 for values. Heads of one kind are a tuple: pointer, and strides of batch, tokens and heads.
"""

# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from ._triton import tl, triton


@triton.jit
def _load_pairs(ptr, offsets, live, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_R: tl.constexpr):
    """Load the first and the second dimension of each pair, `[BLOCK_T, BLOCK_H, BLOCK_R]` float32 each."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK_R)[None, None, :]
        both = tl.load(ptr + offsets + cols, mask=live & (cols < 2 * HALF), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (both.shape[0], both.shape[1], BLOCK_R, 2)))
    else:
        cols = tl.arange(0, BLOCK_R)[None, None, :]
        a = tl.load(ptr + offsets + cols, mask=live & (cols < HALF), other=0.0).to(tl.float32)
        b = tl.load(ptr + offsets + HALF + cols, mask=live & (cols < HALF), other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_pairs(ptr, offsets, live, a, b, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_R: tl.constexpr):
    a, b = a.to(ptr.dtype.element_ty), b.to(ptr.dtype.element_ty)
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK_R)[None, None, :]
        both = tl.reshape(tl.join(a, b), (a.shape[0], a.shape[1], 2 * BLOCK_R))
        tl.store(ptr + offsets + cols, both, mask=live & (cols < 2 * HALF))
    else:
        cols = tl.arange(0, BLOCK_R)[None, None, :]
        tl.store(ptr + offsets + cols, a, mask=live & (cols < HALF))
        tl.store(ptr + offsets + HALF + cols, b, mask=live & (cols < HALF))


@triton.jit
def _load_gains(
    weight_ptr, rest_cols, K: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    a, b = _load_pairs(weight_ptr, 0, tl.full((1, 1, 1), True, tl.int1), HALF, INTERLEAVED, BLOCK_R)
    rest = tl.load(weight_ptr + rest_cols, mask=rest_cols < K, other=0.0).to(tl.float32)
    return a, b, rest


@triton.jit
def _load_table(cos_ptr, sin_ptr, rows, live, T, BATCHED: tl.constexpr, HALF: tl.constexpr, BLOCK_R: tl.constexpr):
    where = rows if BATCHED else rows % T
    cols = tl.arange(0, BLOCK_R)[None, None, :]
    cos = tl.load(cos_ptr + where * HALF + cols, mask=live & (cols < HALF), other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + where * HALF + cols, mask=live & (cols < HALF), other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def _copy_heads(
    x, y_ptr, rows, live, T, FIRST: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    x_ptr, stride_b, stride_t, stride_h = x
    cols = tl.arange(0, BLOCK_K)[None, None, :]
    for first in range(0, HEADS, BLOCK_H):
        head = first + tl.arange(0, BLOCK_H)[None, :, None]
        here = live & (head < HEADS) & (cols < K)
        x_offsets = rows // T * stride_b + rows % T * stride_t + head.to(tl.int64) * stride_h
        copied = tl.load(x_ptr + x_offsets + cols, mask=here, other=0.0)
        tl.store(y_ptr + rows * (N * K) + (FIRST + head) * K + cols, copied, mask=here)


@triton.jit
def rotate_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, y_ptr,
    M, T, eps, q_batch, q_token, q_head, k_batch, k_token, k_head,
    v_batch, v_token, v_head,
    H: tl.constexpr, KV: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BATCHED: tl.constexpr,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, HALF: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None, None]
    live = rows < M
    cos, sin = _load_table(cos_ptr, sin_ptr, rows, live, T, BATCHED, HALF, BLOCK_R)
    if BACK:
        sin = -sin
    kind = tl.program_id(1)
    q, k = (q_ptr, q_batch, q_token, q_head), (k_ptr, k_batch, k_token, k_head)
    rest_cols = 2 * HALF + tl.arange(0, BLOCK_REST if BLOCK_REST else 1)[None, None, :]
    for which in tl.static_range(1 if k_ptr is None else 2):  # queries, keys
        x_ptr, stride_b, stride_t, stride_h = (q, k)[which]
        weight_ptr, FIRST, HEADS = ((q_weight_ptr, 0, H), (k_weight_ptr, H, KV))[which]
        if kind == which:
            x_rows = rows // T * stride_b + rows % T * stride_t
            if weight_ptr is not None:
                gain_a, gain_b, gain_rest = _load_gains(weight_ptr, rest_cols, K, HALF, INTERLEAVED, BLOCK_R)
            for first in range(0, HEADS, BLOCK_H):
                head = first + tl.arange(0, BLOCK_H)[None, :, None]
                here = live & (head < HEADS)
                x_offsets = x_rows + head.to(tl.int64) * stride_h
                y_offsets = rows * (N * K) + (FIRST + head) * K
                a, b = _load_pairs(x_ptr, x_offsets, here, HALF, INTERLEAVED, BLOCK_R)
                if BLOCK_REST:
                    in_rest = here & (rest_cols < K)
                    rest = tl.load(x_ptr + x_offsets + rest_cols, mask=in_rest, other=0.0).to(tl.float32)
                if weight_ptr is not None:
                    square = tl.sum(a * a + b * b, 2, keep_dims=True)
                    if BLOCK_REST:
                        square += tl.sum(rest * rest, 2, keep_dims=True)
                    rstd = tl.rsqrt(square / K + eps)
                    a, b = a * rstd * gain_a, b * rstd * gain_b
                    if BLOCK_REST:
                        rest *= rstd * gain_rest
                _store_pairs(y_ptr, y_offsets, here, a * cos - b * sin, b * cos + a * sin, HALF, INTERLEAVED, BLOCK_R)
                if BLOCK_REST:
                    tl.store(y_ptr + y_offsets + rest_cols, rest.to(y_ptr.dtype.element_ty), mask=in_rest)
    if v_ptr is not None and kind == 2:
        v = (v_ptr, v_batch, v_token, v_head)
        _copy_heads(v, y_ptr, rows, live, T, H + KV, KV, N, K, BLOCK_H, BLOCK_K)


@triton.jit
def norm_backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, q_ptr, k_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr,
    dx_ptr, partials_ptr,
    M, T, eps, dq_batch, dq_token, dq_head, dk_batch, dk_token, dk_head,
    dv_batch, dv_token, dv_head, q_batch, q_token, q_head, k_batch, k_token, k_head,
    H: tl.constexpr, KV: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BATCHED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, HALF: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    kind = tl.program_id(1)
    dq, dk = (dq_ptr, dq_batch, dq_token, dq_head), (dk_ptr, dk_batch, dk_token, dk_head)
    q, k = (q_ptr, q_batch, q_token, q_head), (k_ptr, k_batch, k_token, k_head)
    REST: tl.constexpr = BLOCK_REST if BLOCK_REST else 1  # pyright: ignore[reportAssignmentType]
    rest_cols = 2 * HALF + tl.arange(0, REST)[None, None, :]
    for which in tl.static_range(2):  # queries, keys
        dy_ptr, dy_batch, dy_token, dy_head = (dq, dk)[which]
        x_ptr, x_batch, x_token, x_head = (q, k)[which]
        weight_ptr, FIRST, HEADS = ((q_weight_ptr, 0, H), (k_weight_ptr, H, KV))[which]
        if kind == which:
            gain_a, gain_b, gain_rest = _load_gains(weight_ptr, rest_cols, K, HALF, INTERLEAVED, BLOCK_R)
            dgain_a = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_R), tl.float32)
            dgain_b = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_R), tl.float32)
            dgain_rest = tl.zeros((BLOCK_T, BLOCK_H, REST), tl.float32)
            for block in range(tl.program_id(0), tl.cdiv(M, BLOCK_T), tl.num_programs(0)):
                rows = (block * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None, None]
                live = rows < M
                cos, sin = _load_table(cos_ptr, sin_ptr, rows, live, T, BATCHED, HALF, BLOCK_R)
                dy_rows = rows // T * dy_batch + rows % T * dy_token
                x_rows = rows // T * x_batch + rows % T * x_token
                for first in range(0, HEADS, BLOCK_H):
                    head = first + tl.arange(0, BLOCK_H)[None, :, None]
                    here = live & (head < HEADS)
                    dy_offsets = dy_rows + head.to(tl.int64) * dy_head
                    x_offsets = x_rows + head.to(tl.int64) * x_head
                    dx_offsets = rows * (N * K) + (FIRST + head) * K
                    dy_a, dy_b = _load_pairs(dy_ptr, dy_offsets, here, HALF, INTERLEAVED, BLOCK_R)
                    a, b = _load_pairs(x_ptr, x_offsets, here, HALF, INTERLEAVED, BLOCK_R)
                    dn_a, dn_b = dy_a * cos + dy_b * sin, dy_b * cos - dy_a * sin
                    square = tl.sum(a * a + b * b, 2, keep_dims=True)
                    dot = tl.sum(dn_a * gain_a * a + dn_b * gain_b * b, 2, keep_dims=True)
                    if BLOCK_REST:
                        in_rest = here & (rest_cols < K)
                        dn_rest = tl.load(dy_ptr + dy_offsets + rest_cols, mask=in_rest, other=0.0).to(tl.float32)
                        rest = tl.load(x_ptr + x_offsets + rest_cols, mask=in_rest, other=0.0).to(tl.float32)
                        square += tl.sum(rest * rest, 2, keep_dims=True)
                        dot += tl.sum(dn_rest * gain_rest * rest, 2, keep_dims=True)
                    rstd = tl.rsqrt(square / K + eps)
                    dot = dot * rstd / K
                    a, b = a * rstd, b * rstd
                    dx_a, dx_b = rstd * (gain_a * dn_a - a * dot), rstd * (gain_b * dn_b - b * dot)
                    _store_pairs(dx_ptr, dx_offsets, here, dx_a, dx_b, HALF, INTERLEAVED, BLOCK_R)
                    dgain_a += dn_a * a
                    dgain_b += dn_b * b
                    if BLOCK_REST:
                        rest *= rstd
                        dx = rstd * (gain_rest * dn_rest - rest * dot)
                        tl.store(dx_ptr + dx_offsets + rest_cols, dx.to(dx_ptr.dtype.element_ty), mask=in_rest)
                        dgain_rest += dn_rest * rest
            dgain_a = tl.sum(tl.sum(dgain_a, 0, keep_dims=True), 1, keep_dims=True)
            dgain_b = tl.sum(tl.sum(dgain_b, 0, keep_dims=True), 1, keep_dims=True)
            everywhere = tl.full((1, 1, 1), True, tl.int1)
            partials_ptr += (which * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * K
            _store_pairs(partials_ptr, 0, everywhere, dgain_a, dgain_b, HALF, INTERLEAVED, BLOCK_R)
            if BLOCK_REST:
                dgain_rest = tl.sum(tl.sum(dgain_rest, 0, keep_dims=True), 1, keep_dims=True)
                tl.store(partials_ptr + rest_cols, dgain_rest, mask=rest_cols < K)
    if dv_ptr is not None and kind == 2:
        dv = (dv_ptr, dv_batch, dv_token, dv_head)
        for block in range(tl.program_id(0), tl.cdiv(M, BLOCK_T), tl.num_programs(0)):
            rows = (block * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None, None]
            _copy_heads(dv, dx_ptr, rows, rows < M, T, H + KV, KV, N, K, BLOCK_H, BLOCK_K)
