"""Grouped linear layers of many experts in one call: rows are ordered by expert, and each expert has its own weight.

    y[r] = W[e(r)] x[r]
    dx[r] = W[e(r)]^T dy[r],  dW[e] = sum over the rows of e of dy[r] x[r]^T

The host never reads how many rows each expert has, so a CUDA graph can capture the call. The forward kernel finds the
expert of each tile of rows from the counts in device memory. Tiles of one expert are neighbours, so its weight stays in
the L2 cache. The same kernel with the transposed weight computes the gradient of the input. One program sums each tile
of the weight's gradient over an expert's rows in float32, in the same order every time.

An activation may run on the products before they leave the chip: y = f(z) or, gated, f(z) u of the two halves of the
outputs, z | u. The kernel also writes z and u if backward needs them.

Source: Gale et al. 2022, "MegaBlocks" (arXiv:2211.15841), for products of groups without padding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._activation import backward_op, function
from ._dispatch import operator, refuse_second_derivative, runs_triton
from ._flops import flops
from ._rows import as_rows, ceil_div, next_power_of_2
from ._torch import has_no_values
from ._triton import launch, tl, triton
from .geglu import geglu_reference
from .gelu import gelu_reference
from .relu_squared import relu_squared_reference
from .swiglu import swiglu_reference

STEP_BYTES = 128  # of the terms of one step of a product


class Activation(NamedTuple):
    """An activation of the products: in plain torch, and the name of its Triton function and whether it is gated."""

    reference: Callable[[Tensor], Tensor]
    f: str
    gated: bool


ACTIVATIONS = {
    "swiglu": Activation(swiglu_reference, "silu", True),
    "geglu": Activation(partial(geglu_reference, approximate="none"), "gelu_erf", True),
    "geglu_tanh": Activation(geglu_reference, "gelu_tanh", True),
    "gelu": Activation(partial(gelu_reference, approximate="none"), "gelu_erf", False),
    "gelu_tanh": Activation(gelu_reference, "gelu_tanh", False),
    "relu_squared": Activation(relu_squared_reference, "squared", False),
}


def grouped_linear(
    x: Tensor, weight: Tensor, counts: Tensor, activation: str | None = None, *, impl: str | None = None
) -> Tensor:
    """Multiply each group of rows by its expert's weight.

    Args:
        x: `[R, D]`, the rows of expert 0 first.
        weight: `[E, F, D]`, of x's dtype or wider: products are in x's dtype, and backward saves the weight uncast.
        counts: `[E]` integers, the number of rows of each expert; their sum is at most R.
        activation: one of `ACTIVATIONS`, applied to the products, or `None`. A gated one makes F/2 outputs of F; the
            first half is the gate.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        `[R, F]` or `[R, F/2]`; rows after those of the last expert are zero.

    Raises:
        ValueError: shapes or dtypes don't go together, the activation is unknown, or `impl` can't run here.
    """
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2] or counts.shape != weight.shape[:1]:
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and counts {tuple(counts.shape)} are not [R, D], "
            f"[E, F, D] and [E]"
        )
    if counts.dtype.is_floating_point or counts.device != x.device:
        raise ValueError(f"counts are {counts.dtype} on {counts.device}; they must be integers on {x.device}, as x is")
    if torch.promote_types(x.dtype, weight.dtype) != weight.dtype:
        raise ValueError(f"x is {x.dtype}, but weight is {weight.dtype}")
    if activation is not None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r} is none of {sorted(ACTIVATIONS)} and None")
        if ACTIVATIONS[activation].gated and weight.shape[1] % 2:
            raise ValueError(f"F is {weight.shape[1]}, but gate and up need an even number")
    if runs_triton(impl, x, "grouped_linear", D=x.shape[1], F=weight.shape[1], E=len(weight)) or has_no_values(
        x
    ):  # the reference would read the counts
        keep = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        return _GroupedLinear.apply(x, weight, counts, activation, keep)
    return grouped_linear_reference(x, weight, counts, activation)


def grouped_linear_reference(x: Tensor, weight: Tensor, counts: Tensor, activation: str | None = None) -> Tensor:
    """`grouped_linear` in plain torch, under torch's own autograd: a loop over experts that reads the counts."""
    groups = _groups(x, counts)
    products = [F.linear(group, w.to(x.dtype)) for group, w in zip(groups, weight.unbind(), strict=False)]
    z = torch.cat([*products, groups[-1].new_zeros(len(groups[-1]), weight.shape[1])])
    return z if activation is None else ACTIVATIONS[activation].reference(z)


def _groups(x: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of each expert, and the rows after those of the last."""
    sizes = counts.tolist()
    return x.split([*sizes, len(x) - sum(sizes)])


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, counts, activation, keep):
        ctx.activation, z, w = activation, None, weight.to(x.dtype)
        if activation is None:
            y = _forward_op(x, w, counts)
        else:
            y, z = _activated_op(x, w, counts, activation, keep)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, counts, z)
        return y

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative("grouped_linear")
        x, weight, counts, z = ctx.saved_tensors
        if z is not None:
            _, f, gated = ACTIVATIONS[ctx.activation]
            dy, _ = backward_op(dy, z, None, f, gated)
        dx = _forward_op(dy, weight.to(dy.dtype).transpose(1, 2), counts) if ctx.needs_input_grad[0] else None
        dweight = _weight_op(dy, x, counts).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dweight, None, None, None


def _activated_reference(
    x: Tensor, weight: Tensor, counts: Tensor, activation: str, keep: bool
) -> tuple[Tensor, Tensor]:
    z = grouped_linear_reference(x, weight, counts)
    return ACTIVATIONS[activation].reference(z), z if keep else z.new_empty(0)


def _weight_reference(dy: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    dweight = x.new_empty((len(counts), dy.shape[1], x.shape[1]))
    for term, rows, group in zip(dweight, _groups(dy, counts), _groups(x, counts), strict=False):
        term.copy_(rows.t() @ group)
    return dweight


@operator("grouped_linear_forward(Tensor x, Tensor weight, Tensor counts) -> Tensor y", grouped_linear_reference)
def _forward_op(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    y = x.new_empty((x.shape[0], weight.shape[1]))
    _run(x, weight, counts, y, None, None)
    return y


@operator(
    "grouped_linear_activated(Tensor x, Tensor weight, Tensor counts, str activation, bool keep) "
    "-> (Tensor y, Tensor z)",
    _activated_reference,
)
def _activated_op(x: Tensor, weight: Tensor, counts: Tensor, activation: str, keep: bool) -> tuple[Tensor, Tensor]:
    R, F = x.shape[0], weight.shape[1]
    y = x.new_empty((R, F // 2 if ACTIVATIONS[activation].gated else F))
    z = x.new_empty((R, F) if keep else 0)
    _run(x, weight, counts, y, z if keep else None, ACTIVATIONS[activation])
    return y, z


def _run(x: Tensor, weight: Tensor, counts: Tensor, y: Tensor, z: Tensor | None, activation: Activation | None) -> None:
    """Launch the products, and the activation if there is one, into y; the input of the activation goes into z."""
    if has_no_values(x) or y.numel() == 0:
        return
    (R, K), (E, _, _), N = x.shape, weight.shape, y.shape[1]
    if K == 0 or E == 0:
        y.zero_()
        if z is not None:
            z.zero_()
        return
    x, stride = as_rows(x)
    f, gated = (None, False) if activation is None else (function(activation.f), activation.gated)
    block_n = min(64 if gated else 128, max(16, next_power_of_2(N)))  # a gate and its up each
    block_m, block_k = 128, STEP_BYTES // x.element_size()
    tiles = R // block_m + E + 1  # each expert, and the rows after the last, end in at most one partial tile
    launch(
        _forward_kernel, (tiles * ceil_div(N, block_n), 1, 1), num_warps=8,
        x_ptr=x, weight_ptr=weight, counts_ptr=counts.contiguous(), y_ptr=y, z_ptr=z, R=R, X_STRIDE=stride,
        E_STRIDE=weight.stride(0), N_STRIDE=weight.stride(1), K_STRIDE=weight.stride(2), E=E, N=N, K=K, GATED=gated,
        ACTIVATION=f, BLOCK_E=next_power_of_2(E), BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip


@operator("grouped_linear_weight(Tensor dy, Tensor x, Tensor counts) -> Tensor dweight", _weight_reference)
def _weight_op(dy: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    dweight = x.new_empty((counts.shape[0], dy.shape[1], x.shape[1]))
    if has_no_values(x):
        return dweight
    if dweight.numel() == 0 or x.shape[0] == 0:
        return dweight.zero_()
    E, N, K = dweight.shape
    dy, dy_stride = as_rows(dy)
    x, x_stride = as_rows(x)
    block_n, block_k = (min(128, max(16, next_power_of_2(size))) for size in (N, K))
    grid = (ceil_div(N, block_n) * ceil_div(K, block_k), E, 1)
    launch(
        _weight_kernel, grid, num_warps=8, dy_ptr=dy, x_ptr=x, counts_ptr=counts.contiguous(), dweight_ptr=dweight,
        DY_STRIDE=dy_stride, X_STRIDE=x_stride, E=E, N=N, K=K, BLOCK_E=next_power_of_2(E),
        BLOCK_R=STEP_BYTES // x.element_size(), BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip
    return dweight


@flops(torch.ops.mpcore.grouped_linear_activated)
@flops(torch.ops.mpcore.grouped_linear_forward)
def _forward_flops(x: list[int], weight: list[int], counts: list[int], **_) -> int:
    return 2 * x[0] * weight[1] * weight[2]  # of all rows: only the device knows how many are used


@flops(torch.ops.mpcore.grouped_linear_weight)
def _weight_flops(dy: list[int], x: list[int], counts: list[int], **_) -> int:
    return 2 * x[0] * dy[1] * x[1]


@triton.jit
def _forward_kernel(
    x_ptr, weight_ptr, counts_ptr, y_ptr, z_ptr, R,
    X_STRIDE: tl.constexpr, E_STRIDE: tl.constexpr, N_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr,
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # N: outputs, each from one row of the weight or, gated, from two rows that are N apart
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
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, tl.where(rest, 0, K), BLOCK_K):
        terms = start + tl.arange(0, BLOCK_K)
        x_mask = (rows < end)[:, None] & (terms < K)[None, :]
        x = tl.load(x_ptr + rows[:, None] * X_STRIDE + terms[None, :], mask=x_mask, other=0.0)
        weight_mask = (terms < K)[:, None] & (cols < N)[None, :]
        offsets = terms[:, None].to(tl.int64) * K_STRIDE + cols[None, :].to(tl.int64) * N_STRIDE
        total = tl.dot(x, tl.load(weight_ptr + offsets, mask=weight_mask, other=0.0), total, input_precision="ieee")
        if GATED:
            other = tl.load(weight_ptr + N * N_STRIDE + offsets, mask=weight_mask, other=0.0)
            up = tl.dot(x, other, up, input_precision="ieee")
    mask = (rows < end)[:, None] & (cols < N)[None, :]
    if ACTIVATION is not None:
        if z_ptr is not None:
            z_ptrs = z_ptr + rows[:, None] * (2 * N if GATED else N) + cols[None, :]
            tl.store(z_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask)
            if GATED:
                tl.store(z_ptrs + N, up.to(y_ptr.dtype.element_ty), mask=mask)
        total, _ = ACTIVATION(total)
        if GATED:
            total *= up
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
