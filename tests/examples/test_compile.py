"""The GPT with compiled blocks trains as without, to the bit where the backend runs the same operators."""

from __future__ import annotations

from typing import Any

import torch

from mpcore import full_state_dict
from tests.pool import mesh

FLAGS = (
    "--dtype float64 --layers 2 --d-model 16 --heads 4 --d-ff 24 --seq-len 16 --global-batch 8 --lr 1e-2 --warmup 1 "
    "--eval-every 2 --set eval_samples=3 --steps 2 --sequence-parallel --recompute selective"
)


def train(*flags: str) -> dict[str, Any]:
    """Losses, norms and parameters of a whole run, and how many graphs were compiled for it."""
    from torch._dynamo.utils import counters

    from examples.gpt.pretrain import Trainer, parse

    torch._dynamo.reset()
    counters.clear()
    t = Trainer(parse([*FLAGS.split(), *flags]), mesh(tp=2))
    take, records, graphs = t.step, [], []

    def noted() -> dict[str, Any]:
        records.append(take())
        graphs.append(counters["stats"]["unique_graphs"])
        return records[-1]

    t.step = noted
    t.train()
    assert graphs[-1] == counters["stats"]["unique_graphs"]  # none for evaluations and the sample
    torch._dynamo.reset()
    numbers = [(r["loss"], r["grad_norm"]) for r in records]
    return {"graphs": graphs, "numbers": numbers, "state": full_state_dict(t.model)}


def test_compiled_blocks_train_to_the_bit(ranks, tmp_path):
    """With one graph for all blocks. tests/laws has compiled blocks under all other features."""
    eager = ranks(2, train, "--out", f"{tmp_path}/eager")
    compiled = ranks(2, train, "--out", f"{tmp_path}/compiled", "--compile", "aot_eager", timeout=300)
    for want, got in zip(eager, compiled, strict=True):
        assert (want["graphs"], got["graphs"]) == ([0, 0], [1, 1])
        assert got["numbers"] == want["numbers"]
        assert all(torch.equal(value, want["state"][name]) for name, value in got["state"].items())
