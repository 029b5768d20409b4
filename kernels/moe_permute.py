"""Permute tokens to the experts that they chose, and back: one row for each (token, choice), expert by expert.

    y[row[t, k]] = x[t]                              permute
    out[t] = sum over k of weight[t, k] y[row[t, k]] unpermute

The order of rows is fixed: expert by expert, and within an expert by (t, k). A choice that is no expert (a masked
token, a full or a remote expert) has no row. The host reads nothing back: the caller passes an upper bound of the
number of rows, and rows without a choice are zero. Each function is the backward pass of the other. Both use no
atomics, so results repeat bit for bit.

Source: Gale et al. 2022, "MegaBlocks" (arXiv:2211.15841), section 5.2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ._checks import check_shapes
from ._dispatch import operator, refuse_second_derivative, runs_triton
from ._rows import as_rows, ceil_div, contiguous, next_power_of_2
from ._triton import HAS_TRITON, launch, tl, triton

MOST_EXPERTS = 1024  # of one call: a program holds all of them at once


def moe_rows(experts: Tensor, num_experts: int, *, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """Assign a row to each choice: expert by expert, and within an expert in the order of (token, choice).

    Args:
        experts: `[T, K]` integers, the experts that each token chose; a number outside `[0, num_experts)` is no expert.
        num_experts: E.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device.

    Returns:
        `(row [T, K], counts [E])`, int32: the row of each choice, or -1, and the number of rows of each expert.

    Raises:
        ValueError: `experts` isn't `[T, K]` of integers, or `impl` can't run here.
    """
    if experts.dim() != 2 or experts.is_floating_point():
        raise ValueError(f"experts {tuple(experts.shape)} of {experts.dtype} is not [T, K] of integers")
    like = experts.new_empty(0, dtype=torch.float32)
    triton_runs = runs_triton(impl, like, "moe_permute") and num_experts <= MOST_EXPERTS
    return (_rows_op if triton_runs or experts.is_meta else moe_rows_reference)(experts, num_experts)


def moe_rows_reference(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Compute `moe_rows` in plain torch; the host does not wait for the device."""
    flat = experts.reshape(-1).long()
    key = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    ordered, order = torch.sort(key, stable=True)
    row = torch.empty_like(flat).scatter_(0, order, torch.arange(len(flat), device=flat.device))
    bounds = torch.searchsorted(ordered, torch.arange(num_experts + 1, device=flat.device))
    return torch.where(key < num_experts, row, -1).view(experts.shape).int(), bounds.diff().int()


def moe_permute(x: Tensor, row: Tensor, rows: int, *, impl: str | None = None) -> Tensor:
    """Copy each token to the rows of its choices.

    Args:
        x: `[T, D]`.
        row: `[T, K]`, no row twice; a number outside `[0, rows)` is no row.
        rows: R, the number of rows of the result.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        `[R, D]`; rows without a choice are zero.

    Raises:
        ValueError: shapes don't go together, or `impl` can't run here.
    """
    check_shapes(x=(x, "T D"), row=(row, "T K"))
    if runs_triton(impl, x, "moe_permute") or x.is_meta:
        return _Permute.apply(x, row, rows)
    return moe_permute_reference(x, row, rows)


def moe_permute_reference(x: Tensor, row: Tensor, rows: int) -> Tensor:
    """Compute `moe_permute` in plain torch, under torch's own autograd."""
    T, K = row.shape
    slot = torch.where((row >= 0) & (row < rows), row, rows).reshape(-1).long()
    source = slot.new_full((rows + 1,), T)  # no token
    source = source.scatter_(0, slot, torch.arange(T * K, device=x.device) // max(K, 1))[:rows]
    return torch.cat([x, x.new_zeros(1, x.shape[1])])[source]


def moe_unpermute(y: Tensor, row: Tensor, weight: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """Sum the rows of each token's choices, times their weights.

    Args:
        y: `[R, D]`.
        row: `[T, K]`, the parameter of `moe_permute`.
        weight: `[T, K]`, or `None` for ones.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `y`.

    Returns:
        `[T, D]` in the dtype of `y`, summed in float32 (float64 for float64) in the order of k.

    Raises:
        ValueError: shapes don't go together, or `impl` can't run here.
    """
    check_shapes(y=(y, "R D"), row=(row, "T K"), weight=(weight, "T K"))
    if runs_triton(impl, y, "moe_permute") or y.is_meta:
        return _Unpermute.apply(y, row, weight)
    return moe_unpermute_reference(y, row, weight)


def moe_unpermute_reference(y: Tensor, row: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute `moe_unpermute` in plain torch, under torch's own autograd."""
    exact = torch.promote_types(y.dtype, torch.float32)
    index = torch.where((row >= 0) & (row < len(y)), row, len(y)).long()
    chosen = torch.cat([y, y.new_zeros(1, y.shape[1])])[index].to(exact)  # [T, K, D]
    if weight is not None:
        chosen = chosen * weight.to(exact)[..., None]
    return chosen.sum(1).to(y.dtype)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, row, rows):
        ctx.save_for_backward(row)
        return _permute_op(x, row, rows)

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative("moe_permute")
        (row,) = ctx.saved_tensors
        return _unpermute_op(dy, row, None), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, row, weight):
        ctx.save_for_backward(None if weight is None else y, row, weight)
        ctx.rows = len(y)
        return _unpermute_op(y, row, weight)

    @staticmethod
    def backward(ctx, dout):
        refuse_second_derivative("moe_unpermute")
        y, row, weight = ctx.saved_tensors
        if weight is None:
            return _permute_op(dout, row, ctx.rows), None, None
        dy, dweight = _backward_op(dout, y, row, weight)
        return dy, None, dweight


@operator("moe_rows(Tensor experts, int num_experts) -> (Tensor row, Tensor counts)")
def _rows_op(experts: Tensor, num_experts: int) -> Iterator[tuple[Tensor, Tensor]]:
    row = experts.new_empty(experts.shape, dtype=torch.int32)
    counts = experts.new_empty(num_experts, dtype=torch.int32)
    yield row, counts
    if num_experts == 0:
        row.fill_(-1)
        return
    N, experts = experts.numel(), experts.contiguous()
    block_e = max(next_power_of_2(num_experts), 16)
    block_n = max(8192 // block_e, 16)
    blocks = ceil_div(N, block_n)
    held = row.new_empty((num_experts, blocks))  # so that the scan over blocks runs along contiguous memory
    shared = {"experts_ptr": experts, "N": N, "E": num_experts, "BLOCK_N": block_n, "BLOCK_E": block_e}
    launch(_count_kernel, (blocks, 1, 1), num_warps=4, held_ptr=held, **shared)
    launch(_scan_kernel, (num_experts, 1, 1), num_warps=4, held_ptr=held, counts_ptr=counts, blocks=blocks, BLOCK=256)
    launch(_place_kernel, (blocks, 1, 1), num_warps=4, held_ptr=held, counts_ptr=counts, row_ptr=row, **shared)


@operator("moe_permute(Tensor x, Tensor row, SymInt rows) -> Tensor y")
def _permute_op(x: Tensor, row: Tensor, rows: int) -> Iterator[Tensor]:
    y = x.new_empty((rows, x.shape[1]))
    yield y
    if rows:
        _scatter(x, y, row)


@operator("moe_unpermute(Tensor y, Tensor row, Tensor? weight) -> Tensor out")
def _unpermute_op(y: Tensor, row: Tensor, weight: Tensor | None) -> Iterator[Tensor]:
    out = y.new_empty((row.shape[0], y.shape[1]))
    yield out
    if len(out) == 0:
        return
    (T, K), (R, D), (y, stride) = row.shape, y.shape, as_rows(y)
    row, weight = contiguous(row, weight)
    block = min(next_power_of_2(D), 1024)
    launch(
        _unpermute_kernel, (T, ceil_div(D, block), 1), num_warps=4,
        y_ptr=y, row_ptr=row, weight_ptr=weight, out_ptr=out, R=R, Y_STRIDE=stride, K=K, D=D, BLOCK_D=block,
    )  # fmt: skip


@operator("moe_unpermute_backward(Tensor dout, Tensor y, Tensor row, Tensor weight) -> (Tensor dy, Tensor dweight)")
def _backward_op(dout: Tensor, y: Tensor, row: Tensor, weight: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    dy, dweight = y.new_empty(y.shape), weight.new_empty(weight.shape)
    yield dy, dweight
    _scatter(dout, dy, row, y, weight, dweight)


def _scatter(x, out, row, y=None, weight=None, dweight=None) -> None:
    """Write the rows of `x`, times their weights, into `out`, zeros into rows without a choice, and dweight."""
    (T, K), (R, D), (x, stride), (y, y_stride) = row.shape, out.shape, as_rows(x), as_rows(y)
    filled = row.new_zeros(R)
    row, weight = contiguous(row, weight)
    launch(
        _scatter_kernel, (T, 1, 1), num_warps=4, x_ptr=x, row_ptr=row, y_ptr=y, weight_ptr=weight,
        out_ptr=out, filled_ptr=filled, dweight_ptr=dweight,
        R=R, X_STRIDE=stride, Y_STRIDE=y_stride, K=K, D=D, BLOCK_D=min(next_power_of_2(D), 1024),
    )  # fmt: skip
    if R:
        zero_rows(out, filled)


def zero_rows(out: Tensor, filled: Tensor) -> Tensor:
    """Write zeros to the rows of `out` `[R, D]` where int32 `filled` `[R]` is 0, and leave the others alone."""
    if not HAS_TRITON:
        return out.masked_fill_((filled == 0)[:, None], 0)
    R, D = out.shape
    launch(
        _fill_kernel, (ceil_div(R, 16), 1, 1), num_warps=4,
        out_ptr=out, filled_ptr=filled, R=R, D=D, BLOCK_R=16, BLOCK_D=min(next_power_of_2(D), 256),
    )  # fmt: skip
    return out


@triton.jit
def _chosen(experts_ptr, N, E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr):
    places = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    key = tl.load(experts_ptr + places, mask=places < N, other=-1).to(tl.int32)
    experts = tl.arange(0, BLOCK_E)
    return places, ((key[:, None] == experts[None, :]) & (experts < E)[None, :]).to(tl.int32)


@triton.jit
def _count_kernel(experts_ptr, held_ptr, N, E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr):
    _, chosen = _chosen(experts_ptr, N, E, BLOCK_N, BLOCK_E)  # pyright: ignore[reportGeneralTypeIssues]
    experts = tl.arange(0, BLOCK_E)
    tl.store(
        held_ptr + experts * tl.num_programs(0).to(tl.int64) + tl.program_id(0), tl.sum(chosen, 0), mask=experts < E
    )


@triton.jit
def _scan_kernel(held_ptr, counts_ptr, blocks, BLOCK: tl.constexpr):
    """Replace what each block holds of an expert by what the blocks before it hold."""
    held_ptr += tl.program_id(0).to(tl.int64) * blocks
    total = tl.zeros((1,), tl.int32)
    for start in range(0, blocks, BLOCK):
        places = start + tl.arange(0, BLOCK)
        held = tl.load(held_ptr + places, mask=places < blocks, other=0)
        tl.store(held_ptr + places, total + tl.cumsum(held, 0) - held, mask=places < blocks)
        total += tl.sum(held, 0)
    tl.store(counts_ptr + tl.program_id(0) + tl.arange(0, 1), total)


@triton.jit
def _place_kernel(
    experts_ptr, held_ptr, counts_ptr, row_ptr, N, E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr
):
    places, chosen = _chosen(experts_ptr, N, E, BLOCK_N, BLOCK_E)  # pyright: ignore[reportGeneralTypeIssues]
    experts = tl.arange(0, BLOCK_E)
    held_ptr += experts * tl.num_programs(0).to(tl.int64) + tl.program_id(0)
    counts = tl.load(counts_ptr + experts, mask=experts < E, other=0)
    first = tl.load(held_ptr, mask=experts < E, other=0) + tl.cumsum(counts, 0) - counts
    row = tl.sum(chosen * (tl.cumsum(chosen, 0) + first[None, :]), 1) - 1  # no expert: nothing is summed, -1
    tl.store(row_ptr + places, row, mask=places < N)


@triton.jit
def _unpermute_kernel(
    y_ptr, row_ptr, weight_ptr, out_ptr, R,
    Y_STRIDE: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for k in range(K):
        row = tl.load(row_ptr + token * K + k).to(tl.int64)
        there = (row >= 0) & (row < R)
        part = tl.load(y_ptr + row * Y_STRIDE + cols, mask=there & (cols < D), other=0.0).to(tl.float32)
        if weight_ptr is not None:
            part *= tl.load(weight_ptr + token * K + k).to(tl.float32)
        total += tl.where(there, part, 0.0)
    tl.store(out_ptr + token * D + cols, total.to(out_ptr.dtype.element_ty), mask=cols < D)


@triton.jit
def _scatter_kernel(
    x_ptr, row_ptr, y_ptr, weight_ptr, out_ptr, filled_ptr, dweight_ptr, R,
    X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    for k in range(K):
        row = tl.load(row_ptr + token * K + k).to(tl.int64)
        there = (row >= 0) & (row < R)
        dots = tl.zeros((BLOCK_D,), tl.float32)
        for start in range(0, D, BLOCK_D):  # after the first choice the token comes from the cache
            cols = start + tl.arange(0, BLOCK_D)
            x = tl.load(x_ptr + token * X_STRIDE + cols, mask=cols < D, other=0.0).to(tl.float32)
            out = x
            if weight_ptr is not None:
                out = x * tl.load(weight_ptr + token * K + k).to(tl.float32)
                dots += x * tl.load(y_ptr + row * Y_STRIDE + cols, mask=there & (cols < D), other=0.0).to(tl.float32)
            tl.store(out_ptr + row * D + cols, out.to(out_ptr.dtype.element_ty), mask=there & (cols < D))
        tl.store(filled_ptr + row, 1, mask=there)
        if weight_ptr is not None:
            dot = tl.where(there, tl.sum(dots, 0), 0.0)
            tl.store(dweight_ptr + token * K + k, dot.to(dweight_ptr.dtype.element_ty))


@triton.jit
def _fill_kernel(out_ptr, filled_ptr, R, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    empty = (tl.load(filled_ptr + rows, mask=rows < R, other=1) == 0)[:, None]
    zero = tl.zeros((BLOCK_R, BLOCK_D), out_ptr.dtype.element_ty)
    for start in range(0, D, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)[None, :]
        tl.store(out_ptr + rows[:, None] * D + cols, zero, mask=empty & (cols < D))
