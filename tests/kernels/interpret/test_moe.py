"""Numerics of moe_permute, moe_unpermute and grouped_linear."""

import functools

import laws
import pytest
import torch

from mpcore.kernels.grouped_linear import grouped_linear, grouped_linear_reference
from mpcore.kernels.moe_permute import (
    moe_permute,
    moe_permute_reference,
    moe_rows,
    moe_rows_reference,
    moe_unpermute,
    moe_unpermute_reference,
)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
permute = functools.partial(moe_permute, impl="triton")
unpermute = functools.partial(moe_unpermute, impl="triton")
product = functools.partial(grouped_linear, impl="triton")


def draw(*shape, dtype=F32):
    return laws.drawn(torch.randn, *shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def choices(T, K, E):
    return laws.drawn(torch.randint, -1, E + 1, (T, K), generator=torch.Generator().manual_seed(T))  # -1 and E are none


@pytest.mark.parametrize(("T", "K", "E"), [(7, 2, 5), (300, 3, 20), (1100, 1, 8), (40, 8, 300), (5, 2, 1), (0, 2, 4)])
def test_rows(T, K, E):
    experts = choices(T, K, E)
    row, counts = moe_rows(experts, E, impl="triton")
    wanted = moe_rows_reference(experts, E)
    assert torch.equal(row, wanted[0])
    assert torch.equal(counts, wanted[1])
    laws.check_operator(torch.ops.mpcore.moe_rows, experts, E)


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


@pytest.mark.parametrize("layout", ["contiguous", "strided rows"])
@pytest.mark.parametrize(
    ("counts", "rows", "D", "F", "dtype"),
    [
        ([3, 0, 130, 2], 140, 40, 70, F32),
        ([3, 0, 130, 2], 135, 100, 33, BF16),
        ([0, 0, 5], 300, 70, 8, F16),
        ([0, 0], 4, 8, 8, F32),
        ([9], 9, 16, 16, BF16),
        ([3, 2], 5, 0, 8, F32),
    ],
)
def test_grouped_product(counts, rows, D, F, dtype, layout):
    inputs = {"x": draw(rows, D, dtype=dtype), "weight": draw(len(counts), F, D, dtype=dtype)}
    laws.check_errors(product, grouped_linear_reference, inputs, layout, counts=torch.tensor(counts))


@pytest.mark.parametrize(
    ("activation", "counts", "rows", "D", "F", "dtype"),
    [
        ("swiglu", [3, 0, 130, 2], 140, 40, 74, F32),
        ("swiglu", [0, 0], 4, 8, 8, F32),
        ("swiglu", [3, 2], 5, 0, 8, F32),
        ("geglu", [3, 0, 5], 12, 33, 10, F32),
        ("geglu_tanh", [3, 0, 5], 12, 33, 10, BF16),
        ("gelu", [3, 0, 5], 12, 33, 9, F32),
        ("gelu_tanh", [3, 0, 5], 12, 33, 9, F16),
        ("relu_squared", [9], 9, 16, 16, F32),
    ],
)
def test_grouped_product_and_activation(activation, counts, rows, D, F, dtype):
    inputs = {"x": draw(rows, D, dtype=dtype), "weight": draw(len(counts), F, D, dtype=dtype)}
    options = {"counts": torch.tensor(counts), "activation": activation}
    laws.check_errors(product, grouped_linear_reference, inputs, **options)
    with_gradient = product(inputs["x"].requires_grad_(), inputs["weight"], **options)
    with torch.no_grad():
        assert torch.equal(product(**inputs, **options), with_gradient), "nothing is kept for backward"


@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_a_wider_weight_is_cast_for_the_products_and_kept_as_it_is(activation):
    counts, x = torch.tensor([3, 5]), draw(8, 16, dtype=BF16).requires_grad_()
    wide = draw(2, 32, 16, dtype=F32).requires_grad_()
    half = wide.detach().to(BF16).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = product(x, wide, counts, activation=activation)
    assert [t.dtype for t in saved if t.shape == wide.shape] == [F32]
    z = product(x, half, counts, activation=activation)
    assert torch.equal(y, z)
    dy = draw(*y.shape, dtype=BF16)
    for got, want in zip(torch.autograd.grad(y, (x, wide), dy), torch.autograd.grad(z, (x, half), dy), strict=True):
        assert torch.equal(got, want.to(got.dtype))


@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize("counts", [torch.tensor([[3, 9], [0, 7], [4, 1]])[:, 0], torch.tensor(2).expand(3)], ids=str)
def test_counts_may_have_any_strides(counts, activation):
    counts = counts.to(torch.get_default_device())
    leaves = [draw(10, 8).requires_grad_(), draw(3, 6, 8).requires_grad_()]
    y, want = (product(*leaves, c, activation=activation) for c in (counts, counts.contiguous()))
    assert torch.equal(y, want)
    for got, exact in zip(torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True):
        assert torch.equal(got, exact)


def test_operators_and_compilation():
    row, counts = moe_rows_reference(choices(6, 2, 3), 3)
    x, y, weight, w = draw(6, 8), draw(12, 8), draw(6, 2), draw(3, 4, 8)
    ops = torch.ops.mpcore
    laws.check_operator(ops.moe_permute, x, row, 12)
    laws.check_operator(ops.moe_unpermute, y, row, weight)
    laws.check_operator(ops.moe_unpermute_backward, x, y, row, weight)
    laws.check_operator(ops.grouped_linear_forward, y, w, counts)
    laws.check_operator(ops.grouped_linear_activated, y, w, counts, "swiglu", True)
    laws.check_operator(ops.grouped_linear_activated, y, w, counts, "gelu", False)
    laws.check_operator(ops.grouped_linear_weight, draw(12, 4), y, counts)
    laws.check_compiles(permute, {"x": x}, row=row, rows=12)
    laws.check_compiles(unpermute, {"y": y, "weight": weight}, row=row)
    laws.check_compiles(product, {"x": y, "weight": w}, counts=counts)


@pytest.mark.parametrize("name", ["moe_permute", "moe_unpermute", "grouped_linear"])
def test_a_second_derivative_is_refused(name):
    row, counts = moe_rows_reference(choices(6, 2, 3), 3)
    x, y = draw(6, 8).requires_grad_(), draw(12, 8).requires_grad_()
    out, given = {
        "moe_permute": lambda: (permute(x, row, 12), x),
        "moe_unpermute": lambda: (unpermute(y, row, draw(6, 2)), y),
        "grouped_linear": lambda: (product(y, draw(3, 4, 8), counts), y),
    }[name]()
    with pytest.raises(RuntimeError, match=f"{name} kernel has no second derivative"):
        torch.autograd.grad(out.sum(), given, create_graph=True)
