"""Numerics of dropout_add beside the laws of `test_laws.py`: the mask of Philox in torch, bit for bit."""

import functools

import laws
import pytest
import torch
from torch._dynamo.utils import counters

from mpcore.kernels._philox import philox
from mpcore.kernels.dropout_add import dropout_add, dropout_add_reference

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
KEY = 0x5A5A_0123_FEDC_BA98
kernel = functools.partial(dropout_add, impl="triton")


def draw(*shape, dtype=F32, residual=None):
    generator = torch.Generator().manual_seed(sum(shape))
    made = {"x": laws.drawn(torch.randn, shape, generator=generator).to(dtype)}
    if residual is not None:
        made["residual"] = laws.drawn(torch.randn, shape, generator=generator).to(residual)
    return made


def samples_of(B):
    return torch.tensor([7, 2**40 + 1, 0, 2**32 - 1, 3])[:B]


@pytest.mark.parametrize("key", [0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, KEY])
@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.75, 0.999])
def test_the_mask_is_that_of_the_words_in_torch(p, key):
    samples, tokens = samples_of(3), torch.tensor([0, 5, 2**31 + 7, 2**32 - 1])
    x = torch.ones(3, 4, 20)
    where = {"key": key, "samples": samples, "tokens": tokens, "first_feature": 4_000_000_003}
    y = kernel(x, None, p, **where)
    assert torch.equal(y, dropout_add(x, None, p, **where))
    b, t, d = torch.meshgrid(samples, tokens, 4_000_000_003 + torch.arange(20), indexing="ij")
    words = torch.stack(philox(key, d // 4, t, b & (2**32 - 1), b >> 32), -1).gather(-1, d[..., None] % 4).squeeze(-1)
    assert torch.equal(y, torch.where(words >= int(p * 2**32), 1 / (1 - p), 0.0))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_without_a_residual_the_values_are_the_references_bits(dtype):
    made = draw(3, 7, 33, dtype=dtype)
    where = {"residual": None, "p": 0.3, "key": KEY, "samples": samples_of(3)}
    found, wanted = (laws.results(run, made, **where) for run in (kernel, dropout_add_reference))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_pitfall_19_masks_are_cut_as_the_tensor_is():
    """Every cut of samples, tokens and features gives the slice of one mask, sequence first or not."""
    x, samples = torch.ones(4, 6, 21), samples_of(4)
    where = {"p": 0.5, "key": KEY}
    whole = kernel(x, None, samples=samples, **where)
    tokens = torch.arange(6)
    for a, b in ((0, 2), (2, 3), (3, 6)):
        assert torch.equal(kernel(x[:, a:b], None, samples=samples, tokens=tokens[a:b], **where), whole[:, a:b])
        first = kernel(x[:, a:b].transpose(0, 1), None, samples=samples, tokens=tokens[a:b], sequence_dim=0, **where)
        assert torch.equal(first.transpose(0, 1), whole[:, a:b])
    for a, b in ((0, 5), (5, 6), (6, 8), (8, 21)):
        assert torch.equal(kernel(x[..., a:b], None, samples=samples, first_feature=a, **where), whole[..., a:b])
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(kernel(x, None, samples=samples[order], **where), whole[order])
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole, kernel(x, None, samples=samples, p=0.5, key=KEY + 1))


def test_pitfall_22_backward_draws_the_mask_again_and_stores_none():
    x = torch.ones(2, 3, 40, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = kernel(x, torch.zeros(2, 3, 40), 0.5, key=KEY, samples=samples_of(2))
    assert sum(t.numel() for t in saved) <= 2
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_expanded_gradients_and_unneeded_ones():
    x = draw(2, 3, 8)["x"].requires_grad_()
    residual = torch.ones(2, 3, 8, requires_grad=True)
    where = {"p": 0.5, "key": KEY, "samples": samples_of(2)}
    kernel(x, residual, **where).sum().backward()
    assert torch.equal(residual.grad, torch.ones_like(residual))
    found = x.grad
    (wanted,) = torch.autograd.grad(dropout_add(x, residual, **where).sum(), x)
    assert torch.equal(found, wanted)


def test_a_changed_key_compiles_nothing_new():
    made = draw(2, 3, 8, residual=F32)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager")
    for key in (KEY, 5, 2**62 + 1, 2**63 - 1, 7):
        given = {"p": 0.3, "key": key, "samples": samples_of(2)}
        assert torch.equal(compiled(**made, **given), kernel(**made, **given))
    assert counters["stats"]["unique_graphs"] == 2
