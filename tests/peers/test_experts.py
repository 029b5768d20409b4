"""Routers, balance losses, dispatchers and experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.kernels.moe_permute import moe_permute, moe_rows, moe_unpermute
from mpcore.layers.moe.router import Places, Routing
from tests.peers import rows


def mixture(**options) -> mp.ParallelMoE:
    return mp.ParallelMoE(12, 24, options.pop("experts", 4), options.pop("k", 2), **options)


def alone(n: int) -> Places:
    """The places of n tokens of one sequence."""
    return Places(torch.zeros(n).long(), torch.arange(n), torch.ones(n, dtype=torch.bool), 1, n)


def statistics(moe: nn.Module, on: mp.Mesh = mp.Mesh()):
    (found,) = mp.layers.update_routers(moe, on).values()
    return found


@pytest.mark.parametrize(("best", "groups"), [(3, 8), (2, 4)])
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_a_token_goes_to_no_more_groups_than_allowed(best, groups, score):
    """16 experts, top 4."""
    router = mixture(experts=16, k=4, groups=groups, top_groups=best, score=score).router
    chosen = router(torch.randn(128, 12), alone(128)).experts // (16 // groups)
    assert max(len(set(row)) for row in chosen.tolist()) <= best


def test_a_group_is_as_good_as_its_ceil_of_k_over_groups_best_experts():
    """A convention: Megatron's group_limited_topk sums the floor, and would take experts 0, 2 and 3 here."""
    router = mixture(experts=6, k=3, groups=3, top_groups=2, score="sigmoid").router
    scores = torch.tensor([[0.9, 0.01, 0.5, 0.45, 0.46, 0.47]])
    with torch.no_grad():
        router.weight.copy_(torch.eye(6, 12))
    x = torch.cat([scores.logit(), torch.zeros(1, 6)], 1)
    assert set(router(x, alone(1)).experts[0].tolist()) == {2, 4, 5}


def test_first_choices_go_before_second_ones():
    """A convention: DeepSpeed keeps the highest probabilities, or the earliest tokens whatever their choice was."""
    logits = torch.tensor([[0.11, 0.2, 0.1, 0.3], [0.3, 0.4, 0.11, 0.1], [0.11, 0.1, 0.6, 0.5], [0.1, 0.11, 0.7, 0.8]])
    router = mixture(capacity_factor=1.0).router
    with torch.no_grad():
        router.weight.copy_(torch.eye(4, 12))
    kept = router(torch.cat([logits, torch.zeros(4, 8)], 1), alone(4)).experts
    assert kept.tolist() == [
        [3, 1], [1, 0], [2, 4], [3, 2],
    ]  # expert 3 takes tokens 0 and 3, not the second choice of 2  # fmt: skip


@rows({"aux_loss": "micro_batch", "seq_aux_loss": "sequence", "global_aux_loss": "global"})
def test_equal_probabilities_have_a_balance_loss_of_one(scope):
    moe = mixture(experts=32, k=8, aux_loss=scope, dtype=torch.float64)
    with torch.no_grad():
        moe.router.weight.fill_(1 / moe.router.weight.numel())
    moe(torch.randn(2, 32, 12, dtype=torch.float64), loss_scale=1.0)
    assert float(statistics(moe).aux_loss) == pytest.approx(1.0, abs=1e-12)


def router_gradient(moe: mp.ParallelMoE, x: Tensor, **options) -> Tensor:
    moe.zero_grad()
    moe(x, loss_scale=1.0, **options).sum().mul(0).backward()
    return moe.router.weight.grad.clone()  # type: ignore[union-attr]


def test_the_first_step_has_no_global_balance_loss():
    """A convention: f is 1 in the first step, so the loss has no gradient."""
    moe = mixture(aux_loss="global", aux_coefficient=1.0, dtype=torch.float64)
    x = torch.randn(2, 32, 12, dtype=torch.float64)
    assert router_gradient(moe, x).abs().max() < 1e-12
    statistics(moe)
    assert router_gradient(moe, x).abs().max() > 1e-3


@rows({"10 tokens for expert 0, rate 0.1": (0, 0.1, [-0.1, 0.1]), "10 for expert 1, rate 0.2": (1, 0.2, [0.2, -0.2])})
def test_a_loaded_experts_bias_falls_by_the_rate(loaded, rate, biases):
    moe = mixture(experts=2, k=1, bias_rate=rate)
    with torch.no_grad():
        moe.router.weight.zero_()[loaded] = 1.0
    moe(torch.ones(1, 10, 12))
    assert statistics(moe).tokens_per_expert.tolist() == [10.0 * (loaded == 0), 10.0 * (loaded == 1)]
    torch.testing.assert_close(moe.router.expert_bias.data, torch.tensor(biases))  # type: ignore[union-attr]
    assert moe.router.tally is None


def test_evaluation_counts_no_tokens():
    moe = mixture(experts=2, k=1)
    moe(torch.randn(2, 3, 12))
    counted = moe.router.tally.clone()  # type: ignore[union-attr]
    moe.eval()
    with torch.no_grad():
        moe(torch.randn(2, 3, 12))
    assert torch.equal(moe.router.tally, counted)  # type: ignore[arg-type]
    assert float(statistics(moe).tokens_per_expert.sum()) == 6


def balance_loss(logits: Tensor, real: Tensor, k: int, score: str) -> Tensor:
    """DeepSeek-V3, equations 17 to 20, times the number of tokens."""
    scores = (logits.softmax(-1) if score == "softmax" else logits.sigmoid())[real]
    p = scores / scores.sum(-1, keepdim=True)
    counts = torch.bincount(scores.topk(k).indices.flatten(), minlength=logits.shape[-1])
    f = counts.double() * logits.shape[-1] / (k * len(p))
    return (f * p.sum(0)).sum()


@rows(
    {
        "softmax": ("softmax", 0, False), "sigmoid": ("sigmoid", 0, False), "with padding": ("sigmoid", 7, False),
        "under recomputation": ("softmax", 7, True),
    }
)  # fmt: skip
def test_a_balance_loss_is_torchtitans(score, padded, recomputed):
    """15 tokens, 7 experts."""
    moe = mp.ParallelMoE(6, 8, 7, 2, score=score, aux_loss="micro_batch", aux_coefficient=0.125, dtype=torch.float64)
    x, real = torch.randn(1, 15, 6, dtype=torch.float64), torch.arange(15) < 15 - padded
    if recomputed:
        mp.parallel.recompute([moe], "full")
    moe(x.requires_grad_(), mask=real[None], loss_scale=1 / 8).sum().mul(0).backward()
    weight = moe.router.weight.detach().clone().requires_grad_()
    loss = balance_loss(x[0].detach() @ weight.t(), real, 2, score)
    (loss * 0.125 / 8).backward()
    torch.testing.assert_close(moe.router.weight.grad, weight.grad, rtol=1e-10, atol=1e-14)
    found = statistics(moe)
    assert int(found.tokens_per_expert.sum()) == 2 * (15 - padded)
    assert found.aux_loss == pytest.approx(float(loss.detach()) / (15 - padded), rel=1e-10)


@rows({
        "transformer/moe/test_token_dispatcher.py: TestAllgatherDispatcher.test_forward_backward": ("all_gather", {}),
        "transformer/moe/test_token_dispatcher.py: TestAllgatherDispatcher.test_moe_tp_forward_backward": (
            "all_gather", {"tp": 2, "ep": 2, "dp": 2}),
        "transformer/moe/test_a2a_token_dispatcher.py: TestAlltoAllDispatcher.test_forward_backward": (
            "all_to_all", {"ep": 2, "dp": 2}),
    })  # fmt: skip
def test_tokens_come_back_from_experts_that_do_nothing(dispatch, layout):
    """Weights are 1 / K, so that what comes back is what was sent, and so is its gradient."""

    def there_and_back(on: mp.Mesh) -> None:
        moe = mixture(experts=8, dispatch=dispatch, tp=on.tp, ep=on.ep, etp=mp.Axis(name="etp"), data=on.data)
        mp.layers.materialize(moe, seed=0)
        x = torch.randn(16, 12, generator=torch.Generator().manual_seed(on.data.rank)).requires_grad_()
        routing: Routing = moe.router(x, alone(16))
        weights = torch.full_like(routing.weights, 1 / 2)
        y = moe.dispatcher(x, routing.experts, weights, None, lambda rows, counts: rows)  # type: ignore[arg-type]
        torch.testing.assert_close(y, x.detach())
        y.backward(x.detach())
        torch.testing.assert_close(x.grad, x.detach())

    mp.simulate(there_and_back, **layout)


def test_what_has_no_place_comes_back_as_zero():
    """16 tokens, factor 0.5: no expert has more rows than its capacity, and a token its share of kept choices."""
    moe, x = mixture(experts=8, capacity_factor=0.5), torch.randn(16, 12)
    routing = moe.router(x, alone(16))
    row, counts = moe_rows(routing.experts, 8)
    capacity = moe.router.capacity(16)
    assert capacity == 2
    assert counts.max() <= capacity
    back = moe_unpermute(moe_permute(x, row, int(counts.sum())), row, torch.full((16, 2), 0.5))
    torch.testing.assert_close(back, x * (routing.experts < 8).sum(1, keepdim=True) / 2)


def test_a_mixture_can_be_made_before_its_values_are():
    with torch.device("meta"):
        moe = mixture(dtype=torch.bfloat16)
    mp.layers.materialize(moe, seed=123)
    assert moe(torch.randn(4, 16, 12, dtype=torch.bfloat16)).isfinite().all()
