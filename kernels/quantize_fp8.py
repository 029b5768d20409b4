"""Eight-bit floats with a scale for each block: 1 x 128 elements of activations and gradients, 128 x 128 of weights.

    s = the least power of two with amax / s <= 448,  q = round(x / s) to e4m3

A power of two divides without rounding, so the only error is the rounding to four significant bits: at most 1/16 of an
element that is at least 2^-13 of its block's largest, whatever the tensor's range. Blocks belong to the tensor and not
to a program or a rank: a shard whose edges are multiples of 128 is quantized as the whole.

A product sums over the last dimension of both factors, and eight-bit tensor cores read both along it. So what backward
sums over tokens is wanted with its rows and columns exchanged, in blocks of 128 tokens: one read of x makes both.

Blocks: DeepSeek-V3 (2024), arXiv:2412.19437, section 3.3.2; e4m3: Micikevicius et al. 2022, arXiv:2209.05433, table 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._dispatch import REFERENCE_DTYPES
from ._rows import ceil_div

BLOCK = 128
LARGEST = 448.0  # of e4m3


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
        square: blocks of 128 x 128, for weights; otherwise of 128 elements along K or, of columns, along M.
        rows: whether x is wanted as it lies.
        columns: whether x is wanted turned, `[K, M]`.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        `[M, K]` in blocks along K, and `[K, M]` in blocks along M; None for what isn't wanted.

    Raises:
        ValueError: x is no matrix, has another dtype, or `impl` can't run here.
    """
    if x.dim() != 2:
        raise ValueError(f"x {tuple(x.shape)} is no matrix [M, K], which blocks are cut from: flatten the others")
    if x.dtype not in REFERENCE_DTYPES:
        raise ValueError(f"x is {x.dtype}; it must be float64, float32, bfloat16 or float16")
    return quantize_fp8_reference(x.detach(), square, rows, columns)


def quantize_fp8_reference(
    x: Tensor, square: bool = False, rows: bool = True, columns: bool = False
) -> tuple[Quantized | None, Quantized | None]:
    """`quantize_fp8` in plain torch."""
    return _quantize(x, square) if rows else None, _quantize(x.t(), square) if columns else None


def _quantize(x: Tensor, square: bool) -> Quantized:
    (M, K), block_m = x.shape, BLOCK if square else 1
    wide = x if x.dtype == torch.float64 else x.float()
    grid = ceil_div(M, block_m), ceil_div(K, BLOCK)
    blocks = F.pad(wide, (0, grid[1] * BLOCK - K, 0, grid[0] * block_m - M)).view(grid[0], block_m, grid[1], BLOCK)
    scales = _scale(blocks.abs().amax((1, 3)).float())
    values = (blocks / scales[:, None, :, None]).view(grid[0] * block_m, grid[1] * BLOCK)[:M, :K]
    return Quantized(values.to(torch.float8_e4m3fn).contiguous(), scales)


def _scale(largest: Tensor) -> Tensor:
    """The least power of two with `largest / scale <= 448`, from 2^-126 up; NaN of what isn't finite."""
    bits = largest.contiguous().view(torch.int32)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000)  # 448 = 1.75 * 2^8
    scale = (exponent.clamp(min=1) << 23).view(torch.float32)
    return torch.where(largest.isfinite(), scale, torch.nan)


def dequantize_fp8(x: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """What the values stand for, `[M, K]`; exact in float32, but for scales below 2^-117."""
    values, scales = x
    M, K = values.shape
    scales = scales.to(dtype).repeat_interleave(BLOCK, 1)[:, :K]
    if scales.shape[0] != M:
        scales = scales.repeat_interleave(BLOCK, 0)[:M]
    return values.to(dtype) * scales
