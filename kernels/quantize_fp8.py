"""FP8 (e4m3) with a scale for each block: 1 x 128 elements of activations and gradients, 128 x 128 of weights.

    s = the least power of two with amax / s <= 448,  q = round(x / s) to e4m3

Division by a power of two is exact, so the only error is the rounding to four significant bits: at most 1/16 of an
element that is at least 2^-13 of its block's largest. A shard whose edges are multiples of 128 is quantized as in the
whole tensor. Tensor cores read both factors of a product along the dimension that is summed over. Backward sums over
tokens, so it needs the transpose, in blocks of 128 tokens. One read of x computes both.

Blocks: DeepSeek-V3 (2024), arXiv:2412.19437, section 3.3.2; e4m3: Micikevicius et al. 2022, arXiv:2209.05433, table 1.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import check_dtype
from ._dispatch import operator, runs_triton
from ._rows import as_rows, ceil_div
from ._torch import has_no_values
from ._triton import launch, tl, triton

BLOCK = 128
ROWS = 32  # of a program that computes no blocks along M


class Quantized(NamedTuple):
    """`values` `[M, K]` float8_e4m3fn and float32 `scales`, `[M, K/128]` or, square, `[M/128, K/128]`, rounded up."""

    values: Tensor
    scales: Tensor


def quantize_fp8(
    x: Tensor, *, square: bool = False, rows: bool = True, columns: bool = False, impl: str | None = None
) -> tuple[Quantized | None, Quantized | None]:
    """Quantize a matrix in blocks of its rows, of its columns, or both at once.

    A block with an inf or a NaN has the scale NaN, so that products show it. A block of zeros has the scale 2^-126.

    Args:
        x: `[M, K]`, float32, bfloat16 or float16 (the reference: float64 too); of any size.
        square: blocks of 128 x 128, for weights; otherwise blocks of 128 elements along K (rows) or M (columns).
        rows: return x quantized.
        columns: return its transpose `[K, M]` quantized.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        `[M, K]` in blocks along K, and `[K, M]` in blocks along M; `None` for one that was not asked for.

    Raises:
        ValueError: x is no matrix, has another dtype, `impl` can't run here, or the GPU has no FP8.
    """
    if x.dim() != 2:
        raise ValueError(f"x {tuple(x.shape)} is no matrix [M, K], which blocks are cut from: flatten the others")
    check_dtype("x", x.dtype)
    traced = has_no_values(x)  # as on a GPU
    quantize = _quantize_op if runs_triton(impl, x, "quantize_fp8") or traced else _reference
    values, scales, turned, turned_scales = quantize(x.detach(), square, rows, columns)
    return Quantized(values, scales) if rows else None, Quantized(turned, turned_scales) if columns else None


quantize_fp8_reference: functools.partial[tuple[Quantized | None, Quantized | None]] = functools.partial(
    quantize_fp8, impl="reference"
)


def _scale(largest: Tensor) -> Tensor:
    """Return the least power of two, at least 2^-126, with `largest / scale <= 448`; NaN if `largest` isn't finite."""
    bits = largest.contiguous().view(torch.int32)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000)  # 448 = 1.75 * 2^8
    return torch.where(largest.isfinite(), (exponent.clamp(min=1) << 23).view(torch.float32), torch.nan)


def dequantize_fp8(x: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values times their scales, `[M, K]`; exact in float32, except for scales below 2^-117."""
    values, scales = x
    M, K = values.shape
    scales = scales.to(dtype).repeat_interleave(BLOCK, 1)[:, :K]
    if scales.shape[0] != M:
        scales = scales.repeat_interleave(BLOCK, 0)[:M]
    return values.to(dtype) * scales


@functools.cache
def require_fp8(device: torch.device) -> None:
    """Raise `ValueError` unless the GPU multiplies e4m3; the interpreter on a CPU does."""
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_properties(device)
    if (found.major, found.minor) < (8, 9) or torch.version.hip is not None:
        raise ValueError(
            "e4m3 is for GPUs of compute capability 8.9 and above of NVIDIA, not for "
            f"{found.name} of compute capability {found.major}.{found.minor}; keep the layer in bfloat16"
        )
    if found.major != 9:  # fp8_matmul.py
        warnings.warn(
            f"{found.name} multiplies no e4m3 in blocks: products convert factors to bfloat16 again, which moves 14 "
            "bytes an element more than no FP8, and is slower", RuntimeWarning, stacklevel=3,
        )  # fmt: skip


def _empty(x: Tensor, square: bool, rows: bool, columns: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate the outputs; empty if not asked for. Scales are contiguous along dimension 0, as cuBLAS reads them."""
    outs = []
    for wanted, (M, K) in ((rows, x.shape), (columns, x.shape[::-1])):
        scales = (ceil_div(K, BLOCK), ceil_div(M, BLOCK) if square else M)
        outs.append(x.new_empty((M, K) if wanted else 0, dtype=torch.float8_e4m3fn))
        outs.append(x.new_empty(scales if wanted else 0, dtype=torch.float32).t())
    return tuple(outs)


def _reference(x: Tensor, square: bool, rows: bool, columns: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outs, block_m = _empty(x, square, rows, columns), BLOCK if square else 1
    for matrix, values, scales in ((x, *outs[:2]), (x.t(), *outs[2:])):
        if values.shape != matrix.shape:  # not asked for
            continue
        (M, K), wide = matrix.shape, matrix if x.dtype == torch.float64 else matrix.float()
        down, across = ceil_div(M, block_m), ceil_div(K, BLOCK)
        blocks = F.pad(wide, (0, across * BLOCK - K, 0, down * block_m - M)).view(down, block_m, across, BLOCK)
        scales.copy_(_scale(blocks.abs().amax((1, 3)).float()))
        values.copy_((blocks / scales[:, None, :, None]).view(down * block_m, across * BLOCK)[:M, :K])
    return outs


@operator(
    "quantize_fp8(Tensor x, bool square, bool rows, bool columns) "
    "-> (Tensor values, Tensor scales, Tensor turned, Tensor turned_scales)",
    _reference,
)
def _quantize_op(x: Tensor, square: bool, rows: bool, columns: bool) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    outs = _empty(x, square, rows, columns)
    yield outs
    require_fp8(x.device)
    if not (rows or columns):
        return
    (M, K), (x, stride) = x.shape, as_rows(x)
    block_m = BLOCK if square or columns else ROWS
    values, scales, turned, turned_scales = (t if t.numel() else None for t in outs)
    passes = [(values, scales, turned, turned_scales)]
    if square and rows and columns and x.dtype == torch.float32:
        # The ptxas of Triton 3.6 takes some of the transposed bytes from an undefined register if one pass rounds once
        # for both outputs; seen on an H100, and in the machine code (tests/kernels/machine_code.py looks for it).
        passes = [(values, scales, None, None), (None, None, turned, turned_scales)]
    for values, scales, turned, turned_scales in passes:
        launch(
            _quantize_kernel, (ceil_div(M, block_m) * ceil_div(K, BLOCK), 1, 1), num_warps=block_m // 16, x_ptr=x,
            values_ptr=values, scales_ptr=scales, turned_ptr=turned, turned_scales_ptr=turned_scales,
            M=M, K=K, X_STRIDE=stride, SQUARE=square, BLOCK_M=block_m, BLOCK_K=BLOCK,
        )  # fmt: skip


@triton.jit
def _quantize_kernel(
    x_ptr, values_ptr, scales_ptr, turned_ptr, turned_scales_ptr, M, K, X_STRIDE,
    SQUARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(K, BLOCK_K)
    down = tl.cdiv(M, BLOCK_M)
    block_m = tl.program_id(0) // across
    block_k = tl.program_id(0) % across
    row = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    col = block_k * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (row < M)[:, None] & (col < K)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * X_STRIDE + col[None, :], mask=mask, other=0.0).to(tl.float32)
    size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # as integers, inf is above what is finite, and NaN above inf
    whole = tl.max(size)
    if values_ptr is not None:
        scale, inverse = _scales(whole if SQUARE else tl.max(size, 1, keep_dims=True))
        values = (x * inverse).to(values_ptr.dtype.element_ty)
        tl.store(values_ptr + row.to(tl.int64)[:, None] * K + col[None, :], values, mask=mask)
        if SQUARE:
            tl.store(scales_ptr + block_k.to(tl.int64) * down + block_m, scale)
        else:
            tl.store(scales_ptr + block_k.to(tl.int64) * M + row[:, None], scale, mask=(row < M)[:, None])
    if turned_ptr is not None:
        scale, inverse = _scales(whole if SQUARE else tl.max(size, 0, keep_dims=True))
        values = tl.trans((x * inverse).to(turned_ptr.dtype.element_ty))
        out = turned_ptr + col.to(tl.int64)[:, None] * M + row[None, :]
        tl.store(out, values, mask=(col < K)[:, None] & (row < M)[None, :])
        if SQUARE:
            tl.store(turned_scales_ptr + block_m.to(tl.int64) * across + block_k, scale)
        else:
            tl.store(turned_scales_ptr + block_m.to(tl.int64) * K + col[None, :], scale, mask=(col < K)[None, :])


@triton.jit
def _scales(largest):
    """Return the scale of a block, from the bits of its largest element, and the inverse of the scale; both exact."""
    exponent = tl.maximum((largest >> 23) - 8 + ((largest & 0x7FFFFF) > 0x600000).to(tl.int32), 1)
    finite = largest < 0x7F800000
    scale = tl.where(finite, exponent << 23, 0x7FC00000)
    inverse = tl.where(finite, (254 - exponent) << 23, 0x7FC00000)
    return scale.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)
