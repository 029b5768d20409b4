"""The norms: dense equals torch's, and under sequence parallel their gradients are sums over the sequence's shards."""

import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mpcore import LayerNorm, RMSNorm
from mpcore import collectives as c
from tests.equality import FEWER_SIZES, close, draw, full_gradients, same_layer
from tests.pool import mesh, on_ranks

B, T, D = 2, 12, 5
KINDS = {"rms": RMSNorm, "layer": LayerNorm, "layer without bias": lambda d, **k: LayerNorm(d, bias=False, **k)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_is_pickled(kind):
    norm = pickle.loads(pickle.dumps(KINDS[kind](D)))
    assert torch.equal(norm.inits["weight"](torch.zeros(D)), torch.ones(D))


@pytest.mark.parametrize("shape", [(B, T, D), (1, D), (D,), (0, T, D)], ids=str)
@pytest.mark.parametrize("kind", ["rms", "layer", "layer without bias"])
def test_dense_is_torchs_norm(kind, shape):
    ours = KINDS[kind](D, eps=1e-3).double()
    torchs = (
        nn.RMSNorm(D, eps=1e-3) if kind == "rms" else nn.LayerNorm(D, eps=1e-3, bias=ours.bias is not None)
    ).double()
    with torch.no_grad():
        for i, p in enumerate(ours.parameters()):
            p.copy_(draw(7 + i, D))
    torchs.load_state_dict(ours.state_dict())
    results = []
    for norm in (ours, torchs):
        x = draw(1, *shape).requires_grad_()
        y = norm(x)
        y.backward(draw(2, *shape))
        results.append({"y": y.detach(), "dx": x.grad} | {n: p.grad for n, p in norm.named_parameters()})
    for name, want in results[1].items():
        close(results[0][name], want, name)


@on_ranks(*FEWER_SIZES)
def test_pitfall_11_norm_gradients_are_summed_under_sequence_parallel():
    for kind in KINDS.values():
        for sequence, shape in ((0, (T, B, D)), (1, (B, T, D))):
            same_layer(partial(kind, D, sequence_parallel=True), shape, split=sequence, gather=(sequence,))


@on_ranks(2)
def test_pitfall_11_each_rank_holds_one_term_until_the_sum():
    """Before `reduce_gradients` each rank has its own term: the declaration, and nothing else, makes them equal."""
    tp = mesh(tp=2).tp
    norm = RMSNorm(D, tp=tp, sequence_parallel=True).double()
    x = draw(1, T, D)
    norm(c.split(x, tp, 0)).square().sum().backward()
    mine = norm.weight.grad.clone()
    dense = RMSNorm(D).double()
    dense(x).square().sum().backward()
    close(c.all_reduce(mine, tp), dense.weight.grad, "sum of the terms")
    assert not torch.equal(mine, dense.weight.grad)
    assert full_gradients(norm)["weight"].shape == (D,)


def test_a_huge_input_does_not_overflow_in_half_precision():
    x = torch.full((1, 4), 6e4, dtype=torch.float16)
    close(RMSNorm(4, dtype=torch.float16)(x).detach(), torch.ones(1, 4, dtype=torch.float16), "y")
    assert F.rms_norm(x.float(), (4,)).isfinite().all()
