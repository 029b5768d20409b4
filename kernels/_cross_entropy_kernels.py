"""The Triton kernels of `cross_entropy.py`: statistics of rows, and the gradient of the logits.

An online softmax takes two exponentials per element, and a GPU's memory delivers elements faster than that. So a thread
first finds the maximum of the vector that it loads, and takes one exponential per element and one per vector.
"""

# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from ._math import exp, tanh_and_slope
from ._triton import tl, triton


@triton.jit
def _cap(z, SOFTCAP: tl.constexpr, dtype: tl.constexpr):
    """Return the capped z of logits that were loaded from `dtype`, and the slope of the cap."""
    if SOFTCAP == 0.0:
        return z, 1.0
    else:  # a GPU's fast division of float32 errs by more than tanh_and_slope does
        tanh, slope = tanh_and_slope(tl.div_rn(z, SOFTCAP) if dtype == tl.float32 else z * (1.0 / SOFTCAP))
        return SOFTCAP * tanh, slope


@triton.jit
def _row_shift(row, STRIDE, VECTOR):
    """Return how many elements a row starts after a 16-byte boundary, for a tensor that starts on one."""
    if STRIDE % VECTOR == 0:
        return 0
    else:
        return (row * STRIDE % VECTOR).to(tl.int32)


@triton.jit
def _load_logits(x_ptr, row, lanes, offset, shift, live, outside, STRIDE, V, BLOCK_V, VECTOR):
    """Load `lanes` of a row, counted from the boundary before it; only its ends are loaded element by element."""
    x_ptr += tl.multiple_of(row * STRIDE - shift, VECTOR)
    if (STRIDE % VECTOR == 0) & (V % VECTOR == 0):
        x = tl.load(x_ptr + lanes, mask=live & (lanes < V), other=outside)
    elif (offset >= shift) & (offset + BLOCK_V <= shift + V):
        x = tl.load(x_ptr + lanes, mask=live, other=outside)
    else:
        x = tl.load(x_ptr + lanes, mask=live & (lanes >= shift) & (lanes < shift + V), other=outside)
    return x.to(tl.float32)


@triton.jit
def stats_kernel(
    x_ptr, target_ptr, stats_ptr, N, start, ignore_index,
    STRIDE: tl.constexpr, V: tl.constexpr, SOFTCAP: tl.constexpr, SUM_LOGITS: tl.constexpr, ENTROPY: tl.constexpr,
    BLOCK_V: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Store m, s, t, u and w of a row."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    live = target != ignore_index
    shift = _row_shift(row, STRIDE, VECTOR)
    end = tl.where(live, V + shift, 0)

    THREADS: tl.constexpr = BLOCK_V // VECTOR
    OUTSIDE: tl.constexpr = float("-inf") if SOFTCAP == 0.0 else 0.0
    lane = tl.arange(0, THREADS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    LOWEST: tl.constexpr = -3.4028234663852886e38
    largest = tl.full((THREADS,), LOWEST, tl.float32)
    total = tl.zeros((THREADS,), tl.float32)
    linear = tl.zeros((THREADS,), tl.float32)
    weighted = tl.zeros((THREADS,), tl.float32)
    for offset in tl.range(0, end, BLOCK_V):
        lanes = offset + lane
        in_row = (lanes >= shift) & (lanes < shift + V)
        z = _load_logits(x_ptr, row, lanes, offset, shift, live, OUTSIDE, STRIDE, V, BLOCK_V, VECTOR)
        if SOFTCAP != 0.0:
            z = tl.where(in_row, _cap(z, SOFTCAP, x_ptr.dtype.element_ty)[0], float("-inf"))
        before = largest
        largest = tl.maximum(before, tl.max(z, 1))
        scale = exp(before - largest)
        shifted = z - largest[:, None]
        e = exp(shifted)
        if ENTROPY:
            weighted = tl.where(scale > 0.0, scale * (weighted + (before - largest) * total), 0.0)
            weighted += tl.sum(e * tl.maximum(shifted, LOWEST), 1)  # -inf contributes 0, not NaN
        total = total * scale + tl.sum(e, 1)
        if SUM_LOGITS:
            linear += tl.sum(tl.where(in_row, z, 0.0), 1)

    row_largest = tl.max(largest, 0)
    scale = exp(largest - row_largest)
    row_total = tl.sum(total * scale, 0)
    column = (target - start).to(tl.int64)
    here = live & (column >= 0) & (column < V)
    at_target = tl.load(x_ptr + row * STRIDE + column, mask=here).to(tl.float32)
    at_target, _ = _cap(at_target, SOFTCAP, x_ptr.dtype.element_ty)
    stats_ptr += row
    tl.store(stats_ptr, tl.where(live, row_largest, 0.0))
    stats_ptr += N
    tl.store(stats_ptr, tl.where(live, row_total, 1.0))
    stats_ptr += N
    tl.store(stats_ptr, tl.where(here, at_target, 0.0))
    stats_ptr += N
    tl.store(stats_ptr, tl.sum(linear, 0))
    if ENTROPY:
        weighted = tl.where(scale > 0.0, scale * (weighted + (largest - row_largest) * total), 0.0)
        tl.store(stats_ptr + N, tl.sum(weighted, 0))


@triton.jit
def backward_kernel(
    x_ptr, target_ptr, stats_ptr, dloss_ptr, dlog_prob_ptr, dentropy_ptr, dx_ptr,
    N, start, ignore_index, peak, uniform, twice_z_loss,
    STRIDE: tl.constexpr, DX_STRIDE: tl.constexpr, V: tl.constexpr, SOFTCAP: tl.constexpr,
    TILES: tl.constexpr, BLOCK_V: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Store the gradient of one tile of a row."""
    program = tl.program_id(0)
    row, offset = (program // TILES).to(tl.int64), program % TILES * BLOCK_V
    target = tl.load(target_ptr + row)
    live = target != ignore_index
    shift = _row_shift(row, STRIDE, VECTOR)
    lanes = offset + tl.arange(0, BLOCK_V)
    z = _load_logits(x_ptr, row, lanes, offset, shift, live, 0.0, STRIDE, V, BLOCK_V, VECTOR)
    z, cap_slope = _cap(z, SOFTCAP, x_ptr.dtype.element_ty)

    stats_ptr += row
    largest, total = tl.load(stats_ptr), tl.load(stats_ptr + N)
    slope, at_target, flat = 0.0, 0.0, 0.0
    if dloss_ptr is not None:
        dloss = tl.load(dloss_ptr + row).to(tl.float32)
        slope += dloss * (1.0 + twice_z_loss * (largest + tl.log(total)))
        at_target -= dloss * peak
        flat = dloss * uniform
    if dlog_prob_ptr is not None:
        dlog_prob = tl.load(dlog_prob_ptr + row).to(tl.float32)
        slope -= dlog_prob
        at_target += dlog_prob
    shifted = z - largest
    e = exp(shifted)
    dz = e * (slope / total)
    if dentropy_ptr is not None:
        LOWEST: tl.constexpr = -3.4028234663852886e38
        weighted = tl.load(stats_ptr + N + N + N + N)
        dentropy = tl.load(dentropy_ptr + row).to(tl.float32)
        dz -= e * (tl.maximum(shifted, LOWEST) - weighted / total) * (dentropy / total)  # -inf contributes 0, not NaN
    dz += tl.where(lanes - shift == target - start, at_target, 0.0) - flat
    if SOFTCAP != 0.0:
        dz *= cap_slope
    dx = tl.where(live, dz, 0.0).to(dx_ptr.dtype.element_ty)

    if (STRIDE - DX_STRIDE) % VECTOR == 0:
        dx_ptr += tl.multiple_of(row * DX_STRIDE - shift, VECTOR)
    else:
        dx_ptr += row * DX_STRIDE - shift
    if (STRIDE % VECTOR == 0) & (V % VECTOR == 0):
        tl.store(dx_ptr + lanes, dx, mask=lanes < V)
    elif (offset >= shift) & (offset + BLOCK_V <= shift + V):
        tl.store(dx_ptr + lanes, dx)
    else:
        tl.store(dx_ptr + lanes, dx, mask=(lanes >= shift) & (lanes < shift + V))
