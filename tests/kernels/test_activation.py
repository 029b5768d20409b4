"""swiglu, geglu, gelu and relu_squared without a GPU: the references, bad input, and what would be launched."""

import pytest
import torch
from fake_gpu import calls

from mpcore.kernels.activation import geglu, gelu, relu_squared, swiglu

FUNCTIONS = [swiglu, geglu, gelu, relu_squared]
GATED = [swiglu, geglu]
X = torch.randn(2, 3, 8)


def exact_gelu(z):
    return z * (1 + torch.erf(z / 2**0.5)) / 2


def tanh_gelu(z):
    return z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3))) / 2


@pytest.mark.parametrize(
    ("function", "options", "formula"),
    [
        (swiglu, {}, lambda z: z / (1 + torch.exp(-z))),
        (geglu, {}, tanh_gelu),
        (geglu, {"approximate": "none"}, exact_gelu),
        (gelu, {}, tanh_gelu),
        (gelu, {"approximate": "none"}, exact_gelu),
        (relu_squared, {}, lambda z: z.clamp(min=0) ** 2),
    ],
)
def test_the_reference_is_the_formula(function, options, formula):
    z = X.double()
    wanted = formula(z[..., :4]) * z[..., 4:] if function in GATED else formula(z)
    found = function(z, **options)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_reference_rounds_once(function, dtype):
    x = X.to(dtype)
    torch.testing.assert_close(function(x), function(x.float()).to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_reference_runs_under_torchs_own_autograd(function):
    assert torch.autograd.gradgradcheck(function, X[0].double().requires_grad_())


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": X.long()}, "x is torch.int64"),
        ({"x": X[0, 0, 0]}, "x is a scalar"),
        ({"impl": "triton"}, "impl='triton', but x is on cpu"),
        ({"impl": "fast"}, "impl 'fast' is none of"),
    ],
)
def test_bad_input(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(**{"x": X} | arguments)


@pytest.mark.parametrize("function", GATED)
def test_a_gate_needs_an_even_width(function):
    with pytest.raises(ValueError, match="the last dimension of x is 7, but gate and up need an even number"):
        function(X[..., :7])


@pytest.mark.parametrize("function", [gelu, geglu])
def test_an_unknown_approximation(function):
    with pytest.raises(ValueError, match="approximate 'erf' is neither 'tanh' nor 'none'"):
        function(X, approximate="erf")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)])
def test_empty_in_empty_out(function, shape):
    wanted = (*shape[:-1], shape[-1] // 2) if function in GATED else shape
    assert function(torch.ones(shape)).shape == wanted


@pytest.mark.parametrize(
    ("f", "gated", "kernel"),
    [("silu", True, "silu"), ("gelu_tanh", True, "gelu_tanh"), ("gelu_tanh", False, "gelu_tanh"),
     ("gelu_none", False, "gelu_erf"), ("squared", False, "squared")],
)  # fmt: skip
@pytest.mark.parametrize(
    ("F", "grid", "tiles", "block_m", "block_f"),
    [(14336, 7 * 1000, 7, 1, 2048), (100, 63, 1, 16, 128), (2, 16, 1, 64, 4)],
)
def test_launches(f, gated, kernel, F, grid, tiles, block_m, block_f):
    """A tile is 2048 elements: seven tiles of 2048 columns for each row, or narrow rows that share a program."""
    width = F * (1 + gated)
    x, dy = torch.empty(1000, width + 8, dtype=torch.bfloat16)[:, :width], torch.empty(1000, F + 24)[:, :F]
    with calls() as launches:
        y = torch.ops.mpcore.activation_forward(x, f, gated)
        dx = torch.ops.mpcore.activation_backward(dy, x, f, gated)
    forward, backward = launches
    shared = {
        "M": 1000, "X_STRIDE": width + 8, "F": F, "GATED": gated, "TILES": tiles, "BLOCK_M": block_m,
        "BLOCK_F": block_f,
    }  # fmt: skip
    for launch, name, own, tensors in (
        (forward, "forward_kernel", {}, {"x": x, "y": y}),
        (backward, "backward_kernel", {"DY_STRIDE": F + 24}, {"x": x, "dy": dy, "dx": dx}),
    ):
        assert (launch.kernel, launch.grid, launch.warps) == (name, (grid, 1, 1), 4)
        found = launch.numbers
        assert found.pop("ACTIVATION").__name__ == f"_{kernel}"
        assert found == shared | own
        assert launch.given == tensors.keys()
        assert all(launch.at(key) == t.data_ptr() for key, t in tensors.items())
    assert (y.shape, y.dtype, dx.shape, dx.dtype) == ((1000, F), x.dtype, x.shape, x.dtype)


def test_nothing_is_launched_for_empty_tensors():
    with calls() as launches:
        for shape, f, gated in (((0, 8), "gelu_tanh", False), ((8, 0), "silu", True)):
            y = torch.ops.mpcore.activation_forward(torch.empty(shape), f, gated)
            torch.ops.mpcore.activation_backward(y, torch.empty(shape), f, gated)
    assert launches == []
