"""Choose the K largest scores of each row, best first: the experts of a token. Ties go to the lower index.

A program holds all scores of its rows and takes the largest of them K times. A stable sort, the reference, also sorts
the E - K scores that nobody needs, and returns all values and all indices.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ._checks import check_shapes
from ._dispatch import operator, runs_triton
from ._rows import as_rows, ceil_div, next_power_of_2
from ._triton import launch, tl, triton

MOST = 1024  # scores of a row: a program holds all of them


def top_k(scores: Tensor, k: int, bias: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """Return the indices of the largest scores + bias of each row.

    Args:
        scores: `[N, E]`.
        k: K, from 1 to E.
        bias: `[E]`, added before the choice, in float32 (float64 for float64); None: 0.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `scores`.

    Returns:
        int64 `[N, K]`, best first. It has no gradient.

    Raises:
        ValueError: K is not between 1 and E, shapes don't go together, or `impl` can't run here.

    Note:
        NaN is at least as large as all other scores. Beside infinity, the lower index is first.

    Example:
        >>> top_k(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 3)
        tensor([[1, 2, 3]])
    """
    check_shapes(scores=(scores, "N E"), bias=(bias, "E"))
    if not 1 <= k <= scores.shape[1]:
        raise ValueError(f"k {k} is not between 1 and {scores.shape[1]}, the number of scores in a row")
    triton_runs = runs_triton(impl, scores, "top_k") and scores.shape[1] <= MOST
    return (_top_k_op if triton_runs else top_k_reference)(scores.detach(), k, bias)


def top_k_reference(scores: Tensor, k: int, bias: Tensor | None = None) -> Tensor:
    """Compute `top_k` in plain torch."""
    if bias is not None:
        exact = torch.promote_types(scores.dtype, torch.float32)
        scores = scores.to(exact) + bias.to(exact)
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


@operator("top_k(Tensor scores, SymInt k, Tensor? bias) -> Tensor indices")
def _top_k_op(scores: Tensor, k: int, bias: Tensor | None) -> Iterator[Tensor]:
    indices = scores.new_empty((len(scores), k), dtype=torch.int64)
    yield indices
    (N, E), (scores, stride) = scores.shape, as_rows(scores)
    block_e = max(next_power_of_2(E), 16)
    block_n = max(2048 // block_e, 1)  # 16 scores a thread
    launch(
        _top_k_kernel, (ceil_div(N, block_n), 1, 1), num_warps=4, scores_ptr=scores,
        bias_ptr=None if bias is None else bias.contiguous(), indices_ptr=indices, N=N, STRIDE=stride, E=E, K=k,
        BLOCK_N=block_n, BLOCK_E=block_e,
    )  # fmt: skip


@triton.jit
def _top_k_kernel(
    scores_ptr, bias_ptr, indices_ptr, N,
    STRIDE: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_E)[None, :]
    open_ = (rows < N)[:, None] & (cols < E)
    scores = tl.load(scores_ptr + rows[:, None] * STRIDE + cols, mask=open_, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        scores += tl.load(bias_ptr + cols, mask=cols < E, other=0.0).to(tl.float32)
    scores = tl.where(scores != scores, float("inf"), scores)
    for k in range(K):
        best = tl.max(tl.where(open_, scores, float("-inf")), 1)
        index = tl.min(tl.where(open_ & (scores == best[:, None]), cols, BLOCK_E), 1)
        tl.store(indices_ptr + rows * K + k, index.to(tl.int64), mask=rows < N)
        open_ &= cols != index[:, None]
