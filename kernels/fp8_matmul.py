"""The product of two matrices in blocks of eight-bit floats, summed in float32.

    y[m, n] = sum over blocks b of K  sA[m, b] sB[n, b]  sum over k in b of A[m, k] B[n, k]

The inner sums of 128 terms are the tensor cores', the outer one is float32's: the cores of Hopper keep some 14 bits of
a sum, which is not enough for all of K (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._rows import ceil_div
from .quantize_fp8 import BLOCK, Quantized, dequantize_fp8


def fp8_matmul(
    a: Quantized,
    b: Quantized,
    dtype: torch.dtype = torch.bfloat16,
    *,
    out: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Multiply `a` by the transpose of `b`.

    Args:
        a: `[M, K]` of `quantize_fp8`, in blocks along K, or square ones.
        b: `[N, K]`, likewise.
        dtype: of the result; the reference sums in float64 for float64.
        out: `[M, N]` float32 (the reference: float64 too) to add the result to, instead; then that is what comes back.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `a`.

    Returns:
        `[M, N]` in `dtype`, or `out`.

    Raises:
        ValueError: shapes or dtypes don't go together, or `impl` can't run here.
    """
    _check("a", a)
    _check("b", b)
    (M, K), (N, other) = a.values.shape, b.values.shape
    if other != K:
        raise ValueError(f"a {(M, K)} and b {(N, other)} don't share their last dimension, which is summed over")
    if out is not None and (out.shape != (M, N) or out.dtype not in (torch.float32, torch.float64)):
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, but the result needs float32 {(M, N)}")
    return fp8_matmul_reference(a, b, dtype, out)


def _check(name: str, x: Quantized) -> None:
    M, K = x.values.shape
    blocks = ceil_div(K, BLOCK)
    if x.values.dtype != torch.float8_e4m3fn or x.scales.dtype != torch.float32:
        raise ValueError(f"{name} is {x.values.dtype} with scales {x.scales.dtype}, not float8_e4m3fn with float32")
    if x.scales.shape not in ((M, blocks), (ceil_div(M, BLOCK), blocks)):
        raise ValueError(f"{name} {(M, K)} has scales {tuple(x.scales.shape)}, not one for each block of {BLOCK}")


def fp8_matmul_reference(
    a: Quantized, b: Quantized, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None
) -> Tensor:
    """`fp8_matmul` in plain torch: what the values stand for, multiplied."""
    wide = torch.float64 if torch.float64 in (dtype, out.dtype if out is not None else None) else torch.float32
    y = dequantize_fp8(a, wide) @ dequantize_fp8(b, wide).t()
    return y.to(dtype) if out is None else out.add_(y)
