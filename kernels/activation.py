"""Activations of an MLP: SwiGLU, GeGLU and squared ReLU.

    y = f(x),  or with a gate f(gate) up,  x = gate | up
    dx = dy f'(x),  or dgate = dy up f'(gate),  dup = dy f(gate)

    SiLU:          f(z) = z s(z),  s(z) = 1 / (1 + e^-z)
                   f'(z) = s(z) (1 + z (1 - s(z)))
    GELU, "none":  f(z) = z P(z),  P(z) = (1 + erf(z / sqrt 2)) / 2
                   f'(z) = P(z) + z p(z),  p(z) = e^(-z^2 / 2) / sqrt(2 pi)
    GELU, "tanh":  f(z) = z (1 + tanh u) / 2 = z s(2 u),  u = sqrt(2 / pi) (z + 0.044715 z^3)
                   f'(z) = s + z s (1 - s) 2 du/dz
    squared ReLU:  f(z) = max(z, 0)^2
                   f'(z) = 2 max(z, 0)

Shazeer, "GLU Variants Improve Transformer" (2020), equation 6; Hendrycks and Gimpel, "Gaussian Error Linear Units"
(2016), section 2; So et al., "Primer: Searching for Efficient Transformers for Language Modeling" (2021), section 3.

One forward and one backward kernel serve all: f and f' are one Triton function, z -> (f(z), f'(z)). Backward saves x
only, and computes f again. Kernels compute in float32 and round once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import check_inputs
from ._dispatch import operator, refuse_second_derivative, runs_triton
from ._math import exp
from ._rows import as_rows, ceil_div, count_rows, flat_tiles
from ._triton import launch, tl, triton


def swiglu(x: Tensor, *, impl: str | None = None) -> Tensor:
    """Multiply the second half of the last dimension by the SiLU (swish) of the first.

    Args:
        x: `[..., 2F]`, gate and up side by side; float32, bfloat16 or float16 (the reference takes float64 too), with
            any strides.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        `y` `[..., F]` in the dtype of `x`.

    Raises:
        ValueError: the width is odd, the dtype is another, or `impl` can't run here.
    """
    return _activate("swiglu", "silu", x, impl)


def geglu(x: Tensor, *, approximate: str = "tanh", impl: str | None = None) -> Tensor:
    """Multiply the second half of the last dimension by the GELU of the first.

    Args:
        x, impl: the parameters of `swiglu`.
        approximate: `"tanh"`, or `"none"` for the exact GELU.

    Returns:
        `y` `[..., F]` in the dtype of `x`.

    Raises:
        ValueError: as `swiglu`, or `approximate` is unknown.
    """
    return _activate("geglu", f"gelu_{approximate}", x, impl)


def relu_squared(x: Tensor, *, impl: str | None = None) -> Tensor:
    """Apply the square of ReLU to each element of `x`.

    Args:
        x: `[..., F]`, with the dtypes and strides of `swiglu`.
        impl: the parameter of `swiglu`.

    Returns:
        `y` `[..., F]` in the dtype of `x`.

    Raises:
        ValueError: the dtype is another, or `impl` can't run here.
    """
    return _activate("relu_squared", "squared", x, impl)


swiglu_reference: partial[Tensor] = partial(swiglu, impl="reference")
geglu_reference: partial[Tensor] = partial(geglu, impl="reference")
relu_squared_reference: partial[Tensor] = partial(relu_squared, impl="reference")


def _activate(name: str, f: str, x: Tensor, impl: str | None) -> Tensor:
    """Compute y for the public function `name`; `f` is a key of `_TORCH`."""
    gated = name.endswith("glu")
    check_inputs(x)
    if f not in _TORCH:
        raise ValueError(f"approximate {f.removeprefix('gelu_')!r} is neither 'tanh' nor 'none'")
    if gated and x.shape[-1] % 2:
        raise ValueError(f"the last dimension of x is {x.shape[-1]}, but gate and up need an even number")
    if runs_triton(impl, x, name):
        return _Activation.apply(x, f, gated, name)
    z = x.to(torch.promote_types(x.dtype, torch.float32))
    if not gated:
        return _TORCH[f](z).to(x.dtype)
    gate, up = z.chunk(2, -1)
    return (_TORCH[f](gate) * up).to(x.dtype)


_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_none": F.gelu,
    "squared": lambda z: F.relu(z).square(),
}


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, f, gated, name):
        ctx.how, ctx.name = (f, gated), name
        ctx.save_for_backward(x)
        return _forward_op(x, f, gated)

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative(ctx.name)
        return _backward_op(dy, *ctx.saved_tensors, *ctx.how), None, None, None


@operator("activation_forward(Tensor x, str f, bool gated) -> Tensor y")
def _forward_op(x: Tensor, f: str, gated: bool) -> Iterator[Tensor]:
    y = x.new_empty((*x.shape[:-1], x.shape[-1] // (1 + gated)))
    yield y
    _launch(_forward_kernel, x, f, gated, y_ptr=y)


@operator("activation_backward(Tensor dy, Tensor x, str f, bool gated) -> Tensor dx")
def _backward_op(dy: Tensor, x: Tensor, f: str, gated: bool) -> Iterator[Tensor]:
    dx = x.new_empty(x.shape)
    yield dx
    dy, stride = as_rows(dy)
    _launch(_backward_kernel, x, f, gated, dy_ptr=dy, DY_STRIDE=stride, dx_ptr=dx)


def _launch(kernel: Any, x: Tensor, f: str, gated: bool, **others: Any) -> None:
    M, F = count_rows(x), x.shape[-1] // (1 + gated)
    x, stride = as_rows(x)
    block_m, block_f, tiles = flat_tiles(F)
    # Looked up here because `decorate_all` replaces them.
    activation = {"silu": _silu, "gelu_tanh": _gelu_tanh, "gelu_none": _gelu_erf, "squared": _squared}[f]
    launch(
        kernel, (tiles * ceil_div(M, block_m), 1, 1), num_warps=4, x_ptr=x, M=M, X_STRIDE=stride, F=F, GATED=gated,
        ACTIVATION=activation, TILES=tiles, BLOCK_M=block_m, BLOCK_F=block_f, **others,
    )  # fmt: skip


@triton.jit
def _sigmoids(v):
    """Return s(v) and s(-v) = 1 - s(v) without a difference and without an exponential that may overflow."""
    e = exp(-tl.abs(v))
    large = 1.0 / (1.0 + e)
    small = e * large
    return tl.where(v < 0.0, small, large), tl.where(v < 0.0, large, small)


@triton.jit
def _silu(z):
    s, complement = _sigmoids(z)  # pyright: ignore[reportGeneralTypeIssues]
    return z * s, s * (1.0 + z * complement)


@triton.jit
def _gelu_tanh(z):
    twice_u = 1.5957691216057308 * (z + 0.044715 * z * z * z)  # 2 sqrt(2 / pi)
    s, complement = _sigmoids(twice_u)  # pyright: ignore[reportGeneralTypeIssues]
    return z * s, s + z * s * complement * 1.5957691216057308 * (1.0 + 0.134145 * z * z)


@triton.jit
def _gelu_erf(z):
    cumulative = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
    return z * cumulative, cumulative + z * 0.3989422804014327 * exp(-0.5 * z * z)


@triton.jit
def _squared(z):
    r = tl.where(z < 0.0, 0.0, z)  # a maximum would turn NaN into 0
    return r * r, 2.0 * r


@triton.jit
def _load(x_ptr, rows, live, cols, in_row, X_STRIDE):
    return tl.load(x_ptr + rows * X_STRIDE + cols, mask=live & in_row, other=0.0).to(tl.float32)


@triton.jit
def _forward_kernel(
    x_ptr, y_ptr, M,
    X_STRIDE: tl.constexpr, F: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rows = (program // TILES).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = program % TILES * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    y, _ = ACTIVATION(_load(x_ptr, rows, rows < M, cols, cols < F, X_STRIDE))
    if GATED:
        y *= _load(x_ptr, rows, rows < M, F + cols, cols < F, X_STRIDE)
    tl.store(y_ptr + rows * F + cols, y.to(y_ptr.dtype.element_ty), mask=(rows < M) & (cols < F))


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, dx_ptr, M,
    DY_STRIDE: tl.constexpr, X_STRIDE: tl.constexpr, F: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rows = (program // TILES).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = program % TILES * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    WIDTH: tl.constexpr = 2 * F if GATED else F
    mask = (rows < M) & (cols < F)
    dy = _load(dy_ptr, rows, rows < M, cols, cols < F, DY_STRIDE)
    value, slope = ACTIVATION(_load(x_ptr, rows, rows < M, cols, cols < F, X_STRIDE))
    dz = dy * slope
    if GATED:
        dz *= _load(x_ptr, rows, rows < M, F + cols, cols < F, X_STRIDE)
        tl.store(dx_ptr + rows * WIDTH + F + cols, (dy * value).to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dx_ptr + rows * WIDTH + cols, dz.to(dx_ptr.dtype.element_ty), mask=mask)
