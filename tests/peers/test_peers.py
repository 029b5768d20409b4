"""Properties of the unit tests of Megatron-LM, nanotron, torchtitan, DeepSpeed and torch that no other test states.

docs/records/2026-11-28_peers_tests.md has the sources by area.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import mpcore as mp
from examples.gpt.config import PRESETS
from examples.gpt.indexed_dataset import smallest_dtype
from examples.gpt.model import flops_of_token
from examples.gpt.policies import Ramp
from examples.gpt.samples import Blend, TokenSamples
from mpcore.layers.moe.router import Places
from mpcore.mesh.layout import mesh_ranks
from mpcore.optim.schedules import linear


@pytest.mark.parametrize(
    ("world", "tp", "pp", "cp", "ep"),
    [(1, 1, 1, 1, 1), (8, 2, 2, 1, 1), (24, 8, 3, 1, 1), (64, 2, 1, 1, 4), (64, 2, 2, 2, 1), (64, 2, 2, 2, 4)],
)
def test_groups_are_strides_of_the_ranks(world, tp, pp, cp, ep):
    dp = world // (tp * pp * cp)
    groups = mesh_ranks(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep)
    stage = world // pp
    starts = [range(p * stage, (p + 1) * stage) for p in range(pp)]
    assert groups["tp"] == [[*range(i, i + tp)] for i in range(0, world, tp)]
    assert groups["pp"] == [[*range(i, world, stage)] for i in range(stage)]
    assert groups["data"] == [[*of[i::tp]] for of in starts for i in range(tp)]
    assert groups["dp"] == [[*of[i :: cp * tp]] for of in starts for i in range(cp * tp)]
    blocks = [range(i, i + cp * tp) for i in range(0, world, cp * tp)]
    assert groups["cp"] == [[*block[i::tp]] for block in blocks for i in range(tp)]
    assert groups["edp"] == [[*of[i :: ep * tp]] for of in starts for i in range(ep * tp)]


def test_a_mask_of_megatrons_is_refused():
    """A convention: [b, 1, s, s], True is masked; squeezed it would mean the opposite."""
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


def mixture(**options) -> mp.ParallelMoE:
    return mp.ParallelMoE(12, 24, options.pop("experts", 4), options.pop("k", 2), **options)


def alone(n: int) -> Places:
    """The places of n tokens of one sequence."""
    return Places(torch.zeros(n).long(), torch.arange(n), torch.ones(n, dtype=torch.bool), 1, n)


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


def router_gradient(moe: mp.ParallelMoE, x: Tensor) -> Tensor:
    moe.zero_grad()
    moe(x, loss_scale=1.0).sum().mul(0).backward()
    return moe.router.weight.grad.clone()  # type: ignore[union-attr]


def test_the_first_step_has_no_global_balance_loss():
    """A convention: f is 1 in the first step, so the loss has no gradient."""
    moe = mixture(aux_loss="global", aux_coefficient=1.0, dtype=torch.float64)
    x = torch.randn(2, 32, 12, dtype=torch.float64)
    assert router_gradient(moe, x).abs().max() < 1e-12
    mp.layers.update_routers(moe, mp.Mesh())
    assert router_gradient(moe, x).abs().max() > 1e-3


def test_the_first_step_of_warm_up_isnt_zero():
    """A convention: Megatron's is lr-warmup-init; here step i has lr (i + 1) / warmup, and warm-up isn't shortened."""
    assert [linear(i, steps=3, warmup=4) for i in range(3)] == [0.25, 0.5, 0.75]


def test_a_ramp_takes_the_batches_of_megatron():
    ramp = Ramp(16, 32, stages=1, samples=96)
    assert [ramp.after(0, steps) for steps in range(12)] == [0, 16, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256]
    ramp = Ramp(2, 8, stages=3, samples=12)
    begins = [ramp.after(0, steps) for steps in range(8)]
    assert [ramp.size(sample) for sample in begins[:-1]] == np.diff(begins).tolist() == [2, 2, 4, 6, 8, 8, 8]
    assert [Ramp(16, 32, stages=2, samples=96).size(sample) // 8 for sample in (0, 48)] == [2, 3]


@pytest.mark.parametrize("seed", range(4))
def test_the_loss_scale_is_that_of_torchs_grad_scaler(seed):
    """Over a hundred steps, some of which overflow."""
    dice = random.Random(seed)
    how = {"growth_factor": dice.choice([2.0, 4.0]), "backoff_factor": 0.5, "growth_interval": dice.choice([1, 3, 7])}
    theirs, ours = torch.amp.GradScaler("cpu", init_scale=1024.0, **how), mp.optim.LossScaler(mp.Mesh(), 1024.0, **how)
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.0)
    for _ in range(100):
        good = dice.random() < 0.8
        theirs.scale(torch.ones(()))  # it begins here
        p.grad = torch.tensor([1.0, 1.0 if good else torch.inf])
        theirs.step(optimizer)
        theirs.update()
        assert ours.update(good) is good
        assert ours.scale == theirs.get_scale()


def test_the_loss_scale_has_no_lower_bound():
    """A convention: DeepSpeed's stays at 1."""
    scaler = mp.optim.LossScaler(scale=2.0**4)
    for _ in range(8):
        scaler.update(False)
    assert scaler.scale == 2.0**-4


def test_a_parameter_of_no_group_is_not_updated():
    """A convention, torch's: torchtitan raises an error."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "out": nn.Linear(2, 2)})
    before = model["a"].weight.detach().clone()
    optimizer = mp.AdamW(model, groups=[{"params": list(model["out"].parameters())}])
    model["out"](model["a"](torch.ones(1, 2))).sum().backward()
    optimizer.step()
    assert torch.equal(model["a"].weight, before)


class Three(nn.Module):
    """torchtitan's toy: a gate, a query projection, and an output of twice the width."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.wq = (mp.ColumnParallelLinear(64, 64, bias=False) for _ in range(2))
        self.output = mp.ColumnParallelLinear(64, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.wq(self.gate(x))).sum()


def test_selective_recomputation_repeats_no_product():
    """A convention: torchtitan's repeats every second one, and its full recomputation the last one too."""
    counts = {}
    for kind in ("selective", "full"):
        block, x = Three(), torch.randn(64, 64, requires_grad=True)
        mp.parallel.recompute([block], kind)
        y = block(x)
        with FlopCounterMode(display=False) as counter:
            y.backward()
        counts[kind] = counter.get_total_flops() / (2 * 64**3)
    assert counts == {"selective": 8.0, "full": 10.0}


def test_flops_of_attention_count_what_the_causal_mask_hides():
    """A convention: for 4 layers of 512 and 1,024 tokens Megatron counts 6 x 4 x 512 x 1,024 a token, half as many."""
    config = replace(PRESETS["gpt2"], layers=4, d_model=512, heads=8, kv_heads=8, d_ff=2048, positions="rope")
    short, long = (flops_of_token(replace(config, seq_len=length)) for length in (1024, 2048))
    assert long - short == 2 * 6 * 4 * 512 * 1024


class Corpus:
    """Documents in memory: a token is its place in the corpus."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = np.array(lengths)
        self.starts = np.cumsum(self.lengths) - self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.starts[index] + np.arange(self.lengths[index])

    def origin(self, index: int) -> tuple[str, int]:
        return "corpus", index


def parts(*counts: int) -> list[TokenSamples]:
    """Corpora that hold so many samples of 10 tokens."""
    return [TokenSamples(Corpus(10 * count + 1), 10, seed=i) for i, count in enumerate(counts)]


SIZES = [10 * (i + 1) for i in range(10)]


def test_a_blend_without_weights_holds_every_sample_once():
    blend = Blend(parts(*SIZES), None, seed=1234)
    assert len(blend) == sum(SIZES)
    places = [blend.place(i) for i in range(len(blend))]
    assert len({*places}) == len(blend)
    assert [sum(part == i for part, _ in places) for i in range(10)] == SIZES


def test_a_blends_shares_are_its_weights():
    blend = Blend(parts(*SIZES), range(1, 11), seed=1234)
    found = np.bincount([blend.place(i)[0] for i in range(10_000)], minlength=10)
    assert np.abs(found - 10_000 * np.arange(1, 11) / 55).max() < 1


def test_a_corpus_has_megatrons_dtype():
    assert [smallest_dtype(vocab) for vocab in (20_000, 131_072)] == [np.uint16, np.int32]


def test_batches_go_on_into_the_next_epoch():
    """A convention: DeepSpeed's loader drops the last incomplete batch, or makes it smaller."""
    assert TokenSamples(Corpus(51), 10, seed=0).batch(range(4, 8))[0].shape == (4, 10)
