"""The router of experts: logits, scores, the K best experts of each token and their weights, by one kernel.

    logits = x W^T,  scores = softmax(logits) or sigmoid(logits),  experts = the K largest of scores + bias
    weights = c scores[experts],  divided by the sum of scores[experts] if they are normalized
    dx = dlogits W,  dW = dlogits^T x

A program holds all scores of its tokens and takes the largest of them K times. A stable sort, the reference, also sorts
the E - K scores that nobody needs. The product of two bfloat16 numbers is exact in float32, in which a GPU's tensor
cores sum. There backward splits dlogits, in float32, into three bfloat16 matrices with 8 of its 24 bits each: side by
side they are one factor of both products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import check_shapes
from ._dispatch import operator, refuse_second_derivative, runs_triton
from ._main_grad import add_product
from ._math import exp
from ._rows import as_rows, ceil_div, contiguous, next_power_of_2
from ._torch import has_no_values
from ._triton import launch, tl, triton

_BF16, _F32, _TINY = torch.bfloat16, torch.float32, torch.finfo(torch.float32).tiny
MOST, MOST_LOGITS = 1024, {_BF16: 512, _F32: 128}  # experts: a program holds all scores, and if it multiplies all sums


def route(
    x: Tensor, weight: Tensor, k: int, bias: Tensor | None = None, *, score: str = "softmax", normalize: bool = True,
    scale: float = 1.0, groups: tuple[int, int] = (1, 1), experts: Tensor | None = None, impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Score the experts for each token, and return the K best and their weights.

    Args:
        x: `[N, D]`.
        weight: `[E, D]`. If both are bfloat16, x itself is kept for backward; otherwise a float32 copy.
        k: K, from 1 to E.
        bias: `[E]`, added to the scores for the choice alone; None: 0.
        score: "softmax" or "sigmoid".
        normalize: whether the weights of a token are divided by their sum.
        scale: c, the factor of the weights.
        groups: into how many groups E is cut, and in how many of them a token may choose.
        experts: int64 `[N, K]` in place of the choice.
        impl: `"triton"`, `"reference"`, or `None`: torch's product and `top_k`, until a GPU has shown that the one
            kernel is faster. It serves E up to 512 in bfloat16 and 128 in float32, and neither groups nor `experts`.

    Returns:
        `(logits, scores, experts, weights)`: `[N, E]`, `[N, E]`, int64 `[N, K]`, best first and ties to the lower
        index, and `[N, K]`; in float32, or float64 for float64. All but the experts have gradients.

    Raises:
        ValueError: shapes don't go together, K is not between 1 and E, or `impl` can't run here.

    Example:
        >>> _, _, experts, weights = route(torch.eye(2), torch.eye(3, 2), 2)
        >>> experts
        tensor([[0, 1],
                [1, 0]])
    """
    check_shapes(x=(x, "N D"), weight=(weight, "E D"), bias=(bias, "E"), experts=(experts, "N K"))
    plain = experts is None and groups[0] == groups[1] and x.dtype == weight.dtype
    if runs_triton(impl, x, "route") and plain and 1 <= k <= len(weight) <= MOST_LOGITS.get(x.dtype, 0):
        return _Route.apply(x, weight, bias, k, score == "softmax", normalize, scale)
    logits = router_linear(x, weight)
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    experts = _choose(scores.detach(), k, bias, groups, impl) if experts is None else experts
    weights = scores.gather(-1, experts)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    return logits, scores, experts, weights * scale


route_reference: partial[tuple[Tensor, ...]] = partial(route, impl="reference")


def top_k(scores: Tensor, k: int, bias: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """Return the indices of the largest scores + bias of each row.

    Args:
        scores: `[N, E]`.
        k: K, from 1 to E.
        bias: `[E]`, added before the choice, in float32 (float64 for float64); None: 0.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `scores`.

    Returns:
        int64 `[N, K]`, best first, ties to the lower index. It has no gradient.

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


@torch.no_grad()
def _choose(scores: Tensor, k: int, bias: Tensor | None, groups: tuple[int, int], impl: str | None) -> Tensor:
    """Return the K best experts `[N, K]` of scores `[N, E]`, best first. Ties go to the lower index."""
    if groups[1] < groups[0]:
        scores, bias = scores if bias is None else scores + bias.to(scores.dtype), None
        grouped = scores.unflatten(1, (groups[0], -1))
        best = min(-(-k // groups[1]), grouped.shape[-1])
        merit = grouped.sort(dim=-1, descending=True).values[..., :best].sum(-1)
        open_ = torch.zeros_like(merit, dtype=torch.bool).scatter_(1, top_k(merit, groups[1], impl=impl), True)
        scores = grouped.masked_fill(~open_[..., None], -math.inf).flatten(1)
    return top_k(scores, k, bias, impl=impl)


def router_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the logits `[N, E]` in float32 (float64 for float64), without float32 copies of bfloat16 tokens."""
    if x.dtype == weight.dtype == _BF16:
        return _RouterLinear.apply(x, weight)
    return router_linear_reference(x, weight)


def router_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `router_linear` under torch's own autograd."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide))


class _RouterLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return _linear_op(x, weight)

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative("router_linear", "float32 weights")
        return _products(ctx, in_three_parts(dy))


def in_three_parts(x: Tensor) -> Tensor:
    """Split float32 `[N, E]` into three bfloat16 matrices `[N, 3 E]`, whose sum it is."""
    high = x.to(_BF16)
    middle = (x - high).to(_BF16)
    return torch.cat([high, middle, (x - high - middle).to(_BF16)], 1)


def _products(ctx: Any, parts: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return dx and dweight of dlogits, `[N, E]` or the three parts whose sum it is, `[N, 3 E]`."""
    x, weight, *_ = ctx.saved_tensors
    dx = _input_op(parts, weight) if ctx.needs_input_grad[0] else None
    return dx, _weight_op(parts, x, len(weight)).to(weight.dtype) if ctx.needs_input_grad[1] else None


@operator(
    "router_linear(Tensor x, Tensor weight) -> Tensor y", router_linear_reference,
    lambda x, weight, **_: 2 * x[0] * x[1] * weight[0],
)  # fmt: skip
def _linear_op(x: Tensor, weight: Tensor) -> Tensor:
    if has_no_values(x):
        return x.new_empty((len(x), len(weight)), dtype=torch.float32)
    return add_product(None, x, weight.t(), torch.float32)


@operator(
    "router_linear_input(Tensor parts, Tensor weight) -> Tensor dx",
    flops=lambda parts, weight, **_: 2 * parts[0] * weight[0] * weight[1],
)
def _input_op(parts: Tensor, weight: Tensor) -> Tensor:
    if has_no_values(parts):
        return weight.new_empty((len(parts), weight.shape[1]))
    return parts @ weight.repeat(parts.shape[1] // len(weight), 1)


@operator(
    "router_linear_weight(Tensor parts, Tensor x, SymInt E) -> Tensor dweight",
    flops=lambda parts, x, E, **_: 2 * parts[0] * E * x[1],
)
def _weight_op(parts: Tensor, x: Tensor, E: int) -> Tensor:
    if has_no_values(parts):
        return parts.new_empty((E, x.shape[1]), dtype=torch.float32)
    return add_product(None, parts.t(), x, torch.float32).view(-1, E, x.shape[1]).sum(0)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, k, softmax, *how):
        logits, scores, experts, weights = _route_op(x, weight, bias, k, softmax, *how)
        ctx.save_for_backward(x, weight, scores, experts)
        ctx.mark_non_differentiable(experts)
        ctx.set_materialize_grads(False)
        ctx.how = softmax, *how
        return logits, scores, experts, weights

    @staticmethod
    def backward(ctx, dlogits, dscores, _, dweights):
        refuse_second_derivative("route")
        x, _, scores, experts = ctx.saved_tensors
        parts = _route_backward_op(scores, experts, dlogits, dscores, dweights, x.dtype == _BF16, *ctx.how)
        return *_products(ctx, parts), *[None] * 5


@operator(
    "route(Tensor x, Tensor weight, Tensor? bias, SymInt k, bool softmax, bool normalize, float scale)"
    " -> (Tensor logits, Tensor scores, Tensor experts, Tensor weights)",
    flops=lambda x, weight, *_, **__: 2 * x[0] * x[1] * weight[0],
)
def _route_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, k: int, softmax: bool, normalize: bool, scale: float
) -> Iterator[tuple[Tensor, ...]]:
    N, E = len(x), len(weight)
    logits, scores, weights = (x.new_empty((N, n), dtype=_F32) for n in (E, E, k))
    experts = x.new_empty((N, k), dtype=torch.int64)
    yield logits, scores, experts, weights
    wide = next_power_of_2(E) // 128
    blocks = (16, 16) if x.dtype != _BF16 else (64, 64) if wide < 2 else (64 // wide, 32)  # sums of 64 x 128 at most
    given = {"weight_ptr": weight.contiguous(), "logits_ptr": logits, "scores_ptr": scores, "weights_ptr": weights}
    _launch_choice(x, E, bias, experts, *blocks, **given, SOFTMAX=softmax, NORMALIZE=normalize, scale=scale)


@operator("top_k(Tensor scores, SymInt k, Tensor? bias) -> Tensor indices")
def _top_k_op(scores: Tensor, k: int, bias: Tensor | None) -> Iterator[Tensor]:
    N, E = scores.shape
    indices = scores.new_empty((N, k), dtype=torch.int64)
    yield indices
    given = dict.fromkeys(("weight_ptr", "logits_ptr", "scores_ptr", "weights_ptr"))
    rows = max(2048 // max(next_power_of_2(E), 16), 1)  # 16 scores a thread
    _launch_choice(scores, E, bias, indices, rows, 1, **given, SOFTMAX=False, NORMALIZE=False, scale=1.0)


def _launch_choice(x: Tensor, E: int, bias: Tensor | None, experts: Tensor, rows: int, D: int, **given: Any) -> None:
    """Launch the kernel for tokens, or for scores where it has no weight, with blocks of some rows and features."""
    (N, k), (x, stride), block_e = experts.shape, as_rows(x), max(next_power_of_2(E), 16)
    launch(
        _choice_kernel, (ceil_div(N, rows), 1, 1), num_warps=4 if rows * block_e <= 4096 else 8, x_ptr=x,
        bias_ptr=None if bias is None else bias.contiguous(), experts_ptr=experts, N=N, STRIDE=stride, D=x.shape[1],
        E=E, K=k, TINY=_TINY, BLOCK_N=rows, BLOCK_D=D, BLOCK_E=block_e, BLOCK_K=next_power_of_2(k), **given,
    )  # fmt: skip


@operator(
    "route_backward(Tensor scores, Tensor experts, Tensor? dlogits, Tensor? dscores, Tensor? dweights, bool split,"
    " bool softmax, bool normalize, float scale) -> Tensor parts"
)
def _route_backward_op(
    scores: Tensor, experts: Tensor, dlogits: Tensor | None, dscores: Tensor | None, dweights: Tensor | None,
    split: bool, softmax: bool, normalize: bool, scale: float,
) -> Iterator[Tensor]:  # fmt: skip
    (N, E), dtype = scores.shape, _BF16 if split else _F32
    parts = scores.new_empty((N, (1 + 2 * split) * E), dtype=dtype)
    yield parts
    block_e = max(next_power_of_2(E), 16)
    block_n = max(2048 // block_e, 1)
    dlogits, dscores, dweights = contiguous(dlogits, dscores, dweights)
    launch(
        _route_backward_kernel, (ceil_div(N, block_n), 1, 1), num_warps=4, scores_ptr=scores, experts_ptr=experts,
        dlogits_ptr=dlogits, dscores_ptr=dscores, dweights_ptr=dweights, parts_ptr=parts, N=N, scale=scale, E=E,
        K=experts.shape[1], SOFTMAX=softmax, NORMALIZE=normalize, SPLIT=split, TINY=_TINY, BLOCK_N=block_n,
        BLOCK_E=block_e,
    )  # fmt: skip


@triton.jit
def _choice_kernel(
    x_ptr, weight_ptr, bias_ptr, logits_ptr, scores_ptr, experts_ptr, weights_ptr, N, scale,
    STRIDE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, K: tl.constexpr, SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr, TINY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    cols, slots = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    open_ = (rows < N) & (cols < E)
    if weight_ptr is None:
        scores = tl.load(x_ptr + rows * STRIDE + cols, mask=open_, other=0.0).to(tl.float32)
    else:
        logits = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
        for start in range(0, D, BLOCK_D):
            inner = start + tl.arange(0, BLOCK_D)
            x = tl.load(x_ptr + rows * STRIDE + inner[None, :], mask=(rows < N) & (inner < D)[None, :], other=0.0)
            w = tl.load(weight_ptr + cols * D + inner[:, None], mask=(cols < E) & (inner < D)[:, None], other=0.0)
            logits = tl.dot(x, w, logits, input_precision="ieee")
        tl.store(logits_ptr + rows * E + cols, logits, mask=open_)
        if SOFTMAX:
            logits = tl.where(cols < E, logits, float("-inf"))
            powers = exp(logits - tl.max(logits, 1, keep_dims=True))
            scores = powers / tl.sum(powers, 1, keep_dims=True)
        else:
            scores = 1.0 / (1.0 + exp(-logits))
        tl.store(scores_ptr + rows * E + cols, scores, mask=open_)
    ranked = scores
    if bias_ptr is not None:
        ranked += tl.load(bias_ptr + cols, mask=cols < E, other=0.0).to(tl.float32)
    ranked = tl.where(ranked != ranked, float("inf"), ranked)
    experts, weights = tl.zeros((BLOCK_N, BLOCK_K), tl.int32), tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k in range(K):
        best = tl.max(tl.where(open_, ranked, float("-inf")), 1, keep_dims=True)
        index = tl.min(tl.where(open_ & (ranked == best), cols, BLOCK_E), 1, keep_dims=True)
        experts = tl.where(slots == k, index, experts)
        if weights_ptr is not None:
            weight = tl.sum(tl.where(cols == index, scores, 0.0), 1, keep_dims=True)
            weights = tl.where(slots == k, weight, weights)
        open_ &= cols != index
    stored = (rows < N) & (slots < K)
    tl.store(experts_ptr + rows * K + slots, experts.to(tl.int64), mask=stored)
    if weights_ptr is not None:
        if NORMALIZE:
            weights /= tl.maximum(tl.sum(weights, 1, keep_dims=True), TINY)
        tl.store(weights_ptr + rows * K + slots, weights * scale, mask=stored)


@triton.jit
def _route_backward_kernel(
    scores_ptr, experts_ptr, dlogits_ptr, dscores_ptr, dweights_ptr, parts_ptr, N, scale,
    E: tl.constexpr, K: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, SPLIT: tl.constexpr,
    TINY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    cols = tl.arange(0, BLOCK_E)[None, :]
    there, at = (rows < N) & (cols < E), rows * E + cols
    scores = tl.load(scores_ptr + at, mask=there, other=0.0)
    dscores = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    if dscores_ptr is not None:
        dscores = tl.load(dscores_ptr + at, mask=there, other=0.0)
    if dweights_ptr is not None:
        total, inner = tl.zeros((BLOCK_N, 1), tl.float32), tl.zeros((BLOCK_N, 1), tl.float32)
        if NORMALIZE:
            for k in range(K):
                index = tl.load(experts_ptr + rows * K + k, mask=rows < N, other=0)
                score = tl.load(scores_ptr + rows * E + index, mask=rows < N, other=0.0)
                total += score
                inner += score * tl.load(dweights_ptr + rows * K + k, mask=rows < N, other=0.0)
            inner = tl.where(total >= TINY, inner / tl.maximum(total, TINY), 0.0)
            scale /= tl.maximum(total, TINY)
        for k in range(K):
            index = tl.load(experts_ptr + rows * K + k, mask=rows < N, other=0)
            dweight = tl.load(dweights_ptr + rows * K + k, mask=rows < N, other=0.0)
            dscores += tl.where(cols == index, (dweight - inner) * scale, 0.0)
    if SOFTMAX:
        dy = scores * (dscores - tl.sum(scores * dscores, 1, keep_dims=True))
    else:
        dy = scores * (1.0 - scores) * dscores
    if dlogits_ptr is not None:
        dy += tl.load(dlogits_ptr + at, mask=there, other=0.0)
    if SPLIT:
        for part in range(3):
            high = dy.to(tl.bfloat16)
            tl.store(parts_ptr + rows * 3 * E + part * E + cols, high, mask=there)
            dy -= high.to(tl.float32)
    else:
        tl.store(parts_ptr + at, dy, mask=there)
