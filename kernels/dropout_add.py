"""Bias, dropout and residual addition in one pass; the mask is the same on every layout and is never stored.

    y = residual + keep (x + bias) / (1 - p),  keep = word >= 2^32 p

    dx = keep dy / (1 - p),  dbias = sum over rows of dx,  dresidual = dy

The word of an element is Philox4x32-10 of (key; feature / 4, token, sample), with global indices, as in `_philox.py`.
So each rank draws the mask of the elements that it holds, and backward draws the mask again.

Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting" (2014), section 4.

Kernels compute in float32 and round once. dbias is summed in two stages of fixed order, so it repeats bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._dispatch import operator, refuse_second_derivative, runs_triton
from ._philox import as_int32, keep_mask, random_words, threshold_of
from ._rows import as_rows, ceil_div, check_inputs, contiguous, count_rows, next_power_of_2, optional_rows, sum_partials
from ._triton import STAGES, launch, multiprocessors, tl, triton


def dropout_add(
    x: Tensor,
    residual: Tensor | None,
    p: float,
    *,
    key: int = 0,
    samples: Tensor | None = None,
    tokens: Tensor | None = None,
    bias: Tensor | None = None,
    first_feature: int = 0,
    sequence_dim: int = 1,
    impl: str | None = None,
) -> Tensor:
    """Add a bias, drop elements, scale the others by 1 / (1 - p), and add the residual stream.

    Args:
        x: `[B, T, D]`, or `[T, B, D]` with `sequence_dim` 0; float32, bfloat16 or float16 (the reference takes float64
            too), with any strides. T and D may be this rank's shard. With p = 0: `[..., D]`.
        residual: of the shape of `x`, or `None`; its dtype may differ, as for a float32 residual stream.
        p: probability of zero, in [0, 1).
        key: 64 bits, the stream to draw from.
        samples: `[B]` int64, the global index of the sample in each row; needed where p > 0.
        tokens: `[T]` int64, the index of each token in the whole sequence; `None` for 0 .. T-1.
        bias: `[D]`, added to `x` first; its dtype may differ from that of `x`.
        first_feature: the global index of the first feature of `x`.
        sequence_dim: 1, or 0 where T comes before B.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        `y`, of the shape of `x`, in the wider dtype of `x` and the residual.
        With p = 0, no bias and no residual it is `x` itself.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, p is outside [0, 1), or `impl` can't run here.
    """
    check_inputs(x, residual, bias=bias)
    if not 0 <= p < 1:
        raise ValueError(f"dropout probability {p} is not in [0, 1)")
    if p > 0:
        _check_places(x, samples, tokens, sequence_dim)
    triton_runs = runs_triton(impl, x, "dropout_add", D=x.shape[-1])
    if p == 0 and bias is None and residual is None:
        return x
    mask = _Mask(samples, tokens, p, key if key < 2**63 else key - 2**64, first_feature, sequence_dim)
    return _DropoutAdd.apply(x, residual, bias, *mask) if triton_runs else _reference(x, residual, bias, mask)


# In plain torch, under torch's own autograd; computes in float32, or float64 for a float64 `x`.
dropout_add_reference = functools.partial(dropout_add, impl="reference")


class _Mask(NamedTuple):
    """Where the mask of dropout comes from: the arguments of `dropout_add`, with a signed key."""

    samples: Tensor | None
    tokens: Tensor | None
    p: float
    key: int
    first_feature: int
    sequence_dim: int

    def arguments(self, x: Tensor) -> dict[str, Any]:
        """Return the kernels' arguments that say what to drop of `x`."""
        samples, tokens = contiguous(self.samples, self.tokens)
        return {
            "samples_ptr": samples,
            "tokens_ptr": tokens,
            "inner": x.shape[-2] if self.p > 0 else 1,
            "scale": 1 / (1 - self.p),
            "first_counter": self.first_feature // 4,
            "key_low": as_int32(self.key),
            "key_high": as_int32(self.key >> 32),
            "threshold": as_int32(threshold_of(self.p)),
            "SHIFT": self.first_feature % 4,
            "SEQUENCE_DIM": self.sequence_dim,
            "DROPS": self.p > 0,
        }


def _reference(x: Tensor, residual: Tensor | None, bias: Tensor | None, mask: _Mask) -> Tensor:
    out = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    exact = torch.promote_types(out, torch.float32)
    y = x.to(exact) if bias is None else x.to(exact) + bias.to(exact)
    samples, tokens, p, key, first_feature, sequence_dim = mask
    if p > 0:
        assert samples is not None
        if tokens is None:
            tokens = torch.arange(x.shape[sequence_dim], device=x.device)
        words = random_words(key, samples, tokens, range(first_feature, first_feature + x.shape[-1]))
        keep = words >= threshold_of(p)
        y = (y * (1 / (1 - p))).masked_fill(~(keep if sequence_dim == 1 else keep.transpose(0, 1)), 0)
    return (y if residual is None else residual.to(exact) + y).to(out)


def _check_places(x: Tensor, samples: Tensor | None, tokens: Tensor | None, sequence_dim: int) -> None:
    if x.dim() != 3:
        raise ValueError(f"x has {x.dim()} dimensions; dropout needs 3, of samples, tokens and features")
    if sequence_dim not in (0, 1):
        raise ValueError(f"sequence_dim {sequence_dim} is neither 0 nor 1")
    if samples is None:
        raise ValueError("dropout needs samples, the global index of the sample in each row")
    B, T = x.shape[1 - sequence_dim], x.shape[sequence_dim]
    for name, places, size, of in (("samples", samples, B, "rows"), ("tokens", tokens, T, "tokens")):
        if places is None:
            continue
        if places.shape != (size,):
            raise ValueError(f"{name} has shape {tuple(places.shape)}, but x {tuple(x.shape)} has {size} {of}")
        if places.dtype != torch.int64 or places.device != x.device:
            raise ValueError(f"{name} is {places.dtype} on {places.device}; it must be int64 on {x.device}, as x is")


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, bias, samples, tokens, p, *how):
        ctx.save_for_backward(bias, samples, tokens)
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        ctx.p, ctx.how = p, how
        return _forward_op(x, residual, bias, samples, tokens, p, *how)

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative("dropout_add")
        x_dtype, residual_dtype = ctx.dtypes
        bias, samples, tokens = ctx.saved_tensors
        dx, dbias = dy.to(x_dtype), None
        if bias is not None or ctx.p > 0:
            dx, dbias = _backward_op(dy, bias, x_dtype, samples, tokens, ctx.p, *ctx.how)
        dresidual = None if residual_dtype is None else dy.to(residual_dtype)
        return dx, dresidual, None if bias is None else dbias, *[None] * 6


_MASK = "Tensor? samples, Tensor? tokens, float p, SymInt key, int first_feature, int sequence_dim"


@operator(f"dropout_add_forward(Tensor x, Tensor? residual, Tensor? bias, {_MASK}) -> Tensor y")
def _forward_op(x: Tensor, residual: Tensor | None, bias: Tensor | None, *given: Any) -> Iterator[Tensor]:
    y = x.new_empty(x.shape, dtype=x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype))
    yield y
    mask = _Mask(*given)
    M, D = count_rows(x), x.shape[-1]
    drops = mask.arguments(x)
    x, stride = as_rows(x)
    residual, residual_stride = optional_rows(residual)
    block_m, block_d, tiles = _tiles(D, mask.first_feature)
    (bias,) = contiguous(bias)
    launch(
        _forward_kernel, (tiles * ceil_div(M, block_m), 1, 1), num_warps=4, **drops,
        x_ptr=x, residual_ptr=residual, bias_ptr=bias, y_ptr=y, M=M, X_STRIDE=stride, RESIDUAL_STRIDE=residual_stride,
        D=D, TILES=tiles, BLOCK_M=block_m, BLOCK_D=block_d,
    )  # fmt: skip


@operator(f"dropout_add_backward(Tensor dy, Tensor? bias, ScalarType dtype, {_MASK}) -> (Tensor dx, Tensor dbias)")
def _backward_op(dy: Tensor, bias: Tensor | None, dtype: torch.dtype, *given: Any) -> Iterator[tuple[Tensor, Tensor]]:
    dx = dy.new_empty(dy.shape, dtype=dtype)
    dbias = dy.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    yield dx, dbias
    mask = _Mask(*given)
    M, D = count_rows(dy), dy.shape[-1]
    drops = mask.arguments(dy)
    dy, stride = as_rows(dy)
    block_m, block_d, tiles = _tiles(D, mask.first_feature)
    groups, stages, partials = ceil_div(M, block_m), 1, None  # one block of rows per program
    if bias is not None:
        groups, stages = min(groups, max(1, 2 * multiprocessors(dy.device) // tiles)), STAGES
        partials = dx.new_empty((1, groups, D), dtype=torch.float32)
    launch(
        _backward_kernel, (tiles * groups, 1, 1), num_warps=4, **drops, dy_ptr=dy, dx_ptr=dx, partials_ptr=partials,
        M=M, DY_STRIDE=stride, D=D, TILES=tiles, BLOCK_M=block_m, BLOCK_D=block_d, STAGES=stages,
    )  # fmt: skip
    if partials is not None:
        sum_partials(partials, dbias)


def _tiles(D: int, first_feature: int) -> tuple[int, int, int]:
    """Return rows and columns of a program's tile of 2048 elements, in whole counters, and the tiles in a row."""
    columns = first_feature % 4 + D
    block_d = max(4, min(2048, next_power_of_2(columns)))
    return min(64, 2048 // block_d), block_d, ceil_div(columns, block_d)


@triton.jit
def _keep(
    samples_ptr, tokens_ptr, rows, live, inner, tile, first_counter, key_low, key_high, threshold,
    SEQUENCE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b, t = rows // inner, rows % inner
    if SEQUENCE_DIM == 0:
        b, t = t, b
    sample = tl.load(samples_ptr + b, mask=live, other=0)
    if tokens_ptr is not None:
        t = tl.load(tokens_ptr + t, mask=live, other=0)
    counter = first_counter + tile * (BLOCK_D // 4) + tl.arange(0, BLOCK_D // 4)[None, :]
    return keep_mask(key_low, key_high, threshold, sample, t, counter)


@triton.jit(do_not_specialize=["key_low", "key_high", "threshold"])
def _forward_kernel(
    x_ptr, residual_ptr, bias_ptr, samples_ptr, tokens_ptr, y_ptr,
    M, inner, scale, first_counter, key_low, key_high, threshold,
    X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, D: tl.constexpr, SHIFT: tl.constexpr,
    SEQUENCE_DIM: tl.constexpr, DROPS: tl.constexpr,
    TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tile = program % TILES
    rows = (program // TILES).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tile * BLOCK_D + tl.arange(0, BLOCK_D)[None, :] - SHIFT
    in_row = (cols >= 0) & (cols < D)
    mask = (rows < M) & in_row
    y = tl.load(x_ptr + rows * X_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + cols, mask=in_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if DROPS:
        keep = _keep(
            samples_ptr, tokens_ptr, rows, rows < M, inner, tile, first_counter, key_low, key_high, threshold,
            SEQUENCE_DIM, BLOCK_D,
        )  # fmt: skip
        y = tl.where(keep, y * scale, 0.0)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + rows * RESIDUAL_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows * D + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["key_low", "key_high", "threshold"])
def _backward_kernel(
    dy_ptr, samples_ptr, tokens_ptr, dx_ptr, partials_ptr,
    M, inner, scale, first_counter, key_low, key_high, threshold,
    DY_STRIDE: tl.constexpr, D: tl.constexpr, SHIFT: tl.constexpr, SEQUENCE_DIM: tl.constexpr, DROPS: tl.constexpr,
    TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tile, group = program % TILES, program // TILES
    cols = tile * BLOCK_D + tl.arange(0, BLOCK_D)[None, :] - SHIFT
    in_row = (cols >= 0) & (cols < D)
    dbias = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for block in tl.range(group, tl.cdiv(M, BLOCK_M), tl.num_programs(0) // TILES, num_stages=STAGES):
        rows = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        mask = (rows < M) & in_row
        dx = tl.load(dy_ptr + rows * DY_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
        if DROPS:
            keep = _keep(
                samples_ptr, tokens_ptr, rows, rows < M, inner, tile, first_counter, key_low, key_high, threshold,
                SEQUENCE_DIM, BLOCK_D,
            )  # fmt: skip
            dx = tl.where(keep, dx * scale, 0.0)
        tl.store(dx_ptr + rows * D + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dbias += dx
    if partials_ptr is not None:
        tl.store(partials_ptr + group.to(tl.int64) * D + cols, tl.sum(dbias, 0, keep_dims=True), mask=in_row)
