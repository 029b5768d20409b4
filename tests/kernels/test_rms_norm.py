"""rms_norm without a GPU: the reference, and bad input."""

import pytest
import torch

from mpcore.kernels.rms_norm import rms_norm

X, W = torch.randn(2, 3, 8), torch.randn(8)


def test_the_reference_is_the_formula():
    x, weight, residual = torch.randn(3, 2, 8, dtype=torch.float64)
    h = x + residual
    wanted = h / (h.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight[0]
    y, residual_out = rms_norm(x, weight[0], 0.1, residual=residual)
    assert y.dtype == torch.float64
    torch.testing.assert_close((y, residual_out), (wanted, h))


@pytest.mark.parametrize(("arguments", "message"), [
    ({"weight": W[:7]}, r"weight has shape \(7,\), but the last dimension of x is 8"),
    ({"weight": X}, r"weight has shape \(2, 3, 8\)"), ({"x": X[0, 0, 0]}, "x is a scalar"),
    ({"weight": W.double()}, "weight is torch.float64, which does not go with x of torch.float32"),
    ({"weight": W.to(torch.complex64)}, "weight is torch.complex64"),
    ({"residual": X[0]}, r"residual has shape \(3, 8\), but x has \(2, 3, 8\)"),
    ({"residual": X.int()}, "residual is torch.int32"), ({"impl": "triton"}, "impl='triton', but x is on cpu"),
])  # fmt: skip
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(**{"x": X, "weight": W} | arguments)
