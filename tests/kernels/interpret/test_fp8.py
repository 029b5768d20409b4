"""Numerics of quantize_fp8, bit by bit."""

import functools
import math

import laws
import pytest
import torch

from mpcore.kernels.fp8_matmul import fp8_matmul
from mpcore.kernels.quantize_fp8 import quantize_fp8, quantize_fp8_reference

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
quantize = functools.partial(quantize_fp8, impl="triton")


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
            assert torch.equal(*[q.values.view(torch.uint8)[~nothing] for q in (kernel, wanted)])
    return found


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize(("M", "K", "dtype", "layout"), [
    (1, 127, BF16, "contiguous"), (129, 257, BF16, "strided rows"), (127, 129, F32, "strided columns"),
    (1021, 33, F16, "contiguous"), (256, 128, F32, "strided rows"), (3, 1, BF16, "far rows"),
    (0, 5, BF16, "contiguous"), (5, 0, BF16, "contiguous"),
])  # fmt: skip
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


def test_operators_and_compilation():
    x = draw(130, 40, dtype=BF16)
    ops = torch.ops.mpcore
    check = functools.partial(laws.check_operator, tests=laws.ALL_TESTS[1:])  # the first can't compare e4m3
    for square, rows, columns in ((False, True, True), (True, True, True), (False, False, True), (False, True, False)):
        check(ops.quantize_fp8, x, square, rows, columns)
    check(ops.quantize_fp8, x.t(), False, True, True)

    def both(x, y):
        (a, _), (_, b) = quantize(x), quantize(y, rows=False, columns=True)
        return fp8_matmul(a, b), fp8_matmul(a, b, F32) * 2

    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(x, draw(40, 50)), both(x, draw(40, 50)), strict=True):
        assert torch.equal(found, wanted)
