"""The references are their formulas in float64. They compute in float32 and round once, to the dtype of their input."""

import pytest
import torch
import torch.nn.functional as F

from mpcore.kernels import activation
from mpcore.kernels.dropout_add import dropout_add
from mpcore.kernels.layer_norm import layer_norm
from mpcore.kernels.moe_permute import moe_unpermute
from mpcore.kernels.rms_norm import rms_norm
from mpcore.kernels.rope import rope

X, Y, W, B = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(8), torch.randn(8)
ROW, PLACE = torch.tensor([[4, 0], [1, -1]]), {"key": 5, "samples": torch.tensor([4, 9])}
GAIN, (COS, SIN) = {"q_weight": W, "k_weight": B}, torch.randn(2, 3, 3)


def dropped(x, residual):
    return dropout_add(x, residual, 0.3, **PLACE)


def rotated(q, k):
    return torch.stack(rope(q[:, :, None], k[:, :, None], COS, SIN, **GAIN))


def unpermuted(y):
    return moe_unpermute(y.flatten(0, 1), ROW, torch.tensor([[0.3, 0.7], [0.1, 2.0]]))


ROUNDED = {  # the function, what it is in float32, and its inputs
    **{f.__name__: (f, f, [X]) for f in (activation.swiglu, activation.geglu, activation.relu_squared)},
    "rms_norm": (rms_norm, lambda x, w: F.rms_norm(x, (8,), w, 1e-6), [X, W]),
    "layer_norm": (layer_norm, lambda x, w, b: F.layer_norm(x, (8,), w, b), [X, W, B]),
    "layer_norm, float32 weight": (lambda x: layer_norm(x, W, B), lambda x: F.layer_norm(x, (8,), W, B), [X]),
    "dropout_add": (dropped, dropped, [X, Y]),
    "rope": (rotated, rotated, [X, Y]),
    "moe_unpermute": (unpermuted, unpermuted, [X]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROUNDED)
def test_a_reference_rounds_once(name, dtype):
    function, exact, inputs = ROUNDED[name]
    given = [x.to(dtype) for x in inputs]
    assert torch.equal(function(*given), exact(*(x.float() for x in given)).to(dtype))


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm", "layer_norm without bias"])
def test_norms_are_their_formulas(kind):
    x, residual, (weight, bias) = (
        torch.randn(2, 3, 8).double(),
        torch.randn(2, 3, 8).double(),
        torch.randn(2, 8).double(),
    )
    h, norm = x + residual, rms_norm if kind == "rms_norm" else layer_norm
    centred = h if kind == "rms_norm" else h - h.mean(-1, keepdim=True)
    wanted = centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight
    how = {"bias": bias} if kind == "layer_norm" else {"bias": None} if norm is layer_norm else {}
    y, residual_out = norm(x, weight, eps=0.1, residual=residual, **how)
    assert y.dtype == torch.float64
    torch.testing.assert_close((y, residual_out), (wanted + bias if kind == "layer_norm" else wanted, h))


def tanh_gelu(z):
    return z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3))) / 2


@pytest.mark.parametrize(("function", "options", "formula"), [
    (activation.swiglu, {}, lambda z: z / (1 + torch.exp(-z))), (activation.geglu, {}, tanh_gelu),
    (activation.geglu, {"approximate": "none"}, lambda z: z * (1 + torch.erf(z / 2**0.5)) / 2),
    (activation.relu_squared, {}, lambda z: z.clamp(min=0)**2),
])  # fmt: skip
def test_activations_are_their_formulas(function, options, formula):
    z = X.double()
    wanted = formula(z) if function is activation.relu_squared else formula(z[..., :4]) * z[..., 4:]
    found = function(z, **options)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, wanted)


def test_dropout_is_its_formula():
    x, residual, where = X.double(), Y.double(), {"samples": PLACE["samples"]}
    keep = dropout_add(torch.ones_like(x), None, 0.4, key=5, **where) != 0
    torch.testing.assert_close(dropout_add(x, residual, 0.4, key=5, **where), residual + keep * x / 0.6)
    torch.testing.assert_close(dropout_add(x, residual, 0.0), x + residual)
    assert dropout_add(X, None, 0.0) is X
    told = {"key": 0, "tokens": torch.arange(3), "first_feature": 0}
    assert torch.equal(dropout_add(X, None, 0.4, **where), dropout_add(X, None, 0.4, **where, **told))


@pytest.mark.slow
def test_inductor_draws_the_same_mask_for_any_key():
    x, samples = torch.ones(2, 3, 9), torch.arange(2)
    torch._dynamo.reset()
    compiled = torch.compile(lambda key: dropout_add(x, None, 0.5, key=key, samples=samples), fullgraph=True)
    for key in (0xA0000000, 2**63 - 1, 2**64 - 5):
        assert torch.equal(compiled(key), dropout_add(x, None, 0.5, key=key, samples=samples))
