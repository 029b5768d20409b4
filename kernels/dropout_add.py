"""Bias, dropout and residual addition in one pass; the mask is the same on every layout and is never stored.

    y = residual + keep (x + bias) / (1 - p),  keep = word >= 2^32 p

    dx = keep dy / (1 - p),  dbias = sum over rows of dx,  dresidual = dy

The word of an element is Philox4x32-10 of (key; feature / 4, token, sample), with global indices, as in `_philox.py`.
So each rank draws the mask of the elements that it holds, and backward draws the mask again. Kernels compute in float32
and round once. dbias is summed in a fixed order, so it repeats bit for bit.

Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting" (2014), section 4.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._checks import check_inputs, check_shapes
from ._dispatch import operator, refuse_second_derivative, runs_triton
from ._philox import as_int32, keep_mask, random_words, threshold_of
from ._rows import as_rows, ceil_div, contiguous, count_rows, flat_tiles, sum_partials
from ._triton import STAGES, launch, multiprocessors, tl, triton


def dropout_add(
    x: Tensor, residual: Tensor | None, p: float, *, key: int = 0, samples: Tensor | None = None,
    tokens: Tensor | None = None, bias: Tensor | None = None, first_feature: int = 0, sequence_dim: int = 1,
    impl: str | None = None,
) -> Tensor:  # fmt: skip
    """Add a bias, drop elements, scale the others by 1 / (1 - p), and add the residual stream.

    Args:
        x: `[B, T, D]`, or `[T, B, D]` with `sequence_dim` 0, and `[..., D]` with p = 0; float32, bfloat16 or float16
            (the reference takes float64 too), with any strides. T and D may be this rank's shard.
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
        `y`, of the shape of `x`, in the wider dtype of `x` and the residual; `x` itself if nothing is to be done.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, p is outside [0, 1), or `impl` can't run here.
    """
    check_inputs(x, residual, bias=bias)
    if not 0 <= p < 1:
        raise ValueError(f"dropout probability {p} is not in [0, 1)")
    if p > 0:
        _check_places(x, samples, tokens, sequence_dim)
    triton_runs = runs_triton(impl, x, "dropout_add")
    if p == 0 and bias is None and residual is None:
        return x
    mask = _Mask(samples, tokens, p, key if key < 2**63 else key - 2**64, first_feature, sequence_dim)
    return _DropoutAdd.apply(x, residual, bias, *mask) if triton_runs else _reference(x, residual, bias, mask)


dropout_add_reference: functools.partial[Tensor] = functools.partial(dropout_add, impl="reference")


class _Mask(NamedTuple):
    samples: Tensor | None
    tokens: Tensor | None
    p: float
    key: int
    first_feature: int
    sequence_dim: int

    def tile(self, D: int) -> tuple[int, int, int]:
        """Return rows and columns of a program's tile, in whole counters, and the number of tiles in a row of D."""
        return flat_tiles(self.first_feature % 4 + D)

    def launch(self, kernel: Any, x: Tensor, groups: int, **others: Any) -> None:
        """Launch a kernel with `groups` programs for each tile of a row of `x`."""
        samples, tokens = contiguous(self.samples, self.tokens)
        block_m, block_d, tiles = self.tile(x.shape[-1])
        launch(
            kernel, (tiles * groups, 1, 1), num_warps=4, samples_ptr=samples, tokens_ptr=tokens,
            M=x.numel() // x.shape[-1], inner=x.shape[-2] if self.p > 0 else 1, scale=1 / (1 - self.p),
            first_counter=self.first_feature // 4, key_low=as_int32(self.key), key_high=as_int32(self.key >> 32),
            threshold=as_int32(threshold_of(self.p)), D=x.shape[-1], SHIFT=self.first_feature % 4,
            SEQUENCE_DIM=self.sequence_dim, DROPS=self.p > 0, TILES=tiles, BLOCK_M=block_m, BLOCK_D=block_d, **others,
        )  # fmt: skip


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
    if sequence_dim not in (0, 1):
        raise ValueError(f"sequence_dim {sequence_dim} is neither 0 nor 1")
    if samples is None:
        raise ValueError("dropout needs samples, the global index of the sample in each row")
    check_shapes(x=(x, "B T D" if sequence_dim else "T B D"), samples=(samples, "B"), tokens=(tokens, "T"))
    for name, places in (("samples", samples), ("tokens", tokens)):
        if places is not None and (places.dtype != torch.int64 or places.device != x.device):
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
    (rows, stride), (residual, residual_stride), (bias,) = as_rows(x), as_rows(residual), contiguous(bias)
    mask.launch(
        _forward_kernel, x, ceil_div(count_rows(x), mask.tile(x.shape[-1])[0]), x_ptr=rows, residual_ptr=residual,
        bias_ptr=bias, y_ptr=y, X_STRIDE=stride, RESIDUAL_STRIDE=residual_stride,
    )  # fmt: skip


@operator(f"dropout_add_backward(Tensor dy, Tensor? bias, ScalarType dtype, {_MASK}) -> (Tensor dx, Tensor dbias)")
def _backward_op(dy: Tensor, bias: Tensor | None, dtype: torch.dtype, *given: Any) -> Iterator[tuple[Tensor, Tensor]]:
    dx = dy.new_empty(dy.shape, dtype=dtype)
    dbias = dy.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    yield dx, dbias
    mask, (rows, stride), D = _Mask(*given), as_rows(dy), dy.shape[-1]
    block_m, _, tiles = mask.tile(D)
    groups, stages, partials = ceil_div(count_rows(dy), block_m), 1, None  # one block of rows per program
    if bias is not None:
        groups, stages = min(groups, max(1, 2 * multiprocessors(dy.device) // tiles)), STAGES
        partials = dx.new_empty((1, groups, D), dtype=torch.float32)
    mask.launch(
        _backward_kernel, dy, groups, dy_ptr=rows, dx_ptr=dx, partials_ptr=partials, DY_STRIDE=stride, STAGES=stages
    )
    if partials is not None:
        sum_partials(partials, dbias)


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
