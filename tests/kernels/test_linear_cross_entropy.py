"""linear_cross_entropy on a CPU: against the unfused reference in float64, in chunks; bad input."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mpcore.kernels import linear_cross_entropy as module
from mpcore.kernels._main_grad import add_product
from mpcore.kernels.cross_entropy import Loss
from mpcore.kernels.linear_cross_entropy import rows_of_chunk
from tests.oracles.linear_loss import (
    linear_cross_entropy_reference,
    linear_cross_entropy_rows_reference,
    linear_log_prob_reference,
)

N, D, V = 7, 4, 11
X, WEIGHT = torch.randn(N, D, dtype=torch.float64), torch.randn(V, D, dtype=torch.float64)
TARGET, SCALE = torch.tensor([0, 3, -100, 10, 5, 3, 7]), torch.rand(N, dtype=torch.float64)
OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 2.0}


def of_terms(function):
    """A function of the kernels that takes the terms of the loss one by one, as its reference does."""

    def run(x, weight, *rows, start=0, vocab_size=None, gather=None, chunk_rows=None, **terms):
        loss = Loss(vocab_size or len(weight), start, **terms)
        return function(x, weight, *rows, loss, gather=gather, chunk_rows=chunk_rows)

    return run


linear_cross_entropy, linear_cross_entropy_rows, linear_log_prob = map(
    of_terms, (module.linear_cross_entropy, module.linear_cross_entropy_rows, module.linear_log_prob)
)


def total_of(function):
    """The scaled sum, as a function of the rows."""
    return lambda x, weight, target, **options: function(x, weight, target, SCALE[: len(x)].to(x), **options)


# The cases of single rows, each with its reference and options. ALL adds those of the sum.
ROWS = [
    (linear_cross_entropy_rows, linear_cross_entropy_rows_reference, {}),
    (linear_cross_entropy_rows, linear_cross_entropy_rows_reference, OPTIONS),
    (linear_log_prob, linear_log_prob_reference, {}),
    (linear_log_prob, linear_log_prob_reference, {"softcap": 2.0}),
]
ALL = [*ROWS, *((total_of(linear_cross_entropy), total_of(linear_cross_entropy_reference), o) for o in ({}, OPTIONS))]


def rows_and_gradients(function, x, weight, *rows, seed=0, **options):
    """Of gradients that differ from row to row."""
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    outputs = function(*leaves, *rows, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(seed)
    given = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in outputs]
    return *(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, given)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("chunk_rows", [2, 8])
def test_the_gradient_of_the_weight_is_added_to_its_main_gradient_unrounded(chunk_rows, rows):
    x, weight, scale = X.bfloat16(), WEIGHT.bfloat16().requires_grad_(), SCALE.float()

    def total():
        if rows:
            return linear_cross_entropy_rows(x, weight, TARGET, chunk_rows=chunk_rows) @ scale
        return linear_cross_entropy(x, weight, TARGET, scale, chunk_rows=chunk_rows)

    weight.main_grad = torch.zeros(weight.shape)
    (plain,) = torch.autograd.grad(total(), weight)  # which autograd returns, so that nothing is added
    assert not weight.main_grad.any()
    total().backward()
    once = weight.main_grad.clone()
    assert once.bfloat16().equal(plain)
    # The sum of one chunk is one product in bfloat16; the product of rows adds by itself.
    assert once.equal(plain.float()) == (chunk_rows > N and not rows)
    (2 * total()).backward()
    torch.testing.assert_close(weight.main_grad, 3 * once)
    assert weight.grad is None
    assert weight.grad_added_to_main_grad


GIVEN = {  # the tensors and options of a call
    **{f"chunks of {n}": ((X, WEIGHT, TARGET), {"chunk_rows": n}) for n in (None, 1, 3, 8)},
    "strides": ((X.t().contiguous().t(), WEIGHT.repeat(1, 2)[:, :D], TARGET.repeat_interleave(2)[::2]),
                {"chunk_rows": 3}),
    "another ignored id": ((X, WEIGHT, TARGET.masked_fill(TARGET == -100, 3)), {"ignore_index": 3}),
    "no rows": ((X[:0], WEIGHT, TARGET[:0]), {}), "autocast": ((X, WEIGHT, TARGET), {}),
}  # fmt: skip


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize(("function", "reference", "options"), ALL)
def test_each_row_equals_the_unfused_reference(function, reference, options, given):
    tensors, how = GIVEN[given]
    with torch.autocast("cpu", torch.bfloat16, enabled=given == "autocast"):  # which leaves float64 alone
        found = rows_and_gradients(function, *tensors, **options, **how)
    wanted = rows_and_gradients(reference, *tensors, **options, **{n: how[n] for n in how if n != "chunk_rows"})
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("wanted", "products"), [((True, False), 2), ((False, True), 2), ((True, True), 3)])
@pytest.mark.parametrize(("chunk_rows", "kept"), [(3, 0), (None, 1)])
@pytest.mark.parametrize(("function", "reference", "options"), ROWS)
def test_backward_of_rows_makes_the_logits_of_chunks_again_and_the_gradients_that_are_wanted(
    function, reference, options, chunk_rows, kept, wanted, products
):
    leaves = [t.clone().requires_grad_(want) for t, want in zip((X, WEIGHT), wanted, strict=True)]
    outputs = function(*leaves, TARGET, chunk_rows=chunk_rows, **options)
    with FlopCounterMode(display=False) as counter:
        sum(outputs).sum().backward()
    assert counter.get_total_flops() == (products - kept) * 2 * N * V * D


@pytest.mark.parametrize("chunk_rows", [3, None])
@pytest.mark.parametrize(("function", "reference", "options"), ALL)
def test_rows_may_be_walked_twice_but_have_no_second_derivative(function, reference, options, chunk_rows):
    x, weight = X.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    outputs = function(x, weight, TARGET, chunk_rows=chunk_rows, **options)
    total = sum(y.square().sum() for y in (outputs if isinstance(outputs, tuple) else (outputs,)))
    first, second = (torch.autograd.grad(total, (x, weight), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    assert torch.equal(x, X)
    assert torch.equal(weight, WEIGHT)
    with pytest.raises(RuntimeError, match=r"no second derivative; use torch\.(log_softmax|nn\.functional\.cross_ent)"):
        torch.autograd.grad(total, x, create_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(total, (x, weight))))


@pytest.mark.parametrize(("function", "reference", "options"), ROWS)
def test_backward_makes_the_logits_of_autocast_again(function, reference, options):
    """It runs outside of autocast, where the same product would be of other logits."""

    def cast(x, weight, target):
        return function(x.bfloat16(), weight.bfloat16(), target, chunk_rows=3, **options)

    def auto(x, weight, target):
        with torch.autocast("cpu", torch.bfloat16):
            return function(x, weight, target, chunk_rows=3, **options)

    *found, dweight = rows_and_gradients(auto, X.float(), WEIGHT.float(), TARGET)
    *wanted, dweight_cast = rows_and_gradients(cast, X.float(), WEIGHT.float(), TARGET)
    assert all(map(torch.equal, found, wanted))
    torch.testing.assert_close(dweight.bfloat16().float(), dweight_cast, rtol=0, atol=0)


@pytest.mark.parametrize(("function", "reference", "options"), ROWS)
def test_shapes_without_numbers(function, reference, options):
    leaves = [t.to("meta").requires_grad_() for t in (X, WEIGHT)]
    outputs = function(*leaves, TARGET.to("meta"), **options)
    for y in outputs if isinstance(outputs, tuple) else (outputs,):
        assert (y.device.type, y.shape, y.dtype) == ("meta", (N,), torch.float64)
    (outputs[0] if isinstance(outputs, tuple) else outputs).sum().backward()
    assert [leaf.grad.shape for leaf in leaves] == [X.shape, WEIGHT.shape]


@pytest.mark.parametrize(("function", "reference", "options"), ALL)
def test_pitfall_08_an_ignored_row_is_0_whatever_it_holds(function, reference, options):
    ignored = TARGET == -100
    found = rows_and_gradients(function, torch.where(ignored[:, None], torch.nan, X), WEIGHT, TARGET, **options)
    *rows, dx, _ = found
    assert all(map(torch.equal, found, rows_and_gradients(function, X, WEIGHT, TARGET, **options)))
    assert not any(y[ignored].any() for y in (*rows, dx) if y.dim())


TRAINED, FROZEN = torch.empty(0, requires_grad=True), torch.empty(0)


def test_all_rows_are_one_chunk_if_their_logits_are_no_larger_than_the_float32_gradient_and_a_chunk():
    """Of V rows: 2 bytes of N logits against 4 bytes of D elements, and 512 MiB."""
    x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
    assert [rows_of_chunk(x, 128256, weight) for weight in (TRAINED, FROZEN)] == [8192, 2048]
    for rows, found in ((8192 + 2092, 8192 + 2092), (8192 + 2093, 2176)):  # 2092.98 rows are 512 MiB
        assert rows_of_chunk(x[:1].expand(rows, 4096), 128256, TRAINED) == found
    assert rows_of_chunk(x[:0], 8, TRAINED) == 1
    assert rows_of_chunk(x.float(), 128256, TRAINED) == 1024  # its sum is its gradient


@pytest.mark.parametrize(("arguments", "message"), [
    ({"x": X[None]}, r"x \(1, 7, 4\), weight \(11, 4\), target \(7,\).* are not \[N, D\], \[V, D\], \[N\]"),
    ({"weight": WEIGHT[:, :3]}, r"x \(7, 4\), weight \(11, 3\), .* are not"),
    ({"target": TARGET[:5]}, r"x \(7, 4\), .* target \(5,\).* are not"),
    ({"scale": SCALE[:5]}, r"x \(7, 4\), .* scale \(5,\) are not"),
    ({"target": TARGET.double()}, "target is torch.float64"),
    ({"target": TARGET.clamp(min=0) + 1}, "target 11 is outside the vocabulary of 11"),
    ({"target": TARGET - 1}, "target -101 is outside the vocabulary of 11"),
    ({"target": TARGET, "vocab_size": 10}, "target 10 is outside the vocabulary of 10"),
    ({"weight": WEIGHT.float()}, "x is torch.float64, but weight is torch.float32"),
    ({"chunk_rows": 0}, "chunk_rows 0 is not positive"), ({"softcap": -1.0}, "softcap -1.0 is not a positive number"),
])  # fmt: skip
def test_bad_input(arguments, message):
    given = {"x": X, "weight": WEIGHT, "target": TARGET, "scale": SCALE} | arguments
    x, weight, target, scale = (given.pop(name) for name in ("x", "weight", "target", "scale"))
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(x, weight, target, scale, **given)
    for function in (linear_cross_entropy_rows, linear_log_prob) if "scale" not in arguments else ():
        with pytest.raises(ValueError, match=message):
            function(x, weight, target, **given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_weight_gradient_of_chunks_is_summed_in_float32(dtype):
    torch.manual_seed(5)
    dz, x = torch.randn(64, 301).to(dtype), torch.randn(64, 32).to(dtype)
    total = None
    for rows in range(0, 64, 4):
        total = add_product(total, dz[rows : rows + 4].t(), x[rows : rows + 4], torch.float32)
    assert total is not None
    exact = dz.double().t() @ x.double()
    assert (total.double() - exact).abs().max() < 2e-6 * exact.abs().max()
    assert torch.equal(module._scaled(total, torch.tensor(0.3), dtype), (total * 0.3).to(dtype))
