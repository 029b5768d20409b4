"""dropout_add without a GPU: the reference, bad input, and what would be launched."""

import pytest
import torch
from fake_gpu import fake_gpu

from mpcore.kernels import dropout_add as module
from mpcore.kernels.dropout_add import dropout_add

X, SAMPLES = torch.randn(2, 3, 8), torch.tensor([4, 9])


def test_the_reference_is_the_formula():
    x, residual, bias = X.double(), torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    keep = dropout_add(torch.ones_like(x), None, 0.4, key=5, samples=SAMPLES) != 0
    wanted = residual + keep * (x + bias) / 0.6
    torch.testing.assert_close(dropout_add(x, residual, 0.4, key=5, samples=SAMPLES, bias=bias), wanted)
    torch.testing.assert_close(dropout_add(x, residual, 0.0, bias=bias), x + bias + residual)
    assert dropout_add(X, None, 0.0) is X


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_reference_rounds_once(dtype):
    where = {"key": 5, "samples": SAMPLES, "bias": torch.randn(8)}
    found = dropout_add(X.to(dtype), X.to(dtype), 0.3, **where)
    assert torch.equal(found, dropout_add(X.to(dtype).float(), X.to(dtype).float(), 0.3, **where).to(dtype))


def test_the_reference_runs_under_torchs_own_autograd():
    inputs = [t.requires_grad_() for t in torch.randn(2, 2, 3, 4, dtype=torch.float64)]
    assert torch.autograd.gradgradcheck(lambda x, r: dropout_add(x, r, 0.5, key=1, samples=SAMPLES), inputs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"p": 1.0}, r"dropout probability 1.0 is not in \[0, 1\)"),
        ({"p": -0.1}, r"dropout probability -0.1 is not in"),
        ({"residual": X[0]}, r"residual has shape \(3, 8\), but x has \(2, 3, 8\)"),
        ({"bias": torch.ones(7)}, r"bias has shape \(7,\), but the last dimension of x is 8"),
        ({"x": X[0]}, r"x \(3, 8\), samples \(2,\).* are not \[B, T, D\], \[B\]"),
        ({"samples": None}, "dropout needs samples"),
        ({"samples": torch.arange(3)}, r"x \(2, 3, 8\), samples \(3,\).* are not \[B, T, D\], \[B\]"),
        ({"samples": SAMPLES.int()}, "samples is torch.int32 on cpu; it must be int64 on cpu"),
        ({"tokens": SAMPLES}, r"tokens \(2,\) are not \[B, T, D\], \[B\], \[T\]"),
        ({"sequence_dim": 2}, "sequence_dim 2 is neither 0 nor 1"),
        ({"sequence_dim": 0}, r"x \(2, 3, 8\), samples \(2,\).* are not \[T, B, D\], \[B\]"),
        ({"x": X.long()}, "x is torch.int64"),
        ({"impl": "triton"}, "impl='triton', but x is on cpu"),
    ],
)
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


def launched(B, T, D, p=0.1, bias=None, key=3, residual=True, dtype=torch.bfloat16):
    x, samples = torch.empty(B, T, D, dtype=dtype), torch.zeros(B, dtype=torch.int64)
    with fake_gpu() as launches:
        y = torch.ops.mpcore.dropout_add_forward(x, x if residual else None, bias, samples, None, p, key, 0, 1)
        torch.ops.mpcore.dropout_add_backward(y, bias, dtype, samples, None, p, key, 0, 1)
    return launches


def test_launches(monkeypatch):
    monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    forward, backward = launched(4, 500, 4096)
    assert forward.grid == backward.grid == (2 * 2000, 1, 1)  # two tiles of 2048 columns, for each row
    assert (forward.arguments["M"], forward.arguments["inner"]) == (2000, 500)
    forward, backward, total = launched(4, 500, 4096, bias=torch.empty(4096))
    assert (backward.grid, total.grid) == ((2 * 132, 1, 1), (128, 1, 1))
    assert backward.arguments["partials_ptr"].shape == (1, 132, 4096)
    assert launched(0, 3, 8) == launched(2, 3, 0) == []


def test_sites_share_their_compiled_kernels():
    """A key is data: not even one that is 1, or a multiple of 16, makes Triton compile anew."""
    kernels = {
        launch.kernel.hash for key in (1, 3, 16, 2**40, 2**62 + 16, 5 << 32) for launch in launched(1, 2, 64, key=key)
    }
    assert len(kernels) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_draws_the_same_mask(dtype):
    x, residual = torch.randn(2, 33, 1001, dtype=dtype), torch.randn(2, 33, 1001, dtype=dtype)
    where = {"key": 2**62 + 3, "first_feature": 5}
    found = dropout_add(x.cuda(), None, 0.3, samples=SAMPLES.cuda(), **where)
    assert torch.equal(found.cpu(), dropout_add(x, None, 0.3, samples=SAMPLES, **where))
    added = dropout_add(x.cuda(), residual.cuda(), 0.3, samples=SAMPLES.cuda(), **where)
    torch.testing.assert_close(added.cpu(), dropout_add(x, residual, 0.3, samples=SAMPLES, **where))
