"""`mpcore replay`: the first operator that isn't finite, by rank, layer, direction and micro-batch."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import mpcore as mp
from examples.gpt.pretrain import Trainer, parse
from mpcore.__main__ import main
from tests.quick import some

BASE = (
    "--layers 2 --d-model 16 --heads 4 --kv-heads 2 --d-ff 24 --seq-len 16 --global-batch 4 --micro-batch 1 "
    "--warmup 2 --device cpu --steps 4 --dropout 0.1"
)
LAYOUTS = {
    "pipeline": ({"tp": 2, "pp": 2}, ""),
    "ZeRO-3-experts": ({"tp": 2, "dp": 2}, "--zero 3 --experts 4 --set moe.d_ff=6"),
    "context": ({"cp": 2}, "--dtype bfloat16"),
}


def train(mesh: mp.Mesh, line: str) -> None:
    trainer = Trainer(parse(line.split()), mesh)
    with trainer.checkpoints.folder():
        for _ in range(2):
            trainer.step()
        trainer.checkpoints.save()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[dict[str, Path]]:
    """A run of each layout, with a checkpoint after two of its four steps."""
    folder = tmp_path_factory.mktemp("runs")
    for name, (sizes, flags) in LAYOUTS.items():
        axes = " ".join(f"--{axis} {size}" for axis, size in sizes.items() if axis != "dp")
        mp.simulate(train, f"{BASE} {axes} {flags} --out {folder / name}", **sizes)
    yield {name: folder / name for name in LAYOUTS}
    shutil.rmtree(folder)


def replayed(capsys, run: Path, step: int) -> tuple[int, str]:
    return main(["replay", str(run), "--step", str(step)]), capsys.readouterr().out


@pytest.mark.parametrize("name", some("ZeRO-3-experts", of=LAYOUTS))
def test_a_good_run_is_finite_in_every_operator(runs, capsys, name):
    """Though masks are of -inf, buffers begin with whatever memory held, and rows of attention may see no key."""
    before = sorted(runs[name].rglob("*"))
    status, said = replayed(capsys, runs[name], 3)
    assert "resumed after step 2" in said
    assert (
        said.splitlines()[-1]
        == f"step 3 and those before it, from the checkpoint on: finite on all {2 if name == 'context' else 4} ranks"
    )
    assert status == 0
    assert "resumed after step 2" in replayed(capsys, runs[name], 2)[1], "a checkpoint of the step itself"
    assert sorted(runs[name].rglob("*")) == before  # nothing is written


class Spoil(torch.autograd.Function):
    """The identity, but one element of the output or of the gradient is divided by zero."""

    @staticmethod
    def forward(ctx, x: Tensor, backward: bool) -> Tensor:
        ctx.backward_too = backward
        return x.clone() if backward else x / torch.ones_like(x).flatten().index_fill(0, torch.tensor(5), 0).view_as(x)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return (dy.sign() * torch.inf if ctx.backward_too else dy), None


def plant(monkeypatch, rank: int, layer: str, call: int, backward: bool) -> None:
    """Have a layer's output, or its gradient, spoiled on one rank in its n-th call."""
    real, calls = mp.RowParallelLinear.forward, [0]
    names: dict[int, str] = {}
    begin = Trainer.__init__

    def build(self, *args) -> None:
        begin(self, *args)
        if self.mesh.job.rank == rank:
            names.update({id(m): name for stage in self.run.stages for name, m in stage.named_modules()})

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        out = real(self, x, *args, **kwargs)
        if names.get(id(self)) == layer:
            calls[0] += 1
            out = Spoil.apply(out, backward) if calls[0] == call else out
        return out

    monkeypatch.setattr(Trainer, "__init__", build)
    monkeypatch.setattr(mp.RowParallelLinear, "forward", forward)


@pytest.mark.parametrize(
    ("name", "rank", "layer", "call", "backward", "words"),
    [
        # from step 2 on, four micro-batches a step: the sixth call is step 3, micro-batch 1
        ("pipeline", 3, "blocks.1.mlp.down", 6, False,
         "^rank 3 of 4: step 3: aten.div.Tensor made infinity in blocks.1.mlp.down "
         r"\(forward, micro-batch 1\): 1 of \d+"),
        ("pipeline", 0, "blocks.0.attention.output", 3, True,
         "^rank 0 of 4: step 2: aten.mul.Tensor made (NaN|infinity) in blocks.0.attention.output "
         r"\(backward, micro-batch 2\)"),
        ("ZeRO-3-experts", 2, "blocks.0.attention.output", 4, False,
         "^rank 2 of 4: step 3: aten.div.Tensor made infinity in blocks.0.attention.output "
         r"\(forward, micro-batch 1\)"),
    ],
    ids=str,
)  # fmt: skip
def test_a_planted_infinity_is_found(runs, monkeypatch, capsys, name, rank, layer, call, backward, words):
    plant(monkeypatch, rank, layer, call, backward)
    status, said = replayed(capsys, runs[name], 3)
    found = said.splitlines()[-1]
    assert status == 1
    assert re.search(words, found), found
    assert "its inputs are finite" in found


@pytest.mark.parametrize(("run", "step", "message"), [
    ({}, 4, "outside the run's steps 0 to 3"), ({}, -1, "outside the run's steps 0 to 3"),
    (None, 0, "isn't there or has no 'run': name"), ({"listen": "a:1"}, 3, "listen a:1: workers merge"),
    ({"resume": "auto"}, 3, "from none, which is step 0: the run began with step 2"), ({"resume": "CHECKPOINT"}, 3, ""),
    ({"resume": "CHECKPOINT"}, 1, "step 1 can't be replayed from CHECKPOINT, which is step 2"),
])  # fmt: skip
def test_a_step_that_the_run_has_not_is_refused(runs, capsys, tmp_path, run, step, message):
    """A run that began with a checkpoint of another folder has none of its own."""
    path = str(next(runs["context"].glob("checkpoints/*")))
    content = json.loads((runs["context"] / "config.json").read_text())
    content = {"run": {**content["run"], "dp": 1, **run}} if run is not None else {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(content).replace("CHECKPOINT", path))
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n')
    status, said = main(["replay", str(tmp_path), "--step", str(step)]), capsys.readouterr()
    assert (status, message.replace("CHECKPOINT", path) in said.err) == (2 if message else 0, True)
    assert message or "resumed after step 2" in said.out
