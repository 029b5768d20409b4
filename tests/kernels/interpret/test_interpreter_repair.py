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


def test_float32_rounds_to_the_nearest_bfloat16():
    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    ties = torch.arange(64, dtype=torch.int32) * 0x8000 + 0x3F800000
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-45]).view(torch.int32)
    x = torch.cat([bits, ties, special, ties.new_zeros(8192 - 4096 - 64 - 7)]).view(torch.float32)
    y = torch.empty(8192, dtype=torch.bfloat16)
    _copy_kernel[(1,)](x, y, 8192, BLOCK=8192)
    torch.testing.assert_close(y, x.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dot(dtype):
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    c = torch.empty(16, 16)
    _dot_kernel[(1,)](a, b, c, SIZE=16)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


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
