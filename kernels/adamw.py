"""AdamW of one parameter in one pass, and the sum of squares of a gradient, from which its norm follows.

    g = scale grad                                         (unscale and clip: one number, read on the device)
    w = w - lr decay w
    m = m + (1 - beta1) (g - m),  v = beta2 v + (1 - beta2) g^2
    w = w - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2, with the constants of torch's AdamW.

w is float32 (the master weight, where the parameter is narrower), and so is the arithmetic. m, v and a parameter
without a master weight may be bfloat16. With a key these are rounded stochastically, so that the expected value is
exact (Gupta et al. 2015, arXiv:1502.02551, section 3). The random bits are Philox words of the element's index in the
logical tensor and of t, so they do not depend on the layout.

The sum of squares has two stages of fixed order: a partial sum per program, then a sum over programs in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._dispatch import REFERENCE_DTYPES, operator, runs_triton
from ._philox import philox
from ._rows import ceil_div, contiguous, sum_all
from ._torch import has_no_values
from ._triton import launch, multiprocessors, tl, triton

_BLOCK = 1024


@torch.no_grad()
def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    now: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    master: Tensor | None = None,
    scale: Tensor | None = None,
    key: int | None = None,
    place: tuple[Tensor, Tensor] | None = None,
    impl: str | None = None,
) -> None:
    """Update a parameter, its moments and its master weight in place. Not differentiable.

    Args:
        param: any shape, contiguous; float32, bfloat16 or float16 (the reference takes float64 too).
        grad: of that shape and any such dtype.
        exp_avg, exp_avg_sq: m and v, of that shape.
        now: `[4]` float64 on the device: lr, 1 - beta1^t, sqrt(1 - beta2^t) and t, as `adamw_now` returns them.
        betas, eps, weight_decay: as of `torch.optim.AdamW`.
        master: float32 of that shape. The update goes to `master`, and `param` becomes `master` rounded to nearest.
            Where `param` isn't `master` rounded before, somebody wrote to it: there the step begins with `param`.
        scale: a scalar that multiplies the gradient first.
        key: below 2^63: round every bfloat16 output stochastically. `None`: round to nearest.
        place: with a key, int64 `[R]` and `[C]` with R C elements in all: element i of `param` has the logical index
            `place[0][i // C] + place[1][i % C]`. `None`: i.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `param`.

    Raises:
        ValueError: shapes, dtypes or devices don't go together, or `impl` can't run here.

    Note:
        - Thirteen parameters: the state of one parameter, and by keyword the options of AdamW and of rounding.
    """
    state = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    _check(state if master is None else state | {"master": master}, now, scale, key, place)
    update = _adamw_op if runs_triton(impl, param, "adamw", n=param.numel()) else _reference
    others = (master, now, scale, *(place or (None, None)), *betas, eps, weight_decay, key)
    update(param, grad, exp_avg, exp_avg_sq, *others)


# In plain torch; computes in float32, or float64 for float64 weights.
adamw_reference = functools.partial(adamw, impl="reference")


def _reference(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *others: Any) -> None:
    master, now, scale, rows, columns, beta1, beta2, eps, weight_decay, key = others
    weight = param if master is None else master
    before = param if master is None else followed(master, param)
    exact = torch.promote_types(weight.dtype, torch.float32)
    lr, correction1, correction2, t = now.unbind()
    lr, correction1, correction2 = lr.to(exact), correction1.to(exact), correction2.to(exact)
    w, g, m, v = (x.to(exact) for x in (before, grad, exp_avg, exp_avg_sq))
    g = g if scale is None else g * scale.to(exact)
    w = w - lr * weight_decay * w
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    w = w - lr / correction1 * (m / (v.sqrt() / correction2 + eps))
    bits: Sequence[Tensor | None] = (None, None, None)
    if key is not None:
        i = torch.arange(param.numel(), device=param.device) if rows is None else rows[:, None] + columns
        bits = rounding_bits(key, i.view(param.shape), t.long())
    for x, value, random in zip((weight, exp_avg, exp_avg_sq), (w, m, v), bits, strict=True):
        x.copy_(value if random is None or x.dtype != torch.bfloat16 else round_at_random(value, random))
    if master is not None:
        param.copy_(w)


def followed(master: Tensor, param: Tensor) -> Tensor:
    """Return `master`, and the values of `param` where it isn't `master` rounded: where somebody wrote to it."""
    return torch.where(master.to(param.dtype) == param, master, param.to(master.dtype))


def adamw_now(steps: Tensor, lr: float | Tensor, betas: tuple[float, float]) -> Tensor:
    """Compute the `now` of `adamw` for each of several parameters.

    Args:
        steps: `[n]`, how many steps each parameter has had, this one included.
        lr, betas: as of `torch.optim.AdamW`.

    Returns:
        `[n, 4]` float64 on the device of `steps`; the host does not wait for the device.
    """
    t = steps.to(torch.float64)
    corrections = [torch.ones_like(t) * lr, 1 - betas[0] ** t, (1 - betas[1] ** t).sqrt(), t]
    return torch.stack(corrections, 1)


def rounding_bits(key: int, indices: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw 16 random bits for the weight, for m and for v of each element: int64 of the shape of `indices`."""
    mask = 0xFFFFFFFF
    first, second, _, _ = philox(key, indices & mask, indices >> 32, t & mask, torch.zeros_like(t))
    return first & 0xFFFF, first >> 16, second & 0xFFFF


def round_at_random(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16 stochastically: away from zero if `bits` plus the 16 cut-off bits carry over."""
    x = x.to(torch.float32)
    cut = ((x.view(torch.int32) + bits.to(torch.int32)) & -65536).view(torch.float32)
    return torch.where(x.isnan(), x, cut).to(torch.bfloat16)


def sum_of_squares(x: Tensor, impl: str | None = None) -> Tensor:
    """Sum the squares of all elements, in the same order every time. Not differentiable.

    Args:
        x: any shape, float32, bfloat16 or float16 (the reference takes float64 too).
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        A float64 scalar; inf where a square, or a program's sum of them, exceeds float32 (the reference: float64).

    Raises:
        ValueError: `x` is of another dtype, or `impl` can't run here.
    """
    if x.dtype not in REFERENCE_DTYPES:
        raise ValueError(f"x is {x.dtype}; it must be float64, float32, bfloat16 or float16")
    x = x.detach()
    return _sum_of_squares_op(x) if runs_triton(impl, x, "sum_of_squares", n=x.numel()) else sum_of_squares_reference(x)


def sum_of_squares_reference(x: Tensor) -> Tensor:
    """`sum_of_squares` in plain torch, in float64."""
    return x.to(torch.float64).square().sum()


def _check(
    state: dict[str, Tensor], now: Tensor, scale: Tensor | None, key: int | None, place: tuple[Tensor, Tensor] | None
) -> None:
    param = state["param"]
    for name, x in state.items():
        if x.shape != param.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, but param has {tuple(param.shape)}")
        if x.device != param.device:
            raise ValueError(f"{name} is on {x.device}, but param is on {param.device}")
        if x.dtype not in REFERENCE_DTYPES:
            raise ValueError(f"{name} is {x.dtype}; it must be float64, float32, bfloat16 or float16")
        if name != "grad" and not x.is_contiguous():
            raise ValueError(f"{name} has strides {x.stride()} at shape {tuple(x.shape)}: make it contiguous")
        if name == "master" and x.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"master is {x.dtype}; it must be float32")
    if now.shape != (4,) or now.dtype != torch.float64 or now.device != param.device:
        raise ValueError(f"now is {now.dtype} {tuple(now.shape)} on {now.device}; adamw_now gives float64 (4,) there")
    if key is not None and not 0 <= key < 2**63:
        raise ValueError(f"key {key} is not in [0, 2^63)")
    if scale is not None and scale.numel() != 1:
        raise ValueError(f"scale has shape {tuple(scale.shape)}, but it is one number")
    if scale is not None and scale.device != param.device:
        raise ValueError(f"scale is on {scale.device}, but param is on {param.device}")
    if place is None:
        return
    for index in place:
        if index.dtype != torch.int64 or index.dim() != 1 or index.device != param.device:
            there = f"{index.dtype} {tuple(index.shape)} on {index.device}"
            raise ValueError(f"place has indices of {there}; they must be int64 in one dimension on {param.device}")
    if place[0].numel() * place[1].numel() != param.numel():
        counts = f"{place[0].numel()} x {place[1].numel()}"
        raise ValueError(f"place has {counts} indices, but param has {param.numel()} elements")


@operator(
    "adamw(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? master, Tensor now,"
    " Tensor? scale, Tensor? rows, Tensor? columns, float beta1, float beta2, float eps, float weight_decay, int? key)"
    " -> ()"
)
def _adamw_op(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *others: Any) -> None:
    if has_no_values(param) or param.numel() == 0:
        return
    master, now, scale, rows, columns, beta1, beta2, eps, weight_decay, key = others
    N = param.numel()
    C = N if columns is None else columns.numel()
    places = contiguous(rows, columns)
    tensors = (param, grad.contiguous(), exp_avg, exp_avg_sq, master, now.contiguous(), scale, *places)
    scalars = (N, C, key or 0, 1 - beta1, beta2, 1 - beta2, eps, weight_decay)
    launch(_adamw_kernel, (ceil_div(N, _BLOCK), 1, 1), tensors, scalars, (key is not None, _BLOCK), num_warps=4)


@operator("sum_of_squares(Tensor x) -> Tensor")
def _sum_of_squares_op(x: Tensor) -> Tensor:
    total = x.new_empty((), dtype=torch.float64)
    if has_no_values(x):
        return total
    N = x.numel()
    if N == 0:
        return total.zero_()
    programs = min(ceil_div(N, 4096), 8 * multiprocessors(x.device))
    partials = x.new_empty(programs, dtype=torch.float32)
    launch(_squares_kernel, (programs, 1, 1), (x.contiguous(), partials), (N,), (4096,), num_warps=8)
    return sum_all(partials, total)


@triton.jit
def _round_at_random(x, bits):
    raised = (x.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
    return tl.where(x == x, raised.to(tl.float32, bitcast=True), x)


@triton.jit
def _adamw_kernel(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, master_ptr, now_ptr, scale_ptr, rows_ptr, columns_ptr,
    N, C, key, weight1, beta2, weight2, eps, weight_decay, ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    lr = tl.load(now_ptr).to(tl.float32)
    correction1 = tl.load(now_ptr + 1).to(tl.float32)
    correction2 = tl.load(now_ptr + 2).to(tl.float32)
    g = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(exp_avg_ptr + at, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if master_ptr is None:
        w = tl.load(param_ptr + at, mask=mask, other=0.0).to(tl.float32)
    else:
        w = tl.load(master_ptr + at, mask=mask, other=0.0)
        p = tl.load(param_ptr + at, mask=mask, other=0.0)
        w = tl.where(w.to(p.dtype) == p, w, p.to(tl.float32))  # somebody wrote to the parameter
    if scale_ptr is not None:
        g *= tl.load(scale_ptr).to(tl.float32)
    w -= lr * weight_decay * w
    m += (g - m) * weight1
    v = v * beta2 + g * g * weight2
    w -= tl.div_rn(lr, correction1) * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), correction2) + eps)
    narrow = w
    if ROUND:
        index = at
        if rows_ptr is not None:
            row = tl.load(rows_ptr + at // C, mask=mask, other=0)
            index = row + tl.load(columns_ptr + at % C, mask=mask, other=0)
        low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32)
        t = low * 0 + tl.load(now_ptr + 3).to(tl.int64).to(tl.uint32)
        first, second, _, _ = tl.philox(key, low, high, t, low * 0)  # pyright: ignore[reportGeneralTypeIssues]
        if param_ptr.dtype.element_ty == tl.bfloat16 and master_ptr is None:
            narrow = _round_at_random(w, first & 0xFFFF)
        if exp_avg_ptr.dtype.element_ty == tl.bfloat16:
            m = _round_at_random(m, first >> 16)
        if exp_avg_sq_ptr.dtype.element_ty == tl.bfloat16:
            v = _round_at_random(v, second & 0xFFFF)
    tl.store(param_ptr + at, narrow.to(param_ptr.dtype.element_ty), mask=mask)
    tl.store(exp_avg_ptr + at, m.to(exp_avg_ptr.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq_ptr + at, v.to(exp_avg_sq_ptr.dtype.element_ty), mask=mask)
    if master_ptr is not None:
        tl.store(master_ptr + at, w, mask=mask)


@triton.jit
def _squares_kernel(x_ptr, partials_ptr, N, BLOCK: tl.constexpr):
    squares = tl.zeros((BLOCK,), tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(N, BLOCK), tl.num_programs(0), num_stages=3):
        at = block * tl.full((1,), BLOCK, tl.int64) + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < N, other=0.0).to(tl.float32)
        squares += x * x
    tl.store(partials_ptr + tl.program_id(0), tl.sum(squares, 0))
