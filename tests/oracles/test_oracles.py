"""The example's numbers against plain torch: an error that every layout shares shows here alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from examples.gpt.indexed_dataset import IndexedDatasetWriter
from mpcore.optim.muon import orthogonalize
from tests.oracles.muon import EPS, zeropower
from tests.oracles.runs import CASES, MOE, build, compare, weights_of
from tests.oracles.training import follow

# Losses and norms add some thousand terms; AdamW divides what was rounded by sqrt(v) + 1e-8: lr / 1e-8 x 2^-53 a step.
WITHIN = {"loss": 1e-12, "norm": 1e-12, "lr": 1e-14, "scale": 0.0, "validation": 1e-12, "weights": 1e-9}


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_what_plain_torch_makes_of_its_batches(name):
    both = compare(CASES[name])
    errors = both.errors()
    assert {column: error for column, error in errors.items() if error > WITHIN[column]} == {}
    assert both.got.skipped == both.want.skipped == []
    for weight, p in both.got.weights.items():  # nothing is compared that stood still
        assert "router." in weight or not torch.equal(p, both.first[weight]), weight


# --- half precision -------------------------------------------------------------------------------------------------

SCALING = {"init_scale": 2.0**46, "growth_factor": 2.0, "backoff_factor": 2.0**-30, "growth_interval": 2}
HALF = {
    "bfloat16": ({"dtype": "bfloat16"}, torch.bfloat16, None),
    "float16": ({"dtype": "float16", "steps": 6}, torch.float16, SCALING),
    "float16, balance of experts": (
        {"dtype": "float16", **MOE, "aux_coefficient": 5.0, "clip": 0.0}, torch.float16, {**SCALING, "init_scale": 64.0}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HALF)
def test_half_precision_is_apart_by_its_roundings_and_no_more(name):
    """Each of the 6 products of a block and the head rounds two inputs and an output, norms and sums beside them one.

    A relative error of n roundings, twice that in a gradient, and of cross-entropy twice the largest of a logit (which
    is below 1 in so short a run).
    """
    case, half, scaling = HALF[name]
    both = compare(case, half, scaling)
    roundings, unit = 3 * (6 * both.settings.layers + 1) + 6 * both.settings.layers, torch.finfo(half).eps / 2
    got, want = both.got, both.want
    assert (got.lr, got.scale) == (pytest.approx(want.lr, rel=1e-14), want.scale)
    assert got.skipped == want.skipped == ([0] if scaling is SCALING else [])
    taken = [step for step in range(both.settings.steps) if step not in want.skipped]
    assert got.loss == pytest.approx(want.loss, abs=4 * roundings * unit * 1.0)
    assert got.validation == pytest.approx(want.validation, abs=4 * roundings * unit * 1.0)
    for step in taken:
        assert got.norm[step] == pytest.approx(want.norm[step], rel=4 * roundings * unit)
    exact = follow(both.settings, both.first, both.batches, both.held_out)
    assert abs(got.norm[taken[0]] / exact.norm[taken[0]] - 1) > roundings * 2.0**-24, "it is float32's"


def test_the_loss_scale_goes_through_a_checkpoint(tmp_path):
    case = {"dtype": "float16"}
    trainer = build(case, "--out", str(tmp_path))
    trainer.run.scaler.scale, trainer.run.scaler.good_steps = 2.0**9, 5
    trainer.step()
    trainer.checkpoints.save()
    again = build(case, "--out", str(tmp_path), "--resume", "auto")
    assert (again.run.scaler.scale, again.run.scaler.good_steps) == (2.0**9, 6)


def test_bf16_moments_stay_within_their_roundings_of_exact_ones():
    """A moment that is rounded at random errs by 2^-7 of itself at most, an update so by 1.5 x 2^-7 a step."""
    both = compare({"optimizer": "adamw-bf16", "steps": 2, "warmup": 0, "weight_decay": 0.0})
    moments = [slot for state in both.trainer.run.optimizer.state.values() for slot in (state["exp_avg"],)]
    assert {slot.dtype for slot in moments} == {torch.bfloat16}
    errors = both.errors()
    assert errors["norm"] < 1e-3
    steps = sum(both.want.lr)
    for name, value in both.got.weights.items():
        error = float((value - both.want.weights[name]).abs().max())
        assert 0 < error < 2 * 1.5 * 2.0**-7 * steps, name


# --- a step that is not taken ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_leaves_weights_and_moments_alone(bad):
    trainer = build({})
    trainer.step()
    weight = trainer.model.get_parameter("norm.weight")
    good = weight.detach().clone()
    before = weights_of(trainer)
    moments = [state["exp_avg"].clone() for state in trainer.run.optimizer.state.values()]
    with torch.no_grad():
        weight[3] = bad
    entry = trainer.step()
    with torch.no_grad():
        weight.copy_(good)
    assert not math.isfinite(entry["loss"] + entry["grad_norm"])
    assert trainer.run.step == 2
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    after = [state["exp_avg"] for state in trainer.run.optimizer.state.values()]
    assert all(map(torch.equal, after, moments))


# --- first weights --------------------------------------------------------------------------------------------------

BEGIN = {"layers": 6, "d_model": 64, "d_ff": 96, "heads": 4}
BEGINNINGS = {
    "gpt2": {**BEGIN, "preset": "gpt2", "seq_len": 96},
    "experts": {**BEGIN, **MOE, "shared_experts": 1, "expert_d_ff": 48, "balance": "bias"},
    "latent attention": {**BEGIN, "preset": "tiny-mla"},
    "float32": {**BEGIN, "dtype": "float32"},
}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_first_weights_follow_the_documented_rule(name):
    """Radford et al. 2019, section 2.3: 0.02, and 0.02 / sqrt(2 layers) where a branch ends; norms 1, biases 0."""
    case = BEGINNINGS[name]
    drawn = {}
    for leaf, p in weights_of(build(case)).items():
        if "norm" in leaf or p.dim() == 1:
            assert bool((p == (1.0 if leaf.endswith("weight") else 0.0)).all()), leaf
            continue
        ends = leaf.endswith(("output.weight", "down.weight")) and "q_down" not in leaf and "kv_down" not in leaf
        std, n = 0.02 / math.sqrt(2 * case["layers"]) if ends else 0.02, p.numel()
        assert float(p.double().std()) == pytest.approx(std, rel=5 / math.sqrt(2 * n)), leaf
        assert float(p.double().mean()) == pytest.approx(0, abs=5 * std / math.sqrt(n)), leaf
        assert float((p.double() / std).pow(4).mean()) == pytest.approx(3, abs=5 * math.sqrt(96 / n)), leaf
        drawn[leaf] = p
    one_size = [p.flatten()[:1000] for leaf, p in drawn.items() if leaf.endswith(("qkv.weight", "q_up.weight"))]
    for i, p in enumerate(one_size):  # every layer has values of its own
        for q in one_size[:i]:
            assert abs(float(torch.corrcoef(torch.stack([p, q]))[0, 1])) < 5 / math.sqrt(1000)


# --- closed forms ---------------------------------------------------------------------------------------------------


def test_no_loss_is_below_the_entropy_of_its_source(tmp_path):
    """Of four bytes drawn alike nobody predicts the next: the loss falls from ln 257 to ln 4, and stays there."""
    dice = np.random.default_rng(0)
    with IndexedDatasetWriter(str(tmp_path / "dice"), np.uint16) as writer:
        for _ in range(2):
            writer.add_document(dice.integers(0, 4, 40000).tolist())
    case = {"steps": 60, "warmup": 5, "lr": 0.02, "seq_len": 16, "global_batch": 8, "micro_batch": 8,
            "eval_samples": 200, "dtype": "float32"}  # fmt: skip
    trainer = build(case, "--data", str(tmp_path / "dice"))
    losses = [trainer.step()["loss"] for _ in range(60)]
    floor, tokens = math.log(4), 8 * 16
    assert losses[0] == pytest.approx(math.log(257), abs=0.1)
    # a predicted chance within [1/8, 1/2] makes one token's loss vary by ln 4 / 2 at most
    assert min(losses) > floor - 4 * (floor / 2) / math.sqrt(tokens)
    assert floor - 0.01 < trainer.evaluate() < floor + 0.03


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (7, 7)])
def test_muon_orthogonalizes_as_its_author_published(shape):
    """The reference adds 1e-7 to the norm, torch and mpcore take it as the least: arguments differ by 1e-7 / norm.

    Five iterations of slope 3.4445 at most make 490 times that of it.
    """
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    got = orthogonalize(x, (3.4445, -4.7750, 2.0315), 5)
    torch.testing.assert_close(got, zeropower(x, added=False), rtol=1e-10, atol=1e-12)
    assert float((got - zeropower(x)).abs().max()) < 3.4445**5 * EPS / float(x.norm())
    values = torch.linalg.svdvals(got)
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
