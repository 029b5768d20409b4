"""The product of two matrices in block-wise FP8 (e4m3), summed in float32.

    y[m, n] = sum over blocks b of K  sA[m, b] sB[n, b]  sum over k in b of A[m, k] B[n, k]

Tensor cores compute the inner sums of 128 terms; the outer sum is in float32. Hopper's tensor cores keep some 14 bits
of a sum, which is not enough for all of K (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._dispatch import REFERENCE_DTYPES, operator, runs_triton
from ._flops import flops
from ._rows import as_rows, ceil_div
from ._torch import has_no_values
from ._triton import launch, multiprocessors, tl, triton
from .quantize_fp8 import BLOCK, Quantized, dequantize_fp8, require_fp8

# Rows and columns of a program's tile, stages and warps. The first tile that keeps every multiprocessor busy is used.
TILES = ((128, 128, 4, 8), (64, 128, 4, 4), (64, 64, 4, 4), (64, 32, 4, 4))
GROUP = 8  # so many tiles of rows share their columns in the L2 cache


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
        out: `[M, N]` float32 (the reference: float64 too); the result is added to it, and it is returned.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `a`.

    Returns:
        `[M, N]` in `dtype`, or `out`.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, `impl` can't run here, or the GPU has no FP8.
    """
    _check("a", a)
    _check("b", b)
    (M, K), (N, other) = a.values.shape, b.values.shape
    if other != K:
        raise ValueError(f"a {(M, K)} and b {(N, other)} don't share their last dimension, which is summed over")
    if out is not None and (out.shape != (M, N) or out.dtype not in (torch.float32, torch.float64)):
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, but the result needs float32 {(M, N)}")
    if dtype not in REFERENCE_DTYPES:
        raise ValueError(f"dtype is {dtype}; it must be float64, float32, bfloat16 or float16")
    for name, x in (("b", b.values), ("a's scales", a.scales), ("b's scales", b.scales), ("out", out)):
        if x is not None and x.device != a.values.device:
            raise ValueError(f"{name} is on {x.device}, but a is on {a.values.device}")
    like = a.scales.new_empty(0, dtype=dtype) if out is None else out
    if not (runs_triton(impl, like, "fp8_matmul", M=M, N=N, K=K) or has_no_values(a.values)):
        return fp8_matmul_reference(a, b, dtype, out)
    if out is None:
        return _matmul_op(*a, *b, dtype)
    _add_op(*a, *b, out)
    return out


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
    """`fp8_matmul` in plain torch: dequantize both, then multiply."""
    wide = torch.float64 if torch.float64 in (dtype, out.dtype if out is not None else None) else torch.float32
    y = dequantize_fp8(a, wide) @ dequantize_fp8(b, wide).t()
    return y.to(dtype) if out is None else out.add_(y)


_FACTORS = "Tensor a, Tensor a_scales, Tensor b, Tensor b_scales"


def _reference(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype) -> Tensor:
    return fp8_matmul_reference(Quantized(a, a_scales), Quantized(b, b_scales), dtype)


@operator(f"fp8_matmul({_FACTORS}, ScalarType dtype) -> Tensor y", _reference)
def _matmul_op(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype) -> Tensor:
    y = a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)
    if has_no_values(a):
        return y
    if a.shape[1] == 0:
        return y.zero_()
    _run(a, a_scales, b, b_scales, y, False)
    return y


def _reference_add(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, out: Tensor) -> None:
    fp8_matmul_reference(Quantized(a, a_scales), Quantized(b, b_scales), out=out)


@operator(f"fp8_matmul_add({_FACTORS}, Tensor(a!) out) -> ()", _reference_add)
def _add_op(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, out: Tensor) -> None:
    if not has_no_values(a) and a.shape[1] > 0:
        _run(a, a_scales, b, b_scales, out, True)


@flops(torch.ops.mpcore.fp8_matmul)
@flops(torch.ops.mpcore.fp8_matmul_add)
def _flops(a: list[int], a_scales: list[int], b: list[int], *_, **__) -> int:
    return 2 * a[0] * a[1] * b[0]


def _tile(M: int, N: int, programs: int) -> tuple[int, int, int, int]:
    """Return the first of `TILES` that gives the device at least `programs` programs."""
    for tile in TILES[:-1]:
        if ceil_div(M, tile[0]) * ceil_div(N, tile[1]) >= programs:
            return tile
    return TILES[-1]


def _run(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, y: Tensor, add: bool) -> None:
    require_fp8(a.device)
    if y.numel() == 0:
        return
    (M, K), N = a.shape, b.shape[0]
    (a, a_stride), (b, b_stride) = as_rows(a), as_rows(b)
    block_m, block_n, stages, num_warps = _tile(M, N, multiprocessors(a.device))
    grid = (ceil_div(M, block_m) * ceil_div(N, block_n), 1, 1)
    launch(
        _matmul_kernel, grid, num_warps=num_warps,
        a_ptr=a, a_scales_ptr=a_scales, b_ptr=b, b_scales_ptr=b_scales, y_ptr=y, M=M, N=N, K=K,
        A_STRIDE=a_stride, B_STRIDE=b_stride, A_SCALE_M=a_scales.stride(0), A_SCALE_K=a_scales.stride(1),
        B_SCALE_N=b_scales.stride(0), B_SCALE_K=b_scales.stride(1), Y_M=y.stride(0), Y_N=y.stride(1),
        A_SQUARE=a_scales.shape[0] != M, B_SQUARE=b_scales.shape[0] != N, ADD=add,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=BLOCK, GROUP=GROUP, STAGES=stages,
    )  # fmt: skip


@triton.jit
def _matmul_kernel(
    a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, y_ptr, M, N, K,
    A_STRIDE, B_STRIDE, A_SCALE_M, A_SCALE_K, B_SCALE_N, B_SCALE_K, Y_M, Y_N,
    A_SQUARE: tl.constexpr, B_SQUARE: tl.constexpr, ADD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # GROUP tiles of rows go through all columns, then the next GROUP
    across = tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0) // (GROUP * across) * GROUP
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP)
    within = tl.program_id(0) % (GROUP * across)
    row = (first + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    term = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + row.to(tl.int64)[:, None] * A_STRIDE + term[None, :]
    b_ptrs = b_ptr + col.to(tl.int64)[:, None] * B_STRIDE + term[None, :]
    # a tile is within one block of a square factor
    a_scale = (tl.min(row) // BLOCK_K if A_SQUARE else row).to(tl.int64)
    b_scale = (tl.min(col) // BLOCK_K if B_SQUARE else col).to(tl.int64)
    a_scale_ptrs, b_scale_ptrs = a_scales_ptr + a_scale * A_SCALE_M, b_scales_ptr + b_scale * B_SCALE_N
    rows, cols = row < M, col < N
    whole = K // BLOCK_K
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in tl.range(0, whole, num_stages=STAGES):
        a = tl.load(a_ptrs + block * BLOCK_K, mask=rows[:, None], other=0.0)
        b = tl.load(b_ptrs + block * BLOCK_K, mask=cols[:, None], other=0.0)
        sizes = _scales(a_scale_ptrs, b_scale_ptrs, block, rows, cols, A_SCALE_K, B_SCALE_K, A_SQUARE, B_SQUARE)
        total += tl.dot(a, tl.trans(b)) * sizes  # each block's sum begins at zero
    if whole * BLOCK_K < K:
        left = (term < K - whole * BLOCK_K)[None, :]
        a = tl.load(a_ptrs + whole * BLOCK_K, mask=rows[:, None] & left, other=0.0)
        b = tl.load(b_ptrs + whole * BLOCK_K, mask=cols[:, None] & left, other=0.0)
        sizes = _scales(a_scale_ptrs, b_scale_ptrs, whole, rows, cols, A_SCALE_K, B_SCALE_K, A_SQUARE, B_SQUARE)
        total += tl.dot(a, tl.trans(b)) * sizes
    y_ptrs = y_ptr + row.to(tl.int64)[:, None] * Y_M + col.to(tl.int64)[None, :] * Y_N
    mask = rows[:, None] & cols[None, :]
    if ADD:
        total += tl.load(y_ptrs, mask=mask, other=0.0)
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scales(a_ptrs, b_ptrs, block, rows, cols, A_K, B_K, A_SQUARE: tl.constexpr, B_SQUARE: tl.constexpr):
    """What a block's sums are multiplied by: one for all, a column, a row, or a matrix."""
    a_ptrs += tl.cast(A_K, tl.int64) * block
    b_ptrs += tl.cast(B_K, tl.int64) * block
    a = tl.load(a_ptrs) if A_SQUARE else tl.load(a_ptrs, mask=rows, other=0.0)[:, None]
    b = tl.load(b_ptrs) if B_SQUARE else tl.load(b_ptrs, mask=cols, other=0.0)[None, :]
    return a * b
