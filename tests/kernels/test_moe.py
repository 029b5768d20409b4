"""moe_permute, moe_unpermute and grouped_linear without a GPU: references, bad input, and what would be launched."""

import pytest
import torch
from fake_gpu import fake_gpu
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from mpcore.kernels.grouped_linear import grouped_linear
from mpcore.kernels.moe_permute import moe_permute, moe_rows, moe_unpermute

EXPERTS = torch.tensor([[2, 0], [0, 9], [2, 1], [-1, 0]])
ROW = torch.tensor([[4, 0], [1, -1], [5, 3], [-1, 2]])
F64 = torch.float64
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


def test_the_references_run_under_torchs_own_autograd():
    x, y = torch.randn(4, 3, dtype=F64).requires_grad_(), torch.randn(7, 3, dtype=F64).requires_grad_()
    weight, w = torch.randn(4, 2, dtype=F64).requires_grad_(), torch.randn(4, 2, 3, dtype=F64).requires_grad_()
    counts = torch.tensor([3, 1, 2, 0])
    assert torch.autograd.gradgradcheck(lambda x: moe_permute(x, ROW, 7), x)
    assert torch.autograd.gradgradcheck(lambda y, weight: moe_unpermute(y, ROW, weight), (y, weight))
    assert torch.autograd.gradgradcheck(lambda y, w: grouped_linear(y, w, counts), (y, w))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: moe_rows(EXPERTS.double(), 4), r"experts \(4, 2\) of torch.float64 is not"),
        (lambda: moe_rows(EXPERTS[0], 4), r"experts \(2,\) of torch.int64 is not"),
        (lambda: moe_permute(torch.ones(3, 2), ROW, 7), r"x \(3, 2\) and row \(4, 2\) are not"),
        (lambda: moe_unpermute(torch.ones(7, 2), ROW, torch.ones(4)), r"weight \(4,\) are not"),
        (lambda: grouped_linear(torch.ones(7, 2), torch.ones(4, 3, 3), torch.ones(4).int()), r"x \(7, 2\), weight"),
        (lambda: grouped_linear(torch.ones(7, 2), torch.ones(4, 3, 2), torch.ones(3).int()), r"counts \(3,\) are not"),
        (
            lambda: grouped_linear(torch.ones(7, 2), torch.ones(4, 3, 2), torch.ones(4)),
            "counts are torch.float32 on cpu",
        ),
        (lambda: grouped_linear(torch.ones(7, 2), torch.ones(4, 3, 2).half(), torch.ones(4).int()), "torch.float16"),
        (lambda: moe_permute(torch.ones(4, 2), ROW, 7, impl="triton"), "impl='triton', but x is on cpu"),
        (lambda: grouped_linear(torch.ones(7, 2), torch.ones(4, 3, 2), torch.ones(4).int(), impl="no"), "impl 'no'"),
        (lambda: grouped_linear(torch.ones(7, 2), torch.ones(4, 3, 2), torch.ones(4).int(), "tanh"), "'tanh' is none"),
        (lambda: grouped_linear(torch.ones(7, 2), torch.ones(4, 3, 2), torch.ones(4).int(), "geglu"), "F is 3, but"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_launches():
    x, row, weight = torch.empty(1000, 4096, dtype=torch.bfloat16), torch.zeros(1000, 8).int(), torch.empty(1000, 8)
    with fake_gpu() as launches:
        ops.moe_rows(row.long(), 64)
        y = ops.moe_permute(x, row, 8000)
        ops.moe_unpermute(y, row, weight)
        ops.moe_unpermute_backward(x, y, row, weight)
    names = ["count", "place", "scatter", "fill", "unpermute", "scatter", "fill"]
    assert [launch.name for launch in launches] == [f"_{name}_kernel" for name in names]
    assert launches[0].grid == (63, 1, 1)  # blocks of 8192 / 64 choices
    assert launches[2].grid == (1000, 1, 1)  # a program a token
    assert launches[4].grid == (1000, 4, 1)
    # As in the table of what kernels compile to, so that they needn't be compiled again.
    y, w = torch.empty(8000, 2048, dtype=torch.bfloat16), torch.empty(64, 2816, 2048, dtype=torch.bfloat16)
    counts = torch.zeros(64).int()
    with fake_gpu() as launches:
        z = ops.grouped_linear_forward(y, w, counts)
        ops.grouped_linear_forward(z, w.transpose(1, 2), counts)
        ops.grouped_linear_weight(z, y, counts)
    tiles = 8000 // 128 + 64 + 1  # for any counts
    assert [launch.grid for launch in launches] == [(tiles * 22, 1, 1), (tiles * 16, 1, 1), (22 * 16, 64, 1)]
    with fake_gpu() as launches:
        h, _ = ops.grouped_linear_activated(y, w, counts, "swiglu", True)
    assert h.shape == (8000, 1408)
    assert [launch.grid for launch in launches] == [(tiles * 22, 1, 1)]


def test_nothing_is_launched_for_nothing():
    with fake_gpu() as launches:
        ops.moe_rows(torch.zeros(0, 2).long(), 4)
        ops.moe_permute(torch.empty(4, 8), ROW.int(), 0)
        ops.grouped_linear_forward(torch.empty(0, 8), torch.empty(2, 3, 8), torch.zeros(2).int())
        assert not ops.grouped_linear_weight(torch.empty(0, 3), torch.empty(0, 8), torch.zeros(2).int()).any()
    assert launches == []


@pytest.mark.parametrize("activation", [None, "swiglu", "relu_squared"])
def test_what_fake_tensors_trace_runs_on_a_cpu(activation):
    """The operator that a GPU launches: there it runs the reference."""
    x, w, counts = torch.randn(9, 4), torch.randn(3, 6, 4), torch.tensor([2, 0, 5])
    traced = make_fx(lambda *given: grouped_linear(*given, activation), tracing_mode="fake")(x, w, counts)
    assert any(str(node.target).startswith("mpcore.grouped_linear") for node in traced.graph.nodes)
    counts = torch.tensor([1, 4, 2])
    torch.testing.assert_close(traced(x, w, counts), grouped_linear(x, w, counts, activation))


def test_the_operator_of_the_weights_gradient_runs_on_a_cpu():
    x, w, dy, counts = (
        torch.randn(9, 4),
        torch.randn(3, 6, 4).requires_grad_(),
        torch.randn(9, 6),
        torch.tensor([2, 0, 5]),
    )
    (want,) = torch.autograd.grad(grouped_linear(x, w, counts), w, dy)
    torch.testing.assert_close(ops.grouped_linear_weight(dy, x, counts), want)


def test_products_are_counted():
    x, w, counts = (torch.empty(shape, device="meta") for shape in ((10, 8), (4, 3, 8), (4,)))
    with FlopCounterMode(display=False) as counter:
        grouped_linear(x.requires_grad_(), w.requires_grad_(), counts.int()).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 10 * 8 * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_kernels_are_the_references(dtype):
    """Also captured in a CUDA graph, and replayed with other counts."""
    generator = torch.Generator("cuda").manual_seed(0)
    experts = torch.randint(0, 8, (500, 2), device="cuda", generator=generator)
    x = torch.randn(500, 300, device="cuda", dtype=dtype, generator=generator)
    w = torch.randn(8, 200, 300, device="cuda", dtype=dtype, generator=generator) / 16

    def run(impl):
        row, counts = moe_rows(experts, 8, impl=impl)
        y = grouped_linear(moe_permute(x, row, 1000, impl=impl), w, counts, impl=impl)
        return moe_unpermute(y, row, impl=impl)

    run("triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run("triton")
    for seed in range(3):
        experts.copy_(torch.randint(0, 8, (500, 2), generator=torch.Generator().manual_seed(seed)).clamp(max=6 + seed))
        graph.replay()
        torch.testing.assert_close(out, run("reference"), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=2e-2)
