"""What rms_norm and layer_norm share: the residual stream that they read, the gain, and how wide a row may be."""

from __future__ import annotations

from ._triton import tl, triton

# Wider rows do not fit in a program's registers: up to here tests/kernels/golden_compile.json shows no spills.
WIDEST_FORWARD = 16384
WIDEST_BACKWARD = 8192


@triton.jit
def load_stream(x_ptr, residual_ptr, residual_out_ptr, rows, cols, mask, X_STRIDE, RESIDUAL_STRIDE):
    h = tl.load(x_ptr + rows * X_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        h += tl.load(residual_ptr + rows * RESIDUAL_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
        h = h.to(residual_out_ptr.dtype.element_ty).to(tl.float32)  # the norm sees h as it is stored
    return h


@triton.jit
def inverse_root(x):
    """Return 1 / sqrt(x), both rounded to nearest, unlike a GPU's `rsqrt`; once a row, that costs nothing."""
    return tl.div_rn(1.0, tl.sqrt_rn(x))


@triton.jit
def load_gain(weight_ptr, cols, D, ZERO_CENTERED):
    gain = tl.load(weight_ptr + cols, mask=cols < D, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if ZERO_CENTERED:
        gain += 1.0
    return gain


@triton.jit
def store_gradient(dh_ptr, dresidual_out_ptr, dh, rows, cols, mask, DRESIDUAL_STRIDE, D):
    if dresidual_out_ptr is not None:
        dh += tl.load(dresidual_out_ptr + rows * DRESIDUAL_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(dh_ptr + rows * D + cols, dh.to(dh_ptr.dtype.element_ty), mask=mask)
