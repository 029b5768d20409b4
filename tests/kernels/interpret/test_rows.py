"""Numerics of the second stage of column sums."""

import laws
import pytest
import torch

from mpcore.kernels._rows import sum_partials


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("P", "D"), [(1, 1), (64, 32), (65, 33), (300, 70)])
def test_sums_of_partials(P, D, dtype):
    partials = laws.drawn(torch.randn, 2, P, D, generator=torch.Generator().manual_seed(P))
    with laws.guarded_memory():
        first, second = partials.new_empty(D, dtype=dtype), partials.new_empty(D)
        sum_partials(laws.place(partials, "contiguous", 0), first, second)
    wanted = partials.double().sum(1)
    torch.testing.assert_close(first.double(), wanted[0].to(dtype).double(), atol=1e-5, rtol=torch.finfo(dtype).eps)
    torch.testing.assert_close(second.double(), wanted[1], atol=1e-5, rtol=1e-6)
    alone = torch.empty(D)
    sum_partials(partials[1:], alone)
    assert torch.equal(alone, second)
