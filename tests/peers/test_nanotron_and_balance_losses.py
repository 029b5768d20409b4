"""nanotron's rates and clipping (tests at be8ad7b), and torchtitan's balance losses (test_aux_loss.py at 09da900)."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.optim.schedules import wsd
from tests.pool import mesh


@pytest.mark.parametrize(
    ("steps", "warmup", "start"), [(1000, 100, 100), (1000, 100, 500), (1000, 200, 900), (100, 10, 10)]
)
def test_the_rate_falls_to_the_end_and_not_before(steps, warmup, start):
    """nanotron, test_decay_reaches_min_at_the_end_of_training."""
    rates = [wsd(i, steps=steps, warmup=warmup, decay=steps - start, lr=1.0, floor=0.1) for i in range(steps)]
    assert 0.1 < rates[-1] == pytest.approx(0.1, abs=0.01)
    assert all(later < earlier for earlier, later in pairwise(rates[start:]))


def check_clipping(p: float) -> None:
    tp = mesh(tp=2).tp
    ours, theirs = mp.ColumnParallelLinear(4, 16, tp=tp), nn.Linear(4, 16)
    mp.materialize(ours, seed=0)
    theirs.load_state_dict(mp.full_state_dict(ours))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    ours(x).sum().backward()
    theirs(x).sum().backward()
    norm = mp.grad_norm(ours, mesh(tp=2), p)
    assert float(norm) == pytest.approx(float(nn.utils.clip_grad_norm_(theirs.parameters(), 1.0, p)), rel=1e-6)
    mp.clip_gradients(ours, 1.0, norm)
    rows = slice(8 * tp.rank, 8 * tp.rank + 8)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad[rows], rtol=1e-5, atol=0)  # type: ignore[index]


@pytest.mark.parametrize("p", [math.inf, 1.0, 2.0])
def test_clipping_of_a_sharded_layer_is_that_of_the_whole_one(ranks, p):
    """nanotron, test_clip_grads_with_tp: 4 inputs, 16 outputs, 5 rows."""
    ranks(2, check_clipping, p)


def balance_loss(logits: Tensor, real: Tensor, k: int, score: str) -> Tensor:
    """DeepSeek-V3, equations 17 to 20, times the number of tokens."""
    scores = (logits.softmax(-1) if score == "softmax" else logits.sigmoid())[real]
    p = scores / scores.sum(-1, keepdim=True)
    counts = torch.bincount(scores.topk(k).indices.flatten(), minlength=logits.shape[-1])
    f = counts.double() * logits.shape[-1] / (k * len(p))
    return (f * p.sum(0)).sum()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("padded", [0, 7])
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_balance_loss_is_torchtitans(score, padded, recomputed):
    """test_value_and_gradient_match_reference, with padding and under recomputation: 15 tokens, 7 experts."""
    moe = mp.ParallelMoE(6, 8, 7, 2, score=score, aux_loss="micro_batch", aux_coefficient=0.125, dtype=torch.float64)
    x, real = torch.randn(1, 15, 6, dtype=torch.float64), torch.arange(15) < 15 - padded
    if recomputed:
        mp.recompute([moe], "full")
    moe(x.requires_grad_(), mask=real[None], loss_scale=1 / 8).sum().mul(0).backward()
    weight = moe.router.weight.detach().clone().requires_grad_()
    loss = balance_loss(x[0].detach() @ weight.t(), real, 2, score)
    (loss * 0.125 / 8).backward()
    torch.testing.assert_close(moe.router.weight.grad, weight.grad, rtol=1e-10, atol=1e-14)
    (found,) = mp.update_routers(moe, mp.Mesh()).values()
    assert int(found.tokens_per_expert.sum()) == 2 * (15 - padded)
    assert found.aux_loss == pytest.approx(float(loss.detach()) / (15 - padded), rel=1e-10)
