"""Vocabulary-parallel cross-entropy against `F.cross_entropy` in float64: loss and gradient, at every size."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from mpcore import VocabParallelCrossEntropy, vocab_parallel_cross_entropy
from mpcore import collectives as c
from mpcore.layers import loss as module
from tests.equality import close, draw_ids, tp_axis
from tests.layers.test_fused_loss import dense, draw
from tests.pool import on_ranks

B, T = 2, 5
SIZES = [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]


def compare(full, target, tolerance=1e-12, **options):
    """Loss and gradient of the shards against the reference on the whole."""
    tp = tp_axis()
    ours, theirs = full.clone().requires_grad_(), full.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(c.split(ours, tp, -1), target, tp=tp, vocab_size=full.shape[-1], **options)
    wanted = dense(theirs, target, **options)
    dy = draw(9, *loss.shape)
    loss.backward(dy)
    wanted.backward(dy)
    close(loss.detach(), wanted.detach(), f"loss {options}", tolerance)
    close(ours.grad, theirs.grad, f"gradient {options}", tolerance)


@pytest.mark.parametrize("path", ["kernels", "torch"])
@on_ranks(*SIZES)
def test_pitfall_05_smoothing_and_z_loss_are_over_the_whole_vocabulary(path):
    """With every other option, by the kernels' path, on which a CPU takes their references, and by torch's."""
    target = draw_ids(2, 10, B, T)
    some, other = target.clone(), target.clone()
    some[0, :3], other[1, 2:] = -100, 3
    targets, weight = itertools.cycle([(target, -100), (some, -100), (other, 3)]), draw(6, B, T).abs()
    chosen = module.runs_triton
    module.runs_triton = lambda *_: path == "kernels"
    try:
        for vocab, smoothing, z_loss, softcap, weighted, reduction in itertools.product(
            (12, 10), (0.0, 0.1), (0.0, 0.01), (0.0, 2.0), (False, True), ("mean", "sum", "none")
        ):
            ids, ignored = next(targets)
            options = {"label_smoothing": smoothing, "z_loss": z_loss, "softcap": softcap, "reduction": reduction}
            options |= {"token_weight": weight.where(ids != ignored, torch.nan)} if weighted else {}
            compare(draw(1, B, T, vocab), ids, ignore_index=ignored, **options)
    finally:
        module.runs_triton = chosen


@on_ranks(*SIZES)
def test_any_rank_one_token_and_none():
    compare(draw(1, 1, 10), draw_ids(2, 10, 1))
    compare(draw(1, 2, 3, 4, 10), draw_ids(2, 10, 2, 3, 4), label_smoothing=0.1)
    tp = tp_axis()
    logits = c.split(draw(1, 0, 10), tp, -1).requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, torch.zeros(0, dtype=torch.int64), tp=tp, vocab_size=10)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad.shape == logits.shape


@on_ranks(*SIZES)
def test_pitfall_17_vocabulary_50257_equals_dense():
    target = draw_ids(2, 50257, 3)
    target[0] = 50256
    compare(draw(1, 3, 50257), target, label_smoothing=0.1, z_loss=1e-4)


@on_ranks(1, 2, 4)
def test_pitfall_04_logits_are_never_changed_and_can_be_used_again():
    tp = tp_axis()
    whole, target = draw(1, B, T, 12).float(), draw_ids(2, 12, B, T)
    shard = c.split(whole, tp, -1)
    for logits in (shard.clone(), shard.transpose(0, 1).contiguous().transpose(0, 1), shard[:1].expand(B, -1, -1)):
        before, ids = logits.clone(), target.clone()
        leaf = logits.detach().requires_grad_()
        loss = vocab_parallel_cross_entropy(
            leaf, ids, tp=tp, vocab_size=12, reduction="none", label_smoothing=0.1, z_loss=0.01
        )
        loss.sum().backward()  # an expanded gradient
        assert torch.equal(leaf.detach(), before), "logits were changed"
        assert torch.equal(logits, before), "logits were changed"
        assert torch.equal(ids, target), "targets were changed"
    ours, theirs = (whole.double().clone().requires_grad_() for _ in range(2))
    logits = c.split(ours, tp, -1)
    loss = vocab_parallel_cross_entropy(logits, target, tp=tp, vocab_size=12)
    second = vocab_parallel_cross_entropy(logits, target, tp=tp, vocab_size=12, label_smoothing=0.2)
    penalty = c.reduce(logits.square().sum(), tp)  # the logits used again, after the loss
    (loss + second + 0.1 * penalty).backward()
    ids = target.flatten()
    flat = theirs.flatten(0, 1)
    want = F.cross_entropy(flat, ids) + F.cross_entropy(flat, ids, label_smoothing=0.2) + 0.1 * theirs.square().sum()
    want.backward()
    close(ours.grad, theirs.grad, "gradient of all three uses")


@on_ranks(*SIZES)
def test_pitfall_06_a_gap_of_200_between_logits_stays_finite():
    logits = torch.zeros(3, 12, dtype=torch.float64)
    logits[0, 0], logits[1, 11], logits[2, 5] = 200.0, 200.0, -200.0
    for target in (torch.tensor([11, 0, 5]), torch.tensor([0, 11, 4])):
        for smoothing in (0.0, 0.1):
            compare(logits, target, label_smoothing=smoothing, reduction="none")
    tp = tp_axis()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        loss = vocab_parallel_cross_entropy(
            c.split(logits.to(dtype), tp, -1), torch.tensor([11, 0, 5]), tp=tp, vocab_size=12, label_smoothing=0.1,
            reduction="none",
        )  # fmt: skip
        close(
            loss.double(), dense(logits, torch.tensor([11, 0, 5]), label_smoothing=0.1, reduction="none"), "loss", 1e-6
        )


@on_ranks(*SIZES)
def test_shards_without_any_finite_logit_have_no_probability():
    """Logits of minus infinity, up to all that a rank holds: the forbidden words of a constrained vocabulary."""
    for first, last in ((0, 3), (3, 12), (0, 1), (9, 12)):
        logits = draw(1, 4, 12)
        logits[:, first:last] = -torch.inf
        allowed = [i for i in range(12) if not first <= i < last]
        compare(logits, torch.tensor([allowed[0], allowed[-1], allowed[0], -100]), z_loss=0.01)


@on_ranks(*SIZES)
def test_pitfall_07_the_mean_is_over_tokens_that_count_and_zero_without_any():
    logits = draw(1, 4, 12)
    logits[0] = 0
    logits[0, 7] = 300  # predicted perfectly: its loss is 0, and it counts
    target = torch.tensor([7, 1, -100, 2])
    compare(logits, target)
    tp = tp_axis()
    each = vocab_parallel_cross_entropy(c.split(logits, tp, -1), target, tp=tp, vocab_size=12, reduction="none")
    mean = vocab_parallel_cross_entropy(c.split(logits, tp, -1), target, tp=tp, vocab_size=12)
    assert each[0] == 0
    close(mean, each.sum() / 3, "mean over the three that count")
    leaf = c.split(logits, tp, -1).requires_grad_()
    for reduction in ("mean", "sum", "none"):
        leaf.grad = None
        loss = vocab_parallel_cross_entropy(
            leaf, torch.full((4,), -100), tp=tp, vocab_size=12, reduction=reduction, label_smoothing=0.1, z_loss=0.1,
            token_weight=torch.full((4,), torch.nan),
        )  # fmt: skip
        loss.sum().backward()
        assert not loss.any()
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@on_ranks(*SIZES)
def test_pitfall_08_an_ignored_target_has_loss_0_and_gradient_0():
    tp = tp_axis()
    terms = {"label_smoothing": 0.1, "z_loss": 0.1}
    for ignored, held, more in itertools.product(
        (-100, 5, -1), (0.5, torch.nan, torch.inf, -torch.inf), ({}, {"softcap": 2.0})
    ):
        leaf = c.split(draw(1, 4, 12), tp, -1)
        leaf[1] = held
        leaf.requires_grad_()
        target = torch.tensor([1, ignored, 11, ignored])
        loss = vocab_parallel_cross_entropy(
            leaf, target, tp=tp, vocab_size=12, reduction="none", ignore_index=ignored, **terms, **more
        )
        loss.sum().backward()
        assert leaf.grad.isfinite().all()
        assert loss[1] == loss[3] == 0
        assert (loss[::2] > 0).all()
        assert not leaf.grad[1::2].any()
        assert leaf.grad[::2].any(dim=-1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@on_ranks(1, 2, 4)
def test_pitfall_09_gradients_keep_the_dtype_and_its_precision(dtype):
    """The gradient is the exact one, rounded once to the dtype of the logits."""
    tp = tp_axis()
    whole, target = draw(1, B, T, 12).to(dtype), draw_ids(2, 12, B, T)
    leaf = whole.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(
        c.split(leaf, tp, -1), target, tp=tp, vocab_size=12, label_smoothing=0.1, reduction="sum"
    )
    loss.backward()
    exact = whole.double().requires_grad_()
    wanted = dense(exact, target, label_smoothing=0.1, reduction="sum")
    wanted.backward()
    assert loss.dtype == torch.float32
    close(loss.detach().double(), wanted.detach(), "loss", 1e-6)
    assert leaf.grad.dtype == dtype
    error = (leaf.grad.double() - exact.grad).abs()
    once = torch.finfo(dtype).eps / 2 * exact.grad.abs() + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert (error <= once + 1e-6 * exact.grad.abs().max()).all()


@on_ranks(2, 3, 4)
def test_pitfall_10_gathered_logits_are_refused():
    tp = tp_axis()
    whole, target = draw(1, B, T, 12), draw_ids(2, 12, B, T)
    criterion = VocabParallelCrossEntropy(12, tp=tp, label_smoothing=0.1)
    message = rf"logits have 12 columns, but rank \d of the tp axis of size {tp.size} holds \d of a vocabulary of 12"
    with pytest.raises(ValueError, match=message):
        criterion(whole, target)
    want = dense(whole, target, label_smoothing=0.1)
    close(criterion(c.split(whole, tp, -1), target), want, "loss of shards")
    close(VocabParallelCrossEntropy(12, label_smoothing=0.1)(whole, target), want, "loss of all, on no axis")


@on_ranks(*SIZES)
def test_backward_may_run_twice_over_a_kept_graph():
    tp = tp_axis()
    logits = c.split(draw(1, 6, 12), tp, -1).detach().requires_grad_()
    loss = vocab_parallel_cross_entropy(
        logits, draw_ids(2, 12, 6), tp=tp, vocab_size=12, label_smoothing=0.1, z_loss=1e-3
    )
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, logits)
    assert torch.equal(first, kept), "the second backward wrote to the first one's gradient"
    assert torch.equal(second, kept)
    loss = vocab_parallel_cross_entropy(logits, draw_ids(2, 12, 6), tp=tp, vocab_size=12)
    with pytest.raises(RuntimeError, match="vocab_parallel_cross_entropy has no second derivative"):
        torch.autograd.grad(loss, logits, create_graph=True)
