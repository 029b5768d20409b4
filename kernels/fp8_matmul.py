"""The product of two matrices in block-wise FP8 (e4m3), summed in float32.

    y[m, n] = sum over blocks b of K  sA[m, b] sB[n, b]  sum over k in b of A[m, k] B[n, k]

On Hopper torch's `scaled_mm` computes it in FP8. Tensor cores sum 128 terms, and the outer sum is in float32: they
keep some 14 bits of a sum, which is not enough for all of K (DeepSeek-V3, arXiv:2412.19437, section 3.3.2). Other GPUs
have no such product: there the factors become bfloat16, which holds four significant bits and the scales exactly.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import check_dtype, check_shapes
from ._dispatch import operator, runs_torch
from ._rows import ceil_div
from ._torch import has_no_values
from .quantize_fp8 import BLOCK, Quantized, dequantize_fp8


def fp8_matmul(a: Quantized, b: Quantized, dtype: torch.dtype = torch.bfloat16, *, impl: str | None = None) -> Tensor:
    """Multiply `a` by the transpose of `b`. Not differentiable.

    Args:
        a: `[M, K]` of `quantize_fp8`, in blocks along K or square blocks.
        b: `[N, K]`, in such blocks.
        dtype: of the result; for float64 it is summed in float64.
        impl: `"torch"` for `scaled_mm`, `"reference"`, or `None` to choose by the device of `a`.

    Returns:
        `[M, N]` in `dtype`.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, or `impl` can't run here.
    """
    check_shapes(a=(a.values, "M K"), b=(b.values, "N K"))
    check_dtype("dtype", dtype)
    (M, K), N = a.values.shape, b.values.shape[0]
    for name, x in (("a", a), ("b", b)):
        blocks = ceil_div(K, BLOCK)
        if x.values.dtype != torch.float8_e4m3fn or x.scales.dtype != torch.float32:
            raise ValueError(f"{name} is {x.values.dtype} with scales {x.scales.dtype}, not float8_e4m3fn with float32")
        if x.scales.shape not in ((x.values.shape[0], blocks), (ceil_div(x.values.shape[0], BLOCK), blocks)):
            there = f"{name} {tuple(x.values.shape)} has scales {tuple(x.scales.shape)}"
            raise ValueError(f"{there}, not one for each block of {BLOCK}")
        if not x.values.device == x.scales.device == a.values.device:
            raise ValueError(f"{name} is on {x.values.device}, its scales on {x.scales.device}, a on {a.values.device}")
    fits = dtype in (torch.bfloat16, torch.float32) and M > 0 and K > 0 and K % BLOCK == 0 and not _square(a)
    fits = fits and N % (BLOCK if _square(b) else 16) == 0 and _has_blocks(a.values.device)
    like = a.scales.new_empty(0, dtype=dtype)
    return _matmul_op(*a, *b, dtype, runs_torch(impl, like, "fp8_matmul", fits))


def _square(x: Quantized) -> bool:
    return x.scales.shape[0] != x.values.shape[0]


def _has_blocks(device: torch.device) -> bool:
    """Return whether torch's `scaled_mm` may take scales of blocks on a device; the self-test says whether it does."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def fp8_matmul_reference(a: Quantized, b: Quantized, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Compute `fp8_matmul` in plain torch: dequantize both, then multiply, on a GPU in bfloat16 with float32 sums."""
    if a.values.is_cuda and torch.version.hip is None and dtype != torch.float64:
        x, y = dequantize_fp8(a, torch.bfloat16), dequantize_fp8(b, torch.bfloat16).t()
        return x @ y if dtype == torch.bfloat16 else torch.mm(x, y, out_dtype=torch.float32).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return (dequantize_fp8(a, wide) @ dequantize_fp8(b, wide).t()).to(dtype)


@operator(
    "fp8_matmul(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, ScalarType dtype, bool fp8) -> Tensor y",
    flops=lambda a, a_scales, b, *others, **kwargs: 2 * a[0] * a[1] * b[0],
)
def _matmul_op(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype, fp8: bool) -> Tensor:
    if has_no_values(a):
        return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)
    left, right = Quantized(a, a_scales), Quantized(b, b_scales)
    if not fp8:
        return fp8_matmul_reference(left, right, dtype)
    recipe_a = recipe_b = F.ScalingType.BlockWise1x128
    a_scales = a_scales.t().contiguous().t()  # cuBLAS reads scales of rows along their first dimension,
    if _square(right):  # and others in whole vectors of four
        padded = F.pad(b_scales, (0, -b_scales.shape[1] % 4))  # without padding a view with any strides
        recipe_b, b_scales = F.ScalingType.BlockWise128x128, padded.contiguous().t()
    else:
        b_scales = b_scales.t().contiguous().t()
    return F.scaled_mm(a.contiguous(), b.contiguous().t(), a_scales, recipe_a, b_scales, recipe_b, output_dtype=dtype)
