"""How tokens reach experts: nothing waits for the device, no token is lost, and what is sent is counted."""

import contextlib
import functools
import itertools
import math
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mpcore import Axis, Mesh, ParallelMoE, full_state_dict
from mpcore.layers import update_routers
from mpcore.layers.moe import DispatchBounds
from mpcore.layers.moe import experts as moe_module
from mpcore.layers.moe.bounds import MARGIN, REVIEW
from mpcore.layers.moe.dispatch import Bound
from mpcore.parallel import recompute
from tests.calls import Calls
from tests.equality import close, draw
from tests.layers.test_moe import HIDDEN, INPUTS, REAL, WAYS, B, D, E, K, T, build, check_moe, world
from tests.pool import mesh, on_ranks
from tests.quick import some

TINY = 0.01  # of the worst case


class HostReads(TorchDispatchMode):
    """The calls that wait for a GPU, were there one: what makes a number, a shape or a branch of a tensor's values."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        reads = name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal")
        reads |= name in ("bincount", "histc")
        reads |= name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in ("index", "index_put", "index_put_"):
            reads |= any(i is not None and i.dtype == torch.bool for i in args[1])
        if reads:
            self.found.append(name)
        return func(*args, **kwargs)


@contextlib.contextmanager
def host_reads():
    """The names of all such calls; a copy to the CPU is one that a CPU's own operators don't show."""
    with contextlib.ExitStack() as stack:
        mode = stack.enter_context(HostReads())
        for name in ("tolist", "cpu", "numpy"):
            plain = getattr(torch.Tensor, name)

            def noted(*args, plain=plain, name=name, **kwargs):
                mode.found.append(name)
                return plain(*args, **kwargs)

            stack.enter_context(mock.patch.object(torch.Tensor, name, noted))
        to = torch.Tensor.to

        def noted_to(*args, **kwargs):
            if any(
                str(each) == "cpu" for each in (*args[1:], *kwargs.values()) if isinstance(each, str | torch.device)
            ):
                mode.found.append("to")
            return to(*args, **kwargs)

        stack.enter_context(mock.patch.object(torch.Tensor, "to", noted_to))
        yield mode.found


KINDS = ("none", "checkpoint", "selective", "full")


def check_host_reads(kind, sizes):
    """With the kernels' operators in place of the references, whose loop reads the counts."""
    m, sequence_parallel = mesh(**sizes), kind == "full"
    axes = {name: getattr(m, name) for name in ("tp", "ep", "etp", "cp", "data")}
    seen = {}
    for (capacity, dispatch), bounded in itertools.product(WAYS, (False, True)):
        moe = ParallelMoE(D, HIDDEN, E, top_k=K, capacity_factor=capacity, dispatch=dispatch, aux_loss="sequence",
                          z_loss=0.1, bias_rate=0.1, sequence_parallel=sequence_parallel, **axes)  # fmt: skip
        x = draw(8, B, T, D).float().requires_grad_()
        if kind in ("selective", "full"):
            recompute([moe], kind)
        bounds = DispatchBounds(moe, m)
        assert bounds.is_used == (capacity is None and dispatch == "all_to_all")

        def compute(moe=moe, x=x):
            call = functools.partial(checkpoint, moe, use_reentrant=False) if kind == "checkpoint" else moe
            y = call(x, loss_scale=torch.tensor(0.1))
            forward = [*reads]
            y.sum().backward()
            return forward, reads[len(forward) :]

        with mock.patch.object(moe_module.GroupedLinear, "product", staticmethod(no_products)), host_reads() as reads:
            forward, backward = bounds.exact(compute, moe.zero_grad) if bounded else compute()
            seen[capacity, dispatch, bounded] = (forward, backward, reads[len(forward) + len(backward) :])
            update_routers(moe, m)
    return seen


def no_products(x, weight, counts):
    return x @ weight.sum(0).t() * (counts.sum() >= 0)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    some(("none", {"dp": 2, "ep": 2}), ("checkpoint", {"dp": 2, "ep": 2}), ("selective", {"dp": 2, "ep": 2}),
         ("full", {"tp": 2, "dp": 2, "ep": 2}),
         of=itertools.product(KINDS, ({"dp": 2, "ep": 2}, {"tp": 2, "dp": 2, "ep": 2}))),
    ids=str,
)  # fmt: skip
def test_nothing_is_read_back_between_dispatch_and_combine(ranks, kind, sizes):
    """Forward, backward and recomputation; `DispatchBounds` reads once, when all of them are done."""
    for seen in ranks(world(sizes), check_host_reads, kind, sizes):
        reads = ["tolist", "_local_scalar_dense"]
        again = [] if kind == "none" else reads
        for way, found in seen.items():
            if way == (None, "all_to_all", False):  # without bounds: the slots, and the rows of the experts
                assert found[0] == reads
                assert found[1] in ([], again)
                assert found[2] == []
            else:
                assert found == ([], [], ["tolist"] if way == (None, "all_to_all", True) else []), way


def check_bounded(sizes, sequence_parallel):
    """With room for all, and with too little at first: values, gradients and statistics are exact."""
    balances = itertools.cycle([{"aux_loss": "micro_batch", "z_loss": 0.3}, {"bias_rate": 0.1, "score": "sigmoid"}])
    for kind, balance in zip(INPUTS, balances, strict=False):
        for bound in (1.0, TINY):
            repeats = check_moe(sizes, {**balance, "dispatch": "all_to_all"}, kind, sequence_parallel, bound=bound)
            assert (repeats > 0) == (bound is TINY), (kind, bound)


@pytest.mark.parametrize(
    ("sizes", "sequence_parallel"),
    some(
        ({"dp": 2, "ep": 2}, False),
        ({"tp": 2, "cp": 2, "etp": 1, "ep": 4}, True),
        of=[({"dp": 4, "ep": 4}, False), ({"dp": 4, "etp": 2, "ep": 2}, False), ({"tp": 2, "dp": 2, "ep": 2}, True)],
    ),
    ids=str,
)
def test_a_step_that_overflowed_is_repeated_and_exact(ranks, sizes, sequence_parallel):
    ranks(world(sizes), check_bounded, sizes, sequence_parallel)


@on_ranks(2)
def test_ranks_with_other_numbers_of_tokens():
    """Without bounds each rank of ep may bring another number of tokens."""
    m = mesh(dp=2, ep=2)
    moe, x = build({"dp": 2, "ep": 2}, dispatch="all_to_all"), draw(8, B, T, D)
    mine = x[: 1 + m.dp.rank]
    close(moe(mine).detach(), build()(mine).detach(), "y")


def bounds_of(needs):
    """Bounds of one layer, and steps of which each needs as much as the next of `needs`, on two ranks of ep."""
    moe = ParallelMoE(D, HIDDEN, 16, 2, ep=Axis(2, 0, None, "ep"), dispatch="all_to_all")
    bounds = DispatchBounds(moe, Mesh())
    (dispatch,), needs = bounds.dispatches, iter(needs)
    log = []

    def compute():
        need = Bound(*next(needs))
        over = any(n > b for n, b in zip(sum(need, ()), sum(dispatch.bound, ()), strict=True))
        moe.router.tally = torch.ones(1) + (0 if moe.router.tally is None else moe.router.tally)
        dispatch.needed = torch.tensor([*need.sent, *need.run, over], dtype=torch.float64)
        assert dispatch.is_bounded
        assert tuple(dispatch.shares.tolist()) == dispatch.bound.sent
        log.append(dispatch.bound)
        return len(log)

    return moe, dispatch, lambda: (bounds.exact(compute, lambda: log.append("dropped")), bounds.repeats), log


EVEN = 1 - 28 / 120  # share of the tokens that go to a rank of two, with 2 of 16 experts


def test_a_step_that_fails_or_always_overflows_leaves_no_bound_behind():
    """A forward of its own would lose tokens, and nobody would see it."""
    for needs, error, drops in (([((99.0, 99.0), (99.0, 99.0))] * 9, RuntimeError, 4), ([], StopIteration, 0)):
        _, dispatch, step, log = bounds_of(needs)
        with pytest.raises(error, match="4 times" if drops else None):
            step()
        assert log.count("dropped") == drops
        assert not dispatch.is_bounded


def test_a_step_is_computed_four_times_at_most_and_counted_once():
    needs = [((0.5, 0.5), (2.0, 2.0)), ((1.0, 0.1), (2.0, 0.2)), ((0.9, 0.2), (3.5, 0.5)), ((1.0, 0.9), (3.9, 3.9)),
             ((0.5, 0.4), (2.0, 1.0)), ((0.1, 0.3), (1.0, 1.0))]  # fmt: skip
    moe, dispatch, step, log = bounds_of(needs)
    assert dispatch.bound == ((1.0, 1.0), (4.0, 4.0)) == dispatch.worst, "twice the rows of even loads, at most all"
    dispatch.set_bound(Bound((0.6, 0.7), (2.5, 2.5)), torch.device("cpu"))
    assert step() == (1, 0)
    moe.router.tally = None
    assert step() == (8, 3)
    assert log[2::2] == ["dropped"] * 3
    guess = 1.0 / EVEN * 2.0 * MARGIN
    assert log[3] == ((1.0, 0.7), (pytest.approx(guess), 2.5)), "rows that did not arrive are not counted: a guess"
    assert log[5] == ((1.0, 0.7), (4.0, 2.5))
    assert log[7] == dispatch.worst, "the third time nothing can overflow"
    assert moe.router.tally.item() == 1, "the router counted the last attempt alone"
    assert not dispatch.is_bounded
    least = MARGIN * 0.5, MARGIN * 2.0
    assert dispatch.bound.sent == pytest.approx((least[0], least[0])), "what the steps needed, not the worst case"
    assert dispatch.bound.run == pytest.approx((least[1], least[1]))
    assert step() == (9, 0)


def test_bounds_shrink_to_what_the_last_steps_needed():
    first, later = ((0.85, 0.2), (2.4, 1.0)), ((0.5, 0.01), (2.1, 0.01))
    _, dispatch, step, log = bounds_of([first] + [later] * (3 * REVIEW))
    for _ in range(REVIEW):
        assert step()[1] == 0
    assert log[-1] == dispatch.worst
    assert dispatch.bound.sent == pytest.approx((1.0, 0.2 * MARGIN)), "0.85 x MARGIN saves less than a tenth"
    assert dispatch.bound.run == pytest.approx((2.4 * MARGIN, 1.0 * MARGIN))
    for i in range(2 * REVIEW):
        step()
        if i >= REVIEW - 1:
            assert dispatch.bound.sent == pytest.approx((0.5 * MARGIN, EVEN / 4))
            assert dispatch.bound.run == pytest.approx((2.1 * MARGIN, 0.5)), "an eighth less"


@on_ranks(2)
def test_messages_are_those_of_theory():
    m = mesh(dp=2, ep=2)
    n, found = B * T, {}
    for capacity, dispatch in [*WAYS, (None, None), (0.75, None)]:
        torch.manual_seed(0)  # one router on all ranks
        moe = ParallelMoE(D, HIDDEN, E, top_k=K, capacity_factor=capacity, dispatch=dispatch, ep=m.ep, data=m.data)
        x = draw(8, B, T, D).float().requires_grad_()
        with Calls(collectives=True) as forward:
            y = moe(x, mask=torch.arange(T).expand(B, T) < REAL)
        with Calls(collectives=True) as backward:
            y.sum().backward()
        found[capacity, dispatch] = [
            [(name, args[0].nbytes) for name, args, _ in each.found] for each in (forward, backward)
        ]
    row = 4 * D
    route = n * 2 * K * 4
    for capacity in (None, 0.75):
        forward = [("all_gather_into_tensor", n * row), ("all_gather_into_tensor", route)]
        forward += [("reduce_scatter_tensor", 2 * n * row)]
        backward = [("all_gather_into_tensor", n * row), ("reduce_scatter_tensor", 2 * n * row)]
        backward += [("reduce_scatter_tensor", 2 * route)]
        assert found[capacity, "all_gather"][0] == forward
        assert sorted(found[capacity, "all_gather"][1]) == sorted(backward)
    chosen = (x.reshape(n, D) @ moe.router.weight.t()).topk(K).indices[torch.arange(T).repeat(B) < REAL]
    slots = [int((chosen // (E // 2) == rank).any(1).sum()) for rank in range(2)]
    assert sum(slots) < B * REAL * K, "a token goes once to a rank, whichever of its experts it chose"
    sent, received, info = sum(slots) * row, 2 * slots[m.ep.rank] * row, 2 * K * 4
    forward, backward = found[None, "all_to_all"]
    assert forward[0] == ("all_reduce", 8), "the counts"
    assert forward[1:] == [("all_to_all_single", size) for size in (sent, sum(slots) * info, received)]
    sizes = (sent, received, 2 * slots[m.ep.rank] * info)
    assert sorted(backward) == sorted(("all_to_all_single", size) for size in sizes)
    room = min(n, E // 2 * B * math.ceil(0.75 * T * K / E))
    sizes = [2 * room * row, 2 * room * 2 * K * 4, 2 * room * row]
    assert found[0.75, "all_to_all"][0] == [("all_to_all_single", size) for size in sizes]
    assert sorted(found[0.75, "all_to_all"][1]) == sorted(found[0.75, "all_to_all"][0])
    assert found[None, None] == found[None, "all_gather"]
    assert found[0.75, None] == found[0.75, "all_to_all"]


def check_given_up():
    """A step that was given up counts in no statistics."""
    from examples.gpt.pretrain import Trainer, parse
    from tests.examples.test_layouts import COMMON, EXPERTS

    t = Trainer(parse(f"{COMMON} {EXPERTS} --set moe.aux_loss=none moe.bias_rate=0.001".split()), mesh())
    tokens, targets, arguments = t.batch(t.train_samples, t.share(0))
    t.run.forward_backward(tokens, targets, **arguments)
    t.run.drop_gradients()
    return t.step()["experts"]["tokens_per_expert"], targets.numel()


def test_a_step_that_was_given_up_is_not_counted(ranks):
    [(counts, tokens)] = ranks(1, check_given_up)
    assert [sum(each) for each in counts] == [2 * tokens] * 2


def train(sizes, flags, tiny):
    """Four steps of the example; in two of them the buffers of one pipeline rank are too small."""
    from examples.gpt.pretrain import Trainer, parse
    from tests.examples.test_layouts import COMMON, EXPERTS

    t = Trainer(parse(f"{COMMON} {EXPERTS} --set moe.jitter=0.1 --dropout 0.1 {flags}".split()), mesh(**sizes))
    entries = []
    for step in range(4):
        for each in t.run.bounds.dispatches if tiny and step in (0, 2) and t.mesh.pp.rank == t.mesh.pp.size - 1 else ():
            each.set_bound(each.worst.times(TINY), torch.device("cpu"))
        entries.append(t.step())
    return entries, {name: p.clone() for name, p in full_state_dict(t.model).items()}


@pytest.mark.parametrize(("sizes", "flags"), [
    ({"pp": 2, "dp": 2, "ep": 2}, "--micro-batch 1 --zero 3 --set moe.aux_coefficient=0.1 mtp=1 moe.z_loss=0.01"),
    *some(
        of=[
            ({"tp": 2, "dp": 2, "ep": 2},
             "--micro-batch 1 --sequence-parallel --recompute full --set moe.aux_loss=none moe.bias_rate=0.001"),
            ({"dp": 2, "ep": 2}, "--micro-batch 1 --zero 1 --set moe.aux_loss=global --set moe.aux_coefficient=0.1"),
            ({"pp": 2, "tp": 2, "ep": 2, "etp": 1}, "--micro-batch 1 --schedule zb"),
        ],
    ),
], ids=str)  # fmt: skip
def test_a_run_that_repeats_steps_is_that_of_all_gather(ranks, sizes, flags):
    count = math.prod(size for axis, size in sizes.items() if axis in ("tp", "pp", "dp"))
    wanted = ranks(count, train, sizes, f"{flags} --set moe.dispatch=all_gather", False)
    found = ranks(count, train, sizes, f"{flags} --set moe.dispatch=all_to_all", True)
    for (got, got_state), (want, want_state) in zip(found, wanted, strict=True):
        assert got[0]["dispatch"]["repeats"] > 0 < got[2]["dispatch"]["repeats"]
        for mine, theirs in zip(got, want, strict=True):
            assert "dispatch" not in theirs
            for name in {"loss", "grad_norm", "mtp_loss"} & mine.keys():
                assert mine[name] == pytest.approx(theirs[name], rel=1e-12)
            assert mine["experts"]["tokens_per_expert"] == theirs["experts"]["tokens_per_expert"]
            for name in ("entropy", "aux_loss", "z_loss"):
                assert mine["experts"][name] == pytest.approx(theirs["experts"][name], rel=1e-12)
        for name, value in want_state.items():
            close(got_state[name], value, name, 1e-12)
