"""`mpcore._torch` and simulated ranks, compared with torch or with a formula."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn

import mpcore as mp
from mpcore._torch import compile, distributed, fake, fsdp, fsdp_wrap, values
from mpcore.tools._torch import simulated


@pytest.fixture
def fake_world():
    """Rank 1 of two ranks, of which the other does not exist."""
    fake.start_fake_world(2, 1)
    yield
    dist.destroy_process_group()


def test_eagerly_and_uncompiled_functions_make_no_graph():
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    inner = compile.uncompiled(lambda x: x.sin())
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: inner(x + 1) * 2, backend=backend)
    x = torch.ones(2)
    with compile.eagerly():
        compiled(x)
    assert made == []
    assert torch.equal(compiled(x), (x + 1).sin() * 2)
    assert "sin" not in "".join(str(graph.graph) for graph in made)
    assert len(made) == 2


@pytest.mark.parametrize(("before", "blocks", "after"), [(8, 4, 8), (8, 5, 10), (3, 40, 80)])
def test_each_block_may_have_two_graphs(before, blocks, after):
    with torch._dynamo.config.patch(recompile_limit=before, allow_unspec_int_on_nn_module=False):
        compile.allow_graphs(blocks)
        found = torch._dynamo.config.recompile_limit, torch._dynamo.config.allow_unspec_int_on_nn_module
    assert found == (after, True)


def test_names_and_stores_of_a_world(fake_world):
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (1, 2, "fake")
    world = dist.distributed_c10d._get_default_group()
    assert distributed.group_by_name(world.group_name).group_name == world.group_name
    assert distributed._timeout() is None, "this backend has none"
    assert distributed.as_group(3) is distributed.as_group(torch.ones(1)) is None
    before = distributed.group_count()
    dist.new_group([0, 1])
    assert distributed.group_count() == before + 1
    first = distributed.reserve_groups(3)
    assert (first, distributed.reserve_groups(1), distributed.reserve_groups(2)) == (10**9, 10**9 + 3, 10**9 + 4)
    assert distributed.clone_store().add("mpcore/groups", 0) == 6


@dataclass
class Out:
    x: torch.Tensor


@pytest.mark.parametrize("gpu", [None, False, True])
def test_fake_tensors_have_no_values_and_take_real_ones(gpu):
    real = torch.ones(2)
    with fake.fake_tensors(*(() if gpu is None else (gpu,))) as mode:
        made = torch.ones(3, 2)
        total = made + real
        with pytest.raises(fake.NoValueError):
            total.sum().item()
        with values.real_tensors():
            assert not fake.is_fake(torch.ones(1))
        assert fake.is_fake(torch.ones(1))
    assert mode.stands_for_gpu is bool(gpu)
    assert (fake.is_fake(total), fake.is_fake(real), fake.is_fake(3)) == (True, False, False)
    assert fake.device_of(total) == torch.device("cpu")
    assert total.shape == (3, 2)


def test_several_meshes_and_dataclasses_are_torchs_since_2_13():
    since = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
    assert since == fsdp_wrap.SEVERAL_MESHES
    assert fsdp_wrap.looks_into(timedelta(1)) is False
    out = Out(torch.ones(1, requires_grad=True))
    assert fsdp_wrap.looks_into(out) == since
    assert [id(x) for x in fsdp_wrap.trained_tensors(out)] == ([id(out.x)] if since else [])
    given = [out.x, torch.ones(1), {"a": out.x, "b": 3}]
    assert [id(x) for x in fsdp_wrap.trained_tensors(given)] == [id(out.x)] * 2


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("in backward")


def unit_of(size=4):
    from torch.distributed.fsdp import fully_shard

    unit = nn.Sequential(nn.Linear(size, size, bias=False))
    fully_shard(unit)
    return unit


def units_and_gradients():
    """One unit of two ranks through forward, backward, a failed backward and a drop."""
    model, x = nn.ModuleDict(), torch.ones(2, 4) * (1 + dist.get_rank())
    plain = fsdp.units(model)
    unit = model["inside"] = unit_of()
    beside = unit_of()
    fsdp.add_unit(model, beside)
    assert (plain, fsdp.units(model)) == ([], [unit, beside])
    assert fsdp.units(unit) == [unit]
    gathered = [fsdp.was_gathered(unit)]
    unit(x).sum().backward()
    gathered.append(fsdp.was_gathered(unit))
    ((sharded, record),) = fsdp.records([unit])
    assert sharded is next(unit.parameters())
    told = [fsdp.unreduced_parameter([unit]), fsdp.backward_failed(unit)]
    grad = sharded.grad.to_local().clone()

    unit.set_requires_gradient_sync(False)
    unit(x).sum().backward()
    told.append(fsdp.unreduced_parameter([unit]))
    held = fsdp.exchange_gradient(record, torch.full((4, 4), 3.0))
    assert fsdp.exchange_gradient(record, None).tolist() == [[3.0] * 4] * 4
    assert fsdp.exchange_gradient(record, None) is None
    fsdp.exchange_gradient(record, held)
    fsdp.drop_gradients([unit], lambda p: False)
    told.append(fsdp.unreduced_parameter([unit]))
    assert sharded.grad is not None
    fsdp.drop_gradients([unit], lambda p: p is sharded)
    told.append(fsdp.unreduced_parameter([unit]))
    assert sharded.grad is None
    unit.set_requires_gradient_sync(True)

    given = x.clone().requires_grad_()
    with pytest.raises(ArithmeticError):
        unit(Fails.apply(given)).sum().backward()
    told.append(fsdp.backward_failed(unit))
    fsdp.drop_gradients([unit], lambda p: True)
    told.append(fsdp.backward_failed(unit))
    told.append(fsdp.unreduced_parameter([unit]))
    unit(x).sum().backward()
    assert torch.equal(sharded.grad.to_local(), grad)
    return told, gathered, grad.tolist(), held.tolist()


def test_the_life_of_a_unit():
    for rank, (told, gathered, grad, held) in enumerate(mp.simulate(units_and_gradients, ranks=2)):
        name = "0.weight"
        assert told == [None, False, name, name, None, True, False, None]
        assert gathered == [False, True]
        assert grad == [[3.0] * 4] * 2  # the mean of 2 and 4, of this rank's two rows
        assert held == [[2.0 * (1 + rank)] * 4] * 4  # this rank's own, of all rows
    assert mp.simulate(unused_parameters, ranks=2) == [[(1, 2), (1, 2)]] * 2
    assert mp.simulate(freed_after_a_failure, ranks=2) == [((4, 4), (2, 4))] * 2


class Two(nn.Module):
    """Two layers, of which a rank may leave out the second."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x, both):
        return self.two(self.one(x)) if both else self.one(x)


def unused_parameters():
    """A unit whose second layer has no gradient on rank 1: the ranks reduce zeros for it."""
    from torch.distributed.fsdp import fully_shard

    unit = Two()
    fully_shard(unit)
    fsdp.make_root(unit)
    fsdp.reduce_unused(unit)
    unit(torch.ones(1, 2), dist.get_rank() == 0).sum().backward()
    return [None if p.grad is None else tuple(p.grad.to_local().shape) for p in unit.parameters()]


def freed_after_a_failure():
    """After a backward that failed, gradients are dropped and the gathered parameters are freed."""
    unit = unit_of()

    with pytest.raises(ArithmeticError):
        unit(Fails.apply(torch.ones(1, 4, requires_grad=True))).sum().backward()
    unit.unshard()
    before = next(unit.parameters()).shape
    fsdp.drop_gradients([unit], lambda p: False)
    return tuple(before), tuple(next(unit.parameters()).to_local().shape)


def store_calls():
    """Each call beside a `HashStore`, which has the same answers."""
    ours, theirs = distributed.default_store(), dist.HashStore()
    count = ours.num_keys()
    for store in (ours, theirs):
        store.set("a", "1")
        store.set("b", b"two")
    assert ours.get("a") == theirs.get("a") == b"1"
    assert ours.get("b") == theirs.get("b") == b"two"
    assert [ours.add("n", k) for k in (2, 3, -5, 0)] == [theirs.add("n", k) for k in (2, 3, -5, 0)]
    assert ours.add("looked at", 0) == 0
    assert not ours.check(["looked at"])
    for keys in (["a"], ["a", "b"], ["a", "c"], ["c"], []):
        assert ours.check(keys) == theirs.check(keys), keys
    for key, expected, desired in (("a", b"0", b"9"), ("a", b"1", b"9"), ("new", b"", b"5"), ("other", b"4", b"5")):
        assert ours.compare_set(key, expected, desired) == theirs.compare_set(key, expected, desired), key
    assert (ours.get("a"), ours.get("new"), ours.num_keys()) == (b"9", b"5", count + 4)
    assert (ours.delete_key("a"), ours.delete_key("a"), ours.num_keys()) == (True, False, count + 3)


def test_the_store_is_torchs_hash_store():
    mp.simulate(store_calls, ranks=1)


def every_collective():
    """What this rank of three has after each collective, and what it should have."""
    rank, SUM = dist.get_rank(), dist.ReduceOp.SUM
    x = [torch.arange(6.0) + 10 * r + 1 for r in range(3)]  # of every rank
    found = {}

    def is_(name, got, want):
        want = [torch.as_tensor(w) for w in want]
        found[name] = len(got) == len(want) and all(
            torch.equal(a, b.to(a.dtype)) for a, b in zip(got, want, strict=True)
        )

    stacked = torch.stack(x)
    for op, want in (
        ("SUM", stacked.sum(0)), ("AVG", stacked.mean(0)), ("MAX", x[2]), ("MIN", x[0]), ("PRODUCT", stacked.prod(0)),
    ):  # fmt: skip
        dist.all_reduce(y := x[rank].clone(), getattr(dist.ReduceOp, op))
        is_(f"all_reduce {op}", [y], [want])
    for op, want in (("BAND", 7 & 14 & 28), ("BOR", 7 | 14 | 28), ("BXOR", 7 ^ 14 ^ 28)):
        dist.all_reduce(y := torch.tensor(7 << rank), getattr(dist.ReduceOp, op))
        is_(op, [y], [want])
    dist.all_reduce_coalesced(y := [x[rank].clone(), x[rank][:2].clone()])
    is_("all_reduce_coalesced", y, [stacked.sum(0), stacked.sum(0)[:2]])
    for root in range(3):
        dist.broadcast(y := x[rank].clone(), root)
        is_(f"broadcast {root}", [y], [x[root]])
        dist.reduce(y := x[rank].clone(), root)
        is_(f"reduce {root}", [y], [stacked.sum(0) if rank == root else x[rank]])
        dist.gather(x[rank], y := [torch.zeros(6) for _ in range(3)] if rank == root else None, root)
        is_(f"gather {root}", y or [], x if rank == root else [])
        dist.scatter(y := torch.zeros(6), [a * (1 + root) for a in x] if rank == root else None, root)
        is_(f"scatter {root}", [y], [x[rank] * (1 + root)])
    dist.all_gather(y := [torch.zeros(6) for _ in range(3)], x[rank])
    is_("all_gather", y, x)
    dist.all_gather_into_tensor(y := torch.zeros(18), x[rank])
    is_("all_gather_into_tensor", [y], [torch.cat(x)])
    dist.all_gather_into_tensor(y := torch.zeros(3, 6), x[rank])
    is_("stacked", [y], [stacked])
    dist.reduce_scatter(y := torch.zeros(2), [*x[rank].split(2)], SUM)
    is_("reduce_scatter", [y], [stacked.sum(0)[2 * rank : 2 * rank + 2]])
    dist.reduce_scatter(y := torch.zeros(2), [*x[rank].split(2)], dist.ReduceOp.AVG)
    is_("reduce_scatter AVG", [y], [stacked.mean(0)[2 * rank : 2 * rank + 2]])
    dist.reduce_scatter_tensor(y := torch.zeros(2), x[rank], dist.ReduceOp.MAX)
    is_("reduce_scatter_tensor", [y], [x[2][2 * rank : 2 * rank + 2]])
    dist.all_to_all_single(y := torch.zeros(6), x[rank])
    is_("all_to_all_single", [y], [torch.cat([a[2 * rank : 2 * rank + 2] for a in x])])
    cut = [1, 2, 3]
    dist.all_to_all_single(y := torch.zeros(3 * cut[rank]), x[rank], [cut[rank]] * 3, cut)
    is_("uneven", [y], [torch.cat([a.split(cut)[rank] for a in x])])
    dist.all_to_all(y := [torch.zeros(cut[rank]) for _ in range(3)], [*x[rank].split(cut)])
    is_("all_to_all", y, [a.split(cut)[rank] for a in x])
    group = dist.group.WORLD
    out, want = [torch.zeros(18), torch.zeros(6)], [torch.cat(x), torch.cat([a[:2] for a in x])]
    group.all_gather_single_coalesced(out, [x[rank], x[rank][:2]]).wait()
    is_("all gathers at once", out, want)
    opts = dist.ReduceScatterOptions()
    out, want = (
        [torch.zeros(2), torch.zeros(1)],
        [stacked.sum(0)[2 * rank : 2 * rank + 2], stacked.sum(0)[rank : rank + 1]],
    )
    group.reduce_scatter_single_coalesced(out, [x[rank], x[rank][:3]], opts).wait()
    is_("reduce-scatters at once", out, want)
    dist.barrier()
    return found


def test_every_collective_of_simulated_ranks_is_its_formula():
    for found in mp.simulate(every_collective, ranks=3):
        assert [name for name, right in found.items() if not right] == []
        assert len(found) == 32


def messages():
    """Tags are channels of their own, and in each the order of sends is that of receives."""
    rank, to, source = dist.get_rank(), (dist.get_rank() + 1) % 3, (dist.get_rank() - 1) % 3
    x = torch.full((2,), float(rank))
    works = [dist.isend(x + 10 * i, to, tag=tag) for i, tag in ((1, 0), (2, 0), (3, 7))]
    x.fill_(-1)  # a send has copied it
    got = [torch.zeros(2) for _ in range(3)]
    works += [dist.irecv(y, source, tag=tag) for y, tag in zip(got, (7, 0, 0), strict=True)]
    for work in reversed(works):
        work.wait()
    return [y.tolist() for y in got] == [[source + 10 * i] * 2 for i in (3, 1, 2)]


def test_groups_and_messages_of_simulated_ranks():
    process = dist.distributed_c10d._world
    assert mp.simulate(messages, ranks=3) == [True] * 3
    found = mp.simulate(of_groups, ranks=3)
    for rank, place in ((0, 0), (2, 1)):
        told = (2, place, "of two", (0, 2), "simulated", "default_pg")
        assert found[rank] == (4.0, told, rank, False)
    assert found[1] is None
    assert simulated.simulated_rank() is None
    assert dist.distributed_c10d._world is process
    assert torch.autograd.is_multithreading_enabled()


def of_groups():
    group = dist.new_group([0, 2], group_desc="of two")
    if dist.get_rank() == 1:
        return None
    dist.all_reduce(x := torch.tensor(1.0 + dist.get_rank()), group=group)
    other = dist.distributed_c10d._get_default_group()
    told = group.size(), group.rank(), group.group_desc, group.ranks, group.getBackendName(), other.group_desc
    group.shutdown()
    group.abort()
    return x.item(), told, simulated.simulated_rank(), torch.autograd.is_multithreading_enabled()
