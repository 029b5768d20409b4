"""Runs, replicas and declarations of axes that have sizes alone: by hand."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import mpcore as mp
from mpcore.mesh.axis import Axis
from mpcore.sharding import declare, local, state_dict
from mpcore.sharding.declare import Shard, Sharding, check_lies_on, cut, cut_blocks


def shard(rank: int, *runs: tuple, dim: int = 0) -> Shard:
    return Shard(Axis(len(runs), rank, role="tp"), dim, tuple(runs))


declarations: Any = importlib.import_module("mpcore.sharding.declarations")  # the package has such a function
OVERLAPS = (((0, 4), (8, 10)), ((2, 6),), ((9, 11), (3, 4)), ())


def test_indices_of_several_ranks_belong_to_the_lowest():
    shards = [shard(rank, *OVERLAPS) for rank in range(4)]
    assert [s.mine for s in shards] == list(OVERLAPS)
    assert [shards[0].size(rank) for rank in range(4)] == [6, 4, 3, 0]
    assert shards[0].replicated == (2, 3, 9)
    assert [s.owned for s in shards] == [
        (True,) * 6, (False, False, True, True), (False, True, False), (),
    ]  # fmt: skip
    assert [s.owned_runs for s in shards] == [((0, 6),), ((2, 4),), ((1, 2),), ()]
    assert [s.replica_runs for s in shards] == [((2, 0, 2), (5, 2, 1)), ((0, 0, 2),), ((0, 2, 1), (2, 1, 1)), ()]
    assert shard(0, ((0, 3),), ((3, 6),)).replicated == ()
    assert list(declare._runs([5, 6, None, 7, 9, 8])) == [(0, 5, 2), (3, 7, 1), (4, 9, 1), (5, 8, 1)]


@pytest.mark.parametrize(("length", "size", "unit", "want"), [
    (6, 3, 1, [(0, 2), (2, 4), (4, 6)]), (5, 2, 1, [(0, 3), (3, 5)]), (8, 3, 2, [(0, 4), (4, 6), (6, 8)]),
    (1, 2, 1, [(0, 1), (1, 1)]), (0, 2, 1, [(0, 0), (0, 0)]),
])  # fmt: skip
def test_a_dimension_is_cut_into_ranges_of_units(length, size, unit, want):
    found = cut(length, Axis(size, 0), 3, unit)
    assert found.runs == tuple((run,) for run in want)
    assert found.dim == 3
    with pytest.raises(ValueError, match="length 7 is not a multiple of the unit 2"):
        cut(7, Axis(2), 0, 2)


def test_each_block_of_a_dimension_is_cut_by_itself():
    found = cut_blocks((4, 6, 3), Axis(2, 1), 0, (2, 3, 1))
    assert found.runs == (((0, 2), (4, 7), (10, 12)), ((2, 4), (7, 10), (12, 13)))
    whole = torch.arange(13.0)
    assert Sharding((13,), (found,)).take(whole).tolist() == [2, 3, 7, 8, 9, 12]
    with pytest.raises(ValueError, match="zip"):
        cut_blocks((4, 6), Axis(2), 0, (2,))


def test_a_part_is_taken_along_every_sharded_dimension():
    x = torch.arange(24.0).view(4, 6)
    both = Sharding((4, 6), (cut(4, Axis(2, 1), 0), shard(1, ((0, 2),), ((4, 6), (1, 2)), dim=1)))
    assert both.local_shape == (2, 3)
    assert torch.equal(both.take(x), x[2:][:, [4, 5, 1]])
    assert Sharding((4, 6)).take(x) is x
    nothing = Sharding((4, 6), (shard(1, ((0, 4),), ()),))
    assert nothing.local_shape == (0, 6)
    assert nothing.take(x).shape == (0, 6)
    with pytest.raises(ValueError, match=r"a tensor of shape \(6, 4\) is not the logical shape \(4, 6\)"):
        both.take(x.T)
    assert Sharding((4, 6), (cut(4, Axis(1), 0),)).assemble(x.T.contiguous().T).is_contiguous()
    turned = Sharding((3, 2), (shard(0, ((2, 3), (0, 2))),))
    assert torch.equal(
        turned.assemble(torch.tensor([[5.0, 6], [1, 2], [3, 4]])), torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    )


def test_a_gradient_is_pending_over_partial_axes_and_those_with_replicas():
    one, two, alone = Axis(2, 0, role="tp"), Axis(3, 0, role="cp"), Axis(1, 0, role="ep")
    replicas, plain = shard(0, ((0, 2),), ((1, 3),)), cut(4, Axis(2, 0, role="tp"), 0)
    assert Sharding((4,), (plain,)).pending == ()
    assert Sharding((4,), (plain,), (two, alone)).pending == (two,)
    assert Sharding((3,), (replicas,), (one, two)).pending == (one, two, replicas.axis)


def test_the_axis_of_the_data_depends_on_the_experts():
    mesh = dataclasses.replace(mp.Mesh(), tp=Axis(2, 0, role="tp"), data=Axis(4, 0, role="data"),
                               ep=Axis(2, 0, role="ep"), edp=Axis(2, 0, role="edp"))  # fmt: skip
    expert, other = Sharding((4,), (cut(4, mesh.ep, 0),)), Sharding((4,), (cut(4, mesh.tp, 0),))
    assert (expert.data_axis(mesh), other.data_axis(mesh), Sharding((4,)).data_axis(mesh)) == (
        mesh.edp,
        mesh.data,
        mesh.data,
    )
    cp = Axis(2, 0, role="cp")
    assert Sharding((4,), (), (cp,)).replica_axes(mesh) == (mesh.tp, cp)
    assert Sharding((4,), (cut(4, mesh.tp, 0),), (cp,)).replica_axes(mesh) == (cp,)
    assert Sharding((4,), (cut(4, mesh.ep, 0),), (cp,)).replica_axes(mesh) == (cp,), "experts have their own tp"


class Group:
    """A process group of two ranks."""

    def __init__(self, name: str) -> None:
        self.group_name = name

    def size(self) -> int:
        return 2


def test_a_parameter_must_lie_on_an_axis_of_its_mesh():
    groups: Any = {name: Group(name) for name in "abc"}
    mesh = dataclasses.replace(
        mp.Mesh(), tp=Axis(2, 0, groups["a"], role="tp"), data=Axis(2, 0, groups["b"], role="data")
    )
    p = torch.ones(4)
    own = [Axis(2, 0, groups[name]) for name in "abc"]
    namesake = Axis(2, 0, groups["b"], role="tp")
    for axis, fits in zip((mesh.tp, Axis(), *own, namesake), (True, True, True, True, False, False), strict=True):
        for sharding in (Sharding((4,), (cut(4, axis, 0),)), Sharding((4,), data=axis)):
            if fits:
                check_lies_on("w", p, sharding, mesh)
            else:
                with pytest.raises(ValueError, match=r"w lies on the axis \w+ \(2 ranks\) of another mesh"):
                    check_lies_on("w", p, sharding, mesh)


class Declares(nn.Module):
    """Holds a weight, and says how it is cut."""

    def __init__(self, weight: nn.Parameter, sharding: Sharding | None) -> None:
        super().__init__()
        self.weight = weight
        if sharding is not None:
            self.shardings = {"weight": sharding}


def tied(*said: Sharding | None) -> nn.Module:
    weight = nn.Parameter(torch.ones(2, 3))
    return nn.ModuleDict({"abc"[i]: Declares(weight, each) for i, each in enumerate(said)})


TP, CP = Axis(2, 0, role="tp"), Axis(2, 0, role="cp")
CUT = Sharding((4, 3), (cut(4, TP, 0),))


def test_a_tied_parameter_has_its_first_name_and_the_declarations_of_all():
    ((name, _, sharding),) = declarations.declarations(tied(None, CUT))
    assert (name, sharding) == ("a.weight", CUT)
    ((name, module, leaf, _),) = declarations.owners(tied(None, CUT))
    assert (name, leaf, declarations.declared_by(module)) == ("a.weight", "weight", {"weight": CUT})
    pending = dataclasses.replace(CUT, partial=(CP,), added=(CP,))
    for order in itertools.permutations((CUT, pending)):
        ((_, _, sharding),) = declarations.declarations(tied(*order))
        assert (sharding.partial, sharding.added) == ((CP,), (CP,))
    data = Axis(4, 0, role="data")
    for order in ((CUT, dataclasses.replace(CUT, data=data)), (dataclasses.replace(CUT, data=data), CUT)):
        ((_, _, sharding),) = declarations.declarations(tied(*order))
        assert sharding.data is data
    ((_, _, plain),) = declarations.declarations(tied(None, None))
    assert plain == Sharding((2, 3))


@pytest.mark.parametrize(("other", "said"), [
    (Sharding((2, 3)), r"a.weight and b.weight are one parameter, declared as \(4, 3\) with dimension 0 cut over tp, "
                       r"here \(2, 3\) and as \(2, 3\) with nothing cut, here \(2, 3\): tie"),
    (Sharding((4, 3), (cut(4, CP, 0),)), "with dimension 0 cut over cp"),
    (Sharding((4, 3), (shard(0, ((2, 4),), ((0, 2),)),)), "are one parameter, declared as"),
    (dataclasses.replace(CUT, partial=(CP,)), r"pending sum over cp \(2 ranks\) in one of them and whole in the other"),
])  # fmt: skip
def test_declarations_of_one_parameter_that_differ_are_refused(other, said):
    for order in ((CUT, other), (other, CUT)) if "pending" in said else ((CUT, other),):
        with pytest.raises(ValueError, match=said):
            list(declarations.declarations(tied(*order)))


def test_an_axis_of_size_1_is_no_difference_and_is_not_added():
    single = Sharding((2, 3), (cut(2, Axis(1, 0, role="tp"), 0),))
    assert len(list(declarations.declarations(tied(single, Sharding((2, 3)))))) == 1
    layer = nn.Linear(2, 2)
    mp.add_partial(layer, "weight", Axis())
    assert declarations.declared_by(layer) == {}
    mp.add_partial(layer, "weight", TP)
    mp.add_partial(layer, "weight", CP)
    found = declarations.sharding_of(layer, "weight", layer.weight)
    assert (found.partial, found.added, found.shape) == ((TP, CP), (TP, CP), (2, 2))


def test_names_have_no_parts_of_wrappers():
    assert declarations.plain_name("a._orig_mod.b._checkpoint_wrapped_module.c") == "a.b.c"
    assert declarations.plain_name("_orig_mod") == ""
    inner, wrapper = nn.Linear(1, 1), nn.Module()
    wrapper._orig_mod = inner
    model = nn.ModuleDict({"a": wrapper})
    assert [(name, module) for name, module in declarations.named_modules(model)] == [("", model), ("a", inner)]
    assert [name for name, *_ in declarations.declarations(model)] == ["a.weight", "a.bias"]
    assert declarations.ModelTree(nn.ModuleList([inner, inner])).parameters == (inner.weight, inner.bias)


def test_a_state_dict_is_loaded_by_any_name_of_a_tied_tensor_or_refused_whole():
    model: Any = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    bias, weight = torch.tensor([5.0, 6.0]), torch.full((2, 2), 3.0)
    mp.load_full_state_dict(model, {"b.weight": weight, "b.bias": bias, "more": weight})
    assert torch.equal(model["a"].weight, weight)
    mp.load_full_state_dict(model, {"a.weight": weight + 1, "b.weight": weight, "b.bias": bias})
    assert torch.equal(model["a"].weight, weight + 1), "its first name is asked first"
    before = model["a"].weight.detach().clone()
    wrong = {"a.weight": weight, "b.bias": weight}
    for state, said in (({"a.weight": weight}, "the state dict of 1 tensors has no 'b.bias'"),
                        (wrong, r"b.bias has shape \(2, 2\), the model needs \(2,\)")):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            mp.load_full_state_dict(model, state)
        assert torch.equal(model["a"].weight, before)


def test_a_parameter_without_memory_is_refused_by_name():
    p = torch.ones(3)
    state_dict.check_present("w", p)
    state_dict.check_present("w", torch.ones(0))
    p.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="w has 3 elements and 0 bytes of memory here: its block is offloaded"):
        state_dict.check_present("w", p)
    for a, b, same in ((torch.ones(2, 3), torch.ones(2, 3), True), (torch.ones(3, 2), torch.ones(2, 3), False)):
        assert local.lies_as(a, b) is same


class Placement:
    """A shard of a dimension, or a replica."""

    def __init__(self, dim: int | None) -> None:
        self.dim = dim

    def is_shard(self) -> bool:
        return self.dim is not None

    def is_replicate(self) -> bool:
        return self.dim is None


@pytest.mark.parametrize(("shape", "places", "sizes", "at", "runs", "first"), [
    ((7, 4), (0,), (3,), (0,), [(0, 3), (0, 4)], True), ((7, 4), (0,), (3,), (2,), [(6, 7), (0, 4)], True),
    ((7, 4), (1,), (3,), (1,), [(0, 7), (2, 4)], True), ((4, 1), (0,), (5,), (4,), [(4, 4), (0, 1)], True),
    ((8, 4), (None, 0), (2, 2), (0, 1), [(4, 8), (0, 4)], True),
    ((8, 4), (None, 0), (2, 2), (1, 0), [(0, 4), (0, 4)], False),
    ((8, 4), (0, 0), (2, 2), (1, 0), [(4, 6), (0, 4)], True), ((8, 5), (0, 1), (2, 2), (1, 1), [(4, 8), (3, 5)], True),
])  # fmt: skip
def test_the_ranges_of_a_dtensor_follow_from_its_placements(shape, places, sizes, at, runs, first):
    mesh = SimpleNamespace(size=lambda i: sizes[i], get_coordinate=lambda: at)
    x: Any = SimpleNamespace(shape=shape, placements=tuple(map(Placement, places)), device_mesh=mesh)
    assert local.data_runs(x) == runs
    assert local.data_run(x) == runs[0]
    assert local.is_first_replica(x) is first
