"""Rotary position embedding of queries and keys in one launch, with an optional norm of each head before it.

    n  = x,  or x rstd g,  rstd = (mean(x^2) + eps)^(-1/2),  g = weight, or 1 + weight if zero-centred
    y  = n cos(t) + J n sin(t),  J (a, b) = (-b, a) on each pair of dimensions;  y = n beyond the table's

    dn = dy cos(t) - J dy sin(t),  dx = dn,  or rstd (g dn - x rstd mean(g dn x rstd))
    dweight = sum over tokens and heads of dn x rstd

Pairs are halves (i, i + R/2) or neighbours (2i, 2i + 1). What scales the frequencies, and documents that begin anew,
is in the tables or in the positions.

Su et al., "RoFormer" (2021), section 3.2.2; the norm: Henry et al., "Query-Key Normalization for Transformers" (2020),
in its RMS form of Zhang and Sennrich (2019).

The turn back is the same kernel with the sine negated. Kernels compute in float32 and round once. They read queries,
keys and values where they lie in the packed projection, and the gradient is written packed, so nothing is split or
joined by a copy. A program takes some tokens, loads their cosines and sines once, and goes over the heads. The weights'
gradients are summed in two stages of fixed order, so they repeat bit for bit.
"""

# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
from torch import Tensor

from ._dispatch import REFERENCE_DTYPES, define, launches, outside, refuse_second_derivative, runs_triton, tl, triton
from ._launch import launch, multiprocessors
from ._rows import MAX_ROWS, ceil_div, next_power_of_2, sum_partials


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Turn each pair of dimensions of queries and keys by its angle.

    Args:
        q: `[B, T, H, K]`, float32, bfloat16 or float16 (the reference takes float64 too), with any strides.
        k: `[B, T, Hkv, K]` of the same dtype, or `None`.
        cos, sin: `[T, R/2]` or `[B, T, R/2]`, of any such dtype, R <= K; with positions `[P, R/2]`. The kernel has no
            gradient for them.
        positions: `[T]` or `[B, T]` int64, the row of the table for each token, in 0 .. P-1. The kernel makes NaN of
            tokens with others, and the reference on a CPU refuses them.
        interleaved: pairs are (2i, 2i+1) instead of (i, i + R/2).
        q_weight, k_weight: `[K]` gains of an RMS norm of each head before the turn; both or none.
        eps: added to the mean square.
        zero_centered: the gain is `1 + weight`.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `q`.

    Returns:
        The turned `q` and `k`, of the same shapes and dtype; `None` for a `k` of `None`.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, or `impl` can't run here.
    """
    _check(q, k, cos, sin, positions, q_weight, k_weight)
    how = (cos, sin, positions, q_weight, k_weight, eps, zero_centered, interleaved)
    if not _runs_triton(impl, q, cos, sin):
        return _reference(q, k, *how)
    if k is None:
        return _Rope.apply(q, None, q.shape[2], 0, *how), None
    return _Rope.apply(q, k, q.shape[2], k.shape[2], *how)


def rope_qkv(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`rope` of a packed projection, whose gradient is packed too.

    Args:
        qkv: `[B, T, (H + 2 Hkv) K]`: the queries of all heads, then the keys, then the values.
        num_heads, num_kv_heads: H and Hkv, those in `qkv`.
        cos, sin, positions, interleaved, q_weight, k_weight, eps, zero_centered, impl: as of `rope`.

    Returns:
        q `[B, T, H, K]` and k `[B, T, Hkv, K]`, turned, and v `[B, T, Hkv, K]`, which is a view of `qkv`.

    Raises:
        ValueError: as `rope`, or the width isn't a multiple of the number of heads.
    """
    heads = num_heads + 2 * num_kv_heads
    if qkv.dim() != 3 or min(num_heads, num_kv_heads) < 1 or qkv.shape[2] % heads:
        raise ValueError(f"qkv {tuple(qkv.shape)} is not [B, T, ({num_heads} + 2 x {num_kv_heads}) heads x head_dim]")
    qkv = qkv.unflatten(2, (heads, -1))
    q, k, v = _parts(qkv, None, num_heads, num_kv_heads)
    _check(q, k, cos, sin, positions, q_weight, k_weight)
    how = (cos, sin, positions, q_weight, k_weight, eps, zero_centered, interleaved)
    if not _runs_triton(impl, qkv, cos, sin):
        return *_reference(q, k, *how), v  # pyright: ignore[reportReturnType]
    return _Rope.apply(qkv, None, num_heads, num_kv_heads, *how)


def rope_reference(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`rope` in plain torch, under torch's own autograd; computes in float32, or float64 for a float64 `q`."""
    return _reference(q, k, cos, sin, positions, q_weight, k_weight, eps, zero_centered, interleaved)


def _reference(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    zero_centered: bool,
    interleaved: bool,
) -> tuple[Tensor, Tensor | None]:
    exact = torch.promote_types(q.dtype, torch.float32)
    wrong = None if positions is None else outside(positions, cos.shape[0])
    if wrong is not None:  # an index below 0 would count from the end
        raise ValueError(f"position {wrong} is in no row of tables of {cos.shape[0]}")
    cos, sin = ((t if positions is None else t[positions]).to(exact).unsqueeze(-2) for t in (cos, sin))
    R = 2 * cos.shape[-1]

    def turn(x: Tensor | None, weight: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        n = x.to(exact)
        if weight is not None:
            gain = weight.to(exact) + 1 if zero_centered else weight.to(exact)
            n = n * torch.rsqrt(n.square().mean(-1, keepdim=True) + eps) * gain
        front, rest = n[..., :R], n[..., R:]
        a, b = (front[..., 0::2], front[..., 1::2]) if interleaved else front.chunk(2, -1)
        turned = (a * cos - b * sin, b * cos + a * sin)
        front = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
        return (torch.cat([front, rest], -1) if rest.shape[-1] else front).to(x.dtype)

    return turn(q, q_weight), turn(k, k_weight)  # pyright: ignore[reportReturnType]


def _parts(x: Tensor, k: Tensor | None, H: int, Hkv: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """q, k and v, of which `x` is the first or, without a `k` beside it, all."""
    if k is not None or Hkv == 0:
        return x, k, None
    return x[:, :, :H], x[:, :, H : H + Hkv], x[:, :, H + Hkv :]


def _runs_triton(impl: str | None, x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    runs = runs_triton(impl, x)
    if runs and (cos.requires_grad or sin.requires_grad):
        raise ValueError("the rope kernel has no gradient for cos and sin; detach them, or use impl='reference'")
    return runs


def _check(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
) -> None:
    if q.dim() != 4 or q.dtype not in REFERENCE_DTYPES:
        raise ValueError(f"q is {q.dtype} {tuple(q.shape)}; it must be floating, [B, T, heads, head_dim]")
    B, T, _, K = q.shape
    if k is not None and (k.dim() != 4 or (*k.shape[:2], k.shape[3]) != (B, T, K) or k.dtype != q.dtype):
        raise ValueError(f"k is {k.dtype} {tuple(k.shape)}, which does not go with q of {q.dtype} {tuple(q.shape)}")
    if cos.shape != sin.shape or cos.dim() not in (2, 3) or not 0 < 2 * cos.shape[-1] <= K:
        raise ValueError(
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must be of one shape, [..., T, R/2], R at most {K}"
        )
    if positions is None:
        if tuple(cos.shape[:-1]) not in ((T,), (B, T), (1, T)):
            raise ValueError(f"cos has shape {tuple(cos.shape)}, but q {tuple(q.shape)} has {B} rows of {T} tokens")
    elif tuple(positions.shape) not in ((T,), (B, T)) or positions.dtype != torch.int64 or cos.dim() != 2:
        raise ValueError(
            f"positions are {positions.dtype} {tuple(positions.shape)} into tables {tuple(cos.shape)}; "
            f"they must be int64, ({T},) or ({B}, {T}), into tables [P, R/2]"
        )
    if (q_weight is None) != (k_weight is None) or (k is None and q_weight is not None):
        raise ValueError("q_weight and k_weight go together, and need a k")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and weight.shape != (K,):
            raise ValueError(f"{name} has shape {tuple(weight.shape)}, but head_dim is {K}")
    for other in (k, cos, sin, positions, q_weight, k_weight):
        if other is not None and other.device != q.device:
            raise ValueError(f"an input is on {other.device}, but q is on {q.device}")
        if other is not None and (other.dtype == torch.float64) > (q.dtype == torch.float64):
            raise ValueError(f"an input is torch.float64, which does not go with q of {q.dtype}")
    if B * T > MAX_ROWS:
        raise ValueError(f"{B * T} tokens are more than the {MAX_ROWS} that a kernel can count")


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, k, H, Hkv, cos, sin, positions, q_weight, k_weight, eps, zero_centered, interleaved
    ):  # fmt: skip
        packed = k is None and Hkv > 0
        ctx.packed, ctx.heads, ctx.how = packed, (H, Hkv), (eps, zero_centered, interleaved)
        kept = (None, None) if q_weight is None else (x, k)
        ctx.save_for_backward(*kept, cos, sin, positions, q_weight, k_weight)
        q, k, v = _parts(x, k, H, Hkv)
        y = _forward_op(q, k, cos, sin, positions, q_weight, k_weight, eps, zero_centered, interleaved)
        if Hkv == 0:
            return y
        turned = torch.unsafe_split_with_sizes(
            y, (H, Hkv), 2
        )  # not views: torch 2.11 compiled loses gradients of those
        return (*turned, v) if packed else turned

    @staticmethod
    def backward(ctx, dq, dk=None, dv=None):
        refuse_second_derivative("rope")
        x, k, cos, sin, positions, q_weight, k_weight = ctx.saved_tensors
        H, Hkv = ctx.heads
        q, k, _ = (None, None, None) if x is None else _parts(x, k, H, Hkv)
        dx, dq_weight, dk_weight = _backward_op(dq, dk, dv, q, k, cos, sin, positions, q_weight, k_weight, *ctx.how)
        whole = ctx.packed or Hkv == 0
        dweights = (None, None) if q_weight is None else (dq_weight, dk_weight)
        return dx if whole else dx[:, :, :H], None if whole else dx[:, :, H:], *[None] * 5, *dweights, *[None] * 3


def _empty_forward(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    zero_centered: bool,
    interleaved: bool,
) -> Tensor:
    heads = q.shape[2] + (0 if k is None else k.shape[2])
    return q.new_empty((*q.shape[:2], heads, q.shape[3]))


def _empty_backward(
    dq: Tensor,
    dk: Tensor | None,
    dv: Tensor | None,
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    zero_centered: bool,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    heads = dq.shape[2] + sum(0 if t is None else t.shape[2] for t in (dk, dv))
    dx = dq.new_empty((*dq.shape[:2], heads, dq.shape[3]))
    dq_weight, dk_weight = (dq.new_empty(0) if t is None else t.new_empty(t.shape) for t in (q_weight, k_weight))
    return dx, dq_weight, dk_weight


_forward_op = define(
    "rope_forward(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? positions, Tensor? q_weight, Tensor? k_weight,"
    " float eps, bool zero_centered, bool interleaved) -> Tensor y",
    _empty_forward,
)
_backward_op = define(
    "rope_backward(Tensor dq, Tensor? dk, Tensor? dv, Tensor? q, Tensor? k, Tensor cos, Tensor sin, Tensor? positions,"
    " Tensor? q_weight, Tensor? k_weight, float eps, bool zero_centered, bool interleaved)"
    " -> (Tensor dx, Tensor dq_weight, Tensor dk_weight)",
    _empty_backward,
)


@launches(_forward_op)
def _launch_forward(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    zero_centered: bool,
    interleaved: bool,
) -> Tensor:
    y = _empty_forward(q, k, cos, sin, positions, q_weight, k_weight, eps, zero_centered, interleaved)
    if y.numel() == 0:
        return y
    weights = [None if weight is None else weight.contiguous() for weight in (q_weight, k_weight)]
    _launch_turn((q, k, None), cos, sin, positions, weights, y, eps, (zero_centered, interleaved, False))
    return y


@launches(_backward_op)
def _launch_backward(
    dq: Tensor,
    dk: Tensor | None,
    dv: Tensor | None,
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    zero_centered: bool,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dq_weight, dk_weight = outs = _empty_backward(
        dq, dk, dv, q, k, cos, sin, positions, q_weight, k_weight, eps, zero_centered, interleaved
    )
    if dx.numel() == 0:
        dq_weight.zero_()
        dk_weight.zero_()
        return outs
    if q_weight is None or k_weight is None:
        _launch_turn((dq, dk, dv), cos, sin, positions, (None, None), dx, eps, (False, interleaved, True))
        return outs
    B, T, _, K = dq.shape
    gradients, gradient_strides = _by_heads(dq, dk, dv)
    inputs, input_strides = _by_heads(q, k)
    table, table_sizes, constants = _table(cos, sin, positions)
    block_t, block_h = _tile(dx, dq, dk, elements=2048)
    programs = min(ceil_div(B * T, block_t), 2 * multiprocessors(dx.device))
    partials = dx.new_empty((2, programs, K), dtype=torch.float32)
    tensors = (*gradients, *inputs, *table, q_weight.contiguous(), k_weight.contiguous(), dx, partials)
    scalars = (B * T, T, *table_sizes, eps, *gradient_strides, *input_strides)
    constants = (*_sizes(dq, dk, dx), *constants, zero_centered, interleaved, block_t, block_h, *_blocks(K, cos))
    launch(_norm_backward_kernel, (programs, 2 + (dv is not None), 1), tensors, scalars, constants, num_warps=4)
    sum_partials(partials, dq_weight, dk_weight)
    return outs


def _launch_turn(heads, cos, sin, positions, weights, y: Tensor, eps: float, flags: tuple[bool, bool, bool]) -> None:
    B, T, _, K = y.shape
    tensors, strides = _by_heads(*heads)
    table, table_sizes, constants = _table(cos, sin, positions)
    block_t, block_h = _tile(y, heads[0], heads[1], elements=4096)
    grid = (ceil_div(B * T, block_t), sum(t is not None for t in heads), 1)
    scalars = (B * T, T, *table_sizes, eps, *strides)
    constants = (*_sizes(heads[0], heads[1], y), *constants, *flags, block_t, block_h, *_blocks(K, cos))
    launch(_turn_kernel, grid, (*tensors, *table, *weights, y), scalars, constants, num_warps=4)


def _by_heads(*heads: Tensor | None) -> tuple[list[Tensor | None], list[int]]:
    """Tensors `[B, T, H, K]` with K contiguous, and their other strides."""
    seen = [t if t is None or t.stride(3) == 1 else t.contiguous() for t in heads]
    return seen, [0 if t is None else t.stride(dim) for t in seen for dim in range(3)]


def _table(cos: Tensor, sin: Tensor, positions: Tensor | None) -> tuple[list[Tensor | None], tuple[int], tuple[bool]]:
    """The table and positions, its rows, and whether each sample has its own."""
    if cos.dim() == 3 and cos.shape[0] == 1:
        cos, sin = cos[0], sin[0]
    batched = cos.dim() == 3 if positions is None else positions.dim() == 2
    where = None if positions is None else positions.contiguous()
    return [cos.contiguous(), sin.contiguous(), where], (cos.numel() // cos.shape[-1],), (batched,)


def _sizes(q: Tensor, k: Tensor | None, y: Tensor) -> tuple[int, int, int, int]:
    """H, Hkv, all heads of `y`, and K."""
    return q.shape[2], 0 if k is None else k.shape[2], y.shape[2], y.shape[3]


def _blocks(K: int, cos: Tensor) -> tuple[int, int, int, int]:
    """Pairs, and the powers of two that cover the pairs, what lies beyond them, and all."""
    half = cos.shape[-1]
    rest = next_power_of_2(K - 2 * half) if half * 2 < K else 0
    return half, next_power_of_2(half), rest, next_power_of_2(K)


def _tile(y: Tensor, q: Tensor, k: Tensor | None, elements: int) -> tuple[int, int]:
    """Tokens and heads of a program's tile."""
    block_h = min(8, next_power_of_2(max(q.shape[2], 1 if k is None else k.shape[2])))
    return max(1, min(64, elements // (block_h * next_power_of_2(y.shape[3])))), block_h


@triton.jit
def _load_pairs(ptr, offsets, live, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
                BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK_R)[None, None, :]
        both = tl.load(ptr + offsets + cols, mask=live & (cols < 2 * HALF), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (BLOCK_T, BLOCK_H, BLOCK_R, 2)))
    else:
        cols = tl.arange(0, BLOCK_R)[None, None, :]
        a = tl.load(ptr + offsets + cols, mask=live & (cols < HALF), other=0.0).to(tl.float32)
        b = tl.load(ptr + offsets + HALF + cols, mask=live & (cols < HALF), other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_pairs(ptr, offsets, live, a, b, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
                 BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    a, b = a.to(ptr.dtype.element_ty), b.to(ptr.dtype.element_ty)
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK_R)[None, None, :]
        both = tl.reshape(tl.join(a, b), (BLOCK_T, BLOCK_H, 2 * BLOCK_R))
        tl.store(ptr + offsets + cols, both, mask=live & (cols < 2 * HALF))
    else:
        cols = tl.arange(0, BLOCK_R)[None, None, :]
        tl.store(ptr + offsets + cols, a, mask=live & (cols < HALF))
        tl.store(ptr + offsets + HALF + cols, b, mask=live & (cols < HALF))


@triton.jit
def _load_gains(weight_ptr, HALF: tl.constexpr, K: tl.constexpr, ZERO_CENTERED: tl.constexpr,
                INTERLEAVED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr):  # fmt: skip
    everywhere = tl.full((1, 1, 1), True, tl.int1)
    a, b = _load_pairs(weight_ptr, 0, everywhere, HALF, INTERLEAVED, 1, 1, BLOCK_R)
    cols = 2 * HALF + tl.arange(0, BLOCK_REST if BLOCK_REST else 1)[None, None, :]
    rest = tl.load(weight_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        a, b, rest = a + 1.0, b + 1.0, rest + 1.0
    return a, b, rest


@triton.jit
def _load_turns(cos_ptr, sin_ptr, positions_ptr, rows, live, T, P,
                HALF: tl.constexpr, BATCHED: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    where = rows if BATCHED else rows % T
    if positions_ptr is not None:
        where = tl.load(positions_ptr + where, mask=live, other=0)
        live = live & (where >= 0) & (where < P)
    cols = tl.arange(0, BLOCK_R)[None, None, :]
    cos = tl.load(cos_ptr + where * HALF + cols, mask=live & (cols < HALF), other=float("nan")).to(tl.float32)
    sin = tl.load(sin_ptr + where * HALF + cols, mask=live & (cols < HALF), other=float("nan")).to(tl.float32)
    return cos, sin


@triton.jit
def _turn_heads(
    x_ptr, cos, sin, weight_ptr, y_ptr, rows, live, T, eps, stride_b, stride_t, stride_h, FIRST: tl.constexpr,
    HEADS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ZERO_CENTERED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, HALF: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    x_rows = rows // T * stride_b + rows % T * stride_t
    rest_cols = 2 * HALF + tl.arange(0, BLOCK_REST if BLOCK_REST else 1)[None, None, :]
    if weight_ptr is not None:
        gain_a, gain_b, gain_rest = _load_gains(weight_ptr, HALF, K, ZERO_CENTERED, INTERLEAVED, BLOCK_R, BLOCK_REST)
    for first in range(0, HEADS, BLOCK_H):
        head = first + tl.arange(0, BLOCK_H)[None, :, None]
        here = live & (head < HEADS)
        x_offsets = x_rows + head.to(tl.int64) * stride_h
        y_offsets = rows * (N * K) + (FIRST + head) * K
        a, b = _load_pairs(x_ptr, x_offsets, here, HALF, INTERLEAVED, BLOCK_T, BLOCK_H, BLOCK_R)
        if BLOCK_REST:
            in_rest = here & (rest_cols < K)
            rest = tl.load(x_ptr + x_offsets + rest_cols, mask=in_rest, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            square = tl.sum(a * a + b * b, 2, keep_dims=True)
            if BLOCK_REST:
                square += tl.sum(rest * rest, 2, keep_dims=True)
            rstd = tl.rsqrt(square / K + eps)
            a, b = a * rstd * gain_a, b * rstd * gain_b
            if BLOCK_REST:
                rest *= rstd * gain_rest
        _store_pairs(
            y_ptr, y_offsets, here, a * cos - b * sin, b * cos + a * sin,
            HALF, INTERLEAVED, BLOCK_T, BLOCK_H, BLOCK_R,
        )  # fmt: skip
        if BLOCK_REST:
            tl.store(y_ptr + y_offsets + rest_cols, rest.to(y_ptr.dtype.element_ty), mask=in_rest)


@triton.jit
def _copy_heads(
    x_ptr, y_ptr, rows, live, T, stride_b, stride_t, stride_h, FIRST: tl.constexpr, HEADS: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK_K)[None, None, :]
    for first in range(0, HEADS, BLOCK_H):
        head = first + tl.arange(0, BLOCK_H)[None, :, None]
        here = live & (head < HEADS) & (cols < K)
        x_offsets = rows // T * stride_b + rows % T * stride_t + head.to(tl.int64) * stride_h
        x = tl.load(x_ptr + x_offsets + cols, mask=here, other=0.0)
        tl.store(y_ptr + rows * (N * K) + (FIRST + head) * K + cols, x, mask=here)


@triton.jit
def _turn_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, positions_ptr, q_weight_ptr, k_weight_ptr, y_ptr,
    M, T, P, eps, q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    v_stride_b, v_stride_t, v_stride_h,
    H: tl.constexpr, KV: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BATCHED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, HALF: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    kind = tl.program_id(1)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None, None]
    live = rows < M
    cos, sin = _load_turns(cos_ptr, sin_ptr, positions_ptr, rows, live, T, P, HALF, BATCHED, BLOCK_R)
    if BACK:
        sin = -sin
    if kind == 0:
        _turn_heads(
            q_ptr, cos, sin, q_weight_ptr, y_ptr, rows, live, T, eps, q_stride_b, q_stride_t, q_stride_h, 0,
            H, N, K, ZERO_CENTERED, INTERLEAVED, BLOCK_T, BLOCK_H, HALF, BLOCK_R, BLOCK_REST,
        )  # fmt: skip
    if k_ptr is not None and kind == 1:
        _turn_heads(
            k_ptr, cos, sin, k_weight_ptr, y_ptr, rows, live, T, eps, k_stride_b, k_stride_t, k_stride_h, H,
            KV, N, K, ZERO_CENTERED, INTERLEAVED, BLOCK_T, BLOCK_H, HALF, BLOCK_R, BLOCK_REST,
        )  # fmt: skip
    if v_ptr is not None and kind == 2:
        _copy_heads(
            v_ptr, y_ptr, rows, live, T, v_stride_b, v_stride_t, v_stride_h, H + KV,
            KV, N, K, BLOCK_H, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _norm_backward_heads(
    dy_ptr, x_ptr, cos_ptr, sin_ptr, positions_ptr, weight_ptr, dx_ptr, partials_ptr, M, T, P, eps,
    dy_stride_b, dy_stride_t, dy_stride_h, x_stride_b, x_stride_t, x_stride_h, FIRST: tl.constexpr,
    HEADS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BATCHED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, HALF: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    REST: tl.constexpr = BLOCK_REST if BLOCK_REST else 1  # pyright: ignore[reportAssignmentType]
    rest_cols = 2 * HALF + tl.arange(0, REST)[None, None, :]
    gain_a, gain_b, gain_rest = _load_gains(weight_ptr, HALF, K, ZERO_CENTERED, INTERLEAVED, BLOCK_R, BLOCK_REST)
    dgain_a = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_R), tl.float32)
    dgain_b = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_R), tl.float32)
    dgain_rest = tl.zeros((BLOCK_T, BLOCK_H, REST), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(M, BLOCK_T), tl.num_programs(0)):
        rows = (block * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None, None]
        live = rows < M
        cos, sin = _load_turns(cos_ptr, sin_ptr, positions_ptr, rows, live, T, P, HALF, BATCHED, BLOCK_R)
        within = live & (tl.arange(0, BLOCK_R)[None, None, :] < HALF)
        cos, sin = tl.where(within, cos, 0.0), tl.where(within, sin, 0.0)
        dy_rows = rows // T * dy_stride_b + rows % T * dy_stride_t
        x_rows = rows // T * x_stride_b + rows % T * x_stride_t
        for first in range(0, HEADS, BLOCK_H):
            head = first + tl.arange(0, BLOCK_H)[None, :, None]
            here = live & (head < HEADS)
            dy_offsets, x_offsets = dy_rows + head.to(tl.int64) * dy_stride_h, x_rows + head.to(tl.int64) * x_stride_h
            dx_offsets = rows * (N * K) + (FIRST + head) * K
            dy_a, dy_b = _load_pairs(dy_ptr, dy_offsets, here, HALF, INTERLEAVED, BLOCK_T, BLOCK_H, BLOCK_R)
            a, b = _load_pairs(x_ptr, x_offsets, here, HALF, INTERLEAVED, BLOCK_T, BLOCK_H, BLOCK_R)
            dn_a, dn_b = dy_a * cos + dy_b * sin, dy_b * cos - dy_a * sin
            square = tl.sum(a * a + b * b, 2, keep_dims=True)
            dot = tl.sum(dn_a * gain_a * a + dn_b * gain_b * b, 2, keep_dims=True)
            if BLOCK_REST:
                in_rest = here & (rest_cols < K)
                dn_rest = tl.load(dy_ptr + dy_offsets + rest_cols, mask=in_rest, other=0.0).to(tl.float32)
                rest = tl.load(x_ptr + x_offsets + rest_cols, mask=in_rest, other=0.0).to(tl.float32)
                square += tl.sum(rest * rest, 2, keep_dims=True)
                dot += tl.sum(dn_rest * gain_rest * rest, 2, keep_dims=True)
            rstd = tl.rsqrt(square / K + eps)
            dot = dot * rstd / K
            a, b = a * rstd, b * rstd
            _store_pairs(
                dx_ptr, dx_offsets, here, rstd * (gain_a * dn_a - a * dot), rstd * (gain_b * dn_b - b * dot),
                HALF, INTERLEAVED, BLOCK_T, BLOCK_H, BLOCK_R,
            )  # fmt: skip
            dgain_a += dn_a * a
            dgain_b += dn_b * b
            if BLOCK_REST:
                rest *= rstd
                dx = rstd * (gain_rest * dn_rest - rest * dot)
                tl.store(dx_ptr + dx_offsets + rest_cols, dx.to(dx_ptr.dtype.element_ty), mask=in_rest)
                dgain_rest += dn_rest * rest
    dgain_a = tl.sum(tl.sum(dgain_a, 0, keep_dims=True), 1, keep_dims=True)
    dgain_b = tl.sum(tl.sum(dgain_b, 0, keep_dims=True), 1, keep_dims=True)
    everywhere = tl.full((1, 1, 1), True, tl.int1)
    partials_ptr += tl.program_id(0).to(tl.int64) * K
    _store_pairs(partials_ptr, 0, everywhere, dgain_a, dgain_b, HALF, INTERLEAVED, 1, 1, BLOCK_R)
    if BLOCK_REST:
        dgain_rest = tl.sum(tl.sum(dgain_rest, 0, keep_dims=True), 1, keep_dims=True)
        tl.store(partials_ptr + rest_cols, dgain_rest, mask=rest_cols < K)


@triton.jit
def _norm_backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, q_ptr, k_ptr, cos_ptr, sin_ptr, positions_ptr, q_weight_ptr, k_weight_ptr,
    dx_ptr, partials_ptr,
    M, T, P, eps, dq_stride_b, dq_stride_t, dq_stride_h, dk_stride_b, dk_stride_t, dk_stride_h,
    dv_stride_b, dv_stride_t, dv_stride_h, q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    H: tl.constexpr, KV: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BATCHED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, HALF: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    kind = tl.program_id(1)
    if kind == 0:
        _norm_backward_heads(
            dq_ptr, q_ptr, cos_ptr, sin_ptr, positions_ptr, q_weight_ptr, dx_ptr, partials_ptr, M, T, P, eps,
            dq_stride_b, dq_stride_t, dq_stride_h, q_stride_b, q_stride_t, q_stride_h, 0,
            H, N, K, BATCHED, ZERO_CENTERED, INTERLEAVED, BLOCK_T, BLOCK_H, HALF, BLOCK_R, BLOCK_REST,
        )  # fmt: skip
    elif kind == 1:
        _norm_backward_heads(
            dk_ptr, k_ptr, cos_ptr, sin_ptr, positions_ptr, k_weight_ptr, dx_ptr,
            partials_ptr + tl.num_programs(0).to(tl.int64) * K, M, T, P, eps,
            dk_stride_b, dk_stride_t, dk_stride_h, k_stride_b, k_stride_t, k_stride_h, H,
            KV, N, K, BATCHED, ZERO_CENTERED, INTERLEAVED, BLOCK_T, BLOCK_H, HALF, BLOCK_R, BLOCK_REST,
        )  # fmt: skip
    if dv_ptr is not None and kind == 2:
        for block in range(tl.program_id(0), tl.cdiv(M, BLOCK_T), tl.num_programs(0)):
            rows = (block * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None, None]
            _copy_heads(
                dv_ptr, dx_ptr, rows, rows < M, T, dv_stride_b, dv_stride_t, dv_stride_h, H + KV,
                KV, N, K, BLOCK_H, BLOCK_K,
            )  # fmt: skip
