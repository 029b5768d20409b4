"""What a sharded stage's units are told around each forward and backward, and which arguments are refused: no ranks."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import mpcore as mp
from mpcore.parallel import data, sync
from mpcore.parallel.shared import DataParallel, set_state, state_of
from mpcore.sharding.declare import Sharding


class Unit:
    """A unit that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **how: self.told.append((name.removeprefix("set_"), *given, *how.items()))


def stage_of(zero: int, count: int = 2, **more: Any) -> Any:
    stage: Any = nn.Linear(2, 2)
    set_state(stage, DataParallel(zero, tuple(Unit() for _ in range(count)), **more))  # type: ignore[misc]
    return stage


def told(stage: nn.Module) -> list[list[tuple]]:
    units: Any = state_of(stage).units
    found = [list(unit.told) for unit in units]
    for unit in units:
        unit.told.clear()
    return found


def backward(reduce: bool, all_reduce: bool, reshard: bool) -> list[tuple]:
    flat = ("recurse", False)
    return [("requires_gradient_sync", reduce, flat), ("requires_all_reduce", all_reduce, flat),
            ("reshard_after_backward", reshard, flat)]  # fmt: skip


BACKWARDS = {  # by stage of ZeRO, and whether the micro-batch is the last: reduce, all-reduce over replicas, reshard
    (1, False): (False, False, False), (2, False): (True, False, False), (3, False): (True, False, True),
    (1, True): (True, True, True), (2, True): (True, True, True), (3, True): (True, True, True),
}  # fmt: skip


@pytest.mark.parametrize(("zero", "last"), BACKWARDS)
def test_the_last_micro_batch_completes_the_sums(zero, last):
    stage = stage_of(zero)
    sync.set_gradient_sync(stage, last)
    assert told(stage) == [backward(*BACKWARDS[zero, last])] * 2
    sync.reduce_held(stage, last)  # after the second half of a split backward
    first, second = told(stage)
    want = backward(*BACKWARDS[zero, last]) if zero > 1 else [("is_last_backward", False), *backward(*[False] * 3)]
    assert first[: len(want)] == want
    assert second == backward(*(BACKWARDS[zero, last] if zero > 1 else [False] * 3))


@pytest.fixture(autouse=True)
def no_end(monkeypatch) -> None:
    monkeypatch.setattr(sync.fsdp, "end_backward", lambda root: None)


def test_leaves_keep_their_gradients_until_they_are_reduced():
    for zero, last in BACKWARDS:
        stage = stage_of(zero, leaves=True)
        sync.set_gradient_sync(stage, last)
        first, second = told(stage)
        assert first == [("is_last_backward", False), *backward(False, False, zero == 3)]
        assert second == backward(False, False, zero == 3)


@pytest.mark.parametrize(("out", "hides"), [
    (torch.ones(1), False), ((torch.ones(1), 3, "a", 2.5, 1j, None), False), ({"x": [torch.ones(1)]}, False),
    ((), True), (None, True), ([None], True), (SimpleNamespace(x=1), True), ((torch.ones(1), SimpleNamespace()), True),
    (torch.ones(1, requires_grad=True), True),
])  # fmt: skip
def test_an_output_hides_tensors_in_objects_that_nobody_looks_into(out, hides):
    assert sync.hides_tensors(out) is hides


def mesh_of(size: int, edp: int | None = None, running: bool = True) -> Any:
    return SimpleNamespace(data=mp.Axis(size), edp=mp.Axis(edp or size), device_mesh="there" if running else None)


HALF = torch.bfloat16
REFUSED: list[tuple[mp.Zero, Any, str]] = [
    (mp.Zero(0), mesh_of(4), ""), (mp.Zero(3), mesh_of(4), ""), (mp.Zero(1, 2), mesh_of(4), ""),
    (mp.Zero(3, 2), mesh_of(4, 2), ""), (mp.Zero(1, 3), mesh_of(4), "replicate 3 does not divide the data size 4"),
    (mp.Zero(1, 0), mesh_of(4), "replicate 0 does not divide"), (mp.Zero(1, 2.0), mesh_of(4), "replicate 2.0 does not"),
    (mp.Zero(0, 2), mesh_of(4), "replicate 2 with zero 0 on 4 data ranks leaves nothing"),
    (mp.Zero(1, 4), mesh_of(4), "replicate 4 with zero 1 on 4 data ranks leaves nothing"),
    (mp.Zero(1, 2), mesh_of(4, 1), "replicate 2 does not divide the edp size 1 of the experts"),
    (mp.Zero(1, 1), mesh_of(4, 1), ""), (mp.Zero(0, 1, HALF), mesh_of(4), "zero 0 computes in the parameters' own"),
    (mp.Zero(0, 1, None, HALF), mesh_of(4), "zero 0 computes in the parameters' own"),
    (mp.Zero(1, 1, HALF, HALF), mesh_of(4), ""),
    (mp.Zero(1, 1, HALF), mesh_of(1, running=False), "param_dtype torch.bfloat16 needs a running torch.distributed"),
    (mp.Zero(1, 1), mesh_of(1, running=False), ""),
]  # fmt: skip


@pytest.mark.parametrize(("given", "on", "said"), REFUSED)
def test_policies_of_sharding_are_refused_with_the_numbers(given, on, said):
    try:
        given.check(on)
        text = ""
    except ValueError as error:
        text = str(error)
    assert text.startswith(said)
    assert bool(text) is bool(said)


def test_one_parameter_in_two_units_is_refused_but_not_a_number():
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abc"})
    model["a"].weight = model["b"].weight
    words = "a.weight and b.weight are one parameter in two units, of Linear and ModuleDict"
    data._check_units([model], [])
    with pytest.raises(ValueError, match=words):
        data._check_units([model], [model["a"]])
    with pytest.raises(ValueError, match="in two units, of Linear and Linear"):
        data._check_units([model], [model["a"], model["b"]])
    data._check_units([model], [model["c"]])
    outer = nn.ModuleDict({"in": model})
    data._check_units([outer], [model])
    model["a"].weight = nn.Parameter(torch.ones(2, 2))
    model["a"].scale = model["b"].scale = nn.Parameter(torch.ones(()))
    data._check_units([model], [model["a"], model["b"]])
    other = nn.ModuleDict({"a": nn.Linear(2, 2)})
    other["a"].weight = model["b"].weight
    data._check_units([model, other], [model["b"], other["a"]])  # of two stages


def test_trained_parameters_of_two_dtypes_in_one_unit_are_refused():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2).double()})
    with pytest.raises(
        ValueError, match=r"trained parameters of one ModuleDict are of torch.float32 and torch.float64"
    ):
        data._check_units([model], [])
    data._check_units([model], [model["b"]])
    data._check_units([model], [model["a"], model["b"]])
    model["b"].requires_grad_(False)
    data._check_units([model], [])


def test_what_cant_be_cut_along_dimension_0_stays_whole():
    def stays(size: int = 4, replicate: int = 1, *shape: int) -> bool:
        x = torch.ones(shape)
        return data._stays_whole(
            x, Sharding(tuple(shape)), dataclasses.replace(mp.Mesh(), data=mp.Axis(size)), replicate
        )

    assert [stays(4, 1), stays(4, 1, 0, 3), stays(4, 1, 3), stays(4, 2, 3)] == [True, True, False, False]
    assert stays(1, 1, 3) is False
    expert = mp.Axis(2, role="ep")
    from mpcore.sharding.declare import cut

    sharding = Sharding((4, 2), (cut(4, expert, 0),))
    for edp, replicate, whole in ((1, 1, True), (2, 1, False), (2, 2, True), (4, 2, False)):
        mesh = dataclasses.replace(mp.Mesh(), data=mp.Axis(8), ep=expert, edp=mp.Axis(edp))
        assert data._stays_whole(torch.ones(2, 2), sharding, mesh, replicate) is whole


@pytest.mark.parametrize(("change", "said"), [
    (lambda m: nn.Linear(2, 2), "the block Linear is no submodule of the model"),
    (lambda m: m.weight.register_hook(lambda g: g), "weight has hooks on its gradient, and zero 1 puts shards in its"),
    (lambda m: m.weight.register_post_accumulate_grad_hook(lambda p: None), "weight has hooks on its gradient"),
    (lambda m: setattr(m, "weight", nn.Parameter(torch.ones(3, 2).T)), "weight of strides .* can't be cut by zero 1"),
    (lambda m: set_state(m, DataParallel(0)), "the model is sharded over data already"),
    (lambda m: m.add_module("table", nn.Embedding(3, 2, max_norm=1.0)), r"table has max_norm: each of 2 data ranks"),
])  # fmt: skip
def test_models_that_cant_be_sharded_are_refused(change, said):
    model = nn.Linear(2, 3)
    found = change(model)
    blocks = [found] if isinstance(found, nn.Linear) else []
    on = dataclasses.replace(mp.Mesh(), data=mp.Axis(2))
    with pytest.raises(ValueError, match=said):
        data._check_model([model], blocks, on, 1)
    if "strides" in said:
        data._check_model([model], blocks, on, 0)
    if "hooks" in said:
        data._check_model([model], blocks, mp.Mesh(), 0)
        with pytest.raises(ValueError, match=r"weight has a hook on its gradient, .* term of the sum over .* 2"):
            data._check_model([model], blocks, on, 0)
    if "max_norm" in said:
        data._check_model([model], blocks, mp.Mesh(), 1)
