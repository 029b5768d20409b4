"""dropout_add without a GPU: the reference, bad input, and what would be launched."""

import pytest
import torch

from mpcore.kernels.dropout_add import dropout_add

X, SAMPLES = torch.randn(2, 3, 8), torch.tensor([4, 9])


def test_the_reference_is_the_formula():
    x, residual = X.double(), torch.randn(2, 3, 8, dtype=torch.float64)
    keep = dropout_add(torch.ones_like(x), None, 0.4, key=5, samples=SAMPLES) != 0
    wanted = residual + keep * x / 0.6
    torch.testing.assert_close(dropout_add(x, residual, 0.4, key=5, samples=SAMPLES), wanted)
    torch.testing.assert_close(dropout_add(x, residual, 0.0), x + residual)
    assert dropout_add(X, None, 0.0) is X
    defaults, where = {"p": 0.4, "samples": SAMPLES}, {"key": 0, "tokens": torch.arange(3), "first_feature": 0}
    assert torch.equal(dropout_add(X, None, **defaults), dropout_add(X, None, **defaults, **where))


@pytest.mark.parametrize(("arguments", "message"), [
    ({"p": 1.0}, r"dropout probability 1.0 is not in \[0, 1\)"), ({"p": -0.1}, r"dropout probability -0.1 is not in"),
    ({"residual": X[0]}, r"residual has shape \(3, 8\), but x has \(2, 3, 8\)"),
    ({"x": X[0]}, r"x \(3, 8\), samples \(2,\).* are not \[B, T, D\], \[B\]"),
    ({"samples": None}, "dropout needs samples"),
    ({"samples": torch.arange(3)}, r"x \(2, 3, 8\), samples \(3,\).* are not \[B, T, D\], \[B\]"),
    ({"samples": SAMPLES.int()}, "samples is torch.int32 on cpu; it must be int64 on cpu"),
    ({"tokens": SAMPLES}, r"tokens \(2,\) are not \[B, T, D\], \[B\], \[T\]"),
    ({"tokens": torch.arange(3, device="meta")}, "tokens is torch.int64 on meta; it must be int64 on cpu"),
    ({"samples": SAMPLES.to("meta")}, "samples is torch.int64 on meta; it must be int64 on cpu"),
    ({"tokens": torch.arange(3).int()}, "tokens is torch.int32 on cpu; it must be int64 on cpu"),
    ({"residual": X.int()}, "residual is torch.int32, which does not go with x"),
    ({"sequence_dim": -1}, "sequence_dim -1 is neither 0 nor 1"),
    ({"sequence_dim": 2}, "sequence_dim 2 is neither 0 nor 1"),
    ({"sequence_dim": 0}, r"x \(2, 3, 8\), samples \(2,\).* are not \[T, B, D\], \[B\]"),
])  # fmt: skip
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        dropout_add(**{"x": X, "residual": None, "p": 0.5, "samples": SAMPLES} | arguments)


@pytest.mark.slow
def test_inductor_draws_the_same_mask_for_any_key():
    x, samples = torch.ones(2, 3, 9), torch.arange(2)
    torch._dynamo.reset()
    compiled = torch.compile(lambda key: dropout_add(x, None, 0.5, key=key, samples=samples), fullgraph=True)
    for key in (0xA0000000, 2**63 - 1, 2**64 - 5):
        assert torch.equal(compiled(key), dropout_add(x, None, 0.5, key=key, samples=samples))
