"""The comparisons of `mpcore preflight`: what is sound passes, each kind of mistake is refused with its sentence."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mpcore.tools.preflight.rehearsals import (
    check_digits,
    check_validation,
    compare,
    differing,
    distinct,
    pick,
    resumed,
    within_rounding,
)
from mpcore.tools.preflight.rehearse import Rehearsal, cross_entropy, wrong_loss
from mpcore.tools.verify.run import RankRecord
from tests.preflight.planted import rank

LOGITS, TARGETS = torch.randn(2, 6, 5, dtype=torch.float64), torch.arange(12).view(2, 6) % 5


def sum_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def every_target_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return sum_loss(logits, targets) + 0 * logits.sum() + logits.sub(logits.detach()).sum()


def logarithm_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.nll_loss(logits.softmax(-1).log().flatten(0, 1), targets.flatten(), reduction="sum")


def writing_loss(logits: Tensor, targets: Tensor) -> Tensor:
    loss = sum_loss(logits, targets)
    logits.detach().add_(1)
    return loss


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        return dy.bfloat16().to(dy.dtype)


@pytest.mark.parametrize(("loss", "sentence"), [
    (sum_loss, ""), (writing_loss, "writes to its logits"), (logarithm_loss, "is inf, torch's"),
    (every_target_loss, "gives an ignored target a gradient"),
    (lambda x, y: sum_loss(Rounded.apply(x), y), "it is rounded, or wrong"),
    (lambda x, y: 2 * sum_loss(x, y), "torch's"),
])  # fmt: skip
def test_a_loss_that_is_not_torchs_is_refused(loss, sentence):
    said = wrong_loss(loss, LOGITS, TARGETS)
    assert (sentence in said) if sentence else said == ""


@pytest.mark.parametrize("got", [3.75, 0.0, 5.0])
def test_a_wrong_evaluation_is_named(got):
    with nullcontext() if got == 5 else pytest.raises(ValueError, match=f"is {got:g}, not 5|only the last pipeline"):
        check_validation(got, 5.0, "dp 2")


def test_the_ranks_of_a_worker_have_all_of_its_parameters():
    a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)
    ranks = [rank(0, state={"a": a}, kept={2: {"a": a}}), rank(1, state={"c": c})]
    ranks += [rank(0, state={"b": b}, kept={2: {"b": b}})]
    found = pick(ranks, 0)
    assert (found.worker, found.state, found.kept) == (0, {"a": a, "b": b}, {2: {"a": a, "b": b}})
    assert (found.losses, found.validation) == (ranks[0].losses, 1.5)
    assert pick(ranks, 1).state == {"c": c}
    assert pick([rank(0, kept={})], 0).kept == {}


def refused(sentence: str) -> Any:
    return pytest.raises(ValueError, match=f"^{re.escape(sentence)}") if sentence else nullcontext()


@pytest.mark.parametrize(("change", "sentence"), [
    ({}, ""), ({"losses": {0: 4.0, 1: 3.0 * (1 + 0.9e-8), 2: 2.0, 3: 1.0}}, ""),
    ({"losses": {0: 4.0, 1: 3.0 * (1 + 1.1e-8), 2: 2.0, 3: 1.0}}, "here: loss 3.000000033 of step 1 is not 3: why"),
    ({"losses": {0: 9.0, 1: 3.0, 2: 2.0, 3: 1.0}}, ""),  # of step 0, which isn't compared
    ({"losses": {0: 4.0, 1: 3.0, 2: 2.0, 3: math.nan}}, "here: loss nan of step 3 is not 1: why"),
    ({"norms": {1: 1.0, 2: 1.5, 3: 1.0}}, "here: norm 1.5 of step 2 is not 1: why"),
    ({"state": {"w": torch.tensor([1.0, 2.0 + 1e-6])}}, "here, after step 3: w is off by 9.54e-07: why"),
    ({"validation": 3.0}, "here: the training losses and the parameters are equal, but the validation loss is 3"),
    ({"validation": 0.0}, "here: the training losses and the parameters are equal, but the validation loss is 0"),
])  # fmt: skip
def test_a_run_is_another_one_by_its_losses_norms_parameters_and_validation(change, sentence):
    with refused(sentence):
        compare(replace(rank(), **change), rank(), range(1, 4), "here", "why")
    nan = {0: math.nan, 1: math.nan}
    compare(replace(rank(), losses=nan), replace(rank(), losses=nan), range(2), "here", "why")


@pytest.mark.parametrize(("got", "want", "sentence"), [
    ({"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(1)}, ""),
    ({"a": torch.ones(2)}, {}, "here: a is (2,), not None: why"),
    ({"a": torch.ones(2)}, {"a": torch.ones(3)}, "here: a is (2,), not (3,): why"),
    ({"a": torch.ones(0)}, {"a": torch.ones(0)}, ""),
    ({"a": 1 + 0.9e-7 * torch.ones(1).double()}, {"a": torch.ones(1)}, ""),
    ({"a": 1 + 1.1e-7 * torch.ones(1).double()}, {"a": torch.ones(1)}, "here: a is off by 1.1e-07: why"),
    ({"a": 8 + 8.1e-7 * torch.ones(1).double()}, {"a": torch.full((1,), 8.0)}, "here: a is off by 8.1e-07"),
    ({"a": -8 - 7.9e-7 * torch.ones(1).double()}, {"a": torch.full((1,), -8.0)}, ""),
    ({"a": 0.1 + 0.9e-7 * torch.ones(1).double()}, {"a": torch.full((1,), 0.1).double()}, ""),
    ({"a": torch.tensor([1.0, math.nan])}, {"a": torch.ones(2)}, "here: a is off by nan: why"),
])  # fmt: skip
def test_a_tensor_differs_beyond_a_ten_millionth_of_its_largest_number(got, want, sentence):
    with refused(sentence):
        differing(got, want, "here", "why")


def later(**changes: Any) -> Rehearsal:
    return replace(rank(), losses={2: 2.0, 3: 1.0}, norms={2: 1.0, 3: 1.0}, **changes)


@pytest.mark.parametrize(("change", "whole", "sentence"), [
    ({}, {}, ""),
    ({"begun": {"w": torch.zeros(2)}}, {}, "here: w is off by 2: it was not saved, or not loaded, as it was"),
    ({"begun": {"w": torch.zeros(2)}}, {"kept": {}}, ""),
    ({"scale": 2.0}, {}, "here: the loss scale is 2, it was 1: it is not saved"),
    ({"scale": 2.0}, {"scales": {2: 2.0}}, ""), ({"scale": 2.0}, {"scales": {}}, ""),
    ({"losses": {1: 3.0, 2: 2.0, 3: 1.0}}, {}, "here: it went on with step 1, 2 steps were done"),
    ({"losses": {2: 2.0 * (1 + 0.9e-8), 3: 1.0}}, {}, ""),
    ({"losses": {2: 2.000001, 3: 1.0}}, {}, "here: parameters are what they were, the loss of step 2 is 2.000001, not"),
    ({"losses": {2: 2.0 * (1 + 0.9e-7), 3: 1.0}}, {}, "here: loss 2.00000018 of step 2 is not 2: what the"),
    ({"losses": {2: 2.0, 3: 1.5}}, {}, "here: loss 1.5 of step 3 is not 1: what the optimizer or the routers keep"),
])  # fmt: skip
def test_a_run_that_goes_on_is_the_run_that_went_on(change, whole, sentence):
    with refused(sentence):
        resumed(replace(later(), **change), rank(**whole), 2, "here")


def off(name: str, got: RankRecord, fine: bool, rounded: list[RankRecord], **how: Any) -> None:
    with nullcontext() if fine else pytest.raises(ValueError, match=name):
        rounding(got, rounded, **how)


def test_constants_and_single_numbers_may_begin_alike():
    distinct({"a": torch.ones(2), "b": torch.ones(2), "c": torch.tensor([0.5]), "d": torch.tensor([0.5])})
    with pytest.raises(ValueError, match=r"^a and b begin with the same values: they draw from one random stream$"):
        distinct({"a": torch.tensor([0.5, 1.0]), "b": torch.tensor([0.5, 1.0])})


def run_of(norm: float | None = None, rows: int = 4, length: int = 8, **gradients: Tensor) -> RankRecord:
    found = RankRecord(0, 0, 0, 0, rows=rows, length=length, gradients=dict(gradients))
    whole = torch.cat([g.flatten() for g in gradients.values()]).double().norm()
    found.norm = float(whole) if norm is None else norm
    return found


ONE = torch.tensor([3.0, 4.0], dtype=torch.float64)  # of norm 5


def rounding(got: RankRecord, rounded: list[RankRecord], *, dtype: str = "bfloat16", eps: float = 2.0**-7,
             layers: int = 2, experts: bool = False, truth: RankRecord | None = None) -> None:  # fmt: skip
    within_rounding(dtype, eps, truth or run_of(w=ONE), rounded, got, layers=layers, experts=experts)


def test_the_norm_of_one_process_is_off_by_all_its_roundings_at_most():
    """24 a block and 12 others, each of half a unit: (2 * 24 + 12) * 2^-7 / 2 is 0.234. In float32 never below 1e-4."""
    for layers, most in ((2, 60 / 256), (1, 36 / 256)):
        for sign in (1, -1):
            for part, fine in ((0.99, True), (1.01, False)):
                one = [run_of(w=ONE), run_of(norm=5 * (1 + sign * most * part), w=ONE)]
                off("^the norm of step 0 in bfloat16 on one process", run_of(w=ONE), fine, one, layers=layers)
                rounding(run_of(w=ONE), one, layers=layers, experts=True)
    for part, fine in ((0.99, True), (1.01, False)):
        single = {"dtype": "float32", "eps": 2.0**-23}
        off("on one process", run_of(w=ONE), fine, [run_of(norm=5 * (1 + 1e-4 * part), w=ONE)], **single)
        one = [run_of(norm=5, w=ONE * (1 + 1e-4 * part))]
        off("^the gradient of w on one process in float32", run_of(norm=5, w=ONE), fine, one, **single)
        rounding(run_of(norm=5, w=ONE), one, **single, experts=True)
    far = run_of(norm=50, w=10 * ONE)  # an overflow says nothing
    rounding(run_of(norm=math.inf, w=ONE), [far])
    rounding(far, [run_of(norm=math.nan, w=ONE)])


def test_the_norm_of_a_rank_is_off_by_twice_that_and_four_roundings_at_most():
    for part, fine in ((0.99, True), (1.01, False)):
        for own in (0.0, 0.03):
            for sign in (1, -1):
                got = run_of(norm=5 * (1 + sign * (2 * own + 4 / 128) * part), w=ONE)
                off("^the norm of step 0 in bfloat16 is", got, fine, [run_of(norm=5 * (1 + own), w=ONE)])
        moved = 2 * math.sqrt(2 / 32) + 4 / 128  # two of 32 tokens went to other experts
        off("twice", run_of(norm=5 * (1 + moved * part), w=ONE), fine, [run_of(w=ONE)], experts=True)


def test_a_gradient_of_a_rank_is_off_by_twice_that_of_one_process_and_four_roundings_at_most():
    """A small gradient is measured by a thousandth of the largest."""
    for part, fine in ((0.99, True), (1.01, False)):
        for own in (0.0, 0.02):
            one, got = run_of(norm=5, w=ONE * (1 + own)), run_of(norm=5, w=ONE * (1 + part * (2 * own + 4 / 128)))
            off("^the gradient of w in bfloat16 is off by", got, fine, [one])
            rounding(got, [one], experts=True)
        truth, floor = run_of(norm=5, w=ONE, small=ONE / 1e6), 5e-3 * 4 / 128
        got = run_of(norm=5, w=ONE, small=ONE / 1e6 * (1 + part * floor / 5e-6))
        off("^the gradient of small in bfloat16", got, fine, [truth], truth=truth)


def test_digits_are_looked_at_in_64_numbers_of_blocks_matrices():
    half = torch.randn(64, 1).bfloat16().float()
    with pytest.raises(ValueError, match=r"^the gradient of blocks.0.w has the digits of torch.bfloat16 alone"):
        check_digits(torch.bfloat16, RankRecord(0, 0, 0, 0, gradients={"head": half, "blocks.0.w": half}))
    fine = {"blocks.0.w": half[:63], "blocks.0.norm": half.flatten(), "head": half, "blocks.0.experts.w": half,
            "blocks.0.zeros": torch.cat([half[:63], torch.zeros(9, 1)])}  # fmt: skip
    check_digits(torch.bfloat16, RankRecord(0, 0, 0, 0, gradients=fine))
    digits = torch.cat([half, torch.tensor([[1 + 2.0**-20]])])
    check_digits(torch.bfloat16, RankRecord(0, 0, 0, 0, gradients={"blocks.0.w": digits}))
    check_digits(torch.float16, RankRecord(0, 0, 0, 0, gradients={"blocks.0.w": digits}))


def test_the_reference_is_torchs_mean_over_the_targets_that_count():
    targets = torch.tensor([[0, 1, -100], [2, -100, 3]])
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    chosen = logits.log_softmax(-1)[[0, 0, 1, 1], [0, 1, 0, 2], [0, 1, 2, 3]]
    assert cross_entropy(logits, targets) == pytest.approx(-float(chosen.mean()), rel=1e-12)
    assert cross_entropy(logits, torch.full((2, 3), -100)) == 0
    assert cross_entropy(logits.float(), targets) == pytest.approx(-float(chosen.mean()), rel=1e-6)
