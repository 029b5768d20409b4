"""The GPT with compiled blocks trains as without, to the bit where the backend runs the same operators."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from examples.gpt.arguments import parse
from examples.gpt.config import GPTConfig
from examples.gpt.model import GPT
from examples.gpt.plan import build
from examples.gpt.setup import check
from mpcore import Mesh, full_state_dict
from mpcore.layers import seed_dropout
from mpcore.parallel.compile import compile_blocks
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
def test_blocks_with_dropout_share_two_graphs():
    from torch._dynamo import config
    from torch._dynamo.utils import counters

    made = GPT(GPTConfig(layers=5, d_model=16, heads=4, d_ff=24, seq_len=8, dropout=0.3), dtype=torch.float64)
    seed_dropout(made, 3)
    ids, samples = torch.arange(16).view(2, 8), torch.arange(2)
    wanted = made(ids, samples)
    wanted_gradients = torch.autograd.grad(wanted.sum(), list(made.parameters()))
    torch._dynamo.reset()
    counters.clear()
    with config.patch(allow_unspec_int_on_nn_module=False, recompile_limit=2):
        compile_blocks([*made.blocks.values()], "aot_eager")
        found = made(ids, samples)
        found_gradients = torch.autograd.grad(found.sum(), list(made.parameters()))
    assert counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()
    for got, want in zip((found, *found_gradients), (wanted, *wanted_gradients), strict=True):
        assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LAYOUTS)[1:])
def test_compiled_blocks_of_every_kind_train_to_the_bit(ranks, name, tmp_path):
    exact = "--zero 0 --dtype bfloat16" not in LAYOUTS[name][1]  # a compiled product's gradient is rounded first
    first, last = check_layout(ranks, name, str(tmp_path), tolerance=0.0 if exact else 1e-3)
    assert 0 < first == last


@pytest.mark.slow
def test_what_inductor_makes_of_blocks_trains_alike(ranks, tmp_path):
    check_layout(ranks, "tp2-pp2-selective", str(tmp_path), "inductor", 1e-10)


def test_an_unknown_backend_and_a_plan_are_refused():
    with pytest.raises(ValueError, match=r"compile backend 'fast' is none of torch's, such as .*inductor"):
        check(parse(["--compile", "fast"]), GPTConfig(), Mesh())
    with pytest.raises(ValueError, match="--compile is not counted here"):
        build(Mesh(), ["--compile"])


def test_each_of_many_blocks_may_have_two_graphs(monkeypatch):
    """Beyond torch's limit, a block would run uncompiled."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    compile_blocks([torch.nn.Linear(2, 2) for _ in range(20)], "eager")
    assert torch._dynamo.config.recompile_limit == 40
    compile_blocks([torch.nn.Linear(2, 2)], "eager")
    assert torch._dynamo.config.recompile_limit == 40
