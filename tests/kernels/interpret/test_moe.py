"""Rows of experts, the router, and what moe_permute and moe_unpermute are tried on in `test_laws.py`."""

import functools

import laws
import pytest
import torch

from mpcore.kernels.moe_permute import moe_permute, moe_rows, moe_rows_reference, moe_unpermute
from mpcore.kernels.router import route, route_reference, top_k, top_k_reference
from tests.quick import some

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
permute = functools.partial(moe_permute, impl="triton")
unpermute = functools.partial(moe_unpermute, impl="triton")


def draw(*shape, dtype=F32):
    return laws.drawn(torch.randn, *shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def of_layouts(cases):
    """In each layout, but for many rows."""
    layouts = "contiguous", "strided rows", "strided columns"
    return some(*((each, *case) for each in layouts for case in cases if each == layouts[0] or case[0] < 10),
                of=[(each, *case) for each in layouts for case in cases])  # fmt: skip


def choices(T, K, E):
    return laws.drawn(torch.randint, -1, E + 1, (T, K), generator=torch.Generator().manual_seed(T))  # -1 and E are none


@pytest.mark.parametrize(
    ("T", "K", "E"), some((300, 3, 20), (5, 2, 1), (0, 2, 4), (1400, 3, 300), of=[(1100, 1, 8), (40, 8, 300)])
)
def test_rows(T, K, E):
    experts = choices(T, K, E)
    row, counts = moe_rows(experts, E, impl="triton")
    wanted = moe_rows_reference(experts, E)
    assert torch.equal(row, wanted[0])
    assert torch.equal(counts, wanted[1])
    if E < 30:  # 1400 tokens are 263 blocks, which the scan takes in two parts
        laws.check_operator(torch.ops.mpcore.moe_rows, experts, E)


@pytest.mark.parametrize(("layout", "N", "E", "K", "dtype"), of_layouts(
    [(9, 60, 8, F32), (3, 4, 4, BF16), (5, 1, 1, F32), (2, 1000, 3, F32), (200, 17, 6, F16), (0, 8, 2, F32)]
))  # fmt: skip
def test_largest_scores(N, E, K, dtype, layout):
    """Also of scores with ties, infinity and NaN, and with a bias."""
    drawn = draw(N, E).to(dtype)
    equal = drawn.round().masked_fill(drawn.abs() < 0.1, -torch.inf)
    for scores in (drawn, equal, equal.masked_fill(draw(E, N).t() > 1.5, torch.nan)):
        placed = laws.place(scores, layout, 8)
        for bias in (None, draw(E).to(dtype)):
            assert torch.equal(top_k(placed, K, bias, impl="triton"), top_k_reference(scores, K, bias))
    laws.check_operator(torch.ops.mpcore.top_k, drawn, K, None)


ROUTERS = [  # N, D, E, K, dtype, bias, and what else the router is asked
    (70, 100, 60, 8, BF16, True, {}), (9, 33, 21, 3, F32, False, {"scale": 2.5}),
    (5, 16, 120, 1, BF16, False, {"normalize": False}), (18, 24, 7, 7, F32, True, {"score": "sigmoid"}),
    (3, 8, 17, 2, BF16, True, {"score": "sigmoid", "normalize": False, "scale": 0.5}),
    (35, 70, 256, 8, BF16, True, {"score": "sigmoid"}), (17, 40, 400, 6, BF16, False, {}),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "N", "D", "E", "K", "dtype", "biased", "how"), of_layouts(ROUTERS))
def test_a_router(N, D, E, K, dtype, biased, how, layout):
    """The choice is exactly that of the scores that are returned; the rest errs as the reference with this choice."""
    inputs = {"x": draw(N, D, dtype=dtype), "weight": draw(E, D, dtype=dtype) / D**0.5}
    bias = draw(E).abs() / 8 if biased else None
    _, scores, experts, _ = route(**inputs, k=K, bias=bias, impl="triton", **how)
    assert torch.equal(experts, top_k_reference(scores, K, bias))

    def without_experts(function, **fixed):
        return lambda x, weight: [function(x, weight, K, bias, **how, **fixed)[i] for i in (0, 1, 3)]

    found, wanted = without_experts(route, impl="triton"), without_experts(route_reference, experts=experts)
    laws.check_errors(lambda **given: tuple(found(**given)), lambda **given: tuple(wanted(**given)), inputs, layout)
    alone = [lambda of=of, i=i, **given: of(**given)[i] for i in (0, 2) for of in (found, wanted)]
    for kernel, reference in zip(alone[::2], alone[1::2], strict=True):  # a gradient of one output alone
        laws.check_errors(kernel, reference, inputs, layout)


def test_a_router_whose_scores_are_all_zero_has_finite_gradients():
    x, weight = torch.ones(2, 16), torch.full((5, 16), -50.0)
    leaf = x.clone().requires_grad_()
    weights = route(leaf, weight, 2, score="sigmoid", impl="triton")[3]
    assert not weights.any()
    (dx,) = torch.autograd.grad(weights.sum(), leaf)
    assert dx.isfinite().all()


def test_the_router_is_an_operator():
    x, weight = draw(6, 16), draw(5, 16)
    ops = torch.ops.mpcore
    laws.check_operator(ops.route, x, weight, draw(5), 2, True, True, 1.0)
    _, scores, experts, weights = route(x, weight, 2, impl="triton")
    for split in (False, True):
        laws.check_operator(ops.route_backward, scores, experts, scores, None, weights, split, True, True, 1.0)
    whole, parts = (ops.route_backward(scores, experts, scores, scores, weights, s, True, True, 1.0) for s in (0, 1))
    assert torch.equal(parts.view(6, 3, 5).float().sum(1), whole)  # no bit of float32 is lost
    laws.check_compiles(lambda x, weight: route(x, weight, 2, impl="triton")[::3], {"x": x, "weight": weight})
    with pytest.raises(RuntimeError, match="route kernel has no second derivative"):
        torch.autograd.grad(route(x.requires_grad_(), weight, 2, impl="triton")[0].sum(), x, create_graph=True)
