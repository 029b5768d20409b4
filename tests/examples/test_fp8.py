"""The GPT in eight bits trains on every layout as on one process."""

from __future__ import annotations

from typing import Any

import pytest

from mpcore import full_state_dict
from tests.equality import close
from tests.pool import mesh

FLAGS = [
    "--fp8", "--dtype", "float64", "--d-model", "256", "--heads", "4", "--kv-heads", "4", "--d-ff", "256", "--seq-len",
    "256", "--global-batch", "4", "--dropout", "0.1", "--eval-every", "0", "--steps", "4", "--out", "unused",
]  # fmt: skip
STEPS = 2
LAYOUTS = {
    "tp2-pp2-sp": ({"tp": 2, "pp": 2}, "--sequence-parallel --micro-batch 1"),
    "dp2-cp2-zero3": ({"dp": 2, "cp": 2}, "--zero 3 --cp-kind ring"),
    "pp2-dp2-zbv": ({"pp": 2, "dp": 2}, "--micro-batch 1 --schedule zbv --zero 1"),
    "tp2-pp2-zb": ({"tp": 2, "pp": 2}, "--micro-batch 1 --schedule zb --sequence-parallel"),
    "tp2-dp2-full": ({"tp": 2, "dp": 2}, "--recompute full --zero 2 --offload optimizer activations"),
    "tp2-cp2-selective": ({"tp": 2, "cp": 2}, "--recompute selective --cp-kind alltoall --offload parameters --zero 0"),
    "tp2-dp2-budget": ({"tp": 2, "dp": 2}, "--recompute budget=0.5 --sequence-parallel"),
}


def train(sizes: dict[str, int], flags: list[str]) -> dict[str, Any]:
    """Losses, norms and parameters after some steps."""
    from examples.gpt.pretrain import Trainer, parse

    t = Trainer(parse([*FLAGS, *flags]), mesh(**sizes))
    records = [t.step() for i in range(STEPS)]
    numbers = {name: [r[name] for r in records] for name in ("loss", "grad_norm")}
    with t.run.parameters():
        return numbers | {"state": full_state_dict(t.model)}


def check_layouts(ranks, names: list[str], layers: str) -> None:
    (dense,) = ranks(1, train, {}, ["--layers", layers])
    for name in names:
        sizes, flags = LAYOUTS[name]
        for got in ranks(4, train, sizes, [*flags.split(), "--layers", layers]):
            for number in ("loss", "grad_norm"):
                assert got[number] == pytest.approx(dense[number], rel=1e-9), (name, number)
            for parameter, value in got["state"].items():
                close(value, dense["state"][parameter], f"{name} {parameter}", 1e-8)


def test_layouts_train_as_one_process_does(ranks):
    check_layouts(ranks, list(LAYOUTS)[:2], "2")


@pytest.mark.slow
def test_every_layout_trains_as_one_process_does(ranks):
    check_layouts(ranks, list(LAYOUTS)[2:], "4")
