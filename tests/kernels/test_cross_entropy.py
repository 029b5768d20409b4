"""cross_entropy without a GPU: the references, bad input, and what would be launched."""

import pytest
import torch
from fake_gpu import fake_gpu

from mpcore.kernels.cross_entropy import (
    Loss,
    cross_entropy_backward,
    cross_entropy_stats,
    log_prob_of_stats,
    loss_of_stats,
)

N, V = 6, 11
LOGITS = 3 * torch.randn(N, V, dtype=torch.float64)
TARGET = torch.tensor([0, 3, -100, 10, 5, 3])
ROW = torch.rand(N, dtype=torch.float64)
PLAIN, SMOOTH = Loss(V), Loss(V, label_smoothing=0.1)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.01}, {"softcap": 2.0}])
def test_pitfall_08_an_ignored_row_is_not_read(options):
    logits, target = torch.randn(4, 9), torch.tensor([3, -100, -100, 2])
    logits[1], logits[2, 5] = torch.nan, torch.inf
    loss = Loss(9, **options)
    stats = cross_entropy_stats(logits, target, loss, entropy=True)
    rows = {"dloss": torch.ones(4), "dlog_prob": stats[0] * 0 + 1, "dentropy": torch.full((4,), 0.5)}
    found = cross_entropy_backward(logits, target, stats, loss, **rows)
    assert not found[1:3].any()
    assert found[::3].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("logits", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_of_rows_may_have_any_dtype(logits, dtype):
    z, target, ones = torch.randn(3, 9).to(logits), torch.tensor([3, -100, 2]), torch.ones(3)
    loss = Loss(9, label_smoothing=0.1, z_loss=0.01)
    stats = cross_entropy_stats(z, target, loss, entropy=True)

    def gradient(rows):
        rows = {"dloss": rows, "dlog_prob": rows, "dentropy": rows}
        return cross_entropy_backward(z, target, stats, loss, **rows)

    assert torch.equal(gradient(ones.to(dtype)), gradient(ones.to(torch.promote_types(logits, torch.float32))))


@pytest.mark.parametrize("missing", ["dloss", "dlog_prob", "dentropy"])
def test_each_gradient_may_be_missing(missing):
    stats = cross_entropy_stats(LOGITS, TARGET, SMOOTH, entropy=True)
    given = {"dloss": ROW, "dlog_prob": 2 * ROW, "dentropy": 3 * ROW}
    without, zero = ({**given, missing: value} for value in (None, torch.zeros(N, dtype=torch.float64)))
    found = [cross_entropy_backward(LOGITS, TARGET, stats, SMOOTH, **rows) for rows in (without, zero)]
    torch.testing.assert_close(*found)


def test_four_numbers_give_no_entropy():
    stats = cross_entropy_stats(LOGITS, TARGET, PLAIN)
    assert stats.shape == (4, N)
    assert not stats[3].any()  # the sum of logits, for which nobody asked
    log_prob, entropy = log_prob_of_stats(stats, TARGET, PLAIN)
    assert entropy is None
    stats = cross_entropy_stats(LOGITS, TARGET, PLAIN, entropy=True)
    torch.testing.assert_close(log_prob, log_prob_of_stats(stats, TARGET, PLAIN)[0])


def test_a_confident_row_keeps_its_digits():
    """loss = lse - t would lose all of them: both are 1000."""
    logits = torch.tensor([[1000.0, 990.0]])
    target = torch.tensor([0])
    exact = torch.tensor([10.0], dtype=torch.float64).neg().exp().log1p()
    stats = cross_entropy_stats(logits, target, Loss(2))
    torch.testing.assert_close(loss_of_stats(stats, target, Loss(2)).double(), exact, rtol=3e-3, atol=0)
    gradient = cross_entropy_backward(logits, target, stats, Loss(2), dloss=torch.ones(1))
    torch.testing.assert_close(gradient[0, 1].double(), 1 / (1 + torch.tensor(10.0).double().exp()), rtol=1e-6, atol=0)


def test_pitfall_04_logits_are_changed_in_place_on_demand_alone():
    logits = LOGITS.clone()
    stats, how = cross_entropy_stats(logits, TARGET, SMOOTH, entropy=True), {"dloss": ROW, "dentropy": ROW}
    gradient = cross_entropy_backward(logits, TARGET, stats, SMOOTH, **how)
    assert torch.equal(logits, LOGITS)
    assert cross_entropy_backward(logits, TARGET, stats, SMOOTH, in_place=True, **how) is logits
    assert torch.equal(logits, gradient)


@pytest.mark.parametrize("width", [16032, 50257])
def test_tensors_off_a_16_byte_boundary_are_not_accessed_by_16_bytes(width):
    logits = torch.empty(8 * width + 1, dtype=torch.bfloat16)[1:].view(8, width)
    ids, row, ops = torch.zeros(8, dtype=torch.int64), torch.empty(8), torch.ops.mpcore
    with fake_gpu() as launches:
        stats = ops.cross_entropy_stats(logits, ids, 0, -100, 0.0, False, False)
        ops.cross_entropy_backward_in_place(logits, ids, stats, row, None, None, 0, -100, 1.0, 0.0, 0.0, 0.0)
    for launch in launches:
        assert ".v4" not in launch.kernel.asm["ptx"]


@pytest.mark.parametrize("width", [128256, 50257])
def test_the_pass_takes_one_exponential_per_element_and_one_per_vector(width):
    logits, ids, row = torch.empty(8, width, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int64), torch.empty(8)
    with fake_gpu() as launches:
        stats = torch.ops.mpcore.cross_entropy_stats(logits, ids, 0, -100, 0.0, False, False)
        torch.ops.mpcore.cross_entropy_backward(logits, ids, stats, row, None, None, 0, -100, 1.0, 0.0, 0.0, 0.0)
    stats, backward = launches
    elements = 4096 // 128  # of a thread, in each turn of the loop
    ends = 1  # after the loop, to merge threads
    assert stats.kernel.asm["ptx"].count("ex2.approx") == elements + 2 * (elements // 8) * ends
    assert backward.kernel.asm["ptx"].count("ex2.approx") == elements
