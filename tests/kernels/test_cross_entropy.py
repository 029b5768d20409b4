"""cross_entropy without a GPU: the references, bad input, and what would be launched."""

import pytest
import torch
import torch.nn.functional as F
from fake_gpu import calls, fake_gpu

from mpcore.kernels.cross_entropy import (
    combine_stats,
    cross_entropy_backward,
    cross_entropy_stats,
    log_prob_of_stats,
    loss_of_stats,
)

N, V = 6, 11
LOGITS = 3 * torch.randn(N, V, dtype=torch.float64)
TARGET = torch.tensor([0, 3, -100, 10, 5, 3])
ROW = torch.rand(N, dtype=torch.float64)


def dense(logits, target, label_smoothing, z_loss, softcap):
    """Loss, log-probability and entropy of each row, from torch's own functions."""
    z = softcap * torch.tanh(logits / softcap) if softcap else logits
    loss = F.cross_entropy(z, target, label_smoothing=label_smoothing, reduction="none")
    loss = loss + z_loss * z.logsumexp(-1).square() * (target != -100)
    log_prob = -F.cross_entropy(z, target, reduction="none")
    return loss, log_prob, torch.distributions.Categorical(logits=z).entropy() * (target != -100)


def stats_of_ranks(logits, target, cuts, **options):
    starts = [sum(cuts[:i]) for i in range(len(cuts))]
    shards = zip(starts, logits.split(cuts, -1), strict=True)
    return torch.stack([cross_entropy_stats(shard, target, start=start, **options) for start, shard in shards])


@pytest.mark.parametrize("cuts", [[11], [6, 5], [1, 9, 1], [3, 3, 3, 2]])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_reference_is_the_formula(cuts, label_smoothing, z_loss, softcap):
    options = {"vocab_size": V, "label_smoothing": label_smoothing, "z_loss": z_loss}
    leaf = LOGITS.clone().requires_grad_()
    wanted = dense(leaf, TARGET, label_smoothing, z_loss, softcap)
    torch.autograd.backward(wanted, [ROW, 2 * ROW, 3 * ROW])

    stats = combine_stats(stats_of_ranks(LOGITS, TARGET, cuts, softcap=softcap, sum_logits=True, entropy=True))
    found = loss_of_stats(stats, TARGET, **options), *log_prob_of_stats(stats, TARGET)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    shards = [
        cross_entropy_backward(
            shard, TARGET, stats, ROW, start=start, softcap=softcap, dlog_prob=2 * ROW, dentropy=3 * ROW, **options
        )
        for start, shard in zip([sum(cuts[:i]) for i in range(len(cuts))], LOGITS.split(cuts, -1), strict=True)
    ]
    torch.testing.assert_close(torch.cat(shards, -1), leaf.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.01}, {"softcap": 2.0}])
def test_pitfall_08_an_ignored_row_is_not_read(options):
    logits, target = torch.randn(4, 9), torch.tensor([3, -100, -100, 2])
    logits[1], logits[2, 5] = torch.nan, torch.inf
    softcap = {"softcap": options.get("softcap", 0.0)}
    stats = cross_entropy_stats(logits, target, sum_logits=True, entropy=True, **softcap)
    rows = {"dlog_prob": stats[0] * 0 + 1, "dentropy": torch.full((4,), 0.5)}
    found = cross_entropy_backward(logits, target, stats, torch.ones(4), vocab_size=9, **rows, **options)
    assert not found[1:3].any()
    assert found[::3].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("logits", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_of_rows_may_have_any_dtype(logits, dtype):
    z, target, ones = torch.randn(3, 9).to(logits), torch.tensor([3, -100, 2]), torch.ones(3)
    stats = cross_entropy_stats(z, target, entropy=True)

    def gradient(rows):
        rows = {"dloss": rows, "dlog_prob": rows, "dentropy": rows}
        return cross_entropy_backward(z, target, stats, **rows, vocab_size=9, z_loss=0.01, label_smoothing=0.1)

    assert torch.equal(gradient(ones.to(dtype)), gradient(ones.to(torch.promote_types(logits, torch.float32))))


@pytest.mark.parametrize("missing", ["dloss", "dlog_prob", "dentropy"])
def test_each_gradient_may_be_missing(missing):
    stats = cross_entropy_stats(LOGITS, TARGET, entropy=True, sum_logits=True)
    given = {"dloss": ROW, "dlog_prob": 2 * ROW, "dentropy": 3 * ROW}
    without, zero = ({**given, missing: value} for value in (None, torch.zeros(N, dtype=torch.float64)))
    found = [
        cross_entropy_backward(LOGITS, TARGET, stats, vocab_size=V, label_smoothing=0.1, **rows)
        for rows in (without, zero)
    ]
    torch.testing.assert_close(*found)


def test_four_numbers_give_no_entropy():
    stats = cross_entropy_stats(LOGITS, TARGET)
    assert stats.shape == (4, N)
    assert not stats[3].any()  # the sum of logits, for which nobody asked
    log_prob, entropy = log_prob_of_stats(stats, TARGET)
    assert entropy is None
    torch.testing.assert_close(
        log_prob, log_prob_of_stats(cross_entropy_stats(LOGITS, TARGET, entropy=True), TARGET)[0]
    )


def test_ranks_merge_in_any_order_and_at_once_or_in_turn():
    stats = stats_of_ranks(LOGITS, TARGET, [4, 4, 3], entropy=True, sum_logits=True)
    wanted = combine_stats(stats)
    torch.testing.assert_close(combine_stats(stats.flip(0)), wanted)
    torch.testing.assert_close(combine_stats(torch.stack([combine_stats(stats[:2]), stats[2]])), wanted)


def test_a_confident_row_keeps_its_digits():
    """loss = lse - t would lose all of them: both are 1000."""
    logits = torch.tensor([[1000.0, 990.0]])
    target = torch.tensor([0])
    exact = torch.tensor([10.0], dtype=torch.float64).neg().exp().log1p()
    stats = cross_entropy_stats(logits, target)
    torch.testing.assert_close(loss_of_stats(stats, target, vocab_size=2).double(), exact, rtol=3e-3, atol=0)
    gradient = cross_entropy_backward(logits, target, stats, torch.ones(1), vocab_size=2)
    torch.testing.assert_close(gradient[0, 1].double(), 1 / (1 + torch.tensor(10.0).double().exp()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_reference_computes_in_float32_and_rounds_once(dtype):
    logits = LOGITS.to(dtype)
    stats = cross_entropy_stats(logits, TARGET, softcap=3.0)
    assert stats.dtype == torch.float32
    assert torch.equal(stats, cross_entropy_stats(logits.float(), TARGET, softcap=3.0))
    how = {"vocab_size": V, "label_smoothing": 0.1, "softcap": 3.0}
    gradient = cross_entropy_backward(logits, TARGET, stats, ROW.float(), **how)
    wide = cross_entropy_backward(logits.float(), TARGET, stats, ROW.float(), **how)
    assert torch.equal(gradient, wide.to(dtype))


def test_defaults_are_the_values_that_they_stand_for():
    stats = cross_entropy_stats(LOGITS, TARGET)
    every = {"start": 0, "ignore_index": -100, "softcap": 0.0, "sum_logits": False, "entropy": False, "impl": None}
    assert torch.equal(stats, cross_entropy_stats(LOGITS, TARGET, **every))
    assert torch.equal(stats, cross_entropy_stats(LOGITS, TARGET.int()))
    of_loss = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0}
    loss = loss_of_stats(stats, TARGET, vocab_size=V)
    assert torch.equal(loss, loss_of_stats(stats, TARGET, vocab_size=V, **of_loss))
    assert torch.equal(log_prob_of_stats(stats, TARGET)[0], log_prob_of_stats(stats, TARGET, ignore_index=-100)[0])
    explicit = {"start": 0, "softcap": 0.0, "dlog_prob": None, "dentropy": None, "in_place": False, **of_loss}
    found = cross_entropy_backward(LOGITS, TARGET, stats, ROW, vocab_size=V)
    assert torch.equal(found, cross_entropy_backward(LOGITS, TARGET, stats, ROW, vocab_size=V, **explicit))


def test_another_id_may_be_the_ignored_one():
    ignored, target = TARGET == 3, TARGET.masked_fill(TARGET == -100, 1)
    stats = cross_entropy_stats(LOGITS, target, ignore_index=3, entropy=True)
    assert torch.equal(stats[2] == 0, ignored)
    loss, (log_prob, entropy) = (f(stats, target, ignore_index=3) for f in (
        lambda *given, **how: loss_of_stats(*given, vocab_size=V, **how), log_prob_of_stats,
    ))  # fmt: skip
    dlogits = cross_entropy_backward(LOGITS, target, stats, ROW, vocab_size=V, ignore_index=3)
    for rows in (loss, log_prob, entropy, dlogits.abs().sum(-1)):
        assert torch.equal(rows == 0, ignored)


def test_nothing_is_differentiated():
    logits, target = torch.randn(3, 9).requires_grad_(), torch.tensor([1, -100, 8])
    stats = cross_entropy_stats(logits, target, entropy=True)
    assert not stats.requires_grad
    rows = stats[0].clone().requires_grad_()
    for in_place in (False, True):
        assert (
            cross_entropy_backward(logits, target, stats, rows, vocab_size=9, in_place=in_place).requires_grad
            == in_place
        )
    assert logits.is_leaf
    assert logits._version == 1


def test_pitfall_04_logits_are_changed_in_place_on_demand_alone():
    logits = LOGITS.clone()
    stats = cross_entropy_stats(logits, TARGET, entropy=True, sum_logits=True)
    gradient = cross_entropy_backward(logits, TARGET, stats, ROW, dentropy=ROW, vocab_size=V, label_smoothing=0.1)
    assert torch.equal(logits, LOGITS)
    how = {"dentropy": ROW, "vocab_size": V, "label_smoothing": 0.1}
    assert cross_entropy_backward(logits, TARGET, stats, ROW, in_place=True, **how) is logits
    assert torch.equal(logits, gradient)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logits": LOGITS[0, 0]}, "x is a scalar"),
        ({"logits": LOGITS.long()}, "x is torch.int64"),
        ({"logits": LOGITS[:, :0]}, r"logits \(6, 0\) have no columns"),
        ({"target": TARGET[:5]}, r"target has shape \(5,\), but logits \(6, 11\) have other rows"),
        ({"target": TARGET.double()}, "target is torch.float64; it must be int64 or int32"),
        ({"target": TARGET.to("meta")}, "target is on meta, but logits are on cpu"),
        ({"softcap": -1.0}, "softcap -1.0 is not a positive number"),
        ({"softcap": float("nan")}, "softcap nan is not a positive number"),
        ({"softcap": float("inf")}, "softcap inf is not a positive number"),
        ({"target": TARGET.to(torch.int16)}, "target is torch.int16; it must be int64 or int32"),
        ({"logits": LOGITS[:5]}, r"target has shape \(6,\), but logits \(5, 11\) have other rows"),
        ({"logits": LOGITS.float(), "impl": "triton"}, "impl='triton', but x is on cpu"),
        ({"impl": "fast"}, "impl 'fast' is none of"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        cross_entropy_stats(**{"logits": LOGITS, "target": TARGET} | arguments)
    stats = torch.ones(4, N, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        cross_entropy_backward(
            **{"logits": LOGITS, "target": TARGET} | arguments, stats=stats, dloss=ROW, vocab_size=V
        )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stats": torch.ones(3, N)}, r"stats have shape \(3, 6\); they are 4 or 5 numbers"),
        ({"stats": torch.ones(4, 5)}, r"stats has shape \(5,\), but logits \(6, 11\) have other rows"),
        ({"dloss": ROW[:5]}, r"dloss has shape \(5,\)"),
        ({"dlog_prob": ROW[:5]}, r"dlog_prob has shape \(5,\)"),
        ({"dentropy": ROW}, "dentropy needs stats of 5 numbers"),
        ({"dentropy": ROW[:5], "stats": torch.ones(5, N)}, r"dentropy has shape \(5,\)"),
        ({"dloss": ROW.to("meta")}, "dloss is on meta, but logits are on cpu"),
        ({"dlog_prob": ROW.to("meta")}, "dlog_prob is on meta, but logits are on cpu"),
        ({"dentropy": ROW.to("meta"), "stats": torch.ones(5, N)}, "dentropy is on meta, but logits are on cpu"),
        ({"stats": torch.ones(4, N, device="meta")}, "stats is on meta, but logits are on cpu"),
        ({"stats": torch.ones(6, N)}, r"stats have shape \(6, 6\); they are 4 or 5 numbers"),
        ({"stats": torch.ones(())}, r"stats have shape \(\); they are 4 or 5 numbers"),
    ],
)
def test_bad_input_of_the_backward_pass(arguments, message):
    given = {"logits": LOGITS, "target": TARGET, "stats": torch.ones(4, N), "dloss": ROW, "vocab_size": V}
    with pytest.raises(ValueError, match=message):
        cross_entropy_backward(**given | arguments)


# By width, dtype and the width in memory: columns and warps of a tile, and the tiles of a row in backward. A row that
# begins off a boundary of 16 bytes has up to a vector less one of columns before it.
TILES = [
    (128256, torch.bfloat16, 128256, 4096, 4, 8, 32),
    (50257, torch.bfloat16, 50257, 4096, 4, 8, 13),
    (4096, torch.bfloat16, 4096, 4096, 4, 8, 1),
    (4096, torch.bfloat16, 4097, 4096, 4, 8, 2),
    (4096, torch.float32, 4100, 4096, 4, 4, 1),
    (1000, torch.float32, 1024, 1024, 1, 4, 1),
    (9, torch.float16, 9, 256, 1, 8, 1),
    (2048, torch.bfloat16, 2056, 2048, 2, 8, 1),
]


@pytest.mark.parametrize(("V", "dtype", "width", "block", "warps", "vector", "tiles"), TILES)
@pytest.mark.parametrize("in_place", [False, True])
def test_launches(V, dtype, width, block, warps, vector, tiles, in_place):
    logits, ids = torch.empty(7, width, dtype=dtype)[:, :V], torch.zeros(14, dtype=torch.int64)[::2]
    dloss, dlog_prob, dentropy = torch.empty(3, 7).unbind()
    ops, given = torch.ops.mpcore, (dloss, dlog_prob, dentropy, 40, -7, 0.9, 0.25, 0.02, 30.0)
    with calls() as launches:
        stats = ops.cross_entropy_stats(logits, ids, 40, -7, 30.0, True, True)
        backward = ops.cross_entropy_backward_in_place if in_place else ops.cross_entropy_backward
        out = backward(logits, ids, stats, *given) if not in_place else backward(logits, ids, stats, *given) or logits
    first, second = launches
    shared = {"N": 7, "start": 40, "ignore_index": -7, "STRIDE": width, "V": V, "SOFTCAP": 30.0, "BLOCK_V": block}
    shared["VECTOR"] = vector
    assert (first.kernel, first.grid, first.warps) == ("stats_kernel", (7, 1, 1), warps)
    assert first.numbers == shared | {"SUM_LOGITS": True, "ENTROPY": True}
    assert (first.at("x"), first.at("stats"), stats.shape, stats.dtype) == (
        logits.data_ptr(), stats.data_ptr(), (5, 7), torch.float32
    )  # fmt: skip
    assert first.arguments["target_ptr"].is_contiguous()
    assert (second.kernel, second.grid, second.warps) == ("backward_kernel", (7 * tiles, 1, 1), warps)
    assert second.numbers == shared | {
        "peak": 0.9,
        "uniform": 0.25,
        "twice_z_loss": 0.02,
        "DX_STRIDE": width if in_place else V,
        "TILES": tiles,
    }
    wanted = {"x": logits, "stats": stats, "dloss": dloss, "dlog_prob": dlog_prob, "dentropy": dentropy, "dx": out}
    assert second.given == wanted.keys() | {"target"}
    assert all(second.at(name) == t.data_ptr() for name, t in wanted.items())
    assert (out.shape, out.dtype, out.is_contiguous()) == ((7, V), dtype, not in_place or width == V)


def test_launches_of_what_is_left_out():
    logits, ids, ops = torch.empty(2, 3, 9), torch.zeros(2, 3, dtype=torch.int64), torch.ops.mpcore
    with calls() as launches:
        stats = ops.cross_entropy_stats(logits, ids, 0, -100, 0.0, False, False)
        ops.cross_entropy_backward(logits, ids, stats, None, None, None, 0, -100, 1.0, 0.0, 0.0, 0.0)
        empty = ops.cross_entropy_stats(logits[:0], ids[:0], 0, -100, 0.0, False, True)
        ops.cross_entropy_backward_in_place(logits[:0], ids[:0], empty, None, None, None, 0, -100, 1.0, 0.0, 0.0, 0.0)
    first, second = launches  # and nothing for no rows
    assert (stats.shape, empty.shape) == ((4, 2, 3), (5, 0, 3))
    assert (first.numbers["SUM_LOGITS"], first.numbers["ENTROPY"]) == (False, False)
    assert second.given == {"x", "target", "stats", "dx"}


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
