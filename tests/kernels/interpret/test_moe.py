"""Numerics of moe_permute and moe_unpermute."""

import functools

import laws
import pytest
import torch

from mpcore.kernels.moe_permute import (
    moe_permute,
    moe_permute_reference,
    moe_rows,
    moe_rows_reference,
    moe_unpermute,
    moe_unpermute_reference,
)
from mpcore.kernels.top_k import top_k, top_k_reference

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
permute = functools.partial(moe_permute, impl="triton")
unpermute = functools.partial(moe_unpermute, impl="triton")


def draw(*shape, dtype=F32):
    return laws.drawn(torch.randn, *shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def choices(T, K, E):
    return laws.drawn(torch.randint, -1, E + 1, (T, K), generator=torch.Generator().manual_seed(T))  # -1 and E are none


@pytest.mark.parametrize(("T", "K", "E"), [(300, 3, 20), (1100, 1, 8), (40, 8, 300), (5, 2, 1), (0, 2, 4)])
def test_rows(T, K, E):
    experts = choices(T, K, E)
    row, counts = moe_rows(experts, E, impl="triton")
    wanted = moe_rows_reference(experts, E)
    assert torch.equal(row, wanted[0])
    assert torch.equal(counts, wanted[1])
    laws.check_operator(torch.ops.mpcore.moe_rows, experts, E)


@pytest.mark.parametrize("layout", ["contiguous", "strided rows", "strided columns"])
@pytest.mark.parametrize(
    ("N", "E", "K", "dtype"),
    [(9, 60, 8, F32), (3, 4, 4, BF16), (5, 1, 1, F32), (2, 1000, 3, F32), (200, 17, 6, F16), (0, 8, 2, F32)],
)
def test_largest_scores(N, E, K, dtype, layout):
    """Also of scores with ties, infinity and NaN, and with a bias."""
    drawn = draw(N, E).to(dtype)
    equal = drawn.round().masked_fill(drawn.abs() < 0.1, -torch.inf)
    for scores in (drawn, equal, equal.masked_fill(draw(E, N).t() > 1.5, torch.nan)):
        placed = laws.place(scores, layout, 8)
        for bias in (None, draw(E).to(dtype)):
            assert torch.equal(top_k(placed, K, bias, impl="triton"), top_k_reference(scores, K, bias))
    laws.check_operator(torch.ops.mpcore.top_k, drawn, K, None)


@pytest.mark.parametrize("layout", ["contiguous", "strided rows", "strided columns"])
@pytest.mark.parametrize(
    ("T", "K", "D", "rows", "dtype"), [(7, 2, 100, 14, BF16), (20, 3, 33, 50, F32), (6, 3, 1100, 20, F16)]
)
def test_permute_and_back(T, K, D, rows, dtype, layout):
    """Also with fewer rows than choices, and with more."""
    row, _ = moe_rows_reference(choices(T, K, 4), 4)
    laws.check_errors(permute, moe_permute_reference, {"x": draw(T, D, dtype=dtype)}, layout, row=row, rows=rows)
    y = draw(rows, D, dtype=dtype)
    laws.check_errors(unpermute, moe_unpermute_reference, {"y": y}, layout, row=row)
    inputs = {"y": y, "weight": draw(T, K)}
    laws.check_errors(unpermute, moe_unpermute_reference, inputs, layout, row=row)


@pytest.mark.parametrize(("T", "rows"), [(0, 3), (3, 0)])
def test_nothing_to_permute(T, rows):
    row = torch.full((T, 2), -1, dtype=torch.int32)
    laws.check_errors(permute, moe_permute_reference, {"x": draw(T, 8)}, row=row, rows=rows)
    laws.check_errors(unpermute, moe_unpermute_reference, {"y": draw(rows, 8), "weight": draw(T, 2)}, row=row)


def test_operators_and_compilation():
    row, _ = moe_rows_reference(choices(6, 2, 3), 3)
    x, y, weight = draw(6, 8), draw(12, 8), draw(6, 2)
    ops = torch.ops.mpcore
    laws.check_operator(ops.moe_permute, x, row, 12)
    laws.check_operator(ops.moe_unpermute, y, row, weight)
    laws.check_operator(ops.moe_unpermute_backward, x, y, row, weight)
    laws.check_compiles(permute, {"x": x}, row=row, rows=12)
    laws.check_compiles(unpermute, {"y": y, "weight": weight}, row=row)


@pytest.mark.parametrize("name", ["moe_permute", "moe_unpermute"])
def test_a_second_derivative_is_refused(name):
    row, _ = moe_rows_reference(choices(6, 2, 3), 3)
    x, y = draw(6, 8).requires_grad_(), draw(12, 8).requires_grad_()
    out, given = {
        "moe_permute": lambda: (permute(x, row, 12), x),
        "moe_unpermute": lambda: (unpermute(y, row, draw(6, 2)), y),
    }[name]()
    with pytest.raises(RuntimeError, match=f"{name} kernel has no second derivative"):
        torch.autograd.grad(out.sum(), given, create_graph=True)
