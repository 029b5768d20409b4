"""Linear layers of many experts in one call: rows come expert by expert, and each group has its own weight.

    y[r] = W[e(r)] x[r]
    dx[r] = W[e(r)]^T dy[r],  dW[e] = sum over the rows of e of dy[r] x[r]^T

How many rows each expert has stands in device memory and is never read by the host, so the call can be captured in a
CUDA graph. The forward kernel finds the expert of each tile of rows from the counts; tiles of one expert are
neighbours, so that its weight stays in the L2 cache. The input's gradient is the same kernel with the weight turned.
The weight's gradient is summed over an expert's rows in float32, by one program for each of its tiles, always in the
same order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._dispatch import define, launches, refuse_second_derivative, runs_triton, tl, triton
from ._flops import flops
from ._launch import launch
from ._rows import as_rows, ceil_div, next_power_of_2


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, *, impl: str | None = None) -> Tensor:
    """Multiply each group of rows by its expert's weight.

    Args:
        x: `[R, D]`, the rows of expert 0 first.
        weight: `[E, F, D]`.
        counts: `[E]` integers, the rows of each expert; their sum is at most R.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        `[R, F]`; rows past those of the last expert are zero.

    Raises:
        ValueError: shapes or dtypes don't go together, or `impl` can't run here.
    """
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2] or counts.shape != weight.shape[:1]:
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and counts {tuple(counts.shape)} are not [R, D], "
            f"[E, F, D] and [E]"
        )
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype}, but weight is {weight.dtype}")
    if runs_triton(impl, x) or x.is_meta:
        return _GroupedLinear.apply(x, weight, counts)
    return grouped_linear_reference(x, weight, counts)


def grouped_linear_reference(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """`grouped_linear` in plain torch, under torch's own autograd: a loop over experts, which reads their counts."""
    sizes = counts.tolist()
    groups = x.split([*sizes, len(x) - sum(sizes)])
    products = [F.linear(group, w) for group, w in zip(groups, weight.unbind(), strict=False)]
    return torch.cat([*products, groups[-1].new_zeros(len(groups[-1]), weight.shape[1])])


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, counts):
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, counts)
        return _forward_op(x, weight, counts)

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative("grouped_linear")
        x, weight, counts = ctx.saved_tensors
        dx = _forward_op(dy, weight.transpose(1, 2), counts) if ctx.needs_input_grad[0] else None
        dweight = _weight_op(dy, x, counts) if ctx.needs_input_grad[1] else None
        return dx, dweight, None


def _empty_forward(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


def _empty_weight(dy: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty((counts.shape[0], dy.shape[1], x.shape[1]))


_forward_op = define("grouped_linear_forward(Tensor x, Tensor weight, Tensor counts) -> Tensor y", _empty_forward)
_weight_op = define("grouped_linear_weight(Tensor dy, Tensor x, Tensor counts) -> Tensor dweight", _empty_weight)


@flops(torch.ops.mpcore.grouped_linear_forward)
def _forward_flops(x: list[int], weight: list[int], counts: list[int], **_) -> int:
    return 2 * x[0] * weight[1] * weight[2]  # of all rows: how many are used only the device knows


@flops(torch.ops.mpcore.grouped_linear_weight)
def _weight_flops(dy: list[int], x: list[int], counts: list[int], **_) -> int:
    return 2 * x[0] * dy[1] * x[1]


def _step(x: Tensor) -> int:
    """Terms of a step of a product: two bytes each, or four."""
    return 32 if x.dtype == torch.float32 else 64


@launches(_forward_op)
def _launch_forward(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    y = _empty_forward(x, weight, counts)
    if y.numel() == 0:
        return y
    (R, K), (E, N, _) = x.shape, weight.shape
    if K == 0 or E == 0:
        return y.zero_()
    x, stride = as_rows(x)
    block_m, block_n, block_k = 128, min(128, max(16, next_power_of_2(N))), _step(x)
    tiles = R // block_m + E + 1  # each expert, and the rest after the last, ends in at most one tile that isn't full
    constants = (stride, *weight.stride(), E, N, K, next_power_of_2(E), block_m, block_n, block_k)
    launch(_forward_kernel, (tiles * ceil_div(N, block_n), 1, 1), (x, weight, counts, y), (R,), constants, 8)
    return y


@launches(_weight_op)
def _launch_weight(dy: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    dweight = _empty_weight(dy, x, counts)
    if dweight.numel() == 0 or x.shape[0] == 0:
        return dweight.zero_()
    E, N, K = dweight.shape
    dy, dy_stride = as_rows(dy)
    x, x_stride = as_rows(x)
    block_n, block_k = (min(128, max(16, next_power_of_2(size))) for size in (N, K))
    grid = (ceil_div(N, block_n) * ceil_div(K, block_k), E, 1)
    constants = (dy_stride, x_stride, E, N, K, next_power_of_2(E), _step(x), block_n, block_k)
    launch(_weight_kernel, grid, (dy, x, counts, dweight), (), constants, 8)
    return dweight


@triton.jit
def _forward_kernel(
    x_ptr, weight_ptr, counts_ptr, y_ptr, R,
    X_STRIDE: tl.constexpr, E_STRIDE: tl.constexpr, N_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr,
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // across
    cols = (tl.program_id(0) % across) * BLOCK_N + tl.arange(0, BLOCK_N)
    experts = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + experts, mask=experts < E, other=0).to(tl.int32)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)  # BLOCK_E: past the last one
    before = tl.sum(tl.where(experts < expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(experts < expert, tiles, 0), 0)
    rest = expert == BLOCK_E
    end = tl.where(rest, R, before + tl.sum(tl.where(experts == expert, counts, 0), 0))
    rows = (before + (tile - first_tile) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    weight_ptr += expert.to(tl.int64) * E_STRIDE
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, tl.where(rest, 0, K), BLOCK_K):
        terms = start + tl.arange(0, BLOCK_K)
        x_mask = (rows < end)[:, None] & (terms < K)[None, :]
        x = tl.load(x_ptr + rows[:, None] * X_STRIDE + terms[None, :], mask=x_mask, other=0.0)
        weight_mask = (terms < K)[:, None] & (cols < N)[None, :]
        weight = tl.load(
            weight_ptr + terms[:, None].to(tl.int64) * K_STRIDE + cols[None, :].to(tl.int64) * N_STRIDE,
            mask=weight_mask, other=0.0,
        )  # fmt: skip
        total = tl.dot(x, weight, total, input_precision="ieee")
    mask = (rows < end)[:, None] & (cols < N)[None, :]
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], total.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _weight_kernel(
    dy_ptr, x_ptr, counts_ptr, dweight_ptr,
    DY_STRIDE: tl.constexpr, X_STRIDE: tl.constexpr,
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(K, BLOCK_K)
    expert = tl.program_id(1)
    outs = (tl.program_id(0) // across) * BLOCK_N + tl.arange(0, BLOCK_N)
    ins = (tl.program_id(0) % across) * BLOCK_K + tl.arange(0, BLOCK_K)
    experts = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + experts, mask=experts < E, other=0).to(tl.int32)
    begin = tl.sum(tl.where(experts < expert, counts, 0), 0)
    end = begin + tl.sum(tl.where(experts == expert, counts, 0), 0)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(begin, end, BLOCK_R):
        rows = (start + tl.arange(0, BLOCK_R)).to(tl.int64)
        dy_mask = (rows < end)[None, :] & (outs < N)[:, None]
        dy = tl.load(dy_ptr + rows[None, :] * DY_STRIDE + outs[:, None], mask=dy_mask, other=0.0)
        x_mask = (rows < end)[:, None] & (ins < K)[None, :]
        x = tl.load(x_ptr + rows[:, None] * X_STRIDE + ins[None, :], mask=x_mask, other=0.0)
        total = tl.dot(dy, x, total, input_precision="ieee")
    dweight_ptr += expert.to(tl.int64) * N * K
    mask = (outs < N)[:, None] & (ins < K)[None, :]
    out = dweight_ptr + outs[:, None].to(tl.int64) * K + ins[None, :]
    tl.store(out, total.to(dweight_ptr.dtype.element_ty), mask=mask)
