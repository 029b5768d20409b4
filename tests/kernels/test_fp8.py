"""quantize_fp8 and fp8_matmul without a GPU: the references' laws, bad input, and what would be launched."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import fake_gpu
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from mpcore.kernels import _dispatch, _self_test
from mpcore.kernels import fp8_matmul as products
from mpcore.kernels import quantize_fp8 as module
from mpcore.kernels.fp8_matmul import fp8_matmul
from mpcore.kernels.quantize_fp8 import BLOCK, Quantized, dequantize_fp8, quantize_fp8, require_fp8

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
DTYPES = [F64, F32, BF16, torch.float16]
SHAPES = [(1, 1), (1, 127), (129, 128), (127, 129), (300, 1021)]
ops = torch.ops.mpcore


def draw(*shape, dtype=F32, seed=0):
    """Numbers over some 12 powers of ten, but within float16's."""
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    size = torch.empty(shape).uniform_(-22, 15, generator=generator)
    return (torch.randn(shape, generator=generator).sign() * size.exp2()).to(dtype)


def same(a, b):
    return torch.equal(a.values.view(torch.uint8), b.values.view(torch.uint8)) and torch.equal(a.scales, b.scales)


def block_maxima(x, square):
    """Of each element the largest of its block, by a loop over blocks."""
    largest = torch.empty_like(x)
    rows = BLOCK if square else 1
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], BLOCK):
            largest[i : i + rows, j : j + BLOCK] = x[i : i + rows, j : j + BLOCK].abs().max()
    return largest


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize(("M", "K"), SHAPES[:4])
def test_the_error_is_a_sixteenth_at_most(M, K, square):
    """Of what is at least 2^-13 of its block's largest, and of all else the same of that."""
    x = draw(M, K, dtype=F64)
    q, _ = quantize_fp8(x, square=square)
    largest = block_maxima(x, square)
    error = (dequantize_fp8(q, F64) - x).abs()
    assert (error <= torch.maximum(x.abs(), largest * 2**-13) / 16).all()
    scales = dequantize_fp8(q._replace(values=torch.ones_like(q.values)), F64)
    assert torch.equal(scales.log2().round().exp2(), scales), "a power of two divides exactly"
    assert ((largest / scales <= 448) & (largest / scales > 224)).all(), "the least one"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("square", [False, True])
def test_all_dtypes_give_the_bits_of_float64(dtype, square):
    x = draw(130, 260, dtype=dtype)
    assert same(quantize_fp8(x, square=square)[0], quantize_fp8(x.double(), square=square)[0])


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize(("M", "K"), SHAPES)
def test_columns_are_the_rows_of_the_transpose(M, K, square):
    x = draw(M, K)
    rows, columns = quantize_fp8(x, square=square, columns=True)
    assert rows.values.shape == (M, K)
    assert columns.values.shape == (K, M)
    assert same(columns, quantize_fp8(x.t(), square=square)[0])
    assert quantize_fp8(x, square=square, rows=False) == (None, None)
    if square:
        assert torch.equal(columns.scales, rows.scales.t())
        assert torch.equal(columns.values.float(), rows.values.float().t())


@pytest.mark.parametrize("square", [False, True])
def test_what_was_quantized_is_exact(square):
    """Though a scale may be half of what it was: 225 becomes 224."""
    x = dequantize_fp8(quantize_fp8(draw(130, 200), square=square)[0])
    assert torch.equal(dequantize_fp8(quantize_fp8(x, square=square)[0]), x)


@pytest.mark.parametrize("square", [False, True])
def test_shards_of_whole_blocks_are_quantized_as_the_whole(square):
    x = draw(3 * BLOCK + 5, 2 * BLOCK + 7)
    rows, columns = quantize_fp8(x, square=square, columns=True)
    for dim, cut in ((0, BLOCK), (0, 2 * BLOCK), (1, BLOCK)):
        parts = [quantize_fp8(part, square=square, columns=True) for part in x.tensor_split([cut], dim)]
        for whole, own, along in ((rows, [r for r, _ in parts], dim), (columns, [c for _, c in parts], 1 - dim)):
            assert same(whole, Quantized(*(torch.cat(held, along) for held in zip(*own, strict=True))))


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("square", [False, True])
def test_a_block_with_what_is_no_number_shows_it_in_products(strange, square):
    x = draw(130, 300)
    x[129, 7] = strange
    rows, columns = quantize_fp8(x, square=square, columns=True)
    y = fp8_matmul(rows, quantize_fp8(draw(3, 300))[0])
    assert y.isnan().any(1).nonzero().flatten().tolist() == ([128, 129] if square else [129])
    turned = fp8_matmul(columns, quantize_fp8(draw(3, 130))[0])
    assert turned.isnan().any(1).nonzero().flatten().tolist() == (list(range(BLOCK)) if square else [7])


def test_the_ends_of_the_range():
    zeros, _ = quantize_fp8(torch.zeros(2, 3))
    assert not dequantize_fp8(zeros).any()
    assert zeros.scales.eq(2.0**-126).all()
    assert quantize_fp8(torch.full((1, 2), torch.finfo(F32).max))[0].scales.item() == 2.0**120
    tiny = torch.tensor([[2.0**-126, 2.0**-132, 2.0**-136, 2.0**-149]])
    assert dequantize_fp8(quantize_fp8(tiny)[0]).tolist() == [[2.0**-126, 2.0**-132, 0, 0]]
    above = torch.nextafter(torch.tensor(448.0), torch.tensor(500.0)).item()
    for edge, scale in ((448.0, 1.0), (above, 2.0), (224.0, 0.5), (225.0, 1.0)):
        assert quantize_fp8(torch.tensor([[-edge]]))[0].scales.item() == scale


@pytest.mark.parametrize("squares", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(("M", "N", "K"), [(1, 130, 127), (129, 3, 300), (5, 4, 0)])
def test_the_product_is_that_of_what_the_values_stand_for(M, N, K, squares):
    a, b = (
        quantize_fp8(draw(size, K, seed=size), square=square)[0] for size, square in zip((M, N), squares, strict=True)
    )
    exact = torch.stack([(dequantize_fp8(a, F64) * row).sum(1) for row in dequantize_fp8(b, F64)], 1)
    torch.testing.assert_close(fp8_matmul(a, b, F64), exact, rtol=1e-12, atol=1e-12)
    terms = dequantize_fp8(a, F64).abs() @ dequantize_fp8(b, F64).abs().t()
    assert ((fp8_matmul(a, b, F32) - exact).abs() <= 1e-6 * terms).all()
    assert torch.equal(fp8_matmul(a, b), fp8_matmul(a, b, F32).bfloat16())


def factor(M, K, square=False, device="cpu"):
    blocks = -(-M // BLOCK) if square else M, -(-K // BLOCK)
    return Quantized(
        torch.zeros(M, K, dtype=torch.float8_e4m3fn, device=device), torch.ones(blocks, dtype=F32, device=device)
    )


@pytest.mark.parametrize(
    ("capability", "hip", "fits"),
    [((8, 6), None, False), ((8, 9), None, True), ((9, 0), None, True), ((10, 0), None, True), ((9, 4), "6.4", False)],
)
def test_a_gpu_without_eight_bit_floats_is_refused_before_a_launch(capability, hip, fits, monkeypatch):
    found = SimpleNamespace(name="A GPU", major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.version, "hip", hip)
    check = require_fp8.__wrapped__
    if fits:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check(torch.device("cuda", 0))
        assert len(caught) == (capability[0] != 9), "others convert to bfloat16, which is slower"
    else:
        there = rf"capability 8\.9 .* A GPU of compute capability {capability[0]}\.{capability[1]}; keep .* bfloat16"
        with pytest.raises(ValueError, match=there):
            check(torch.device("cuda", 0))

    def refuse(device):
        raise ValueError("refused")

    monkeypatch.setattr(module, "require_fp8", refuse)
    with fake_gpu() as launches, pytest.raises(ValueError, match="refused"):
        ops.quantize_fp8(torch.ones(3, 4), False, True, True)
    assert launches == []


@pytest.fixture
def hopper(monkeypatch):
    """CPU tensors count as those of a GPU that has torch's product, without any measurement; returns its calls."""
    calls = []

    def scaled_mm(a, b, a_scales, recipe_a, b_scales, recipe_b, output_dtype):
        with FakeTensorMode(allow_non_fake_inputs=True):  # torch's own checks of shapes and strides
            scaled(a, b, a_scales, recipe_a, b_scales, recipe_b, output_dtype=output_dtype)
        calls.append(recipe_b)
        blocks, N = a.shape[1] // BLOCK, b.shape[1]
        if len(b_scales) != N:  # "scale_b must have strides (1, 16)", as a GPU asks and the fake does not
            assert b_scales.stride() == (1, -(-blocks // 4) * 4)
        scales = b_scales if len(b_scales) == N else b_scales[:blocks].t()  # without the vector's padding
        return products.fp8_matmul_reference(Quantized(a, a_scales), Quantized(b.t(), scales), output_dtype)

    scaled = torch.nn.functional.scaled_mm
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    monkeypatch.setattr(_dispatch, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(_self_test, "passes", lambda operator, x: operator == "fp8_matmul")
    monkeypatch.setattr(products, "_has_blocks", lambda device: True)
    return calls


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("K", "N"), [(640, 384), (512, 1024)])  # scales that are padded to vectors of four, or not
def test_torch_multiplies_where_it_has_the_product(hopper, K, N, dtype):
    """The three products of a linear layer: the layouts of scales are those that torch asks for."""
    x, dy, weight = draw(256, K), draw(256, N), draw(N, K)
    (x_rows, x_columns), (dy_rows, dy_columns) = (quantize_fp8(t, columns=True, impl="reference") for t in (x, dy))
    w_rows, w_columns = quantize_fp8(weight, square=True, columns=True, impl="reference")
    for a, b in ((x_rows, w_rows), (dy_rows, w_columns), (dy_columns, x_columns)):
        assert torch.equal(fp8_matmul(a, b, dtype), fp8_matmul(a, b, dtype, impl="reference"))
    recipes = torch.nn.functional.ScalingType
    assert hopper == [recipes.BlockWise128x128] * 2 + [recipes.BlockWise1x128]
    assert fp8_matmul(factor(1, 128), factor(16, 128), dtype).shape == (1, 16)
    assert len(hopper) == 4, "the least that has the product"


@pytest.mark.parametrize(("M", "N", "K", "square", "dtype"), [
    (1, 16, 100, False, BF16), (1, 20, 128, False, BF16), (1, 16, 128, True, BF16), (1, 16, 128, False, F64),
    (0, 16, 128, False, BF16), (4, 16, 0, False, BF16),
])  # fmt: skip
def test_other_products_are_those_of_bfloat16_or_float64(hopper, M, N, K, square, dtype):
    assert not fp8_matmul(factor(M, K), factor(N, K, square), dtype).any()
    assert hopper == []
    with pytest.raises(ValueError, match="torch has no fp8_matmul of these inputs"):
        fp8_matmul(factor(M, K), factor(N, K, square), dtype, impl="torch")


@pytest.mark.parametrize("where", ["meta", "fake"])
def test_a_dry_run_holds_what_a_gpu_would(where):
    with FakeTensorMode() if where == "fake" else torch.device("meta"):
        x, weight = torch.empty(100, 40), torch.empty(70, 40)
        (a, turned), (b, _) = quantize_fp8(x, columns=True), quantize_fp8(weight, square=True)
        assert turned.values.stride() == (100, 1)
        assert fp8_matmul(a, b).shape == (100, 70)
        with FlopCounterMode(display=False) as counter:
            fp8_matmul(a, b)
    assert counter.get_total_flops() == 2 * 100 * 70 * 40


@pytest.mark.parametrize("square", [False, True])
def test_what_fake_tensors_trace_runs_on_a_cpu(square):
    """The operators that a GPU launches: there they run the references."""

    def both(x, weight):
        (a, c), (b, _) = quantize_fp8(x, columns=True), quantize_fp8(weight, square=square)
        return fp8_matmul(a, b), fp8_matmul(c, c, F32)

    traced = make_fx(both, tracing_mode="fake")(draw(130, 40), draw(20, 40))
    assert sum(str(node.target).startswith("mpcore.") for node in traced.graph.nodes) == 4
    given = draw(130, 40, seed=1), draw(20, 40, seed=1)
    for found, wanted in zip(traced(*given), both(*given), strict=True):
        assert torch.equal(found, wanted)
    quantized = ops.quantize_fp8(given[0], square, True, False)
    with FakeTensorMode() as mode:
        strides = [t.stride() for t in ops.quantize_fp8(mode.from_tensor(given[0]), square, True, False)]
    assert [t.stride() for t in quantized] == strides


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("square", [False, True])
def test_a_gpu_gives_the_bits_of_the_cpu(square):
    x = draw(1000, 3001, dtype=BF16)
    for found, wanted in zip(
        quantize_fp8(x.cuda(), square=square, columns=True), quantize_fp8(x, square=square, columns=True), strict=True
    ):
        assert same(Quantized(*(held.cpu() for held in found)), wanted)
