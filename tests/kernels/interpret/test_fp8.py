"""Numerics of quantize_fp8, bit by bit, and of fp8_matmul."""

import functools
import math

import laws
import pytest
import torch

from mpcore.kernels import fp8_matmul as module
from mpcore.kernels.fp8_matmul import fp8_matmul, fp8_matmul_reference
from mpcore.kernels.quantize_fp8 import Quantized, dequantize_fp8, quantize_fp8, quantize_fp8_reference

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
quantize = functools.partial(quantize_fp8, impl="triton")
product = functools.partial(fp8_matmul, impl="triton")


def draw(*shape, dtype=F32, seed=0):
    """Numbers of all sizes, a few of them 0."""
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    x, size = (laws.drawn(torch.randn, *shape, generator=generator) for _ in range(2))
    return torch.where(size.abs() < 0.1, 0.0, x * torch.exp2(3 * size)).to(dtype)


def check_bits(x, layout="contiguous", **options):
    """Both directions at once, each alone, and the reference are the same bits; of NaN values only that they are."""
    with laws.guarded_memory():
        placed = laws.place(x, layout, 8)
        found = quantize(placed, columns=True, **options)
        alone = quantize(placed, **options)[0], quantize(placed, rows=False, columns=True, **options)[1]
    for both, one, wanted in zip(found, alone, quantize_fp8_reference(x, columns=True, **options), strict=True):
        for kernel in (both, one):
            assert (kernel.values.dtype, kernel.values.shape) == (torch.float8_e4m3fn, wanted.values.shape)
            assert (kernel.scales.dtype, kernel.scales.shape) == (F32, wanted.scales.shape)
            assert torch.equal(kernel.scales.view(torch.int32), wanted.scales.view(torch.int32))
            nothing = wanted.values.isnan()
            assert torch.equal(kernel.values.isnan(), nothing)
            bits = [q.values.view(torch.uint8)[~nothing] for q in (kernel, wanted)]
            assert torch.equal(*bits)
    return found


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize(
    ("M", "K", "dtype", "layout"),
    [
        (1, 127, BF16, "contiguous"),
        (129, 257, BF16, "strided rows"),
        (127, 129, F32, "strided columns"),
        (1021, 33, F16, "contiguous"),
        (256, 128, F32, "strided rows"),
        (3, 1, BF16, "far rows"),
        (0, 5, BF16, "contiguous"),
        (5, 0, BF16, "contiguous"),
    ],
)
def test_quantized_bits(M, K, dtype, layout, square):
    check_bits(draw(M, K, dtype=dtype), layout, square=square)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("strange", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_block_with_what_is_no_number_shows_it(strange, square):
    x = draw(130, 260)
    x[128, 3] = strange
    rows, columns = check_bits(x, square=square)
    lost = rows.scales.isnan().nonzero().tolist(), columns.scales.isnan().nonzero().tolist()
    assert lost == (([[1, 0]], [[0, 1]]) if square else ([[128, 0]], [[3, 1]]))
    y = product(rows, quantize(draw(7, 260))[0])
    assert y.isnan().any(1).nonzero().flatten().tolist() == ([128, 129] if square else [128])


def test_the_ends_of_the_range():
    """Each power of two and what lies beside 1.75 times it, where a scale doubles, down to what is subnormal."""
    exponent = torch.arange(-149, 128)
    power = torch.exp2(exponent.double())
    some = torch.stack([power, power * 1.75, power * 1.75 * (1 + 2**-23), power * (2 - 2**-23)]).float().flatten()
    x = torch.zeros(len(some), 128)
    x[:, 5], x[:, 6], x[:, 7] = some, -some / 3, torch.full_like(some, 1e-45)
    check_bits(x[:, :8].contiguous())
    check_bits(x[100:300, :8].contiguous(), square=True)
    check_bits(torch.zeros(3, 130))
    check_bits(torch.full((2, 129), 2.0**-133, dtype=BF16))


def quantized(M, K, square, seed=0):
    return quantize_fp8_reference(draw(M, K, seed=seed), square)[0]


def check_product(a, b, dtype=BF16, place=lambda x: x):
    """The kernel errs at most twice as much as the reference, or by a rounding; alone and added to something.

    On a GPU each term may err by 2^-12 of itself: tensor cores keep some 14 bits of a block's sum.
    """
    exact = fp8_matmul_reference(a, b, torch.float64)
    terms = dequantize_fp8(a).abs() @ dequantize_fp8(b).abs().t()
    a, b = (Quantized(place(q.values), q.scales) for q in (a, b))
    with laws.guarded_memory():
        y = product(a, b, dtype)
    assert (y.dtype, y.shape) == (dtype, exact.shape)
    before = torch.ones_like(exact, dtype=F32)
    out = laws.place(before, "strided rows", 8)
    assert product(a, b, out=out) is out
    plain = fp8_matmul_reference(a, b, dtype), fp8_matmul_reference(a, b, out=before.clone())
    for found, wanted, truth in zip((y, out), plain, (exact, exact + 1), strict=True):
        if exact.numel():
            granted = torch.finfo(found.dtype).eps * truth.abs().max() + (
                2**-12 * terms.max() if a.values.is_cuda else 0
            )
            assert (found - truth).abs().max() <= 2 * torch.maximum((wanted - truth).abs().max(), granted)


def strided(values):
    """Rows apart, at no multiple of anything, among NaN."""
    M, K = values.shape
    held = torch.full((M, K + 3), math.nan).to(values.dtype)
    held[:, 2 : K + 2] = values
    return held[:, 2 : K + 2]


@pytest.mark.parametrize(
    ("M", "N", "K", "squares", "programs"),
    [
        (1, 129, 127, (False, True), 1),
        (127, 1, 129, (False, False), 1),
        (130, 260, 300, (False, True), 1),
        (129, 70, 256, (True, True), 99),
        (260, 40, 1021, (True, False), 1),
        (257, 129, 128, (False, False), 7),
        (3, 5, 0, (False, True), 1),
        (0, 5, 4, (False, True), 1),
    ],
)
def test_product(M, N, K, squares, programs, monkeypatch):
    monkeypatch.setattr(module, "multiprocessors", lambda device: programs)
    a, b = quantized(M, K, squares[0]), quantized(N, K, squares[1], 1)
    check_product(a, b)
    check_product(a, b, F32, strided)


def test_many_tiles_each_once(monkeypatch):
    """More tiles of rows than go together, and not a multiple of them."""
    monkeypatch.setattr(module, "TILES", ((64, 32, 2, 4),))
    monkeypatch.setattr(module, "GROUP", 2)
    check_product(quantized(64 * 5 - 3, 130, True), quantized(65, 130, False, 1), F32)


def test_what_quantize_turns_multiplies():
    """The three products of a linear layer, of one read of each."""
    x, dy, weight = draw(130, 140, dtype=BF16), draw(130, 150, dtype=BF16), draw(150, 140, dtype=BF16)
    (x_rows, x_columns), (dy_rows, dy_columns) = quantize(x, columns=True), quantize(dy, columns=True)
    w_rows, w_columns = quantize(weight, square=True, columns=True)
    for a, b in ((x_rows, w_rows), (dy_rows, w_columns), (dy_columns, x_columns)):
        check_product(a, b)


def test_factors_turned_by_a_view_are_read_as_they_are():
    a, b = quantized(20, 30, False), quantized(40, 30, False, 1)
    turned = Quantized(a.values.t().contiguous().t(), a.scales.t().contiguous().t())
    assert torch.equal(product(turned, b), product(a, b))


def test_what_a_product_is_added_to_has_a_new_version():
    a, b, out = quantized(9, 40, False), quantized(11, 40, True), torch.ones(9, 11)
    versions = [out._version]
    for impl in ("triton", "reference"):
        fp8_matmul(a, b, out=out, impl=impl)
        versions.append(out._version)
    assert versions == [0, 1, 2]


def test_operators_and_compilation():
    x = draw(130, 40, dtype=BF16)
    ops = torch.ops.mpcore
    check = functools.partial(laws.check_operator, tests=laws.ALL_TESTS[1:])  # the first can't compare e4m3
    for square, rows, columns in ((False, True, True), (True, True, True), (False, False, True), (False, True, False)):
        check(ops.quantize_fp8, x, square, rows, columns)
    check(ops.quantize_fp8, x.t(), False, True, True)
    a, b = quantized(9, 40, False), quantized(11, 40, True)
    check(ops.fp8_matmul, *a, *b, BF16)
    check(ops.fp8_matmul_add, *a, *b, torch.ones(9, 11))

    def both(x, y, out):
        (a, _), (_, b) = quantize(x), quantize(y, rows=False, columns=True)
        return product(a, b), product(a, b, out=out) * 2

    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    out, held = torch.ones(130, 50), torch.ones(130, 50)
    for found, wanted in zip(compiled(x, draw(40, 50), out), both(x, draw(40, 50), held), strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(out, held)
