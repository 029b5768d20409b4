"""Tensors as kernels read them: `[..., D]` is M rows of D contiguous elements, covered by power-of-two tiles."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor

from ._triton import launch, tl, triton

MAX_ROWS = 2**31 - 1  # row numbers are 32-bit in the grid; offsets are 64-bit


def as_rows(x: Tensor | None) -> tuple[Any, int]:
    """Return `x` `[..., D]` with its D contiguous, and the stride between rows; `(None, 0)` where `x` is `None`."""
    if x is None:
        return None, 0
    D = x.shape[-1]
    if not x.is_contiguous():
        x = x.reshape(-1, D)
        if x.stride(1) != 1:
            x = x.contiguous()
        if x.shape[0] > 1:  # the stride of a single row means nothing, and must not compile a new kernel
            return x, x.stride(0)
    return x, D


def contiguous(*tensors: Tensor | None) -> list[Any]:
    """Return the tensors contiguous; `None` stays `None`."""
    return [None if t is None else t.contiguous() for t in tensors]


def by_heads(**tensors: Tensor | None) -> dict[str, Any]:
    """Name tensors `[B, T, H, K]`, copied where K is not contiguous, and their strides, as kernels do."""
    named: dict[str, Any] = {}
    for name, x in tensors.items():
        x = x if x is None or x.stride(3) == 1 else x.contiguous()
        batch, token, head, _ = (0, 0, 0, 1) if x is None else x.stride()
        named |= {f"{name}_ptr": x, f"{name}_batch": batch, f"{name}_token": token, f"{name}_head": head}
    return named


def count_rows(x: Tensor) -> int:
    """Return M of `x` `[..., D]`, which must not be empty."""
    M = x.numel() // x.shape[-1]
    if M > MAX_ROWS:
        raise ValueError(f"{M} rows are more than the {MAX_ROWS} that a kernel can count")
    return M


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up; triton's own function takes microseconds."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is no less than `n`."""
    return 1 << (n - 1).bit_length()


class RowTile(NamedTuple):
    """A program's share: `block_m` rows, each covered by `main` columns and a masked `tail` (0 if none)."""

    main: int
    tail: int
    block_m: int
    num_warps: int


@functools.cache
def row_tile(D: int, elements_per_thread: int, elements: int = 4096) -> RowTile:
    """Cover whole rows of `D` with the fewest idle lanes that two powers of two allow (5120 = 4096 + 1024).

    Short rows share a program until it holds `elements`: 4096 are enough bytes in flight to cover memory latency.
    """
    main = 1 << (D.bit_length() - 1)
    tail = next_power_of_2(D - main) if main < D else 0
    if main < 128 or tail == main:  # one masked tile costs no more lanes than two
        main, tail = next_power_of_2(D), 0
    block_m = max(1, min(64, elements // main))
    return RowTile(main, tail, block_m, max(1, min(16, main * block_m // (32 * elements_per_thread))))


@functools.cache
def flat_tiles(columns: int) -> tuple[int, int, int]:
    """Return rows and columns of an element-wise kernel's tile of 2048 elements, and the number of tiles in a row."""
    block = max(4, min(2048, next_power_of_2(columns)))
    return min(64, 2048 // block), block, ceil_div(columns, block)


def sum_partials(partials: Tensor, first: Tensor, second: Tensor | None = None, accumulate: bool = False) -> None:
    """Write the sums over P of float32 `partials` `[1 or 2, P, D]` into `first` and `second` `[D]`, in a fixed order.

    With `accumulate`, add the sums to the values of `first` and `second`.
    """
    S, P, D = partials.shape
    launch(
        _sum_partials_kernel, (ceil_div(D, 32), S, 1), num_warps=4,
        partials_ptr=partials, first_ptr=first, second_ptr=second,
        P=P, D=D, ACCUMULATE=accumulate, BLOCK_P=64, BLOCK_D=32,
    )  # fmt: skip


@triton.jit
def _sum_partials_kernel(
    partials_ptr, first_ptr, second_ptr, P,
    D: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    partials_ptr += which.to(tl.int64) * P * D
    total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = (start + tl.arange(0, BLOCK_P)).to(tl.int64)[:, None]
        total += tl.load(partials_ptr + rows * D + cols[None, :], mask=(rows < P) & (cols < D)[None, :], other=0.0)
    column = tl.sum(total, 0)
    if which == 0:
        _store_sum(first_ptr, column, cols, D, ACCUMULATE)
    elif second_ptr is not None:
        _store_sum(second_ptr, column, cols, D, ACCUMULATE)


@triton.jit
def _store_sum(sum_ptr, column, cols, D, ACCUMULATE):
    if ACCUMULATE:
        column += tl.load(sum_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    tl.store(sum_ptr + cols, column.to(sum_ptr.dtype.element_ty), mask=cols < D)
