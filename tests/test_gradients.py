"""Between backward and the step: pending sums, the norm and the clip, each against the dense model's."""

import contextlib
import itertools
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import distribute_module

from mpcore import Axis, ColumnParallelLinear, Mesh, RMSNorm, RowParallelLinear, VocabParallelEmbedding, full_state_dict
from mpcore import collectives as c
from mpcore.gradients import grad_norm, guard_optimizer, overlap, reduce_gradients
from mpcore.gradients import reduce as of_gradients
from mpcore.gradients.accumulate import mark_reduced
from mpcore.layers import GroupedLinear, materialize
from mpcore.layers.module import ParallelModule, constant
from mpcore.parallel.data import shard_data_parallel
from mpcore.sharding import shardings
from mpcore.sharding.declarations import add_partial
from mpcore.sharding.declare import Shard, cut
from tests.equality import close, draw, same_model
from tests.layers.test_block import Model
from tests.pool import mesh, on_ranks
from tests.quick import some

NORMS = [1, 2, math.inf]


class Kinds(ParallelModule):
    """One parameter of each kind that a layer can declare."""

    RUNS = (((0, 3),), ((2, 5), (7, 8)), ((4, 7),), ((5, 8),))  # rows 2, 4, 5, 6 and 7 have two holders

    def __init__(self, tp=Axis(name="tp"), dtype=torch.float64):
        super().__init__()
        like = {"dtype": dtype}
        runs = self.RUNS if tp.size == 4 else (((0, 8),),)
        self.declare("own", (10, 2), constant(0.0), shard=cut(10, tp, 0), **like)
        self.declare("overlapping", (8, 2), constant(0.0), shard=Shard(tp, 0, runs), **like)
        self.declare("columns", (2, 8), constant(0.0), shard=Shard(tp, 1, runs), **like)
        self.declare("partial", (3,), constant(0.0), partial=(tp,), **like)
        self.declare("replicated", (3,), constant(0.0), **like)


def give_gradients(model, tp):
    """Each rank's own random terms (the same for what is declared replicated); returns what the sums must be."""
    want = {}
    for i, (name, p) in enumerate(model.named_parameters()):
        sharding = model.shardings[name]
        terms = [draw(100 * i + r, *sharding.shape, dtype=p.dtype) for r in range(tp.size)]
        if name == "replicated":
            p.grad, want[name] = terms[0].clone(), terms[0].double()
        elif name == "partial":
            p.grad, want[name] = terms[tp.rank].clone(), sum(t.double() for t in terms)
        else:
            p.grad = sharding.take(terms[tp.rank]).clone()
            full = torch.zeros(sharding.shape, dtype=torch.float64)
            (shard,) = sharding.shards
            for rank, runs in enumerate(shard.runs):
                for start, end in runs:
                    here = (slice(None),) * shard.dim + (slice(start, end),)
                    full[here] += terms[rank].double()[here]
            want[name] = full
    return want


@contextlib.contextmanager
def cut_in(bucket=of_gradients.BUCKET, alone=overlap.ALONE):
    """Sum in buckets of this size, and a gradient of `alone` elements by itself; yields the calls of all-reduce."""
    with (
        mock.patch.object(of_gradients, "BUCKET", bucket),
        mock.patch.object(overlap, "ALONE", alone),
        mock.patch.object(of_gradients, "all_reduce", mock.Mock(wraps=c.all_reduce)) as sent,
    ):
        yield sent


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@on_ranks(4)
def test_what_is_declared_pending_is_summed_and_nothing_else(dtype):
    tp = mesh(tp=4).tp
    more = [{"bucket": bucket} for bucket in (1, 9, 16)]  # ranks hold unlike numbers of replicas
    for options in ({}, {"alone": 1}, *(more if dtype == torch.float64 else ())):
        model = Kinds(tp, dtype)
        want = give_gradients(model, tp)
        with cut_in(**options) as sent:
            reduce_gradients(model)
        largest = max(options.get("bucket", of_gradients.BUCKET), 10)
        assert max(call.args[0].numel() for call in sent.call_args_list) <= largest + 3  # whether each of 3 is there
        for name, p in model.named_parameters():
            assert p.grad.dtype == dtype
            # half-precision terms are added in float32 and rounded once
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            got, expected = p.grad, model.shardings[name].take(want[name])
            if dtype in (torch.bfloat16, torch.float16):
                assert torch.equal(got, expected.to(wide).to(dtype)), name
            else:
                close(got.double(), expected, name, 1e-12 if dtype == torch.float64 else 1e-6)


@on_ranks(4)
def test_pitfall_33_a_gradient_that_some_ranks_lack_counts_as_zero():
    tp = mesh(tp=4).tp
    for alone in (overlap.ALONE, 1):
        model = Kinds(tp)
        want = give_gradients(model, tp)
        model.columns.grad = None  # seen by nobody
        if tp.rank != 2:
            model.partial.grad = None  # seen by one rank alone
        if tp.rank == 1:
            model.overlapping.grad = None
        with cut_in(alone=alone):
            reduce_gradients(model)
        assert model.columns.grad is None
        close(model.partial.grad, draw(300 + 2, 3), "partial")
        close(model.replicated.grad, want["replicated"], "replicated")
        full = torch.zeros(8, 2, dtype=torch.float64)
        for rank, runs in enumerate(Kinds.RUNS):
            for start, end in runs:
                if rank != 1:
                    full[start:end] += draw(100 + rank, 8, 2)[start:end]
        # rows that rank 1 alone holds have no gradient anywhere: 0
        close(model.overlapping.grad, model.shardings["overlapping"].take(full), "overlapping")


@on_ranks(4)
def test_what_is_sharded_over_data_is_not_summed_over_it_again():
    """What is sharded over data is not summed over it again, but over other axes."""
    m, rows = mesh(tp=2, dp=2), draw(1, 4, 3)
    for over in (m, m.data, m.world):
        model = Model(sequence=1, tp=m.tp).double()
        shard_data_parallel(model, m)
        ids = torch.arange(24).reshape(2, 12) % 21
        model(ids, ids.flip(1)).backward()
        with pytest.raises(ValueError, match=r"sums its gradient over 2 of the [24] ranks of \w+"):
            reduce_gradients(model, over)
        reduce_gradients(model, Axis(name="ends"))
    model, dense = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    dense.load_state_dict(model.state_dict())
    dense(rows).square().sum().backward()
    shard_data_parallel(model, m)
    model(rows[m.world.rank :][:1]).square().sum().backward()
    reduce_gradients(model, m.tp)
    for p, q in zip(model.parameters(), dense.parameters(), strict=True):
        close(p.grad.full_tensor(), q.grad, "sum over both axes")


class OwnExperts(ParallelModule):
    """Six experts dealt out over ep, and a router that all ranks hold."""

    def __init__(self, ep=Axis(name="ep")):
        super().__init__()
        like = {"dtype": torch.float64}
        self.declare("experts", (6, 2, 3), constant(0.0), shard=cut(6, ep, 0), **like)
        self.declare("router", (6, 3), constant(0.0), **like)


def check_experts(sizes):
    """Each rank has its own terms: experts are summed over the ranks that hold them, the router over all."""
    m = mesh(**sizes)
    model = OwnExperts(m.ep)
    whole = OwnExperts()
    for name, p in model.named_parameters():
        terms = [draw(10 * hash_of(name) + r, *model.shardings[name].shape) for r in range(m.world.size)]
        p.grad = model.shardings[name].take(terms[m.world.rank]).clone()
        dict(whole.named_parameters())[name].grad = sum(terms)
    assert model.shardings["experts"].data_axis(m).group is m.edp.group
    assert model.shardings["router"].data_axis(m) is m.data
    if m.ep.size > 1:  # terms of experts exist on the ranks of one ep coordinate alone
        owned = model.shardings["experts"].shards[0].mine[0]
        terms = [draw(10 * hash_of("experts") + r, 6, 2, 3) for r in range(m.world.size)]
        holders = [r for r in range(m.world.size) if r % m.ep.size == m.ep.rank]
        whole.experts.grad[slice(*owned)] = sum(terms[r] for r in holders)[slice(*owned)]
    reduce_gradients(model, m)
    for name, p in model.named_parameters():
        close(p.grad, model.shardings[name].take(dict(whole.named_parameters())[name].grad), name)
    whole.experts.grad = model.shardings["experts"].assemble(model.experts.grad)
    for p in NORMS:
        close(grad_norm(model, m, p), grad_norm(whole, Mesh(), p), f"the {p}-norm")


@pytest.mark.parametrize("sizes", [{"dp": 4}, {"dp": 4, "ep": 2}, {"dp": 4, "ep": 4}, {"dp": 2, "ep": 2}], ids=str)
def test_pitfall_28_30_experts_are_summed_over_those_that_hold_them_and_counted_once(ranks, sizes):
    ranks(sizes["dp"], check_experts, sizes)


class Scale(nn.Module):
    """A weight that nobody declares, for features of a sequence."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def reset_parameters(self):
        nn.init.normal_(self.weight)

    def forward(self, x):
        return x.sin() * self.weight


class Shared(nn.Module):
    """Weights under two names: a cut one on the model itself, and norms that see this rank's part of the sequence."""

    def __init__(self, order, added, tp=Axis(name="tp"), device=None):
        super().__init__()
        self.tp = tp
        up = ColumnParallelLinear(3, 5, bias=False, tp=tp, device=device)
        self.table = up.weight
        self.up, self.down = up, RowParallelLinear(5, 3, bias=False, tp=tp, device=device)
        kinds = {"plain": Scale, "norm": lambda: RMSNorm(3, tp=tp, sequence_parallel=True)}
        self.first, self.second = (kinds[kind]() for kind in order)
        self.second.weight = self.first.weight
        if added is not None:
            add_partial(getattr(self, added), "weight", tp)

    def forward(self, x):
        part = c.split(x, self.tp, 0)
        return self.down(self.up(x)) + c.gather(self.first(part) + self.second(part), self.tp, 0)


def run_shared(model):
    x = draw(7, 12, 3).requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return {"y": y.detach(), "dx": x.grad}


@pytest.mark.parametrize(("order", "added"), [
    (("plain", "plain"), "first"), (("plain", "plain"), "second"), (("plain", "norm"), None), (("norm", "plain"), None),
    (("norm", "plain"), "second"),
])  # fmt: skip
@on_ranks(2)
def test_pitfall_11_30_every_owner_of_a_parameter_says_how_it_is_cut_and_summed(order, added):
    m = mesh(tp=2)
    same_model(lambda **axes: Shared(order, added, **axes), run_shared, tp=m.tp)
    model = materialize(Shared(order, added, m.tp, "meta"), 3).double()
    whole = materialize(Shared(order, added, device="meta"), 3).double()
    want = full_state_dict(whole)
    assert list(shardings(whole)) == ["table", "down.weight", "first.weight"], "a parameter keeps its first name"
    for name, value in full_state_dict(model).items():
        close(value, want[name], name)
    run_shared(model)
    run_shared(whole)
    reduce_gradients(model)
    for p in NORMS:
        close(grad_norm(model, m, p), grad_norm(whole, Mesh(), p), f"the {p}-norm")


@on_ranks(4)
def test_pitfall_14_a_tied_table_is_summed_over_the_ends_whichever_of_its_owners_says_so():
    """The last stage has the table twice, as embedding and as head: whichever is told of the ends, they are summed."""
    m = mesh(tp=2, pp=2)
    for first, added in itertools.product(("embedding", "head"), repeat=2):
        stage = nn.Module()
        layers = {
            "embedding": VocabParallelEmbedding(5, 3, tp=m.tp).double(),
            "head": ColumnParallelLinear(3, 5, bias=False, tp=m.tp).double(),
        }
        for name in sorted(layers, reverse=first == "head"):
            stage.add_module(name, layers[name])
        stage.head.weight = stage.embedding.weight
        add_partial(stage.get_submodule(added), "weight", m.ends)
        terms, (name, sharding) = [draw(pp, 5, 3) for pp in range(2)], *shardings(stage).items()
        assert name == f"{first}.weight"
        stage.head.weight.grad = sharding.take(terms[m.pp.rank]).clone()
        reduce_gradients(stage)
        close(stage.head.weight.grad, sharding.take(sum(terms)), "tied gradient")
        for p in NORMS:
            close(grad_norm(stage, m, p), torch.linalg.vector_norm(sum(terms), p), f"the {p}-norm")


@on_ranks(2)
def test_the_norm_over_another_mesh_or_of_others_dtensors_is_refused():
    m, other = mesh(tp=2), mesh(dp=2)
    model = ColumnParallelLinear(3, 4, tp=m.tp)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(ValueError, match=r"weight lies on the axis tp \(2 ranks\) of another mesh"):
        grad_norm(model, other)
    with pytest.raises(ValueError, match=r"weight lies on the axis tp \(2 ranks\) of another mesh"):
        shard_data_parallel(model, other)
    own = Axis(2, m.tp.rank, m.tp.group)  # of another name
    same = ColumnParallelLinear(3, 4, tp=own)
    same.load_state_dict(model.state_dict())
    same(torch.ones(2, 3)).sum().backward()
    close(grad_norm(same, m), grad_norm(model, m), "the norm over an axis of one's own")
    plain = nn.Linear(3, 4)
    shard_data_parallel(plain, other, zero=0)
    plain(torch.ones(2, 3)).sum().backward()
    reduce_gradients(plain)
    with pytest.raises(ValueError, match=r"weight lies on the axis data \(2 ranks\) of another mesh"):
        grad_norm(plain, m)
    foreign = distribute_module(nn.Linear(3, 4), m.device_mesh["tp"])
    foreign.weight.grad = torch.zeros_like(foreign.weight)
    with pytest.raises(ValueError, match="weight is a DTensor over 2 ranks that shard_data_parallel didn't make"):
        grad_norm(foreign, m)


def test_owners_that_declare_one_parameter_differently_are_refused():
    tp = Axis(2, 1, None, "tp")
    model = nn.Module()
    model.a, model.b = ColumnParallelLinear(6, 4, tp=tp, bias=False), RowParallelLinear(6, 4, tp=tp, bias=False)
    model.b.weight = model.a.weight
    for use in (reduce_gradients, full_state_dict, shardings, lambda model: grad_norm(model, Mesh())):
        with pytest.raises(ValueError, match=r"a.weight and b.weight are .*dimension 0 .*\(2, 6\) .*dimension 1"):
            use(model)
    model.a, model.b = RMSNorm(6), RMSNorm(6, tp=tp, sequence_parallel=True)
    model.b.weight = model.a.weight
    with pytest.raises(ValueError, match=r"a.weight and b.weight are one .* pending sum over tp \(2 ranks\) in one"):
        reduce_gradients(model)
    add_partial(model.a, "weight", tp)
    assert shardings(model)["a.weight"].partial == (tp,)
    model.b.shardings = {"weight": replace(model.b.shardings["weight"], data=Axis(4, 0, role="data"))}
    for one, other in ((model.a, model.b), (model.b, model.a)):
        assert shardings(nn.ModuleList([one, other]))["0.weight"].data == Axis(4, 0, role="data")


def dense_gradients(model, dtype):
    """A fixed gradient for every logical parameter."""
    return {n: draw(hash_of(n), *s.shape, dtype=dtype) for n, s in shardings(model).items()}


def hash_of(name):
    return sum((i + 1) * ord(letter) for i, letter in enumerate(name))


def check_norm(sizes, cases):
    """The gradient is given, so that the norm alone is tested: each logical element is counted once."""
    m = mesh(**sizes)
    for options, dtype in cases:
        want = dense_gradients(Model(**{k: v for k, v in options.items() if k != "sequence"}, device="meta"), dtype)
        model = Model(**options, tp=m.tp, dtype=dtype)
        for name, p in model.named_parameters():
            p.grad = shardings(model)[name].take(want[name]).clone()
            mark_reduced(p)
        for p in NORMS:
            flat = torch.cat([g.double().flatten() for g in want.values()])
            got, norm = grad_norm(model, m, p), torch.linalg.vector_norm(flat, p)
            assert got.dtype == torch.float64
            assert got.shape == ()
            close(got, norm, f"the {p}-norm")
            single, wanted = got.float(), norm.float()
            assert wanted.nextafter(torch.tensor(0.0)) <= single <= wanted.nextafter(torch.tensor(math.inf)), "1 ulp"
        everywhere = torch.stack([c.all_reduce(grad_norm(model, m), m.world, op) for op in ("min", "max")])
        assert everywhere[0] == everywhere[1], "ranks differ"


@pytest.mark.parametrize(
    "sizes", some({"tp": 1}, {"tp": 3}, {"tp": 2, "dp": 2}, {"tp": 2, "cp": 2}, of=[{"tp": 4}, {"dp": 4}]), ids=str
)
def test_pitfall_30_the_norm_is_the_dense_norm_in_every_layout(ranks, sizes):
    cases = [(None, True, torch.float64), (1, False, torch.float32), (1, True, torch.bfloat16)]
    cases = [({"sequence": sequence, "tied": tied}, dtype) for sequence, tied, dtype in cases]
    ranks(math.prod(sizes.values()), check_norm, sizes, cases)


@pytest.mark.parametrize("p", [0, -math.inf, math.nan])
def test_a_norm_that_is_none_is_refused(p):
    with pytest.raises(ValueError, match=f"the norm's p is {p}, which is not above 0: take 1, 2"):
        grad_norm(nn.Linear(2, 2), Mesh(), p)


def test_experts_on_one_rank_are_whole_tensors():
    experts = GroupedLinear(2, 4, 6, ep=Axis(), shard=cut(6, Axis(), 1))
    assert experts.shardings["weight"].shards, "the axis of one rank is declared all the same"
    experts.weight.grad = torch.ones_like(experts.weight)
    guard_optimizer(torch.optim.Adafactor(experts.parameters()), experts).step()
