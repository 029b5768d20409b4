"""Which policies and models can't be sharded over data, and the numbers that the error holds: no ranks."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import mpcore as mp
from mpcore.parallel import data, sync
from mpcore.parallel.shared import DataParallel, SharedUnit, set_state


class Unit:
    """A unit that writes down the values that it is told."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda value, **how: self.told.update({name: value})


def test_leaves_keep_their_gradients_until_they_are_reduced_and_shard_parameters_again():
    for zero, last in itertools.product((1, 2, 3), (False, True)):
        stage, units = nn.Linear(2, 2), tuple(Unit() for _ in range(2))
        set_state(stage, DataParallel(zero, units, leaves=True))  # type: ignore[arg-type]
        sync.set_gradient_sync(stage, last)
        told = {"set_requires_gradient_sync": False, "set_requires_all_reduce": False}
        told["set_reshard_after_backward"] = zero == 3
        assert [unit.told for unit in units] == [told | {"set_is_last_backward": False}, told]


def test_a_shared_unit_holds_its_parameters_in_the_order_of_the_stages_on_every_rank():
    modules = [nn.Linear(1, 1) for _ in range(32)]
    assert [*SharedUnit((module, "weight") for module in modules).held] == modules, "else ranks gather in other orders"


def mesh_of(size: int, edp: int | None = None, running: bool = True) -> Any:
    return SimpleNamespace(data=mp.Axis(size), edp=mp.Axis(edp or size), device_mesh="there" if running else None)


HALF = torch.bfloat16
REFUSED: list[tuple[mp.Zero, Any, str]] = [
    (mp.Zero(1, 3), mesh_of(4), "replicate 3 does not divide the data size 4"),
    (mp.Zero(1, 0), mesh_of(4), "replicate 0 does not divide"), (mp.Zero(1, 2.0), mesh_of(4), "replicate 2.0 does not"),
    (mp.Zero(0, 2), mesh_of(4), "replicate 2 with zero 0 on 4 data ranks leaves nothing"),
    (mp.Zero(1, 4), mesh_of(4), "replicate 4 with zero 1 on 4 data ranks leaves nothing"),
    (mp.Zero(1, 2), mesh_of(4, 1), "replicate 2 does not divide the edp size 1 of the experts"),
    (mp.Zero(0, 1, HALF), mesh_of(4), "zero 0 computes in the parameters' own"),
    (mp.Zero(0, 1, None, HALF), mesh_of(4), "zero 0 computes in the parameters' own"),
    (mp.Zero(1, 1, HALF), mesh_of(1, running=False), "param_dtype torch.bfloat16 needs a running torch.distributed"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "on", "said"), REFUSED)
def test_policies_of_sharding_are_refused_with_the_numbers(given, on, said):
    with pytest.raises(ValueError, match=said):
        given.check(on)


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


@pytest.mark.parametrize(("change", "said"), [
    (lambda m: m.weight.register_hook(lambda g: g), "weight has hooks on its gradient, and zero 1 puts shards in its"),
    (lambda m: m.weight.register_post_accumulate_grad_hook(lambda p: None), "weight has hooks on its gradient"),
    (lambda m: setattr(m, "weight", nn.Parameter(torch.ones(3, 2).T)), "weight of strides .* can't be cut by zero 1"),
    (lambda m: m.add_module("table", nn.Embedding(3, 2, max_norm=1.0)), r"table has max_norm: each of 2 data ranks"),
])  # fmt: skip
def test_models_that_cant_be_sharded_are_refused(change, said):
    model = nn.Linear(2, 3)
    change(model)
    on = dataclasses.replace(mp.Mesh(), data=mp.Axis(2))
    with pytest.raises(ValueError, match=said):
        data._check_model([model], [], on, 1)
    if "strides" in said:
        data._check_model([model], [], on, 0)
    if "hooks" in said:
        data._check_model([model], [], mp.Mesh(), 0)
        with pytest.raises(ValueError, match=r"weight has a hook on its gradient, .* term of the sum over .* 2"):
            data._check_model([model], [], on, 0)
    if "max_norm" in said:
        data._check_model([model], [], mp.Mesh(), 1)
