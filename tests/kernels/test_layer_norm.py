"""layer_norm without a GPU: the reference, and bad input."""

import pytest
import torch

from mpcore.kernels.layer_norm import layer_norm

X, W, B = torch.randn(2, 3, 8), torch.randn(8), torch.randn(8)


@pytest.mark.parametrize("has_bias", [True, False])
def test_the_reference_is_the_formula(has_bias):
    x, weight, bias, residual = torch.randn(4, 2, 8, dtype=torch.float64)
    h = x + residual
    centred = h - h.mean(-1, keepdim=True)
    wanted = centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight[0] + has_bias * bias[0]
    shift = bias[0] if has_bias else None
    y, residual_out = layer_norm(x, weight[0], shift, 0.1, residual=residual)
    assert y.dtype == torch.float64
    torch.testing.assert_close((y, residual_out), (wanted, h))


@pytest.mark.parametrize(("arguments", "message"), [
    ({"weight": W[:7]}, r"weight has shape \(7,\), but the last dimension of x is 8"),
    ({"bias": B[:7]}, r"bias has shape \(7,\), but the last dimension of x is 8"),
    ({"bias": B.double()}, "bias is torch.float64, which does not go with x of torch.float32"),
    ({"residual": X[0]}, r"residual has shape \(3, 8\), but x has \(2, 3, 8\)"),
])  # fmt: skip
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        layer_norm(**{"x": X, "weight": W, "bias": B} | arguments)
