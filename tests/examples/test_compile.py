"""The GPT with compiled blocks trains as without, to the bit where the backend runs the same operators."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mpcore import full_state_dict
from tests.pool import mesh

FLAGS = [
    "--dtype", "float64", "--layers", "4", "--d-model", "16", "--heads", "4", "--d-ff", "24", "--seq-len", "16",
    "--global-batch", "8", "--lr", "1e-2", "--warmup", "1", "--eval-every", "2", "--set", "eval_samples=3",
    "--steps", "2",
]  # fmt: skip
LAYOUTS = {
    "tp2-selective": ({"tp": 2}, "--sequence-parallel --recompute selective --layers 2"),
    "tp2-pp2-selective": ({"tp": 2, "pp": 2}, "--sequence-parallel --recompute selective"),
    "tp2-dp2-zero3": ({"tp": 2, "dp": 2}, "--zero 3 --recompute full --dropout 0.1"),
    "cp2-dp2-offload": ({"cp": 2, "dp": 2}, "--zero 0 --offload optimizer activations parameters --cp-kind ring"),
    "pp2-dp2-zbv": ({"pp": 2, "dp": 2}, "--schedule zbv --zero 2"),
    "dp2-tp2-ep4": ({"dp": 2, "tp": 2, "ep": 4, "etp": 1}, "--experts 4 --set moe.top_k=2 --dropout 0.1 --layers 2"),
    "tp2-dp2-bfloat16": ({"tp": 2, "dp": 2}, "--dtype bfloat16"),
    "tp4-bfloat16": ({"tp": 4}, "--zero 0 --dtype bfloat16"),
}


def train(sizes: dict[str, int], flags: list[str], out: str) -> dict[str, Any]:
    """Losses, norms and parameters of a whole run, and how many graphs were compiled for it."""
    from torch._dynamo.utils import counters

    from examples.gpt.pretrain import Trainer, parse

    torch._dynamo.reset()
    counters.clear()
    t = Trainer(parse([*FLAGS, *flags, "--out", out]), mesh(**sizes))
    take, records, graphs = t.step, [], []

    def noted() -> dict[str, Any]:
        records.append(take())
        graphs.append(counters["stats"]["unique_graphs"])
        return records[-1]

    t.step = noted
    t.train()
    numbers = {name: [r[name] for r in records] for name in ("loss", "grad_norm")}
    assert graphs[-1] == counters["stats"]["unique_graphs"]  # none for evaluations and the sample
    torch._dynamo.reset()
    with t.run.parameters():
        return numbers | {"graphs": graphs, "state": full_state_dict(t.model)}


def check_layout(ranks, name: str, out: str, backend: str = "aot_eager", tolerance: float = 0.0) -> list[int]:
    sizes, flags = LAYOUTS[name]
    world = math.prod(size for axis, size in sizes.items() if axis not in ("ep", "etp"))
    wanted = ranks(world, train, sizes, flags.split(), f"{out}/eager")
    compiled = ranks(world, train, sizes, [*flags.split(), "--compile", backend], f"{out}/compiled", timeout=300)
    for want, got in zip(wanted, compiled, strict=True):
        assert want["graphs"] == [0, 0]
        for number in ("loss", "grad_norm"):
            assert got[number] == pytest.approx(want[number], rel=tolerance, abs=0), name
        for parameter, value in got["state"].items() if tolerance < 1e-4 else ():  # where Adam's first steps are signs
            torch.testing.assert_close(value, want["state"][parameter], rtol=tolerance, atol=tolerance)
    return compiled[0]["graphs"]


def test_compiled_blocks_train_to_the_bit(ranks, tmp_path):
    assert check_layout(ranks, "tp2-selective", str(tmp_path)) == [1, 1]  # one graph for all blocks


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LAYOUTS)[1:])
def test_compiled_blocks_of_every_kind_train_to_the_bit(ranks, name, tmp_path):
    exact = "--zero 0 --dtype bfloat16" not in LAYOUTS[name][1]  # a compiled product's gradient is rounded first
    first, last = check_layout(ranks, name, str(tmp_path), tolerance=0.0 if exact else 1e-3)
    assert 0 < first == last
