"""The comparisons of `mpcore preflight`: what is sound passes, each kind of mistake is refused with its sentence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from examples.gpt.rehearsals import check_digits, check_validation, distinct, within_rounding
from examples.gpt.rehearse import wrong_loss
from mpcore.verify.run import SHIFT, Seen, check_slope, direction

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


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (sum_loss, ""),
        (writing_loss, "writes to its logits"),
        (logarithm_loss, "is inf, torch's"),
        (every_target_loss, "gives an ignored target a gradient"),
        (lambda x, y: sum_loss(Rounded.apply(x), y), "it is rounded, or wrong"),
        (lambda x, y: 2 * sum_loss(x, y), "torch's"),
    ],
)
def test_a_loss_that_is_not_torchs_is_refused(loss, sentence):
    said = wrong_loss(loss, LOGITS, TARGETS)
    assert (sentence in said) if sentence else said == ""


@pytest.mark.parametrize(
    ("got", "sentence"),
    [
        (5.0, ""),
        (3.75, r"is 3.75, not 5 \(0.75 times as large\)..* don't count targets that are -100"),
        (0.0, "only the last pipeline stage has the loss"),
    ],
)
def test_a_wrong_evaluation_is_named(got, sentence):
    if not sentence:
        check_validation(got, 5.0, "dp 2")
        return
    with pytest.raises(ValueError, match=sentence):
        check_validation(got, 5.0, "dp 2")


def test_parameters_that_begin_alike_are_named():
    drawn = torch.randn(3)
    distinct({"a": drawn, "b": drawn + 1, "gain": torch.ones(3), "other gain": torch.ones(3), "one": drawn[:1]})
    with pytest.raises(ValueError, match="a and c begin with the same values"):
        distinct({"a": drawn, "c": drawn.clone()})


def test_a_gradient_that_is_not_the_slope_is_refused():
    """Of the loss sum of p^2 / 2 at p."""
    p = torch.linspace(-1, 1, 7, dtype=torch.float64)
    above, below = (float((p + sign * SHIFT * direction("p", p)).square().sum() / 2) for sign in (1, -1))
    assert check_slope({"p": p}, float(p.norm()), above, below) < 1e-8
    with pytest.raises(ValueError, match="a backward is not that of its forward"):
        check_slope({"p": 1.001 * p}, float(p.norm()), above, below)


def seen(gradient: Tensor) -> Seen:
    found = Seen(0, 0, 0, 0, rows=4, length=8, gradients={"blocks.0.w": gradient})
    found.norm = float(gradient.double().norm())
    return found


NORM = "the norm of step 0 in bfloat16 is .*: a gradient of this dtype is lost, kept or counted twice"


@pytest.mark.parametrize(
    ("change", "experts", "sentence"),
    [
        (lambda g: g.bfloat16(), False, ""),
        (lambda g: g * (1 + 2.0**-7 * torch.randn(g.shape)), False, ""),
        (lambda g: g * (1 + 0.1 * torch.randn(g.shape)), False, "the gradient of blocks.0.w in bfloat16 is off by"),
        (lambda g: 1.4 * g, False, NORM),
        (lambda g: 1.4 * g, True, ""),  # two of 32 tokens that went to other experts move it by up to half
        (lambda g: 1.7 * g, True, NORM),
    ],
)
def test_more_than_rounding_is_refused(change, experts, sentence):
    draws = torch.Generator().manual_seed(0)
    truth = torch.randn(20, 10, generator=draws, dtype=torch.float64)
    twins = [seen(truth * (1 + 2.0**-7 * torch.randn(truth.shape, generator=draws))) for _ in range(4)]
    compared = ("bfloat16", 2.0**-7, seen(truth), twins)
    torch.manual_seed(1)
    if not sentence:
        return within_rounding(*compared, seen(change(truth)), layers=2, experts=experts)
    with pytest.raises(ValueError, match=sentence):
        within_rounding(*compared, seen(change(truth)), layers=2, experts=experts)
    return None


def test_what_one_process_has_wrong_too_is_refused_beyond_all_its_roundings():
    truth = torch.randn(100, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with pytest.raises(ValueError, match=r"on one process is [\d.]+, in float64"):
        within_rounding(
            "bfloat16", 2.0**-7, seen(truth), [seen(1.5 * truth)], seen(1.5 * truth), layers=2, experts=False
        )
    with pytest.raises(ValueError, match="something is computed in a narrower dtype"):
        within_rounding(
            "float32", 2.0**-23, seen(truth), [seen(truth.bfloat16())], seen(truth), layers=2, experts=False
        )


def test_a_sum_of_half_precision_has_more_digits_than_a_term():
    a, b = torch.randn(2, 20, 10).bfloat16()
    check_digits(torch.bfloat16, seen(a.float() + b.float()))
    with pytest.raises(ValueError, match=r"blocks.0.w has the digits of torch.bfloat16 alone"):
        check_digits(torch.bfloat16, seen((a + b).float()))
