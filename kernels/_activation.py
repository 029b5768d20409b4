"""Activations over rows: plain, `y = f(z)`, or gated, `y = f(z) u`, with an optional bias added first.

    x = z or z | u,  bias added;   dz = dy u f'(z),  du = dy f(z),  dbias = sum over rows of dz | du

Without a gate, u is 1. f and f' are one Triton function, z -> (f(z), f'(z)): `silu`, `gelu_tanh`, `gelu_erf` or
`squared`. Only x and the bias are saved for the backward pass, which computes f again. In backward each program sums
dbias over its rows, and a second kernel sums over programs in a fixed order, so gradients repeat bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._dispatch import operator, refuse_second_derivative, runs_triton
from ._math import exp
from ._rows import as_rows, ceil_div, check_inputs, contiguous, count_rows, next_power_of_2, sum_partials
from ._torch import has_no_values
from ._triton import launch, multiprocessors, tl, triton


def runs_kernel(x: Tensor, bias: Tensor | None, impl: str | None, name: str, gated: bool = False) -> bool:
    """Check the inputs, and return whether the kernel of activation `name` runs; otherwise the reference does."""
    check_inputs(x, bias=bias)
    if gated and x.shape[-1] % 2:
        raise ValueError(f"the last dimension of x is {x.shape[-1]}, but gate and up need an even number")
    return runs_triton(impl, x, name, F=x.shape[-1] // (1 + gated))


def gelu_function(approximate: str) -> str:
    """Return the name of the Triton function; raises `ValueError` unless there is one."""
    if approximate not in ("tanh", "none"):
        raise ValueError(f"approximate {approximate!r} is neither 'tanh' nor 'none'")
    return "gelu_tanh" if approximate == "tanh" else "gelu_erf"


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """Add the bias as kernels do: in float32, or float64 for a float64 `x`, without rounding to the dtype of `x`."""
    exact = torch.promote_types(x.dtype, torch.float32)
    return x.to(exact) if bias is None else x.to(exact) + bias.to(exact)


def activate(x: Tensor, bias: Tensor | None, f: str, gated: bool, name: str) -> Tensor:
    """Compute y by the kernel; `f` names a Triton function below, and `name` is the public function, for errors."""
    return _Activation.apply(x, bias, f, gated, name)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, f, gated, name):
        ctx.f, ctx.gated, ctx.name = f, gated, name
        ctx.save_for_backward(x, bias)
        return _forward_op(x, bias, f, gated)

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative(ctx.name)
        x, bias = ctx.saved_tensors
        dx, dbias = backward_op(dy, x, bias, ctx.f, ctx.gated)
        return dx, None if bias is None else dbias, None, None, None


def function(f: str) -> Any:
    """Return the Triton function of this name. Look it up at each launch: `decorate_all` replaces it."""
    return {"silu": silu, "gelu_tanh": gelu_tanh, "gelu_erf": gelu_erf, "squared": squared}[f]


@operator("activation_forward(Tensor x, Tensor? bias, str f, bool gated) -> Tensor y")
def _forward_op(x: Tensor, bias: Tensor | None, f: str, gated: bool) -> Tensor:
    y = x.new_empty((*x.shape[:-1], x.shape[-1] // (1 + gated)))
    if has_no_values(x) or y.numel() == 0:
        return y
    M, F = count_rows(x), y.shape[-1]
    x, stride = as_rows(x)
    block_m, block_f, tiles = _tiles(F)
    (bias,) = contiguous(bias)
    launch(
        _forward_kernel, (tiles * ceil_div(M, block_m), 1, 1), num_warps=4, x_ptr=x, bias_ptr=bias, y_ptr=y, M=M,
        X_STRIDE=stride, F=F, GATED=gated, ACTIVATION=function(f), TILES=tiles, BLOCK_M=block_m, BLOCK_F=block_f,
    )  # fmt: skip
    return y


@operator("activation_backward(Tensor dy, Tensor x, Tensor? bias, str f, bool gated) -> (Tensor dx, Tensor dbias)")
def backward_op(dy: Tensor, x: Tensor, bias: Tensor | None, f: str, gated: bool) -> tuple[Tensor, Tensor]:
    dx, dbias = x.new_empty(x.shape), x.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    if has_no_values(x):
        return dx, dbias
    if dx.numel() == 0:
        return dx, dbias.zero_()
    M, F, width = count_rows(x), dy.shape[-1], x.shape[-1]
    x, stride = as_rows(x)
    dy, dy_stride = as_rows(dy)
    block_m, block_f, tiles = _tiles(F)
    groups, stages, num_warps, partials = ceil_div(M, block_m), 1, 4, None  # one block of rows per program
    if bias is not None:  # many blocks a program; the sums double the registers
        most = (
            8 * multiprocessors(x.device) // tiles,
            M * x.element_size() // 72,
        )  # partial sums: under 5 % of the traffic
        groups = min(groups, max(1, min(most)))
        stages, num_warps, partials = 3, 8, x.new_empty((1, groups, width), dtype=torch.float32)
    (bias,) = contiguous(bias)
    launch(
        _backward_kernel, (tiles * groups, 1, 1), num_warps=num_warps,
        dy_ptr=dy, x_ptr=x, bias_ptr=bias, dx_ptr=dx, partials_ptr=partials, M=M, DY_STRIDE=dy_stride, X_STRIDE=stride,
        F=F, GATED=gated, ACTIVATION=function(f), TILES=tiles, BLOCK_M=block_m, BLOCK_F=block_f, STAGES=stages,
    )  # fmt: skip
    if partials is not None:
        sum_partials(partials, dbias)
    return dx, dbias


def _tiles(F: int) -> tuple[int, int, int]:
    """Return rows and columns of a program's tile of 2048 elements, and the number of tiles in a row."""
    block_f = min(2048, next_power_of_2(F))
    return min(64, 2048 // block_f), block_f, ceil_div(F, block_f)


@triton.jit
def _sigmoids(v):
    """Return s(v) and s(-v) = 1 - s(v) without a difference and without an exponential that may overflow."""
    e = exp(-tl.abs(v))
    large = 1.0 / (1.0 + e)
    small = e * large
    return tl.where(v < 0.0, small, large), tl.where(v < 0.0, large, small)


@triton.jit
def silu(z):
    s, complement = _sigmoids(z)  # pyright: ignore[reportGeneralTypeIssues]
    return z * s, s * (1.0 + z * complement)


@triton.jit
def gelu_tanh(z):
    twice_u = 1.5957691216057308 * (z + 0.044715 * z * z * z)  # 2 sqrt(2 / pi)
    s, complement = _sigmoids(twice_u)  # pyright: ignore[reportGeneralTypeIssues]
    return z * s, s + z * s * complement * 1.5957691216057308 * (1.0 + 0.134145 * z * z)


@triton.jit
def gelu_erf(z):
    cumulative = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
    return z * cumulative, cumulative + z * 0.3989422804014327 * exp(-0.5 * z * z)


@triton.jit
def squared(z):
    r = tl.where(z < 0.0, 0.0, z)  # a maximum would turn NaN into 0
    return r * r, 2.0 * r


@triton.jit
def _load(x_ptr, bias_ptr, rows, live, cols, in_row, X_STRIDE):
    z = tl.load(x_ptr + rows * X_STRIDE + cols, mask=live & in_row, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + cols, mask=in_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
    return z


@triton.jit
def _forward_kernel(
    x_ptr, bias_ptr, y_ptr, M,
    X_STRIDE: tl.constexpr, F: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rows = (program // TILES).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = program % TILES * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    y, _ = ACTIVATION(_load(x_ptr, bias_ptr, rows, rows < M, cols, cols < F, X_STRIDE))
    if GATED:
        y *= _load(x_ptr, bias_ptr, rows, rows < M, F + cols, cols < F, X_STRIDE)
    tl.store(y_ptr + rows * F + cols, y.to(y_ptr.dtype.element_ty), mask=(rows < M) & (cols < F))


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, partials_ptr, M,
    DY_STRIDE: tl.constexpr, X_STRIDE: tl.constexpr, F: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    group = program // TILES
    cols = program % TILES * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    in_row = cols < F
    WIDTH: tl.constexpr = 2 * F if GATED else F
    dbias = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    dbias_up = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    for block in tl.range(group, tl.cdiv(M, BLOCK_M), tl.num_programs(0) // TILES, num_stages=STAGES):
        rows = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        live = rows < M
        dy = tl.load(dy_ptr + rows * DY_STRIDE + cols, mask=live & in_row, other=0.0).to(tl.float32)
        value, slope = ACTIVATION(_load(x_ptr, bias_ptr, rows, live, cols, in_row, X_STRIDE))
        dz = dy * slope
        if GATED:
            dz *= _load(x_ptr, bias_ptr, rows, live, F + cols, in_row, X_STRIDE)
            du = dy * value
            tl.store(dx_ptr + rows * WIDTH + F + cols, du.to(dx_ptr.dtype.element_ty), mask=live & in_row)
            dbias_up += du
        tl.store(dx_ptr + rows * WIDTH + cols, dz.to(dx_ptr.dtype.element_ty), mask=live & in_row)
        dbias += dz
    if partials_ptr is not None:
        partials_ptr += group.to(tl.int64) * WIDTH
        tl.store(partials_ptr + cols, tl.sum(dbias, 0, keep_dims=True), mask=in_row)
        if GATED:
            tl.store(partials_ptr + F + cols, tl.sum(dbias_up, 0, keep_dims=True), mask=in_row)
