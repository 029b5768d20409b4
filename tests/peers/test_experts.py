"""Routers, balance losses, dispatchers and experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpcore as mp
from mpcore.kernels.moe_permute import moe_permute, moe_rows, moe_unpermute
from mpcore.layers.moe.experts import Experts
from mpcore.layers.moe.router import Places, Routing
from tests.peers.sources import states

MOE = "router and experts"


def mixture(**options) -> mp.ParallelMoE:
    return mp.ParallelMoE(12, 24, options.pop("experts", 4), options.pop("k", 2), **options)


def alone(n: int) -> Places:
    """The places of n tokens of one sequence."""
    return Places(torch.zeros(n).long(), torch.arange(n), torch.ones(n, dtype=torch.bool), 1, n)


def statistics(moe: nn.Module, on: mp.Mesh = mp.Mesh()):
    (found,) = mp.layers.update_routers(moe, on).values()
    return found


# --- the choice ----------------------------------------------------------------------------------------------------


@states(
    MOE,
    "Megatron-LM",
    "transformer/moe/test_routers.py",
    table={"TestTop2Router.test_constructor": (4, 2), "TestGroupLimitedRouter.test_constructor": (16, 4)},
)
def test_a_router_has_a_weight_for_each_pair(experts, k):
    assert sum(p.numel() for p in mixture(experts=experts, k=k).router.parameters()) == 12 * experts


@states(
    MOE,
    "Megatron-LM",
    "transformer/moe/test_routers.py: TestTop2Router.test_aux_loss",
    table={
        "no coefficient": ({}, False),
        "a balance loss": ({"aux_loss": "sequence", "aux_coefficient": 1.0}, True),
        "a z-loss": ({"z_loss": 1.0}, True),
    },
)
def test_a_balance_loss_alone_moves_the_router(options, moves):
    """The output counts for nothing."""
    moe = mixture(**options)
    moe(torch.randn(2, 32, 12), loss_scale=1.0).sum().mul(0).backward()
    assert bool(moe.router.weight.grad.abs().sum() > 0) is moves  # type: ignore[union-attr]


@states(MOE, "Megatron-LM", "transformer/moe/test_routers.py", "TestTop2Router.test_router_with_padding_mask")
def test_padding_changes_no_other_tokens_routing():
    """With the opposite sign of the mask."""
    moe, x = mixture().eval(), torch.randn(2, 32, 12)
    mask = torch.arange(32).expand(2, 32) < 16
    torch.testing.assert_close(moe(x, mask=mask)[:, :16], moe(x[:, :16]))
    assert torch.equal(moe(x, mask=mask)[:, 16:], torch.zeros(2, 16, 12))


@states(
    MOE,
    "Megatron-LM",
    "transformer/moe/test_routers.py: TestTop2Router.test_expert_bias_token_counts_with_padding_mask",
    table={"10 tokens": 10, "8 of 10 tokens": 8},
)
def test_each_token_counts_for_its_experts_and_padding_for_none(tokens):
    moe = mixture(score="sigmoid", bias_rate=0.001)
    x = torch.randn(2, 5, 12, requires_grad=True)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, 5 - (10 - tokens) :] = False
    moe(x, mask=mask).sum().backward()
    assert statistics(moe).tokens_per_expert.sum() == 2 * tokens
    assert x.grad.isfinite().all()  # type: ignore[union-attr]
    assert moe.router.weight.grad.isfinite().all()  # type: ignore[union-attr]


@states(MOE, "Megatron-LM", "transformer/moe/test_routers.py", "TestTop2Router.test_router_dtype")
def test_a_bf16_router_scores_in_float32_and_the_layer_stays_in_bf16():
    moe, x = mixture(dtype=torch.bfloat16), torch.randn(32, 12, dtype=torch.bfloat16)
    assert moe.router(x, alone(32)).weights.dtype == torch.float32
    assert moe(x[None]).dtype == torch.bfloat16


@states(
    MOE,
    "Megatron-LM",
    "transformer/moe/test_routers.py: test_router_gating_linear",
    table={"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64},
)
def test_a_routers_gradients_have_the_dtype_of_what_they_are_of(dtype):
    router = mixture(dtype=dtype).router
    x = torch.randn(16, 12, dtype=dtype, requires_grad=True)
    router(x, alone(16)).weights.square().sum().backward()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inner, weight = (t.detach().to(wide).requires_grad_() for t in (x, router.weight))
    scores = F.linear(inner, weight).softmax(-1).topk(2).values
    (scores / scores.sum(-1, keepdim=True)).square().sum().backward()
    assert (x.grad.dtype, router.weight.grad.dtype) == (dtype, dtype)  # type: ignore[union-attr]
    tolerance = {torch.bfloat16: 2e-2}.get(dtype, 1e-6)
    torch.testing.assert_close(x.grad.to(wide), inner.grad, rtol=tolerance, atol=1e-6)  # type: ignore[union-attr]
    torch.testing.assert_close(router.weight.grad.to(wide), weight.grad, rtol=tolerance, atol=2e-4)  # type: ignore[union-attr]


@states(MOE, "Megatron-LM", "transformer/moe/test_routers.py", "TestTop2Router.test_token_dropping")
@pytest.mark.parametrize("factor", [None, 1.0, 2.0])
def test_no_more_is_routed_than_the_capacity(factor):
    """32 tokens."""
    moe = mixture(capacity_factor=factor)
    moe(torch.randn(1, 32, 12))
    found = statistics(moe)
    kept = float(found.tokens_per_expert.sum() * (1 - found.dropped))
    assert kept == 64 if factor is None else kept <= 64 * factor


@states(MOE, "Megatron-LM", "transformer/moe/test_routers.py", "TestGroupLimitedRouter.test_router_forward")
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
        [3, 1],
        [1, 0],
        [2, 4],
        [3, 2],
    ]  # expert 3 takes tokens 0 and 3, not the second choice of 2


# --- balance -------------------------------------------------------------------------------------------------------


@states(
    MOE,
    "Megatron-LM",
    "transformer/moe/test_aux_loss.py: TestRouterAuxLoss.test_force_balanced_aux_loss",
    table={"aux_loss": "micro_batch", "seq_aux_loss": "sequence", "global_aux_loss": "global"},
)
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


@states(
    MOE,
    "Megatron-LM",
    "transformer/moe/test_aux_loss.py: TestRouterAuxLoss.test_seq_aux_loss",
    table={"one sequence": 1, "two sequences are two micro-batches": 2},
)
def test_the_loss_of_a_sequence_is_that_of_a_micro_batch_of_it(sequences):
    x = torch.randn(sequences, 32, 12, dtype=torch.float64)
    by_sequence = mixture(experts=32, k=8, aux_loss="sequence", dtype=torch.float64)
    by_batch = mixture(experts=32, k=8, aux_loss="micro_batch", dtype=torch.float64)
    by_batch.load_state_dict(by_sequence.state_dict())
    whole = router_gradient(by_sequence, x)
    parts = sum(router_gradient(by_batch, x[i : i + 1]) for i in range(sequences))
    torch.testing.assert_close(whole, parts, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(statistics(by_sequence).aux_loss, statistics(by_batch).aux_loss)


@states(
    MOE,
    "Megatron-LM",
    "transformer/moe/test_aux_loss.py: TestRouterAuxLoss.test_seq_aux_loss_mbs_invariant_per_token_loss",
    table={"without padding": 32, "half of it padding": 16},
)
def test_micro_batches_of_one_sequence_have_the_gradient_of_four(real):
    x, mask = torch.randn(4, 32, 12, dtype=torch.float64), torch.arange(32).expand(4, 32) < real
    moe = mixture(experts=32, k=8, aux_loss="sequence", aux_coefficient=1.0, dtype=torch.float64)
    parts = sum(router_gradient(moe, x[i : i + 1], mask=mask[i : i + 1]) for i in range(4))
    torch.testing.assert_close(router_gradient(moe, x, mask=mask), parts, rtol=1e-10, atol=1e-12)


@states(
    MOE,
    "Megatron-LM",
    "transformer/moe/test_aux_loss.py",
    table={
        "TestAuxLoss.test_allgather_dispatcher": ("micro_batch", "all_gather", {"tp": 2}),
        "TestAuxLoss.test_a2a_dispatcher": ("micro_batch", "all_to_all", {"cp": 2, "ep": 2}),
        "TestSeqAuxLoss.test_a2a_dispatcher": ("sequence", "all_to_all", {"cp": 2, "ep": 2}),
        "TestPerTokenAuxLoss.test_per_token_aux_loss_invariant_to_tp_cp": ("sequence", "all_gather", {"tp": 2}),
    },
)
def test_a_balance_loss_has_the_same_gradient_on_every_layout(scope, dispatch, layout):
    """Of the whole batch on one rank."""
    x = torch.randn(2, 8, 12, dtype=torch.float64)
    options = {"experts": 8, "aux_loss": scope, "aux_coefficient": 1.0, "dtype": torch.float64}

    def gradient(on: mp.Mesh) -> Tensor:
        axes = {"tp": on.tp, "cp": on.cp, "ep": on.ep, "data": on.data, "dispatch": dispatch}
        moe = mixture(**options, **axes)
        mp.layers.materialize(moe, seed=0)
        router_gradient(moe, x.chunk(on.cp.size, 1)[on.cp.rank])
        mp.gradients.reduce_gradients(moe, on)
        return moe.router.weight.grad.clone()  # type: ignore[union-attr]

    dense = gradient(mp.Mesh())
    assert dense.abs().sum() > 0
    for found in mp.simulate(gradient, **layout):
        torch.testing.assert_close(found, dense, rtol=1e-9, atol=1e-12)


def test_the_first_step_has_no_global_balance_loss():
    """A convention: f is 1 in the first step, so the loss has no gradient."""
    moe = mixture(aux_loss="global", aux_coefficient=1.0, dtype=torch.float64)
    x = torch.randn(2, 32, 12, dtype=torch.float64)
    assert router_gradient(moe, x).abs().max() < 1e-12
    statistics(moe)
    assert router_gradient(moe, x).abs().max() > 1e-3


@states(MOE, "Megatron-LM", "transformer/moe/test_aux_loss.py", "TestRouterAuxLoss.test_global_aux_loss, its counts")
def test_the_counts_are_of_all_ranks_and_begin_anew():
    """64 tokens on each of two ranks, top 2: 256 choices, and none after they are read."""

    def counted(on: mp.Mesh) -> list[float]:
        moe = mixture(aux_loss="global", data=on.data)
        moe(torch.randn(2, 32, 12), loss_scale=1.0)
        first = float(statistics(moe, on).tokens_per_expert.sum())
        moe(torch.randn(1, 32, 12), loss_scale=1.0)
        return [first, float(statistics(moe, on).tokens_per_expert.sum())]

    assert mp.simulate(counted, dp=2) == [[256.0, 128.0]] * 2


@states(MOE, "Megatron-LM", "transformer/moe/test_routers.py", "TestAuxLossFreeTop2Router.test_router_forward_aux_free")
@states(
    MOE,
    "torchtitan",
    "test_optimizer_param_groups.py: test_moe_load_balancing_updates_all_enabled_layers",
    table={
        "10 tokens for expert 0, rate 0.1": (0, 0.1, [-0.1, 0.1]),
        "10 for expert 1, rate 0.2": (1, 0.2, [0.2, -0.2]),
    },
)
def test_a_loaded_experts_bias_falls_by_the_rate(loaded, rate, biases):
    moe = mixture(experts=2, k=1, bias_rate=rate)
    with torch.no_grad():
        moe.router.weight.zero_()[loaded] = 1.0
    moe(torch.ones(1, 10, 12))
    assert statistics(moe).tokens_per_expert.tolist() == [10.0 * (loaded == 0), 10.0 * (loaded == 1)]
    torch.testing.assert_close(moe.router.expert_bias.data, torch.tensor(biases))  # type: ignore[union-attr]
    assert moe.router.tally is None


@states(MOE, "torchtitan", "test_moe.py", "test_eval_forward_does_not_accumulate_tokens_per_expert")
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


@states(
    MOE,
    "torchtitan@09da900",
    "test_aux_loss.py: test_value_and_gradient_match_reference",
    table={
        "softmax": ("softmax", 0, False),
        "sigmoid": ("sigmoid", 0, False),
        "with padding": ("sigmoid", 7, False),
        "under recomputation": ("softmax", 7, True),
    },
)
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


# --- dispatch and experts ------------------------------------------------------------------------------------------


@states(
    MOE,
    "Megatron-LM",
    "",
    table={
        "transformer/moe/test_token_dispatcher.py: TestAllgatherDispatcher.test_forward_backward": ("all_gather", {}),
        "transformer/moe/test_token_dispatcher.py: TestAllgatherDispatcher.test_moe_tp_forward_backward": (
            "all_gather", {"tp": 2, "ep": 2, "dp": 2}),
        "transformer/moe/test_a2a_token_dispatcher.py: TestAlltoAllDispatcher.test_forward_backward": (
            "all_to_all", {"ep": 2, "dp": 2}),
    },
)  # fmt: skip
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


@states(MOE, "Megatron-LM", "transformer/moe/test_token_dispatcher.py", "dispatcher_capacity_test")
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


@states(MOE, "nanotron", "test_moe.py", "test_grouped_mlp")
@states(
    MOE,
    "Megatron-LM",
    "transformer/moe/test_sequential_mlp.py: TestTEParallelSequentialMLP",
    table={
        "test_gpu_forward": [2, 2],
        "test_gpu_forward_with_one_local_expert": [4],
        "test_gpu_forward_with_no_tokens_allocated": [0, 4],
        "test_gpu_forward, 8 experts of 1 to 8 tokens": [1, 2, 3, 4, 5, 6, 7, 8],
    },
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_experts_are_one_after_another(counts, dtype):
    experts = Experts(len(counts), 12, 24, dtype=dtype)
    x = torch.randn(sum(counts), 12, dtype=dtype)
    y = experts(x, torch.tensor(counts))
    assert (y.shape, y.dtype) == (x.shape, dtype)
    if dtype == torch.bfloat16:  # nanotron's test states no more
        return
    parts = []
    for rows, up, down in zip(x.split(counts), experts.gate_up.weight, experts.down.weight, strict=True):
        gate, value = (rows @ up.t()).chunk(2, -1)
        parts.append((F.silu(gate) * value) @ down.t())
    torch.testing.assert_close(y, torch.cat(parts), rtol=1e-5, atol=1e-6)


@states(MOE, "Megatron-LM", "transformer/moe/test_sequential_mlp.py", "TestParallelSequentialMLP.test_gpu_forward")
@states(
    MOE, "Megatron-LM", "transformer/moe/test_moe_layer.py", "TestMoELayerFP16.test_moe_layer_fp16_forward_backward"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("experts", [2, 4])
def test_a_mixture_keeps_shape_and_dtype_and_every_parameter_has_a_gradient(dtype, experts):
    moe, x = mixture(experts=experts, dtype=dtype), torch.randn(2, 32, 12, dtype=dtype, requires_grad=True)
    y = moe(x)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    y.sum().backward()
    assert x.grad.dtype == dtype  # type: ignore[union-attr]
    assert all(p.grad is not None for p in moe.parameters())


@states(
    MOE,
    "Megatron-LM",
    "transformer/moe/test_moe_layer.py: TestMoELayerRecompute.test_moe_layer_recompute_forward_backward",
    table={"without a mask": False, "with a padding mask": True},
)
def test_a_recomputed_mixture_has_the_same_gradients(padded):
    mask = torch.arange(32).expand(2, 32) < (28 if padded else 32)
    plain, again = mixture(), mixture()
    again.load_state_dict(plain.state_dict())
    mp.parallel.recompute([again], "full")
    x = torch.randn(2, 32, 12)
    found = []
    for moe in (plain, again):
        inner = x.clone().requires_grad_()
        moe(inner, mask=mask).square().sum().backward()
        found.append([inner.grad, *(p.grad for p in moe.parameters())])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@states(
    MOE,
    "Megatron-LM",
    "transformer/moe/test_upcycling.py",
    table={"test_upcycling_Local": "gelu", "test_upcycling_TE, swiglu": "swiglu", "squared relu": "relu_squared"},
)
def test_an_upcycled_mixture_begins_as_the_dense_model(activation):
    dense = nn.Sequential(mp.ParallelMLP(12, 24, activation, bias=False))
    moe = nn.Sequential(mp.ParallelMoE(12, 24, 2, 2, activation))
    moe.load_state_dict(moe.state_dict() | mp.layers.upcycle(dense.state_dict(), moe))
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(moe(x), dense(x), rtol=1e-5, atol=1e-6)


@states(MOE, "DeepSpeed", "moe/test_moe.py", "TestExpertWeightGradWithZero.test")
def test_sharded_experts_have_the_gradients_of_all_experts():
    """Two experts on ep 1 and on ep 2."""

    def gradient(on: mp.Mesh) -> Tensor:
        moe = mixture(experts=2, k=1, ep=on.ep, data=on.data)
        mp.layers.materialize(moe, seed=0)
        x = torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(0))
        moe(x.chunk(on.dp.size)[on.dp.rank]).square().sum().backward()
        mp.gradients.reduce_gradients(moe, on)
        return moe.experts.down.weight.grad.clone()  # type: ignore[union-attr]

    whole = gradient(mp.Mesh())
    torch.testing.assert_close(torch.cat(mp.simulate(gradient, ep=2, dp=2)), whole, rtol=1e-4, atol=1e-7)


@states(MOE, "Megatron-LM", "transformer/moe/test_moe_layer.py", "TestMoELayerInit.test_moe_with_late_initialize")
def test_a_mixture_can_be_made_before_its_values_are():
    with torch.device("meta"):
        moe = mixture(dtype=torch.bfloat16)
    mp.layers.materialize(moe, seed=123)
    assert moe(torch.randn(4, 16, 12, dtype=torch.bfloat16)).isfinite().all()
