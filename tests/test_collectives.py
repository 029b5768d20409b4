"""Every dual pair: what it gives, that each backward is the adjoint of its forward, and what it must never touch."""

import itertools

import pytest
import torch

from mpcore import Axis
from mpcore import collectives as c
from mpcore.layers.linear_ops import Product
from mpcore.tools.invariant.sums import tree_sum
from tests.equality import FEWER_SIZES, close, tp_axis
from tests.pool import mesh, on_ranks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [4, 8, 10, 3, 7]


@pytest.mark.parametrize(("length", "size", "unit", "sizes"), [
    (10, 4, 1, [3, 3, 2, 2]), (8, 4, 1, [2, 2, 2, 2]), (3, 4, 1, [1, 1, 1, 0]), (0, 2, 1, [0, 0]), (7, 1, 1, [7]),
    (12, 2, 4, [8, 4]), (8, 3, 4, [4, 4, 0]),
])  # fmt: skip
def test_longer_shards_come_first_and_follow_each_other(length, size, unit, sizes):
    assert c.shard_sizes(length, size, unit) == sizes
    ends = list(itertools.accumulate(sizes))
    for rank, (n, end) in enumerate(zip(sizes, ends, strict=True)):
        assert c.shard_range(length, Axis(size, rank), unit) == (end - n, end)


def test_a_tree_adds_neighbours_first():
    """Terms of which every other order of adding gives another sum."""
    big = 2.0**54
    for terms, want in (
        ([1.0], 1.0), ([1.0, 2.0], 3.0),
        ([big, 1.0, -big, 1.0], 0.0),  # in turn: 1
        ([big, -big, 1.0, 1.0], 2.0), ([1.0, 1.0, big, -big, 1.0, 1.0, -big, big], 4.0),
    ):  # fmt: skip
        assert tree_sum(torch.tensor(x, dtype=torch.float64) for x in terms).item() == want
    with pytest.raises(ValueError, match="zip"):
        tree_sum(torch.ones(3))


@on_ranks(3)
def test_what_has_no_gradient_gives_what_plain_torch_gives():
    """What has no gradient: each operation, messages to one rank and to none, and a sum in place."""
    axis = mesh(tp=3).tp
    terms = per_rank(axis, (6, 2))
    mine = terms[axis.rank]
    stack = torch.stack(terms)
    for op, want in (("sum", stack.sum(0)), ("max", stack.amax(0)), ("min", stack.amin(0))):
        close(c.all_reduce(mine, axis, op), want, op)
        close(c.wait(c.start_all_reduce(mine, axis, op)), want, op)
    close(c.wait(c.start_all_gather(mine.t().contiguous().t(), axis)), torch.cat(terms), "all_gather")
    close(c.wait(c.start_reduce_scatter(mine, axis)), stack.sum(0).chunk(3)[axis.rank], "reduce_scatter")
    to = {0: 2, 1: None, 2: 0}[axis.rank]  # a message of as many numbers as its sender's rank tells
    message = torch.arange(axis.rank + 1) + 10.0 * axis.rank
    receive = {0: [0, 0, 3], 1: [0, 0, 0], 2: [1, 0, 0]}[axis.rank]
    got = c.wait(c.start_send(message, axis, to, receive))
    assert got.tolist() == {0: [20.0, 21.0, 22.0], 1: [], 2: [0.0]}[axis.rank]
    here = mine.clone()
    assert c.wait(c.start_sum_in_place(here, axis)).data_ptr() == here.data_ptr()
    close(here, stack.sum(0), "in place")
    with torch.no_grad():
        assert c.copy(mine, axis) is mine
        close(c.reduce(mine, axis), stack.sum(0), "reduce without gradients")


def shard(full, axis, dim):
    start, end = c.shard_range(full.shape[dim], axis)
    return full.narrow(dim, start, end - start).contiguous()


def whole(seed, shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def per_rank(axis, shape, dtype=torch.float64):
    """The tensors of all ranks: one differing draw each."""
    return [whole(100 + r, shape, dtype) for r in range(axis.size)]


@on_ranks(*FEWER_SIZES)
def test_every_function_gives_what_plain_torch_gives_on_the_whole():
    axis = tp_axis()
    for length, dim in itertools.product(LENGTHS, range(3)):
        shape = [2, 3, 2]
        shape[dim] = length
        terms = per_rank(axis, shape)
        mine, total = terms[axis.rank], sum(terms)
        full = whole(1, shape)
        close(c.copy(full, axis), full, "copy")
        close(c.reduce(mine, axis), total, "reduce")
        close(c.split(full, axis, dim), shard(full, axis, dim), "split")
        close(c.gather(shard(full, axis, dim), axis, dim, length), full, "gather")
        close(c.all_gather(shard(full, axis, dim), axis, dim, length), full, "all_gather")
        close(c.reduce_scatter(mine, axis, dim), shard(total, axis, dim), "reduce_scatter")
        other = (dim + 1) % 3
        close(c.all_to_all(shard(full, axis, dim), axis, other, dim, length), shard(full, axis, other), "all_to_all")


def check_adjoint(axis, length, dim):
    """<f(x), y> = <x, f*(y)>, both inner products taken over the ranks as the layouts say."""
    shape = [2, 3, 2]
    shape[dim] = length
    other = (dim + 1) % 3
    cut, cut_other = list(shape), list(shape)
    cut[dim] = c.shard_sizes(length, axis.size)[axis.rank]
    cut_other[other] = c.shard_sizes(shape[other], axis.size)[axis.rank]

    # name, function, input, output gradient, whether input and output hold one value (I) or one term a rank
    def rank_own(shape, seed):
        return whole(seed + axis.rank, shape)

    no, yes = False, True
    cases = [
        ("copy", lambda x: c.copy(x, axis), whole(1, shape), rank_own(shape, 50), yes, no),
        ("reduce", lambda x: c.reduce(x, axis), rank_own(shape, 60), whole(2, shape), no, yes),
        ("split", lambda x: c.split(x, axis, dim), whole(3, shape), rank_own(cut, 70), yes, no),
        ("gather", lambda x: c.gather(x, axis, dim, length), rank_own(cut, 80), whole(4, shape), no, yes),
        ("all_gather", lambda x: c.all_gather(x, axis, dim, length), rank_own(cut, 90), rank_own(shape, 110), no, no),
        ("reduce_scatter", lambda x: c.reduce_scatter(x, axis, dim), rank_own(shape, 120), rank_own(cut, 130), no, no),
        ("all_to_all", lambda x: c.all_to_all(x, axis, other, dim, length), rank_own(cut, 140),
         rank_own(cut_other, 150), no, no),
    ]  # fmt: skip
    for name, f, x, dy, one_in, one_out in cases:
        x.requires_grad_()
        y = f(x)
        (dx,) = torch.autograd.grad(y, x, dy)
        left, right = (y * dy).sum().detach(), (x * dx).sum().detach()
        left = left if one_out else c.all_reduce(left, axis)
        right = right if one_in else c.all_reduce(right, axis)
        close(left, right, f"adjointness of {name}")


@on_ranks(*FEWER_SIZES)
def test_every_backward_is_the_adjoint_of_its_forward():
    for length, dim in itertools.product(LENGTHS, range(3)):
        check_adjoint(tp_axis(), length, dim)


@on_ranks(2)
def test_gradients_of_gradients_and_a_shard_of_the_wrong_length():
    axis = mesh(tp=2).tp
    with pytest.raises(ValueError, match=r"length 3, but rank \d of the tp axis of size 2 holds \d of 9"):
        c.gather(torch.zeros(3, 2), axis, 0, 9)
    x = whole(1, (4, 3)).requires_grad_()
    y = c.reduce(c.copy(x, axis) ** 3 * (axis.rank + 1), axis).sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    close(dx.detach(), 9 * x.detach() ** 2, "first derivative")
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    close(ddx, 18 * x.detach(), "second derivative")
    for name in ("all_gather", "reduce_scatter", "all_to_all_rows"):
        found = []
        for f in (FUNCTIONS[f"started {name}"], lambda x, a, name=name: c.Flying(name, a, [2, 2], [2, 2]).run(x)):
            (dx,) = torch.autograd.grad((f(x**2, axis) ** 2).sum(), x, create_graph=True)
            found.append(torch.autograd.grad(dx.sin().sum(), x)[0])
        close(*found, f"second derivative of started {name}")


def even(x, axis):
    return [len(x) // axis.size] * axis.size


FUNCTIONS = {
    "copy": lambda x, a: c.copy(x, a), "reduce": lambda x, a: c.reduce(x, a), "split": lambda x, a: c.split(x, a, 1),
    "gather": lambda x, a: c.gather(x, a, 1), "all_gather": lambda x, a: c.all_gather(x, a, 1),
    "reduce_scatter": lambda x, a: c.reduce_scatter(x, a, 1), "all_to_all": lambda x, a: c.all_to_all(x, a, 0, 1),
    "all_to_all_rows": lambda x, a: c.all_to_all_rows(x, a),
    "started all_gather": lambda x, a: c.finish(c.start("all_gather", x, a)),
    "started reduce_scatter": lambda x, a: c.finish(c.start("reduce_scatter", x, a)),
    "started all_to_all_rows": lambda x, a: c.finish(c.start("all_to_all_rows", x, a, *2 * [even(x, a)])),
}  # fmt: skip


@on_ranks(3)
def test_rows_are_exchanged():
    """Rank r sends r + s rows to rank s: each arrives, in the order of ranks, and gradients go back."""
    axis = mesh(tp=3).tp
    send, receive = [axis.rank + s for s in range(3)], [r + axis.rank for r in range(3)]
    x = torch.tensor([[100.0 * axis.rank + 10 * s + i, 1.0] for s in range(3) for i in range(send[s])])
    x = x.double().requires_grad_()
    y = c.all_to_all_rows(x, axis, send, receive)
    want = [100.0 * r + 10 * axis.rank + i for r in range(3) for i in range(receive[r])]
    assert y[:, 0].tolist() == want
    (dx,) = torch.autograd.grad(y, x, y.detach())
    assert torch.equal(dx, x)
    with pytest.raises(ValueError, match=rf"x has {len(x)} rows, but 10 are to be sent to the tp axis"):
        c.all_to_all_rows(x, axis, [3, 3, 4], receive)
    with pytest.raises(ValueError, match="4 rows are not a multiple of the tp size 3"):
        c.all_to_all_rows(torch.ones(4, 1), axis)
    x = torch.ones(4, 1)
    assert c.all_to_all_rows(x, Axis()) is c.all_to_all_rows(x, Axis(), [4], [4]) is x
    with pytest.raises(ValueError, match="x has 4 rows, but 3 are to be sent"):
        c.all_to_all_rows(x, Axis(), [3], [3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(2)
def test_pitfall_02_03_inputs_are_never_written_and_strides_do_not_matter(dtype):
    """PITFALLS 2 and 3: odd strides in, the right values out, and the input as it was."""
    axis = mesh(tp=2).tp
    base = whole(5 + axis.rank, (4, 6), dtype)
    for name, f in FUNCTIONS.items():
        for layout, x in {
            "transposed": base.t(), "expanded": base[:1].expand(4, 6), "strided": base.repeat(2, 2)[::2, ::2],
            "plain": base,
        }.items():  # fmt: skip
            before = x.clone()
            leaf = x.detach().requires_grad_()
            y = f(leaf, axis)
            y.sum().backward()  # the gradient of a sum is expanded: stride 0
            assert torch.equal(x, before), f"{name} wrote to its {layout} input"
            contiguous = f(before.contiguous(), axis)
            assert torch.equal(y, contiguous), f"{name} of {layout} input"
            assert y.dtype == dtype
            expected = {"copy": 2.0, "all_gather": 2.0, "reduce_scatter": 1.0}.get(name.split()[-1], 1.0)
            assert torch.equal(leaf.grad, torch.full_like(leaf, expected)), f"gradient of {name} of {layout} input"


@on_ranks(2)
def test_pitfall_01_a_branch_beside_copy_keeps_its_gradient():
    """PITFALL 1: v + copy(a) must leave v's gradient alone."""
    axis = mesh(tp=2).tp
    v, a = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    (v + c.copy(a, axis)).backward(torch.full((3,), 2.0, dtype=torch.float64))
    assert v.grad.tolist() == [2.0] * 3
    assert a.grad.tolist() == [4.0] * 3


@on_ranks(2)
def test_pitfall_01_a_branch_beside_an_overlapped_linear_keeps_its_gradient():
    """PITFALL 1 again, through the layers that start their collective early."""
    axis = mesh(tp=2).tp
    weight = torch.eye(3, dtype=torch.float64)
    v, a = (torch.ones(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    (v + Product().column(a, weight, None, axis)).backward(torch.full((2, 3), 2.0, dtype=torch.float64))
    assert v.grad.eq(2).all()
    assert a.grad.eq(4).all()
    v, a = (torch.ones(n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 2))
    (v + Product().column(a, weight, None, axis, 0)).backward(torch.full((4, 3), 2.0, dtype=torch.float64))
    assert v.grad.eq(2).all()
    assert a.grad.eq(4).all()


@on_ranks(2)
def test_pitfall_42_two_collectives_under_way_at_once():
    """PITFALL 42: two collectives under way at once keep their results apart."""
    axis = mesh(tp=2).tp
    a, b = whole(1 + axis.rank, (4, 3)), whole(11 + axis.rank, (4, 3))
    first, second = c.start_all_reduce(a, axis), c.start_all_reduce(b, axis)
    second, first = c.wait(second), c.wait(first)
    close(first, whole(1, (4, 3)) + whole(2, (4, 3)), "first")
    close(second, whole(11, (4, 3)) + whole(12, (4, 3)), "second")


def test_size_one_returns_the_input_itself():
    x = torch.randn(4, 3)
    for name, f in FUNCTIONS.items():
        assert f(x, Axis()) is x, name


@on_ranks(1, 2)
def test_what_has_no_gradient_refuses_an_input_that_needs_one():
    """Right on one rank and cut on two, were it not refused on both."""
    axis = tp_axis()
    size = axis.size
    plain = {"all_reduce": lambda t: c.all_reduce(t, axis)}
    if size > 1:
        plain["all_reduce"] = lambda t: c.wait(c.start_all_reduce(t, axis))
        plain["all_gather_into_tensor"] = lambda t: c.wait(c.start_all_gather(t, axis))
        plain["reduce_scatter_tensor"] = lambda t: c.wait(c.start_reduce_scatter(t, axis))
        plain["all_to_all_single"] = lambda t: c.wait(c.start_send(t, axis, None, [0] * size))
    x = whole(1, (2 * size,)).requires_grad_()
    for what, f in [*plain.items(), ("all_reduce", lambda t: c.all_reduce(t, axis))]:
        with pytest.raises(ValueError, match=rf"^{what} has no gradient, .* use reduce .* or give it x.detach\(\)"):
            f(3 * x)
        want = f((3 * x).detach())
        with torch.no_grad():
            assert torch.equal(f(3 * x), want)
    (dx,) = torch.autograd.grad((c.reduce(3 * c.copy(x, axis), axis) + x).sum(), x)
    assert torch.equal(dx, torch.full_like(x, 3 * size + 1))


@on_ranks(2)
def test_all_trace_under_fullgraph():
    axis = mesh(tp=2).tp
    x = whole(1, (4, 6), torch.float32)

    def total(t):
        return sum((i + 1) * f(t, axis).sin().sum() for i, f in enumerate(FUNCTIONS.values()))

    eager, compiled = (x.clone().requires_grad_() for _ in range(2))
    total(eager).backward()
    torch.compiler.reset()
    torch.compile(total, fullgraph=True, backend="aot_eager")(compiled).backward()
    close(compiled.grad, eager.grad, "compiled", 1e-6)
