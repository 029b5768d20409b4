"""Numerics of swiglu, geglu and relu_squared, which keep the same laws."""

import functools
import importlib
import math

import laws
import pytest
import torch

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


class Activation:
    def __init__(self, name, f, **options):
        module = importlib.import_module("mpcore.kernels.activation")
        self.name, self.f = name, f
        self.gated = name in ("swiglu", "geglu")
        self.kernel = functools.partial(getattr(module, name), impl="triton", **options)
        self.reference = functools.partial(getattr(module, f"{name}_reference"), **options)

    def inputs(self, *shape, dtype=F32):
        width = shape[-1] * (1 + self.gated)
        generator = torch.Generator().manual_seed(sum(shape))
        return {"x": (3 * laws.drawn(torch.randn, *shape[:-1], width, generator=generator)).to(dtype)}

    def check(self, inputs, layout="contiguous"):
        laws.check_errors(self.kernel, self.reference, inputs, layout)


ACTIVATIONS = {
    "swiglu": Activation("swiglu", "silu"),
    "geglu": Activation("geglu", "gelu_tanh", approximate="tanh"),
    "exact geglu": Activation("geglu", "gelu_none", approximate="none"),
    "relu_squared": Activation("relu_squared", "squared"),
}


@pytest.fixture(params=ACTIVATIONS)
def activation(request):
    return ACTIVATIONS[request.param]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("F", [1, 100, 2100])
def test_errors(activation, F, dtype):
    activation.check(activation.inputs(3 if F > 1000 else 50, F, dtype=dtype))


@pytest.mark.parametrize("layout", ["strided rows", "strided columns", "far rows"])
def test_errors_of_strided_tensors(activation, layout):
    activation.check(activation.inputs(3, 100, dtype=BF16), layout)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0), (0,), (7,)])
def test_empty_tensors_and_a_single_row(activation, shape):
    activation.check(activation.inputs(*shape))


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


def test_operators(activation):
    x = activation.inputs(3, 24, dtype=BF16)["x"]
    given, ops = (x, activation.f, activation.gated), torch.ops.mpcore
    laws.check_operator(ops.activation_forward, *given)
    laws.check_operator(ops.activation_backward, ops.activation_forward(*given), *given)


def test_compiles_in_one_graph(activation):
    laws.check_compiles(activation.kernel, activation.inputs(3, 24, dtype=BF16))
