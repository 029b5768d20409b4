"""What `prepare` hands to the functions below it, in which order, and whom it refuses: in one process."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp

module: Any = importlib.import_module("mpcore.training.prepare")


def squares(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().sum()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def prepared(model: Any = None, **told: Any) -> mp.Run:
    model = model or nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    given = {"blocks": list(model.children()), "loss": squares, "optimizer": sgd, "initialize": False}
    return mp.prepare(model, mp.Mesh(), **{**given, **told})


@pytest.fixture
def steps(monkeypatch) -> list:
    """The steps of `lay_out` and `prepare` that change a model, in their order, with what they were given."""
    found: list = []

    def noted(name: str, answer: Any = None) -> None:
        monkeypatch.setattr(module, name, lambda *given, **how: found.append((name, given, how)) or answer)

    before = ("compare_replicas", "materialize", "seed_dropout", "convert_to_fp8", "recompute_blocks")
    after = ("shard_data_parallel", "compile_blocks", "main_gradients", "guard_optimizer", "offload_optimizer")
    for name in (*before, *after):
        noted(name)
    return found


def names(steps: list) -> list[str]:
    return [name for name, *_ in steps]


def test_policies_reach_the_steps_that_they_are_of(steps):
    example: Any = lambda block: ((), {})  # noqa: E731
    told = {
        "seed": 5, "precision": mp.Precision("bfloat16", fp8=True), "compile": mp.Compile("eager"),
        "recompute": mp.Recompute("selective", every=3, budget=0.5, example=example, preserve_rng_state=False),
        "data": mp.Zero(2, reduce_dtype=torch.bfloat16), "optimizer": mp.AdamW,
        "offload": mp.Offload(optimizer=True),
    }  # fmt: skip
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    run = prepared(model, **told)
    assert names(steps) == [
        "compare_replicas", "seed_dropout", "convert_to_fp8", "recompute_blocks", "shard_data_parallel",
        "compile_blocks", "main_gradients", "offload_optimizer",
    ]  # fmt: skip
    of: dict[str, Any] = {name: (given, how) for name, given, how in steps}
    blocks = [model[0], model[1]]
    assert of["compare_replicas"][0] == (model, mp.Mesh(), module.OTHER_VALUES)
    assert of["seed_dropout"][0] == (model, 5)
    assert of["convert_to_fp8"][0] == (blocks,)
    options = {"preserve_rng_state": False, "budget": 0.5, "example": example, "axes": (mp.Mesh().tp, mp.Mesh().data)}
    assert of["recompute_blocks"] == ((blocks, "selective"), {"every": 3, **options})
    assert of["shard_data_parallel"][1] == {
        "zero": 2, "replicate": 1, "param_dtype": None, "reduce_dtype": torch.bfloat16,
    }  # fmt: skip
    assert of["compile_blocks"][0] == (blocks, "eager")
    whole, masters = of["main_gradients"][0]
    assert whole is model
    assert set(masters) == set(model.parameters())
    assert of["offload_optimizer"][0] == (run.optimizer,)
    for p, master in masters.items():
        assert run.optimizer.state[p]["master"] is master
        assert (p.dtype, master.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(("precision", "made", "main"), [
    ("float32", mp.AdamW, []), ("float16", mp.AdamW, [1]), ("float16", sgd, []), ("bfloat16", mp.AdamW, [2]),
    (mp.Precision("bfloat16", autocast=True), mp.AdamW, [1]),
])  # fmt: skip
def test_main_gradients_are_made_for_optimizers_that_read_them(steps, precision, made, main):
    prepared(nn.Sequential(nn.Linear(3, 2)), precision=precision, optimizer=made)
    assert [len(given) for name, given, _ in steps if name == "main_gradients"] == main
    assert ("guard_optimizer" in names(steps)) is (made is sgd)
