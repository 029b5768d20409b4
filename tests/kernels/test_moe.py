"""moe_permute, moe_unpermute and grouped_linear without a GPU: references, bad input, and what would be launched."""

from unittest import mock

import laws
import pytest
import torch
import torch.nn.functional as F
from fake_gpu import calls, fake_gpu
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from mpcore.kernels import _dispatch
from mpcore.kernels.grouped_linear import grouped_linear
from mpcore.kernels.moe_permute import moe_permute, moe_rows, moe_unpermute
from mpcore.kernels.router import in_three_parts, router_linear, router_linear_reference

EXPERTS = torch.tensor([[2, 0], [0, 9], [2, 1], [-1, 0]])
ROW = torch.tensor([[4, 0], [1, -1], [5, 3], [-1, 2]])
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
ops = torch.ops.mpcore


def test_rows_are_stable_and_without_gaps():
    row, counts = moe_rows(EXPERTS, 4)
    assert torch.equal(row, ROW.int())
    assert counts.tolist() == [3, 1, 2, 0]


def test_the_references_are_the_formulas():
    x, weight = torch.randn(4, 5, dtype=F64), torch.randn(4, 2, dtype=F64)
    y = moe_permute(x, ROW, 7)
    for t, k in [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (3, 1)]:
        assert torch.equal(y[ROW[t, k]], x[t])
    assert not y[6].any()
    out = moe_unpermute(y, ROW, weight)
    kept = weight * (ROW >= 0)
    torch.testing.assert_close(out, kept.sum(1, keepdim=True) * x)
    w = torch.randn(4, 3, 5, dtype=F64)
    counts = torch.tensor([3, 1, 2, 0])
    z = grouped_linear(y, w, counts)
    for r, e in enumerate([0, 0, 0, 1, 2, 2]):
        torch.testing.assert_close(z[r], w[e] @ y[r])
    assert not z[6].any()


def test_no_experts_have_no_rows_and_shapes_come_out_on_the_meta_device():
    for call in (moe_rows, ops.moe_rows):
        with calls() as launches:
            row, counts = call(EXPERTS, 0)
        assert (row.tolist(), counts.shape, launches) == ([[-1] * 2] * 4, (0,), [])
    x, row = torch.empty(4, 5, device="meta"), ROW.to("meta")
    row_meta, counts = moe_rows(EXPERTS.to("meta"), 3)
    assert (row_meta.shape, row_meta.dtype, counts.shape) == ((4, 2), torch.int32, (3,))
    y = moe_permute(x, row, 9)
    assert (y.shape, moe_unpermute(y, row, row.float()).shape) == ((9, 5), (4, 5))


def test_without_choices_every_row_is_zero():
    x = torch.randn(4, 3)
    assert not moe_permute(x, torch.empty(4, 0, dtype=torch.int64), 2).any()
    assert moe_permute(x, ROW, 0).shape == (0, 3)
    permuted = moe_permute(x, ROW, 3)  # choices beyond the last row have none
    assert torch.equal(permuted, x[[0, 1, 3]])
    assert torch.equal(moe_unpermute(permuted, ROW), torch.stack([x[0], x[1], torch.zeros(3), x[3]]))


@pytest.mark.parametrize("counts", [[3, 0, 130, 2], [0, 0, 0, 0], [140, 0, 0, 0]], ids=str)
def test_torchs_grouped_products_run(counts, monkeypatch):
    """On a GPU, which CPU tensors count as here: all three are torch's, and the rows after the last are cleared."""
    monkeypatch.setattr(_dispatch, "is_on_gpu", lambda x: True)
    x = torch.randn(140, 40).bfloat16().requires_grad_()
    weight, counts = torch.randn(4, 24, 40).requires_grad_(), torch.tensor(counts)
    used, dy = int(counts.sum()), torch.randn(140, 24).bfloat16()
    with mock.patch.object(F, "grouped_mm", wraps=F.grouped_mm) as torchs, fake_gpu() as launches:
        y = grouped_linear(x, weight, counts)
        found = torch.autograd.grad(y, (x, weight), dy)
    assert torchs.call_count == 3
    assert [launch.name for launch in launches] == ["_fill_kernel"] * 2
    for launch in launches:
        assert launch.arguments["filled_ptr"].tolist() == [1] * used + [0] * (140 - used)
    want = grouped_linear(x, weight, counts, impl="reference")
    dx, dweight = torch.autograd.grad(want, (x, weight), dy)
    torch.testing.assert_close(y[:used], want[:used], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found[0][:used], dx[:used], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found[1], dweight, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("shape", "dtype"), [
    ((4, 24, 40), F32), ((4, 25, 40), BF16), ((4, 24, 36), BF16), ((0, 8, 8), BF16),
])  # fmt: skip
def test_what_torch_would_refuse_or_read_counts_for_is_the_reference(shape, dtype, monkeypatch):
    """Also in a graph that was traced with fake tensors."""
    monkeypatch.setattr(_dispatch, "is_on_gpu", lambda x: True)
    x, weight, counts = torch.randn(9, shape[2]).to(dtype), torch.randn(shape).to(dtype), torch.ones(shape[0]).int()
    with mock.patch.object(F, "grouped_mm") as torchs, fake_gpu():
        y = grouped_linear(x, weight, counts)
        assert torch.equal(ops.grouped_linear_forward(x, weight, counts), y)
        assert ops.grouped_linear_weight(y, x, counts).shape == shape
    assert not torchs.called
    with pytest.raises(ValueError, match="torch has no grouped_linear of these inputs"):
        grouped_linear(x, weight, counts, impl="torch")


@pytest.mark.parametrize(("wanted", "main"), [
    ((True, True), None), ((True, False), None), ((False, True), None), ((True, True), 2.0),
])  # fmt: skip
def test_gradients_of_grouped_products_are_made_where_they_are_wanted(wanted, main):
    """With a main gradient autograd gets none: the product is added, to what was there."""
    from mpcore.kernels import grouped_linear as module

    x, weight, counts = torch.randn(9, 4), torch.randn(3, 6, 4).double(), torch.tensor([2, 0, 5])
    leaves = x.clone().requires_grad_(wanted[0]), weight.clone().requires_grad_(wanted[1])
    if main is not None:
        leaves[1].main_grad = torch.full_like(weight, main)
    y = module._GroupedLinear.apply(*leaves, counts)
    dy = torch.randn(9, 6)
    assert (y.grad_fn.saved_tensors[0] is None) == (not wanted[1])
    y.backward(dy)
    dense = [t.double().requires_grad_() for t in (x, weight)]
    grouped_linear(*dense, counts).backward(dy.double())
    if main is not None:
        assert leaves[1].grad is None
        assert leaves[1].grad_added_to_main_grad
        leaves[1].grad = leaves[1].main_grad - main
    for leaf, other, want in zip(leaves, dense, wanted, strict=True):
        assert (leaf.grad is not None) == want
        if want:
            assert leaf.grad.dtype == leaf.dtype
            torch.testing.assert_close(leaf.grad.double(), other.grad, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="grouped_linear kernel has no second derivative"):
        torch.autograd.grad(module._GroupedLinear.apply(*leaves, counts).sum(), [t for t in leaves if t.requires_grad],
                            create_graph=True)  # fmt: skip


def test_nothing_is_launched_for_nothing():
    with fake_gpu() as launches:
        ops.moe_rows(torch.zeros(0, 2).long(), 4)
        ops.moe_permute(torch.empty(4, 8), ROW.int(), 0)
        ops.grouped_linear_forward(torch.empty(0, 8), torch.empty(2, 3, 8), torch.zeros(2).int())
        assert not ops.grouped_linear_weight(torch.empty(0, 3), torch.empty(0, 8), torch.zeros(2).int()).any()
    assert launches == []


def test_what_fake_tensors_trace_runs_on_a_cpu():
    """The operator that a GPU launches: there it runs the reference."""
    x, w, counts = torch.randn(9, 4), torch.randn(3, 6, 4), torch.tensor([2, 0, 5])
    traced = make_fx(lambda *given: grouped_linear(*given), tracing_mode="fake")(x, w, counts)
    assert any(str(node.target).startswith("mpcore.grouped_linear") for node in traced.graph.nodes)
    counts = torch.tensor([1, 4, 2])
    torch.testing.assert_close(traced(x, w, counts), grouped_linear(x, w, counts))


def test_the_operator_of_the_weights_gradient_runs_on_a_cpu():
    x, w, dy, counts = (
        torch.randn(9, 4), torch.randn(3, 6, 4).requires_grad_(), torch.randn(9, 6), torch.tensor([2, 0, 5]),
    )  # fmt: skip
    (want,) = torch.autograd.grad(grouped_linear(x, w, counts), w, dy)
    torch.testing.assert_close(ops.grouped_linear_weight(dy, x, counts), want)


def test_products_are_counted():
    x, w, counts = (torch.empty(shape, device="meta") for shape in ((10, 8), (4, 3, 8), (4,)))
    with FlopCounterMode(display=False) as counter:
        grouped_linear(x.requires_grad_(), w.requires_grad_(), counts.int()).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 10 * 8 * 3


@pytest.mark.parametrize("on_gpu", [False, True])
def test_logits_of_a_router_err_as_products_of_float32_copies(on_gpu, monkeypatch):
    monkeypatch.setattr(_dispatch, "launching_on_cpu", on_gpu)
    inputs = {"x": torch.randn(50, 24).bfloat16(), "weight": torch.randn(7, 24).bfloat16()}

    def squares(logits):  # whose gradients have all bits of float32
        return lambda x, weight: logits(x, weight).square()

    laws.check_errors(squares(router_linear), squares(router_linear_reference), inputs)
    laws.check_compiles(squares(router_linear), inputs)
    dy = torch.randn(50, 7)
    assert torch.equal(ops.router_linear_weight(in_three_parts(dy), torch.eye(50).bfloat16(), 7), dy.t())
