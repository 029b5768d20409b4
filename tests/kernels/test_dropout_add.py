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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_reference_rounds_once(dtype):
    where = {"key": 5, "samples": SAMPLES}
    found = dropout_add(X.to(dtype), X.to(dtype), 0.3, **where)
    assert torch.equal(found, dropout_add(X.to(dtype).float(), X.to(dtype).float(), 0.3, **where).to(dtype))


def test_the_reference_runs_under_torchs_own_autograd():
    inputs = [t.requires_grad_() for t in torch.randn(2, 2, 3, 4, dtype=torch.float64)]
    assert torch.autograd.gradgradcheck(lambda x, r: dropout_add(x, r, 0.5, key=1, samples=SAMPLES), inputs)


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


KEEP = dropout_add(torch.ones(2, 3, 8), None, 0.5, key=5, samples=SAMPLES) != 0


@pytest.mark.parametrize(("changes", "same"), [
    ({}, True), ({"key": 6}, False), ({"samples": SAMPLES + 1}, False), ({"tokens": torch.arange(3)}, True),
    ({"tokens": torch.arange(3) + 1}, False), ({"first_feature": 4}, False), ({"sequence_dim": 1}, True),
    ({"key": 5 + 2**63}, False),
])  # fmt: skip
def test_every_part_of_a_place_changes_the_mask_and_defaults_are_what_they_say(changes, same):
    """The key is 0 by default, tokens count from 0, and features from 0."""
    where = {"key": 5, "samples": SAMPLES} | changes
    assert torch.equal(dropout_add(torch.ones(2, 3, 8), None, 0.5, **where) != 0, KEEP) == same
    defaults = dropout_add(torch.ones(2, 3, 8), None, 0.5, samples=SAMPLES)
    assert torch.equal(defaults, dropout_add(torch.ones(2, 3, 8), None, 0.5, samples=SAMPLES, key=0, first_feature=0))
    turned = dropout_add(torch.ones(3, 2, 8), None, 0.5, key=5, samples=SAMPLES, sequence_dim=0)
    assert torch.equal(turned.transpose(0, 1) != 0, KEEP)


def test_a_shard_of_features_or_tokens_has_its_part_of_the_mask():
    x = torch.ones(2, 7, 23)
    whole = dropout_add(x, None, 0.5, key=5, samples=SAMPLES)
    for first in (0, 1, 2, 3, 4, 22):
        part = dropout_add(x[..., first:], None, 0.5, key=5, samples=SAMPLES, first_feature=first)
        assert torch.equal(part, whole[..., first:])
    part = dropout_add(x[:, 3:], None, 0.5, key=5, samples=SAMPLES, tokens=torch.arange(3, 7))
    assert torch.equal(part, whole[:, 3:])
