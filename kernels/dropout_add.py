"""Dropout and residual addition in one pass; the mask is the same on every layout and is never stored.

    y = residual + keep x / (1 - p),  keep = word >= 2^32 p

    dx = keep dy / (1 - p),  dresidual = dy

The word of an element is Philox4x32-10 of (key; feature / 4, token, sample), with global indices, as in `_philox.py`.
So each rank draws the mask of the elements that it holds, and backward draws the mask again. One kernel serves both
passes. It computes in float32 and rounds once.

Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting" (2014), section 4.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from ._checks import check_inputs, check_shapes
from ._dispatch import operator, refuse_second_derivative, runs_triton
from ._philox import as_int32, keep_mask, random_words, threshold_of
from ._rows import as_rows, ceil_div, contiguous, count_rows, flat_tiles
from ._triton import launch, tl, triton


def dropout_add(
    x: Tensor, residual: Tensor | None, p: float, *, key: int = 0, samples: Tensor | None = None,
    tokens: Tensor | None = None, first_feature: int = 0, sequence_dim: int = 1, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """Drop elements, scale the others by 1 / (1 - p), and add the residual stream.

    Args:
        x: `[B, T, D]`, or `[T, B, D]` with `sequence_dim` 0, and `[..., D]` with p = 0; float32, bfloat16 or float16
            (the reference takes float64 too), with any strides. T and D may be this rank's shard.
        residual: of the shape of `x`, or `None`; its dtype may differ, as for a float32 residual stream.
        p: probability of zero, in [0, 1).
        key: 64 bits, the stream to draw from.
        samples: `[B]` int64, the global index of the sample in each row; needed where p > 0.
        tokens: `[T]` int64, the index of each token in the whole sequence; `None` for 0 .. T-1.
        first_feature: the global index of the first feature of `x`.
        sequence_dim: 1, or 0 where T comes before B.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        `y`, of the shape of `x`, in the wider dtype of `x` and the residual; `x` itself if nothing is to be done.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, p is outside [0, 1), or `impl` can't run here.
    """
    check_inputs(x, residual)
    if not 0 <= p < 1:
        raise ValueError(f"dropout probability {p} is not in [0, 1)")
    triton_runs = runs_triton(impl, x, "dropout_add")
    if p == 0:
        return x if residual is None else residual + x
    _check_places(x, samples, tokens, sequence_dim)
    assert samples is not None
    run = _DropoutAdd.apply if triton_runs else _reference
    return run(x, residual, samples, tokens, p, key if key < 2**63 else key - 2**64, first_feature, sequence_dim)


dropout_add_reference: functools.partial[Tensor] = functools.partial(dropout_add, impl="reference")


def _reference(
    x: Tensor, residual: Tensor | None, samples: Tensor, tokens: Tensor | None, p: float, key: int,
    first_feature: int, sequence_dim: int,
) -> Tensor:  # fmt: skip
    out = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    exact = torch.promote_types(out, torch.float32)
    if tokens is None:
        tokens = torch.arange(x.shape[sequence_dim], device=x.device)
    keep = random_words(key, samples, tokens, range(first_feature, first_feature + x.shape[-1])) >= threshold_of(p)
    y = (x.to(exact) * (1 / (1 - p))).masked_fill(~(keep if sequence_dim == 1 else keep.transpose(0, 1)), 0)
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
    def forward(ctx, x, residual, samples, tokens, *how):
        ctx.save_for_backward(samples, tokens)
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        ctx.how = how
        y = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        return _dropout_add_op(x, residual, y, samples, tokens, *how)

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative("dropout_add")
        x, residual = ctx.dtypes
        dx = _dropout_add_op(dy, None, x, *ctx.saved_tensors, *ctx.how)
        return dx, None if residual is None else dy.to(residual), *[None] * 6


@operator(
    "dropout_add(Tensor x, Tensor? residual, ScalarType dtype, Tensor samples, Tensor? tokens, float p, SymInt key, "
    "int first_feature, int sequence_dim) -> Tensor y"
)
def _dropout_add_op(
    x: Tensor, residual: Tensor | None, dtype: torch.dtype, samples: Tensor, tokens: Tensor | None, p: float, key: int,
    first_feature: int, sequence_dim: int,
) -> Iterator[Tensor]:  # fmt: skip
    y = x.new_empty(x.shape, dtype=dtype)
    yield y
    D, shift = x.shape[-1], first_feature % 4
    (rows, stride), (residual, residual_stride) = as_rows(x), as_rows(residual)
    samples, tokens = contiguous(samples, tokens)
    block_m, block_d, tiles = flat_tiles(shift + D)  # in whole counters
    launch(
        _dropout_add_kernel, (tiles * ceil_div(count_rows(x), block_m), 1, 1), num_warps=4, x_ptr=rows,
        residual_ptr=residual, samples_ptr=samples, tokens_ptr=tokens, y_ptr=y, M=count_rows(x), inner=x.shape[-2],
        scale=1 / (1 - p), first_counter=first_feature // 4, key_low=as_int32(key), key_high=as_int32(key >> 32),
        threshold=as_int32(threshold_of(p)), X_STRIDE=stride, RESIDUAL_STRIDE=residual_stride, D=D, SHIFT=shift,
        SEQUENCE_DIM=sequence_dim, TILES=tiles, BLOCK_M=block_m, BLOCK_D=block_d,
    )  # fmt: skip


@triton.jit(do_not_specialize=["key_low", "key_high", "threshold"])
def _dropout_add_kernel(
    x_ptr, residual_ptr, samples_ptr, tokens_ptr, y_ptr,
    M, inner, scale, first_counter, key_low, key_high, threshold,
    X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, D: tl.constexpr, SHIFT: tl.constexpr,
    SEQUENCE_DIM: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tile = program % TILES
    rows = (program // TILES).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tile * BLOCK_D + tl.arange(0, BLOCK_D)[None, :] - SHIFT
    live = rows < M
    mask = live & (cols >= 0) & (cols < D)
    b, t = rows // inner, rows % inner
    if SEQUENCE_DIM == 0:
        b, t = t, b
    sample = tl.load(samples_ptr + b, mask=live, other=0)
    if tokens_ptr is not None:
        t = tl.load(tokens_ptr + t, mask=live, other=0)
    counter = first_counter + tile * (BLOCK_D // 4) + tl.arange(0, BLOCK_D // 4)[None, :]
    keep = keep_mask(key_low, key_high, threshold, sample, t, counter)
    y = tl.load(x_ptr + rows * X_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    y = tl.where(keep, y * scale, 0.0)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + rows * RESIDUAL_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows * D + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
