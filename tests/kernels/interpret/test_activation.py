"""Numerics of swiglu, geglu, gelu and relu_squared, which keep the same laws."""

import functools
import importlib
import math

import laws
import pytest
import torch

from mpcore.kernels import _activation
from tests.quick import some

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


class Activation:
    def __init__(self, name, f, **options):
        module = importlib.import_module(f"mpcore.kernels.{name}")
        self.name, self.f = name, f
        self.gated = name in ("swiglu", "geglu")
        self.kernel = functools.partial(getattr(module, name), impl="triton", **options)
        self.reference = functools.partial(getattr(module, f"{name}_reference"), **options)

    def inputs(self, *shape, dtype=F32, bias=None):
        width = shape[-1] * (1 + self.gated)
        generator = torch.Generator().manual_seed(sum(shape))
        made = {"x": (3 * laws.drawn(torch.randn, *shape[:-1], width, generator=generator)).to(dtype)}
        if bias is not None:
            made["bias"] = laws.drawn(torch.randn, width, generator=generator).to(bias)
        return made

    def check(self, inputs, layout="contiguous"):
        laws.check_errors(self.kernel, self.reference, inputs, layout)


ACTIVATIONS = {
    "swiglu": Activation("swiglu", "silu"),
    "geglu": Activation("geglu", "gelu_tanh", approximate="tanh"),
    "exact geglu": Activation("geglu", "gelu_erf", approximate="none"),
    "gelu": Activation("gelu", "gelu_tanh", approximate="tanh"),
    "exact gelu": Activation("gelu", "gelu_erf", approximate="none"),
    "relu_squared": Activation("relu_squared", "squared"),
}


@pytest.fixture(params=ACTIVATIONS)
def activation(request):
    return ACTIVATIONS[request.param]


@pytest.mark.parametrize(
    ("F", "has_bias", "dtype"),
    some(
        (1, True, F32), (100, False, F32), (100, True, F16), (2100, True, F32), (2100, True, BF16),
        of=[
            (*size, dtype)
            for size in ((1, True), (100, False), (100, True), (2100, True)) for dtype in (F32, BF16, F16)
        ],
    ),
)  # fmt: skip
def test_errors(activation, F, dtype, has_bias):
    activation.check(activation.inputs(3 if F > 1000 else 50, F, dtype=dtype, bias=dtype if has_bias else None))


@pytest.mark.parametrize("multiprocessors", [0, 1])
def test_errors_when_a_program_takes_many_rows(activation, multiprocessors, monkeypatch):
    monkeypatch.setattr(_activation, "multiprocessors", lambda device: multiprocessors)
    activation.check(activation.inputs(41, 700, dtype=BF16, bias=F32))  # 21 blocks of rows for 1 or 8 programs


@pytest.mark.parametrize(("x", "bias"), [(BF16, F32), (F32, BF16), (F16, BF16)])
def test_errors_of_mixed_dtypes(activation, x, bias):
    activation.check(activation.inputs(2, 5, 100, dtype=x, bias=bias))


@pytest.mark.parametrize("layout", ["strided rows", "strided columns", "far rows"])
def test_errors_of_strided_tensors(activation, layout):
    activation.check(activation.inputs(3, 100, dtype=BF16, bias=BF16), layout)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0), (0,), (7,)])
@pytest.mark.parametrize("bias", [None, F32])
def test_empty_tensors_and_a_single_row(activation, shape, bias):
    activation.check(activation.inputs(*shape, bias=bias))


def test_extreme_values(activation):
    z = torch.tensor([-1e4, -90.0, -12.0, -1e-30, -0.0, 0.0, 1e-30, 12.0, 90.0, 1e4, math.nan])
    x = torch.cat([z, torch.ones_like(z)]) if activation.gated else z
    found, wanted = (laws.results(run, {"x": x}) for run in (activation.kernel, activation.reference))
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], equal_nan=True)


def test_a_second_derivative_is_refused(activation):
    x = activation.inputs(2, 8)["x"].requires_grad_()
    with pytest.raises(RuntimeError, match=f"{activation.name} kernel has no second derivative"):
        torch.autograd.grad(activation.kernel(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("bias", [None, F32])
def test_operators(activation, bias):
    made = activation.inputs(3, 24, dtype=BF16, bias=bias)
    given, ops = (made["x"], made.get("bias"), activation.f, activation.gated), torch.ops.mpcore
    laws.check_operator(ops.activation_forward, *given)
    laws.check_operator(ops.activation_backward, ops.activation_forward(*given), *given)


@pytest.mark.parametrize("bias", [None, F32])
def test_compiles_in_one_graph(activation, bias):
    laws.check_compiles(activation.kernel, activation.inputs(3, 24, dtype=BF16, bias=bias))
