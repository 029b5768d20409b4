"""The options of policies that change no number reach the functions below `prepare`: in one process."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

import mpcore as mp
from mpcore.gradients.accumulate import main_grad

module: Any = importlib.import_module("mpcore.training.prepare")


def test_policies_reach_the_functions_that_they_are_of(monkeypatch):
    found: dict[str, Any] = {}
    for name in ("seed_dropout", "recompute_blocks", "shard_data_parallel", "compile_blocks"):
        monkeypatch.setattr(module, name, lambda *given, name=name, **how: found.update({name: (given, how)}))
    example: Any = lambda block: ((), {})  # noqa: E731
    model, on = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), mp.Mesh()
    blocks = [*model]
    mp.prepare(
        model, on, blocks=blocks, loss=lambda y, t: y.sum(), optimizer=mp.AdamW, initialize=False, seed=5,
        recompute=mp.Recompute("selective", every=3, budget=0.5, example=example, preserve_rng_state=False),
        data=mp.Zero(2, reduce_dtype=torch.bfloat16), compile=mp.Compile("eager"),
    )  # fmt: skip
    options = {"preserve_rng_state": False, "budget": 0.5, "example": example, "axes": (on.tp, on.data)}
    assert found["recompute_blocks"] == ((blocks, "selective"), {"every": 3, **options})
    assert found["seed_dropout"][0] == (model, 5)
    assert found["compile_blocks"][0] == (blocks, "eager")
    data = {"zero": 2, "replicate": 1, "param_dtype": None, "reduce_dtype": torch.bfloat16}
    assert found["shard_data_parallel"][1] == data


def test_main_gradients_are_made_for_optimizers_that_read_them():
    def torchs(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    for precision, made, main in (("float32", mp.AdamW, False), ("float16", mp.AdamW, True), ("float16", torchs, False),
                                  (mp.Precision("bfloat16", autocast=True), mp.AdamW, True)):  # fmt: skip
        told: dict[str, Any] = {"precision": precision, "optimizer": made, "loss": None, "initialize": False}
        run = mp.prepare(nn.Linear(3, 2), mp.Mesh(), blocks=(), **told)
        assert all((main_grad(p) is not None) is main for p in run.model.parameters())
