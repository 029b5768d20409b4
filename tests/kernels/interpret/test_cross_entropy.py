"""Numerics of the cross-entropy kernels, as ranks that each hold a run of the vocabulary call them."""

import laws
import pytest
import torch
import torch.nn.functional as F

from mpcore.kernels.cross_entropy import (
    Loss,
    combine_stats,
    cross_entropy_backward,
    cross_entropy_stats,
    log_prob_of_stats,
    loss_of_stats,
)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ALL = {"label_smoothing": 0.1, "z_loss": 0.01, "entropy": True}


class Kernels(torch.autograd.Function):
    """What the layer does, with the ranks one after the other in one process."""

    @staticmethod
    def forward(ctx, logits, target, cuts, label_smoothing, z_loss, softcap, entropy):
        V = logits.shape[-1]
        starts = [sum(cuts[:i]) for i in range(len(cuts))]
        shards = logits.split(cuts, -1)
        terms = [Loss(V, start, -100, softcap, label_smoothing, z_loss) for start in starts]
        stats = [
            cross_entropy_stats(shard, target, of, entropy=entropy, impl="triton")
            for shard, of in zip(shards, terms, strict=True)
        ]
        stats = combine_stats(torch.stack(stats))
        loss = loss_of_stats(stats, target, terms[0])
        log_prob, row_entropy = log_prob_of_stats(stats, target, terms[0])
        ctx.save_for_backward(logits, target, stats)
        ctx.cuts, ctx.terms = cuts, terms
        return (loss, log_prob, row_entropy) if entropy else loss

    @staticmethod
    def backward(ctx, dloss, dlog_prob=None, dentropy=None):
        logits, target, stats = ctx.saved_tensors
        rows = {"dloss": dloss, "dlog_prob": dlog_prob, "dentropy": dentropy}
        shards = [
            cross_entropy_backward(shard, target, stats, of, impl="triton", **rows)
            for of, shard in zip(ctx.terms, logits.split(ctx.cuts, -1), strict=True)
        ]
        return shards[0] if len(shards) == 1 else torch.cat(shards, -1), *[None] * 6


def kernels(logits, target, cuts=None, label_smoothing=0.0, z_loss=0.0, softcap=0.0, entropy=False):
    cuts = [logits.shape[-1]] if cuts is None else cuts
    return Kernels.apply(logits, target, cuts, label_smoothing, z_loss, softcap, entropy)


def truth(logits, target, cuts=None, label_smoothing=0.0, z_loss=0.0, softcap=0.0, entropy=False):
    """The formulas, of the whole vocabulary, under torch's own autograd."""
    z = logits.to(torch.promote_types(logits.dtype, F32))
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    flat, ids, counts = z.reshape(-1, z.shape[-1]), target.reshape(-1).long(), target != -100
    loss = F.cross_entropy(flat, ids, label_smoothing=label_smoothing, reduction="none").view(target.shape)
    loss = loss + z_loss * z.logsumexp(-1).square() * counts
    if not entropy:
        return loss
    log_prob = -F.cross_entropy(flat, ids, reduction="none").view(target.shape)
    log_p = z.log_softmax(-1)
    return loss, log_prob, -(log_p.exp() * log_p.clamp(min=torch.finfo(z.dtype).min)).sum(-1) * counts


def draw(*shape, dtype=F32, ignored=1):
    generator = torch.Generator().manual_seed(sum(shape))
    target = laws.drawn(torch.randint, 0, shape[-1], shape[:-1], generator=generator)
    target.view(-1)[:ignored] = -100
    return (3 * laws.drawn(torch.randn, shape, generator=generator)).to(dtype), target


def check(logits, target, layout="contiguous", **options):
    laws.check_errors(kernels, truth, {"logits": logits}, layout, target=target, **options)


@pytest.mark.parametrize("cuts", [[502, 501], [335, 334, 334], [1, 1000, 2]])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_pitfall_05_options_are_over_the_whole_vocabulary(cuts, softcap):
    logits, target = draw(6, 1003, dtype=BF16)
    target[1:4] = torch.tensor([0, cuts[0], 1002])
    check(logits, target, cuts=cuts, softcap=softcap, **ALL)


def test_errors_of_transposed_tokens():
    logits, target = draw(2, 3, 101)
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    kernels(ours.transpose(0, 1), target.t()).sum().backward()
    truth(theirs.transpose(0, 1), target.t()).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_one_token_without_a_dimension():
    logits, target = draw(8, ignored=0)
    found = laws.results(kernels, {"logits": logits}, target=target, **ALL)
    torch.testing.assert_close(found, laws.results(truth, {"logits": logits}, target=target, **ALL))


def test_pitfall_06_a_gap_of_200_between_logits_stays_finite():
    logits = torch.zeros(3, 1001)
    logits[0, 0], logits[1, 1000], logits[2, 5] = 200.0, 200.0, -200.0
    for target in ([1000, 0, 5], [0, 1000, 4]):
        check(logits, torch.tensor(target), cuts=[500, 501], **ALL)


@pytest.mark.parametrize("cuts", [[12], [6, 6], [3, 9]])
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # numpy's, of what is masked
@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(F32).min])
def test_columns_that_are_masked_have_no_probability(cuts, lowest):
    for first, last in ((0, 3), (3, 12), (0, 6)):
        logits, _ = draw(3, 12)
        logits[:, first:last] = lowest
        allowed = [i for i in range(12) if not first <= i < last]
        target = torch.tensor([allowed[0], allowed[-1], -100])
        leaf = logits.clone().requires_grad_()
        found, wanted = kernels(leaf, target, cuts=cuts, z_loss=0.01, entropy=True), truth(
            logits.double(), target, z_loss=0.01, entropy=True
        )  # fmt: skip
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs.float())
        sum(y.sum() for y in found).backward()
        assert leaf.grad.isfinite().all()
        assert not leaf.grad[:, first:last].any()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_not_a_number_stays_one():
    for bad in (torch.nan, torch.inf):
        logits, target = draw(2, 5000)
        logits[1, 4321] = bad
        loss = kernels(logits, target)
        assert loss[0] == 0  # ignored
        assert loss[1].isnan()


def test_pitfall_08_an_ignored_row_is_not_read():
    logits, target = draw(4, 4099, ignored=4)
    leaf = torch.full_like(logits, torch.nan).requires_grad_()
    outputs = kernels(leaf, target, softcap=3.0, **ALL)
    assert not any(y.any() for y in outputs)
    torch.autograd.backward(outputs, [torch.full((4,), torch.nan)] * 3)
    assert torch.equal(leaf.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_pitfall_09_gradients_keep_the_dtype_and_its_precision(dtype):
    logits, target = draw(4, 1001, dtype=dtype)
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    kernels(leaf, target, label_smoothing=0.1).sum().backward()
    truth(exact, target, label_smoothing=0.1).sum().backward()
    assert leaf.grad.dtype == dtype
    once = torch.finfo(dtype).eps / 2 * exact.grad.abs() + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((leaf.grad.double() - exact.grad).abs() <= once + 1e-6 * exact.grad.abs().max()).all()


@pytest.mark.parametrize("layout", ["contiguous", "strided rows", "strided columns"])
@pytest.mark.parametrize("V", [96, 4099])
def test_pitfall_04_logits_are_changed_in_place_on_demand_alone(V, layout):
    logits, target = draw(3, V, dtype=BF16)
    placed, stats = laws.place(logits, layout, 0), torch.full((4, 3), 9.0)
    how = {"loss": Loss(V, label_smoothing=0.1), "dloss": stats[0], "impl": "triton"}
    wanted = cross_entropy_backward(placed, target, stats, **how)
    assert torch.equal(placed, logits)
    sea = placed.as_strided((placed.untyped_storage().nbytes() // 2,), (1,), 0)
    numbers = sea.isfinite().sum()
    assert cross_entropy_backward(placed, target, stats, in_place=True, **how) is placed
    assert torch.equal(placed, wanted)
    assert sea.isfinite().sum() == numbers, "a gap between rows was written"


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_a_graph_whose_logits_were_written_over_is_refused(impl):
    logits, target = draw(3, 9)
    logits = torch.tanh(logits.requires_grad_())
    stats = cross_entropy_stats(logits, target, Loss(9), impl=impl)
    assert not stats.requires_grad
    how = {"loss": Loss(9), "dloss": stats[0].requires_grad_(), "impl": impl}
    assert cross_entropy_backward(logits, target, stats, in_place=True, **how) is logits
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logits.sum().backward()
    assert not cross_entropy_backward(logits, target, stats, **how).requires_grad


@pytest.mark.parametrize("entropy", [False, True])
def test_operators(entropy):
    logits, target = draw(3, 25, dtype=BF16)
    ops, row, stats = torch.ops.mpcore, torch.rand(3), torch.rand(4 + entropy, 3) + 9
    laws.check_operator(ops.cross_entropy_stats, logits, target, 2, -100, 30.0, entropy, entropy)
    optional = (row, row) if entropy else (None, None)
    numbers = (2, -100, 0.9, 0.01, 0.1, 30.0)
    laws.check_operator(ops.cross_entropy_backward, logits, target, stats, row, *optional, *numbers)
    laws.check_operator(ops.cross_entropy_backward_in_place, logits, target, stats, row, *optional, *numbers)


def test_compiles_in_one_graph():
    logits, target = draw(3, 25, dtype=BF16)
    laws.check_compiles(kernels, {"logits": logits}, target=target, cuts=[13, 12], softcap=30.0, **ALL)
