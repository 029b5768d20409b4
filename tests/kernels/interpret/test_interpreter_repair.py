"""The interpreter, as repaired, computes what a GPU does; a new Triton that no longer fits goes red here."""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _copy_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < N)
    tl.store(y_ptr + cols, x.to(tl.float32).to(y_ptr.dtype.element_ty))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, SIZE: tl.constexpr):
    square = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(c_ptr + square, tl.dot(tl.load(a_ptr + square), tl.load(b_ptr + square)))


@triton.jit
def _double_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols)
    tl.store(y_ptr + cols, x + x)


@triton.jit
def _maximum_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(y_ptr + cols, tl.maximum(tl.load(x_ptr + cols), 0.0))


@triton.jit
def _count_kernel(y_ptr, N):
    total = 0
    for i in range(0, N):
        total += i
    tl.store(y_ptr, total)


def test_float32_rounds_to_the_nearest_bfloat16():
    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    ties = torch.arange(64, dtype=torch.int32) * 0x8000 + 0x3F800000
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-45]).view(torch.int32)
    x = torch.cat([bits, ties, special, ties.new_zeros(8192 - 4096 - 64 - 7)]).view(torch.float32)
    y = torch.empty(8192, dtype=torch.bfloat16)
    _copy_kernel[(1,)](x, y, 8192, BLOCK=8192)
    torch.testing.assert_close(y, x.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


def test_every_bfloat16_widens_exactly():
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    y = torch.empty(2**16)
    _copy_kernel[(1,)](x, y, 2**16, BLOCK=2**16)
    torch.testing.assert_close(y, x.float(), rtol=0, atol=0, equal_nan=True)


@triton.jit
def _fma_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(y_ptr + tl.arange(0, BLOCK), tl.fma(x, x, tl.full((BLOCK,), -1.0, tl.float32)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dot(dtype):
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    c = torch.empty(16, 16)
    _dot_kernel[(1,)](a, b, c, SIZE=16)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_bfloat16_arithmetic_is_refused():
    x = torch.ones(16, dtype=torch.bfloat16)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="upcast"):
        _double_kernel[(1,)](x, torch.empty_like(x), BLOCK=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_masked_lane_is_undefined(dtype):
    y = torch.empty(16)
    _copy_kernel[(1,)](torch.ones(16, dtype=dtype), y, 10, BLOCK=16)
    assert y[:10].eq(1).all()
    assert y[10:].isnan().all()


@pytest.mark.parametrize(("size", "reach"), [(10, 16), (16, 10)])
def test_an_access_past_a_tensor_raises(size, reach):
    x, y = torch.ones(20)[:reach], torch.empty(20)[:size]
    with pytest.raises(triton.runtime.errors.InterpreterError, match="past the tensors"):
        _copy_kernel[(1,)](x, y, 16, BLOCK=16)


def test_a_maximum_drops_nan():
    y = torch.empty(16)
    _maximum_kernel[(1,)](torch.full((16,), torch.nan), y, BLOCK=16)
    assert y.eq(0).all()


def test_a_loop_may_count_to_a_run_time_number():
    y = torch.empty(1, dtype=torch.int32)
    _count_kernel[(1,)](y, 10)
    assert y.item() == 45


def test_fma_rounds_once():
    x = torch.tensor([1 + 2**-12] * 16)  # its square is 1 + 2^-11 + 2^-24, of which float32 has no last digit
    y = torch.empty(16)
    _fma_kernel[(1,)](x, y, BLOCK=16)
    assert y.eq(2**-11 + 2**-24).all()


@triton.jit
def _scaled_kernel(x_ptr, y_ptr, z_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK)).to(tl.float8e4nv)
    tl.store(y_ptr + tl.arange(0, BLOCK), x)
    tl.store(z_ptr + tl.arange(0, BLOCK), x.to(tl.float32))


def test_float32_rounds_to_the_nearest_e4m3_and_stops_at_the_largest():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (every[:-1] + every[1:])[:254] / 2
    special = torch.tensor([500.0, -1e30, torch.inf, -torch.inf, torch.nan, 1e-45, -0.0])
    x = torch.cat([every, between, special, between.new_zeros(1024 - 256 - 254 - 7)])
    y, z = torch.empty(1024, dtype=torch.float8_e4m3fn), torch.empty(1024)
    _scaled_kernel[(1,)](x, y, z, BLOCK=1024)
    wanted = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(y.view(torch.uint8)[~x.isnan()], wanted.view(torch.uint8)[~x.isnan()])
    torch.testing.assert_close(z, wanted.float(), rtol=0, atol=0, equal_nan=True)


def test_dot_of_e4m3():
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    c = torch.empty(16, 16)
    _dot_kernel[(1,)](a, b, c, SIZE=16)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
    a[0, 0] = torch.nan
    _dot_kernel[(1,)](a, b, c, SIZE=16)
    assert torch.equal(c.isnan().any(1), torch.arange(16) == 0)


@triton.jit
def _approximate_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, tl.exp2(x))
    tl.store(y_ptr + BLOCK + at, tl.exp(x))
    tl.store(y_ptr + 2 * BLOCK + at, tl.rsqrt(x))
    tl.store(y_ptr + 3 * BLOCK + at, x / 3.0)
    tl.store(y_ptr + 4 * BLOCK + at, tl.div_rn(x, 3.0))
    tl.store(y_ptr + 5 * BLOCK + at, tl.sqrt_rn(x))


def test_what_a_gpu_approximates_is_off_by_two_units_at_most():
    x = torch.rand(1024, generator=torch.Generator().manual_seed(0)) + 0.5
    y, again = torch.empty(6, 1024), torch.empty(6, 1024)
    for found in (y, again):
        _approximate_kernel[(1,)](x, found, BLOCK=1024)
    assert torch.equal(y, again)
    wide = x.double()
    exact = torch.stack([wide.exp2(), wide.exp(), wide.rsqrt(), wide / 3, wide / 3, wide.sqrt()])
    units = (y.double() - exact).abs() / (2.0 ** exact.log2().floor() * 2**-23)
    assert (units.amax(1) <= torch.tensor([2.0, 3.0, 2.0, 2.0, 0.5, 0.5])).all()
    assert (units.amax(1)[:4] > 0.6).all()  # more than rounding to nearest is off
