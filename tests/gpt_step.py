"""A step of the example's GPT in a pipeline on any mesh, beside one backward of the unsharded model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.gpt.config import GPTConfig
from examples.gpt.model import GPT, build_stages
from mpcore import Mesh, vocab_parallel_cross_entropy
from mpcore.collectives import all_reduce
from mpcore.gradients import grad_norm, main_gradients, reduce_gradients
from mpcore.gradients.accumulate import gradient_of
from mpcore.layers import materialize
from mpcore.parallel.data import shard_data_parallel
from mpcore.pipeline import Pipeline
from mpcore.pipeline.partition import join_stages, partition
from mpcore.pipeline.schedules import V_SHAPED, Schedule, default_virtual_stages
from mpcore.sharding import shardings
from mpcore.sharding.declare import Sharding
from mpcore.sharding.local import is_dtensor
from tests.equality import close

CONFIG = {"vocab_size": 31, "seq_len": 8, "layers": 4, "d_model": 12, "heads": 3, "d_ff": 16, "dropout": 0.2}
BATCH, TOLERANCE = 16, 1e-10


def batch(rows: int = BATCH, length: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets of which each sample has another number that count (some have none), sample indices."""
    g = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(31, (2, rows, length), generator=g)
    valid = torch.arange(length) < torch.randint(length + 1, (rows, 1), generator=g)
    return tokens, targets.masked_fill(~valid, -100), torch.arange(100, 100 + rows)


def unsharded(dtype: torch.dtype = torch.float64, **config: Any) -> nn.Module:
    """The model in one process."""
    return materialize(GPT(GPTConfig(**{**CONFIG, **config}), device="meta", dtype=dtype), seed=5)


@cache
def dense(rows: int = BATCH, length: int = 8, **config: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The unsharded model's loss and gradients."""
    model = unsharded(**config)
    tokens, targets, samples = batch(rows, length)
    loss = vocab_parallel_cross_entropy(model(tokens, samples), targets)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def over_data(x: Tensor, on: Mesh, sharding: Sharding) -> Tensor:
    """The logical tensor. Not by DTensor: it caches meshes of worlds that the pool has ended."""
    if is_dtensor(x):
        # consecutive ranks hold the shards, groups of them the replicas
        shards: list = [None] * sharding.data_axis(on).size
        dist.all_gather_object(shards, x.to_local().detach(), group=sharding.data_axis(on).group)
        x = torch.cat(shards[: x.device_mesh.size(x.device_mesh.ndim - 1)])
    return sharding.assemble(x.detach())


class Run:
    """This rank's stages of the GPT, its pipeline, and the module that holds them all.

    Args:
        ranks: the rank of each stage.
        plan: a schedule that has no name.
        main: gradients are summed in `main_grad`, without data parallelism.
        mixed: other arguments of `shard_data_parallel`.
        change: is called with each stage, before data parallelism.
        config: changes of `CONFIG`.
    """

    def __init__(
        self, on: Mesh, schedule: str = "1f1b", micro_batches: int = 4, zero: int = 1, virtual: int | None = None,
        ranks: Iterable[int] | None = None, plan: str | Schedule | None = None, main: bool = False,
        dtype: torch.dtype = torch.float64, mixed: dict | None = None, sequence_parallel: bool = False,
        change: Callable[[nn.Module], object] = lambda stage: None, **config: Any,
    ) -> None:  # fmt: skip
        made = GPTConfig(**{**CONFIG, **config})
        virtual = virtual or default_virtual_stages(schedule)
        blocks = partition([1.0] * made.layers, on.pp.size * virtual, last=0.5)
        there = list(range(on.pp.size))
        looped = [rank for i in range(virtual) for rank in (there[::-1] if schedule in V_SHAPED and i % 2 else there)]
        ranks = ranks or looped
        self.on, self.count, self.vocab_size = on, torch.ones(()), made.vocab_size
        how = {"device": "meta", "dtype": dtype, "sequence_parallel": sequence_parallel}
        self.stages = build_stages(made, on, blocks, ranks, **how)
        self.model = materialize(join_stages(self.stages), seed=5)
        for stage in self.stages:
            change(stage)
        if main:
            main_gradients(self.model)
        else:
            units = [block for stage in self.stages for block in stage.blocks.values()]
            shard_data_parallel(self.stages, on, units, zero=zero, **(mixed or {}))
        self.pipeline = Pipeline(self.stages, on, micro_batches, self.loss, plan or schedule)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """The sum over targets, divided by the step's number of them."""
        sizes = {"tp": self.on.tp, "vocab_size": self.vocab_size}
        return vocab_parallel_cross_entropy(logits, target, **sizes, reduction="sum") / self.count

    def step(self, rows: int = BATCH, length: int = 8) -> Tensor:
        """Forward and backward of a batch; return the loss of all ranks."""
        data = self.on.data
        tokens, targets, samples = (t.chunk(data.size)[data.rank] for t in batch(rows, length))
        self.count = all_reduce((targets != -100).sum(), data)
        return all_reduce(self.pipeline.forward_backward(tokens, targets, samples=samples), data)

    def evaluate(self, batches: int = 1) -> None:
        """Forwards alone."""
        for stage in self.stages:
            stage.eval()
        list(self.pipeline.forward([batch()[0][:2]] * batches))
        for stage in self.stages:
            stage.train()

    def gradients(self) -> dict[str, Tensor]:
        """Reduce them; return those of this rank's stages in logical shapes."""
        reduce_gradients(self.model)
        declared, found = shardings(self.model), {}
        for name, p in self.model.named_parameters():
            grad = gradient_of(p)
            assert grad is not None, f"{name} got no gradient"
            found[name] = over_data(grad, self.on, declared[name])
        return found

    def compare(self, loss: Tensor, rows: int = BATCH, length: int = 8, **config: Any) -> None:
        """Loss, gradients and their norm are those of the unsharded model."""
        want_loss, want = dense(rows, length, **config)
        close(loss, want_loss, "loss", TOLERANCE)
        for name, grad in self.gradients().items():
            close(grad, want[name], f"gradient of {name}", TOLERANCE)
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in want.values()]))
        close(grad_norm(self.model, self.on), norm, "norm", TOLERANCE)
