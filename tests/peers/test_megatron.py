"""Megatron-LM's unit tests (github.com/NVIDIA/Megatron-LM, tests/unit_tests at 00caa53), said in mpcore."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import mpcore as mp
from examples.gpt.model import GPT
from examples.gpt.presets import PRESETS
from examples.gpt.ramp import Ramp
from mpcore import collectives as c
from mpcore.layers.moe.router import Places
from mpcore.mesh.layout import mesh_ranks
from mpcore.optim.schedules import cosine, linear
from mpcore.sharding.declare import cut
from tests.pool import mesh


def check_mappings() -> None:
    tp = mesh(tp=4).tp
    mine = torch.ones(1) * tp.rank

    x = torch.ones(1, requires_grad=True)
    c.copy(x, tp).backward(mine)  # test_CopyToModelParallelRegion
    assert x.grad is not None
    assert float(x.grad) == 6

    y = torch.ones(1).mul(tp.rank).requires_grad_()
    total = c.reduce(y, tp)  # test_ReduceFromModelParallelRegion
    total.backward(mine)
    assert (total.item(), y.grad.item()) == (6, tp.rank)

    whole = torch.rand(8, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    part = c.split(whole, tp, 1)  # test_ScatterToModelParallelRegion
    assert torch.equal(part, whole[:, tp.rank : tp.rank + 1])
    part.backward(torch.ones(8, 1) * tp.rank)
    assert torch.equal(whole.grad, torch.arange(4.0).expand(8, 4))

    eight = (torch.ones(8) * tp.rank).requires_grad_()
    gathered = c.gather(eight, tp, 0)  # test_GatherFromModelParallelRegion
    assert torch.equal(gathered, torch.arange(4.0).repeat_interleave(8))
    rows = torch.rand(32, generator=torch.Generator().manual_seed(0))
    gathered.backward(rows)
    assert torch.equal(eight.grad, rows[8 * tp.rank : 8 * tp.rank + 8])

    assert torch.equal(c.split(whole, tp, 0), whole[2 * tp.rank : 2 * tp.rank + 2])  # test_ScatterToSequence..

    four = (torch.ones(4) * tp.rank).requires_grad_()
    sequence = c.all_gather(four, tp, 0)  # test_GatherFromSequenceParallelRegion
    assert torch.equal(sequence, torch.arange(4.0).repeat_interleave(4))
    sequence.backward(torch.arange(4.0).repeat_interleave(4))
    assert torch.equal(four.grad, torch.ones(4) * 4 * tp.rank)

    stacked = torch.arange(4.0)[:, None].repeat(1, 4).requires_grad_()
    reduced = c.reduce_scatter(stacked, tp, 0)  # test_ReduceScatterToSequenceParallelRegion
    assert torch.equal(reduced, torch.ones(1, 4) * 4 * tp.rank)
    reduced.backward(torch.ones(1, 4) * tp.rank)
    assert torch.equal(stacked.grad, stacked.detach())

    # test_cross_entropy.py: 32 columns on each of 4 ranks
    logits, target = torch.arange(8.0).repeat(16, 4), torch.arange(0, 32, 2)
    loss = mp.vocab_parallel_cross_entropy(logits, target, tp=tp, vocab_size=128, reduction="none")
    torch.testing.assert_close(loss, torch.tensor([10.2309, 8.2309, 6.2309, 4.2309]).repeat(4), rtol=0, atol=5e-5)


def test_mappings_and_cross_entropy_have_megatrons_values(ranks):
    """tensor_parallel/test_mappings.py and test_cross_entropy.py."""
    ranks(4, check_mappings)


@pytest.mark.parametrize(
    ("step", "schedule", "rate"),
    [
        (500, linear, 0.1 - (0.1 - 0.001) * ((500 - 100) / (1000 - 100))),
        (1001, linear, 0.001),
        (500, cosine, 0.001 + (0.1 - 0.001) * 0.5 * (math.cos(math.pi * ((500 - 100) / (1000 - 100))) + 1.0)),
        (100, linear, 0.1),  # test_step_function: warm-up is complete
    ],
)
def test_the_rate_after_warm_up_is_megatrons(step, schedule, rate):
    """test_optimizer_param_scheduler.py: test_get_lr_linear, test_get_lr_cosine."""
    assert math.isclose(schedule(step, steps=1000, warmup=100, lr=0.1, floor=0.01), rate, rel_tol=1e-12)


def test_a_ramp_takes_the_batches_of_megatron():
    """test_num_microbatches_calculator.py: test_ramp_up, test_update_num_microbatches."""
    ramp = Ramp(16, 32, stages=1, samples=96)
    assert [ramp.after(0, steps) for steps in range(12)] == [0, 16, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256]
    assert [Ramp(16, 32, stages=2, samples=96).size(sample) // 8 for sample in (0, 48)] == [2, 3]


def test_ranks_are_numbered_as_megatrons():
    """test_parallel_state.py: test_pipeline_parallel_initializations, 8 ranks."""
    for group in mesh_ranks(tp=2, pp=4)["pp"]:
        assert all((rank % 2, after) == (group[0], rank + 2) for rank, after in pairwise(group))


# --- transformer/moe/test_routers.py ----------------------------------------------------------------------------------


def mixture(**options) -> mp.ParallelMoE:
    return mp.ParallelMoE(12, 24, options.pop("experts", 4), options.pop("k", 2), **options)


def test_a_router_has_a_weight_for_each_pair():
    """TestTop2Router.test_constructor: 12 x 4."""
    assert sum(p.numel() for p in mixture().router.parameters()) == 12 * 4


@pytest.mark.parametrize(
    ("options", "moves"),
    [({}, False), ({"aux_loss": "sequence", "aux_coefficient": 1.0}, True), ({"z_loss": 1.0}, True)],
)
def test_a_balance_loss_alone_moves_the_router(options, moves):
    """TestTop2Router.test_aux_loss: the output counts for nothing."""
    moe = mixture(**options)
    moe(torch.randn(2, 32, 12), loss_scale=1.0).sum().mul(0).backward()
    assert bool(moe.router.weight.grad.abs().sum() > 0) is moves  # type: ignore[union-attr]


def test_padding_changes_no_other_tokens_routing():
    """TestTop2Router.test_router_with_padding_mask, with the opposite sign of the mask."""
    moe, x = mixture().eval(), torch.randn(2, 32, 12)
    mask = torch.arange(32).expand(2, 32) < 16
    torch.testing.assert_close(moe(x, mask=mask)[:, :16], moe(x[:, :16]))
    assert torch.equal(moe(x, mask=mask)[:, 16:], torch.zeros(2, 16, 12))


@pytest.mark.parametrize("factor", [None, 1.0, 2.0])
def test_no_more_is_routed_than_the_capacity(factor):
    """TestTop2Router.test_token_dropping: 32 tokens."""
    moe = mixture(capacity_factor=factor)
    moe(torch.randn(1, 32, 12))
    (found,) = mp.update_routers(moe, mp.Mesh()).values()
    kept = float(found.tokens_per_expert.sum() * (1 - found.dropped))
    assert kept == 64 if factor is None else kept <= 64 * factor


@pytest.mark.parametrize(("best", "groups"), [(3, 8), (2, 4)])
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_a_token_goes_to_no_more_groups_than_allowed(best, groups, score):
    """TestGroupLimitedRouter.test_router_forward: 16 experts, top 4."""
    router = mixture(experts=16, k=4, groups=groups, top_groups=best, score=score).router
    n = 128
    places = Places(torch.zeros(n).long(), torch.arange(n), torch.ones(n, dtype=torch.bool), 1, n)
    chosen = router(torch.randn(n, 12), places).experts // (16 // groups)
    assert max(len(set(row)) for row in chosen.tolist()) <= best


def test_a_group_is_as_good_as_its_ceil_of_k_over_groups_best_experts():
    """Megatron's group_limited_topk sums the floor: it would take experts 0, 2 and 3 here."""
    router = mixture(experts=6, k=3, groups=3, top_groups=2, score="sigmoid").router
    scores = torch.tensor([[0.9, 0.01, 0.5, 0.45, 0.46, 0.47]])
    with torch.no_grad():
        router.weight.copy_(torch.eye(6, 12))
    places = Places(torch.zeros(1).long(), torch.zeros(1).long(), torch.ones(1, dtype=torch.bool), 1, 1)
    x = torch.cat([scores.logit(), torch.zeros(1, 6)], 1)
    assert set(router(x, places).experts[0].tolist()) == {2, 4, 5}


# --- for those who port: docs/megatron.md, "Conventions" ------------------------------------------------------------


def test_a_mask_of_megatrons_is_refused():
    """[b, 1, s, s], True is masked; squeezed it would mean the opposite."""
    attention = mp.ParallelAttention(8, 2)
    x, seen = torch.randn(2, 5, 8), torch.ones(5, 5).tril().bool()
    theirs = ~seen.expand(2, 1, 5, 5)
    with pytest.raises(ValueError, match=r"mask \(2, 1, 5, 5\) is none of \[T, T\]"):
        attention(x, mask=theirs)
    for mask in (theirs[:, 0], theirs[0, 0]):
        with pytest.raises(ValueError, match=r"no query sees its own key in the mask .*: True is a key that is seen"):
            attention(x, mask=mask)
    torch.testing.assert_close(attention(x, mask=~theirs[:, 0]), attention(x))
    assert not attention(x, mask=torch.zeros(5, 5).bool()).isnan().any()  # padding alone


def test_labels_of_another_order_are_refused_where_shapes_tell():
    """Megatron's logits are [s, b, v] and its labels [b, s]."""
    logits = torch.randn(5, 2, 7)
    with pytest.raises(ValueError, match="don't have the same tokens"):
        mp.vocab_parallel_cross_entropy(logits, torch.zeros(2, 5).long())


def test_the_first_step_of_warm_up_isnt_zero():
    """Megatron's has lr-warmup-init; here step i has lr (i + 1) / warmup, and warm-up is as long as asked."""
    assert [linear(i, steps=3, warmup=4) for i in range(3)] == [0.25, 0.5, 0.75]


def test_matrices_alone_decay():
    """optimizer/__init__.py, _get_param_groups: no decay for biases and for what has one dimension."""
    model = torch.nn.Sequential(torch.nn.Embedding(3, 4), mp.LayerNorm(4), torch.nn.Linear(4, 4))
    decays, spared = mp.decay_groups(model, 0.1)
    assert (decays["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decays["params"]} == {2}
    assert {p.dim() for p in spared["params"]} == {1}


@pytest.mark.parametrize(
    ("size", "parts", "count"),
    [
        (12, ("",), 6240),  # models/test_gpt_model.py
        (12, ("blocks.0.",), 1884),  # transformer/test_transformer_layer.py
        (64, ("blocks.", "norm."), 100096),  # transformer/test_transformer_block.py
        (128, ("blocks.0.attention.", "blocks.0.attention_norm."), 66304),  # transformer/test_attention.py
    ],
)
def test_a_gpt_has_as_many_parameters_as_megatrons(size, parts, count):
    """test_constructor: two layers of 4 heads, 100 tokens, 4 positions."""
    config = replace(PRESETS["gpt2"], vocab_size=100, seq_len=4, layers=2, d_model=size, heads=4, kv_heads=4,
                     d_ff=4 * size, tie_embeddings=False)  # fmt: skip
    model = GPT(config, mp.Mesh())
    assert sum(p.numel() for name, p in model.named_parameters() if name.startswith(parts)) == count


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_vocabulary_is_sharded_in_megatrons_ranges(size):
    """test_vocab: rank r of n has tokens r * 1600 / n to (r + 1) * 1600 / n - 1."""
    for rank in range(size):
        shard = cut(1600, mp.Axis(size, rank, name="tp"), 0)
        assert shard.mine == ((rank * 1600 // size, (rank + 1) * 1600 // size),)
