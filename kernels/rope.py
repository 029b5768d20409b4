"""Rotary position embedding of queries and keys in one launch, with an optional norm of each head before it.

    n  = x,  or x rstd g,  rstd = (mean(x^2) + eps)^(-1/2),  g = weight
    y  = n cos(t) + J n sin(t),  J (a, b) = (-b, a) on each pair of dimensions;  y = n beyond the table's

    dn = dy cos(t) - J dy sin(t),  dx = dn,  or rstd (g dn - x rstd mean(g dn x rstd))
    dweight = sum over tokens and heads of dn x rstd

Pairs are halves (i, i + R/2) or neighbours (2i, 2i + 1). The tables express scaled frequencies, and documents whose
positions start from 0.

Su et al., "RoFormer" (2021), section 3.2.2; the norm: Henry et al., "Query-Key Normalization for Transformers" (2020),
in its RMS form of Zhang and Sennrich (2019).

The backward pass rotates by the same kernel with the sine negated. Kernels compute in float32 and round once. They
read queries, keys and values in place in the packed projection and write the gradient packed, so no copy splits or
joins them. The gradients of the weights are summed in a fixed order, so they repeat bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._checks import check_beside, check_dtype, check_shapes
from ._dispatch import operator, refuse_second_derivative, runs_triton
from ._rope_kernels import norm_backward_kernel, rotate_kernel
from ._rows import MAX_ROWS, by_heads, ceil_div, contiguous, next_power_of_2, sum_partials
from ._triton import launch, multiprocessors


class _Options(NamedTuple):
    """The table and the norm, in the order in which the operators take them."""

    cos: Tensor
    sin: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    interleaved: bool


def rope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, interleaved: bool = False, q_weight: Tensor | None = None,
    k_weight: Tensor | None = None, eps: float = 1e-6, impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Apply rotary position embedding: rotate each pair of dimensions of queries and keys by the angle of its token.

    Args:
        q: `[B, T, H, K]`, float32, bfloat16 or float16 (the reference takes float64 too), with any strides.
        k: `[B, T, Hkv, K]` of the same dtype, or `None`.
        cos, sin: `[T, R/2]` or `[B, T, R/2]`, of any such dtype, R <= K. The kernel computes no gradient for them.
        interleaved: pairs are (2i, 2i+1) instead of (i, i + R/2).
        q_weight, k_weight: `[K]` gains of an RMS norm of each head before the rotation; both or none.
        eps: added to the mean square.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `q`.

    Returns:
        The rotated `q` and `k`, of the same shapes and dtype; `None` for a `k` of `None`.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, or `impl` can't run here.

    Example:
        >>> angles = torch.outer(torch.arange(6.0), 10000.0 ** (-torch.arange(4) / 4))
        >>> q, k = rope(torch.randn(1, 6, 4, 8), torch.randn(1, 6, 2, 8), angles.cos(), angles.sin())
        >>> tuple(q.shape), tuple(k.shape)
        ((1, 6, 4, 8), (1, 6, 2, 8))
    """
    options = _Options(cos, sin, q_weight, k_weight, eps, interleaved)
    if not _check(q, k, options, impl):
        return _reference(q, k, options)
    if k is None:
        return _Rope.apply(q, None, (q.shape[2], 0), *options), None
    return _Rope.apply(q, k, (q.shape[2], k.shape[2]), *options)


rope_reference: functools.partial[tuple[Tensor, Tensor | None]] = functools.partial(rope, impl="reference")


def rope_qkv(
    qkv: Tensor, num_heads: int, num_kv_heads: int, cos: Tensor, sin: Tensor, *, interleaved: bool = False,
    q_weight: Tensor | None = None, k_weight: Tensor | None = None, eps: float = 1e-6, impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Apply `rope` to a packed projection; its gradient is packed too.

    Args:
        qkv: `[B, T, (H + 2 Hkv) K]`: the queries of all heads, then the keys, then the values.
        num_heads, num_kv_heads: H and Hkv of this `qkv`.
        cos, sin, interleaved, q_weight, k_weight, eps, impl: the parameters of `rope`.

    Returns:
        q `[B, T, H, K]` and k `[B, T, Hkv, K]`, rotated, and v `[B, T, Hkv, K]`, a view of `qkv`.

    Raises:
        ValueError: as `rope`, or the width isn't a multiple of the number of heads.

    Example:
        >>> angles = torch.outer(torch.arange(6.0), 10000.0 ** (-torch.arange(4) / 4))
        >>> q, k, v = rope_qkv(torch.randn(1, 6, 8 * 8), 4, 2, angles.cos(), angles.sin())
    """
    heads = num_heads + 2 * num_kv_heads
    if qkv.dim() != 3 or min(num_heads, num_kv_heads) < 1 or qkv.shape[2] % heads:
        raise ValueError(f"qkv {tuple(qkv.shape)} is not [B, T, ({num_heads} + 2 x {num_kv_heads}) heads x head_dim]")
    # torch 2.11 can't compile `unflatten` under a default device
    qkv = qkv.view(*qkv.shape[:2], heads, qkv.shape[2] // heads)
    q, k, v = _parts(qkv, None, num_heads, num_kv_heads)
    options = _Options(cos, sin, q_weight, k_weight, eps, interleaved)
    if not _check(q, k, options, impl):
        return *_reference(q, k, options), v  # pyright: ignore[reportReturnType]
    return _Rope.apply(qkv, None, (num_heads, num_kv_heads), *options)


def _reference(q: Tensor, k: Tensor | None, options: _Options) -> tuple[Tensor, Tensor | None]:
    cos, sin, q_weight, k_weight, eps, interleaved = options
    exact = torch.promote_types(q.dtype, torch.float32)
    cos, sin = (t.to(exact).unsqueeze(-2) for t in (cos, sin))
    R = 2 * cos.shape[-1]

    def rotate(x: Tensor | None, weight: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        n = x.to(exact)
        if weight is not None:
            n = n * torch.rsqrt(n.square().mean(-1, keepdim=True) + eps) * weight.to(exact)
        front, rest = n[..., :R], n[..., R:]
        a, b = (front[..., 0::2], front[..., 1::2]) if interleaved else front.chunk(2, -1)
        rotated = (a * cos - b * sin, b * cos + a * sin)
        front = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
        return (torch.cat([front, rest], -1) if rest.shape[-1] else front).to(x.dtype)

    return rotate(q, q_weight), rotate(k, k_weight)  # pyright: ignore[reportReturnType]


def _parts(x: Tensor, k: Tensor | None, H: int, Hkv: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return q, k and v: `x` is q where k is given or there are no KV heads, and all three packed otherwise."""
    if k is not None or Hkv == 0:
        return x, k, None
    return x[:, :, :H], x[:, :, H : H + Hkv], x[:, :, H + Hkv :]


def _check(q: Tensor, k: Tensor | None, options: _Options, impl: str | None) -> bool:
    """Raise `ValueError` unless the inputs go together; return whether the kernel runs, not the reference."""
    cos, sin, q_weight, k_weight = options[:4]
    check_dtype("q", q.dtype)
    table = "T R/2" if cos.dim() == 2 else "1 T R/2" if cos.shape[:1] == (1,) else "B T R/2"
    check_shapes(
        q=(q, "B T H K"), k=(k, "B T Hkv K"), cos=(cos, table), sin=(sin, table), q_weight=(q_weight, "K"),
        k_weight=(k_weight, "K"),
    )  # fmt: skip
    B, T, H, K = q.shape
    if H == 0 or not 0 < 2 * cos.shape[-1] <= K:
        raise ValueError(f"q {tuple(q.shape)} has {H} heads, and cos {tuple(cos.shape)} rotates R at most {K}")
    if k is not None and k.dtype != q.dtype:
        raise ValueError(f"k is {k.dtype}, but q is {q.dtype}: cast one of them")
    if (q_weight is None) != (k_weight is None) or (k is None and q_weight is not None):
        raise ValueError("q_weight and k_weight go together, and need a k")
    check_beside("q", q, k=k, cos=cos, sin=sin, q_weight=q_weight, k_weight=k_weight)
    if B * T > MAX_ROWS:
        raise ValueError(f"{B * T} tokens are more than the {MAX_ROWS} that a kernel can count")
    runs = runs_triton(impl, q, "rope")
    if runs and (cos.requires_grad or sin.requires_grad):
        raise ValueError("the rope kernel has no gradient for cos and sin; detach them, or use impl='reference'")
    return runs


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k, heads, *given):
        (H, Hkv), options = heads, _Options(*given)
        ctx.heads, ctx.packed, ctx.numbers = heads, k is None and Hkv > 0, options[4:]
        ctx.save_for_backward(*(None, None) if options.q_weight is None else (x, k), *options[:4])
        q, k, v = _parts(x, k, H, Hkv)
        y = _forward_op(q, k, *options)
        if Hkv == 0:
            return y
        rotated = torch.unsafe_split_with_sizes(y, (H, Hkv), 2)  # no views: torch 2.11 compiled loses their gradients
        return (*rotated, v) if ctx.packed else rotated

    @staticmethod
    def backward(ctx, dq, dk=None, dv=None):
        refuse_second_derivative("rope")
        x, k, *tensors = ctx.saved_tensors
        options, (H, Hkv) = _Options(*tensors, *ctx.numbers), ctx.heads
        q, k, _ = (None, None, None) if x is None else _parts(x, k, H, Hkv)
        dx, *dweights = _backward_op(dq, dk, dv, q, k, *options)
        if options.q_weight is None:
            dweights = None, None
        whole = ctx.packed or Hkv == 0
        dx, dk = (dx, None) if whole else (dx[:, :, :H], dx[:, :, H:])
        return dx, dk, *[None] * 3, *dweights, *[None] * 2


_OPTIONS = "Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, float eps, bool interleaved"


@operator(f"rope_forward(Tensor q, Tensor? k, {_OPTIONS}) -> Tensor y")
def _forward_op(q: Tensor, k: Tensor | None, *given: Any) -> Iterator[Tensor]:
    y = q.new_empty((*q.shape[:2], q.shape[2] + (0 if k is None else k.shape[2]), q.shape[3]))
    yield y
    _rotate(q, k, None, y, _Options(*given), back=False)


@operator(
    f"rope_backward(Tensor dq, Tensor? dk, Tensor? dv, Tensor? q, Tensor? k, {_OPTIONS})"
    " -> (Tensor dx, Tensor dq_weight, Tensor dk_weight)"
)
def _backward_op(
    dq: Tensor, dk: Tensor | None, dv: Tensor | None, q: Tensor | None, k: Tensor | None, *given: Any
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    options = _Options(*given)
    dx = dq.new_empty((*dq.shape[:2], sum(0 if t is None else t.shape[2] for t in (dq, dk, dv)), dq.shape[3]))
    weights = options.q_weight, options.k_weight
    dq_weight, dk_weight = (dq.new_empty(0) if t is None else t.new_empty(t.shape) for t in weights)
    yield dx, dq_weight, dk_weight
    if options.q_weight is None:
        return _rotate(dq, dk, dv, dx, options, back=True)
    B, T, _, K = dq.shape
    tile = _tile(dx, dq, dk, elements=2048)
    programs = min(ceil_div(B * T, tile[0]), 2 * multiprocessors(dx.device))
    partials = dx.new_empty((2, programs, K), dtype=torch.float32)
    read = {"dq": dq, "dk": dk, "dv": dv, "q": q, "k": k}
    _launch(norm_backward_kernel, programs, read, options, tile, dx_ptr=dx, partials_ptr=partials)
    sum_partials(partials, dq_weight, dk_weight)


def _rotate(q: Tensor, k: Tensor | None, v: Tensor | None, y: Tensor, options: _Options, back: bool) -> None:
    """Rotate q and k, by the negative angles to go `back`, and copy v, into y; the way back has no norm."""
    tile = _tile(y, q, k, elements=4096)
    programs = ceil_div(y.shape[0] * y.shape[1], tile[0])
    _launch(rotate_kernel, programs, {"q": q, "k": k, "v": v}, options, tile, y_ptr=y, BACK=back)


def _launch(
    kernel: Any, programs: int, heads: dict[str, Tensor | None], options: _Options, tile: tuple[int, int], **others: Any
) -> None:
    """Launch a kernel on queries, keys and values, or their gradients: the first three of the heads.

    BATCHED: each sample has rows of the table of its own. HALF: pairs; BLOCK_R, BLOCK_REST and BLOCK_K are powers of
    two that cover the pairs, the other dimensions, and all K.
    """
    q, k, v = list(heads.values())[:3]
    assert q is not None
    B, T, H, K = q.shape
    KV, V = (0 if t is None else t.shape[2] for t in (k, v))
    cos, sin, q_weight, k_weight = contiguous(*options[:4])
    if cos.dim() == 3 and cos.shape[0] == 1:
        cos, sin = cos[0], sin[0]
    half = cos.shape[-1]
    launch(
        kernel, (programs, 1 + (k is not None) + (v is not None), 1), num_warps=4, **by_heads(**heads),
        cos_ptr=cos, sin_ptr=sin, q_weight_ptr=q_weight, k_weight_ptr=k_weight, eps=options.eps,
        M=B * T, T=T, H=H, KV=KV, N=H + KV + V, K=K, BATCHED=cos.dim() == 3, INTERLEAVED=options.interleaved,
        HALF=half, BLOCK_R=next_power_of_2(half), BLOCK_REST=next_power_of_2(K - 2 * half) if 2 * half < K else 0,
        BLOCK_K=next_power_of_2(K), BLOCK_T=tile[0], BLOCK_H=tile[1], **others,
    )  # fmt: skip


def _tile(y: Tensor, q: Tensor, k: Tensor | None, elements: int) -> tuple[int, int]:
    block_h = min(8, next_power_of_2(max(q.shape[2], 1 if k is None else k.shape[2])))
    return max(1, min(64, elements // (block_h * next_power_of_2(y.shape[3])))), block_h
