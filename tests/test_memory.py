"""The memory estimate: against bytes held in real runs, against Korthikanti's formulas, and a model of 65 billion."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from examples.gpt.plan import build
from examples.gpt.pretrain import Trainer, parse
from mpcore.dry_run import dry_run
from mpcore.sharding import local_tensor
from mpcore.storages import Storages, storage_bytes
from tests.pool import mesh

# --- real runs ----------------------------------------------------------------------------------------------------

FLAGS = [
    "--layers", "4", "--d-model", "64", "--heads", "4", "--d-ff", "96", "--seq-len", "64", "--global-batch", "16",
]  # fmt: skip
LAYOUTS: list[tuple[dict[str, int], list[str]]] = [
    ({}, []),
    ({}, ["--recompute", "full", "--dropout", "0.1"]),
    ({}, ["--recompute", "selective", "--dtype", "float64"]),
    ({}, ["--recompute", "budget=0.5"]),
    ({}, ["--dtype", "bfloat16", "--recompute", "selective"]),
    ({}, ["--dtype", "bfloat16"]),
    ({"tp": 2}, []),
    ({"tp": 2}, ["--sequence-parallel"]),
    ({"tp": 2}, ["--sequence-parallel", "--recompute", "selective"]),
    ({"tp": 2}, ["--sequence-parallel", "--recompute", "full"]),
    ({"tp": 4}, ["--recompute", "selective", "--dropout", "0.1"]),
    ({"dp": 2}, []),
    ({"dp": 4}, ["--recompute", "full"]),
    ({"tp": 2, "dp": 2}, ["--sequence-parallel"]),
    ({"pp": 2}, []),
    ({"pp": 2}, ["--schedule", "gpipe"]),
    ({"pp": 2}, ["--schedule", "interleaved"]),
    ({"pp": 2}, ["--schedule", "bfs", "--recompute", "full"]),
    ({"pp": 2}, ["--schedule", "zb", "--recompute", "selective"]),
    ({"pp": 2}, ["--schedule", "zbv"]),
    ({"pp": 2}, ["--schedule", "dualpipev", "--recompute", "full"]),
    ({"pp": 4}, ["--recompute", "selective"]),
    ({"pp": 2, "tp": 2}, ["--sequence-parallel", "--recompute", "selective"]),
    ({"pp": 2, "dp": 2}, []),
    ({"pp": 2, "dp": 2}, ["--schedule", "interleaved", "--recompute", "full"]),
    ({"pp": 2, "dp": 2}, ["--tie-embeddings", "--schedule", "zbv"]),
]


def measure(sizes: dict[str, int], flags: list[str]) -> dict[str, int]:
    """The bytes that this rank really holds in the second step, each kind at its largest."""
    trainer = Trainer(parse([*FLAGS, *flags]), mesh(**sizes))
    parameters = [local_tensor(p) for p in trainer.model.parameters()]
    found = {"parameters": storage_bytes(parameters), "gradients": 0, "activations": 0}
    loss, storages = trainer.pipeline.loss, Storages()

    def states() -> list[Tensor]:
        each = trainer.optimizer.state.values()
        return [local_tensor(x) for state in each for x in state.values() if isinstance(x, Tensor)]

    def gradients() -> list[Tensor]:
        return [local_tensor(p.grad) for p in trainer.model.parameters() if p.grad is not None]

    def sample(*_) -> None:
        held = []
        for _ in range(4):  # gloo's threads let go of their tensors a little later
            held.append(storages.held([*states(), *gradients()]))
            time.sleep(0.002)
        found["activations"] = max(found["activations"], min(held))

    def loss_and_sample(logits: Tensor, target: Tensor) -> Tensor:
        out = loss(logits, target)
        sample()
        return out

    def before_step(*_) -> None:
        found["gradients"] = max(found["gradients"], storage_bytes(gradients()))

    trainer.optimizer.register_step_pre_hook(before_step)
    with storages:
        trainer.step(0)
        for stage in trainer.stages:
            if not stage.last:
                stage.register_forward_hook(sample)
        trainer.pipeline.loss = loss_and_sample
        if trainer.pipeline.runtime is not None:
            trainer.pipeline.runtime._loss_fn = loss_and_sample
        trainer.step(1)
    return found | {"optimizer": storage_bytes(states())}


def compare(sizes: dict[str, int], flags: list[str], got: dict[str, int], rank: int) -> tuple[int, int]:
    """Bytes estimated and measured on a rank."""
    plan = dry_run(build, [*FLAGS, *flags], rank, **sizes)
    assert plan.parameters == got["parameters"]
    assert plan.gradients == got["gradients"]
    assert plan.optimizer == got["optimizer"]
    return plan.total, sum(got.values())


@pytest.mark.parametrize("case", [1, 8, 13, 18, 24], ids=lambda i: str(LAYOUTS[i]))
def test_the_estimate_is_within_three_percent_of_the_bytes_held(ranks, case):
    sizes, flags = LAYOUTS[case]
    for rank, got in enumerate(ranks(torch.Size(sizes.values()).numel(), measure, sizes, flags)):
        estimated, measured = compare(sizes, flags, got, rank)
        assert estimated == pytest.approx(measured, rel=0.03), f"rank {rank}: {got}"
