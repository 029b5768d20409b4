"""swiglu, geglu and relu_squared without a GPU: the references, bad input, and what would be launched."""

import pytest
import torch

from mpcore.kernels.activation import geglu, relu_squared, swiglu

FUNCTIONS = [swiglu, geglu, relu_squared]
GATED = [swiglu, geglu]
X = torch.randn(2, 3, 8)


def exact_gelu(z):
    return z * (1 + torch.erf(z / 2**0.5)) / 2


def tanh_gelu(z):
    return z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3))) / 2


@pytest.mark.parametrize(("function", "options", "formula"), [
    (swiglu, {}, lambda z: z / (1 + torch.exp(-z))), (geglu, {}, tanh_gelu),
    (geglu, {"approximate": "none"}, exact_gelu), (relu_squared, {}, lambda z: z.clamp(min=0) ** 2),
])  # fmt: skip
def test_the_reference_is_the_formula(function, options, formula):
    z = X.double()
    wanted = formula(z[..., :4]) * z[..., 4:] if function in GATED else formula(z)
    found = function(z, **options)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("arguments", "message"), [
    ({"x": X.long()}, "x is torch.int64"), ({"x": X[0, 0, 0]}, "x is a scalar"),
    ({"impl": "triton"}, "impl='triton', but x is on cpu"), ({"impl": "fast"}, "impl 'fast' is none of"),
])  # fmt: skip
def test_bad_input(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(**{"x": X} | arguments)


@pytest.mark.parametrize("function", GATED)
def test_a_gate_needs_an_even_width(function):
    with pytest.raises(ValueError, match="the last dimension of x is 7, but gate and up need an even number"):
        function(X[..., :7])


def test_an_unknown_approximation():
    with pytest.raises(ValueError, match="approximate 'erf' is neither 'tanh' nor 'none'"):
        geglu(X, approximate="erf")
