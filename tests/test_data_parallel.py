"""ZeRO-0 to 3 and HSDP against the dense model: values, gradients, norms, what lies where, and what is sent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from examples.gpt.model import GPT, GPTConfig, build_stages
from mpcore import (
    Axis,
    Mesh,
    clip_gradients,
    full_state_dict,
    grad_norm,
    load_full_state_dict,
    materialize,
    reduce_gradients,
    shardings,
    vocab_parallel_cross_entropy,
)
from mpcore.collectives import all_reduce
from mpcore.data_parallel import placements, reshard, shard_data_parallel, sync_gradients
from mpcore.layers.module import ParallelModule, normal
from mpcore.pipeline import Pipeline
from mpcore.pipeline.partition import join_stages, partition
from mpcore.pipeline.schedules import default_placement, default_virtual_stages
from mpcore.sharding import Sharding, cut, is_dtensor, local_tensor
from tests.equality import close
from tests.pool import mesh

CONFIG = {"vocab_size": 31, "seq_len": 8, "layers": 4, "d_model": 12, "heads": 3, "d_ff": 16, "dropout": 0.2}
BATCH = 16
TOLERANCE = 1e-10
STAGES = [0, 1, 2, 3]
NORMS = [1, 2, math.inf]


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets of which each sample has another number that count (some have none), sample indices."""
    g = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(31, (2, BATCH, 8), generator=g)
    valid = torch.arange(8) < torch.randint(9, (BATCH, 1), generator=g)
    return tokens, targets.masked_fill(~valid, -100), torch.arange(100, 100 + BATCH)


def over_data(x: Tensor, on: Mesh, sharding: Sharding) -> Tensor:
    """The logical tensor. Not by DTensor: it caches meshes of worlds that the pool has ended."""
    if is_dtensor(x):
        # consecutive ranks hold the shards, groups of them the replicas
        shards: list = [None] * sharding.data_axis(on).size
        dist.all_gather_object(shards, x.to_local().detach(), group=sharding.data_axis(on).group)
        x = torch.cat(shards[: x.device_mesh.size(x.device_mesh.ndim - 1)])
    return sharding.assemble(x.detach())


class Run:
    """This rank's stages of the GPT, its pipeline, and the module that holds them all."""

    def __init__(self, on: Mesh, zero: int, schedule: str = "1f1b", micro_batches: int = 4, **options) -> None:
        replicate, dtype = options.pop("replicate", 1), options.pop("dtype", torch.float64)
        mixed = options.pop("mixed", {})
        config = GPTConfig(**{**CONFIG, **options})
        virtual = default_virtual_stages(schedule)
        ranks = default_placement(schedule, on.pp.size, virtual)
        blocks = partition([1.0] * config.layers, on.pp.size * virtual, last=0.5)
        self.on, self.count = on, torch.ones(())
        self.stages = build_stages(config, on, blocks, ranks, device="meta", dtype=dtype)
        self.model = materialize(join_stages(self.stages), seed=5)
        units = [block for stage in self.stages for block in stage.blocks.values()]
        shard_data_parallel(self.stages, on, units, zero=zero, replicate=replicate, **mixed)
        self.pipeline = Pipeline(self.stages, on, micro_batches, self.loss, schedule)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        total = vocab_parallel_cross_entropy(logits, target, tp=self.on.tp, vocab_size=31, reduction="sum")
        return total / self.count

    def step(self) -> Tensor:
        data = self.on.data
        tokens, targets, samples = (t.chunk(data.size)[data.rank] for t in batch())
        self.count = all_reduce((targets != -100).sum(), data)
        loss = self.pipeline.forward_backward(tokens, targets, samples=samples)
        reduce_gradients(self.model)
        return all_reduce(loss, data)

    def evaluate(self) -> None:
        """A forward alone leaves parameters gathered."""
        for stage in self.stages:
            stage.eval()
        list(self.pipeline.forward([batch()[0][:2]]))
        for stage in self.stages:
            stage.train()

    def gradients(self) -> dict[str, Tensor]:
        declared = shardings(self.model)
        found = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        return {n: over_data(grad, self.on, declared[n]) for n, grad in found.items()}


_dense: dict = {}


def dense(**options) -> tuple[Tensor, dict[str, Tensor]]:
    key = tuple(options.items())
    if key not in _dense:
        model = materialize(GPT(GPTConfig(**{**CONFIG, **options}), device="meta", dtype=torch.float64), seed=5)
        tokens, targets, samples = batch()
        loss = vocab_parallel_cross_entropy(model(tokens, samples), targets)
        loss.backward()
        _dense[key] = loss.detach(), {n: p.grad for n, p in model.named_parameters()}
    return _dense[key]


def check_gradients(sizes: dict, zero: int, schedule: str, **options) -> None:
    """Twice, with an evaluation between: nothing is left of the step before."""
    run = Run(mesh(**sizes), zero, schedule, **options)
    options.pop("replicate", 1)
    want_loss, want = dense(**options)
    for _ in range(2):
        close(run.step(), want_loss, "loss", TOLERANCE)
        got = run.gradients()
        for name, grad in got.items():
            close(grad, want[name], f"gradient of {name}", TOLERANCE)
        assert len(got) == len(list(run.model.parameters()))
        for p in NORMS:
            norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in want.values()]), p)
            close(grad_norm(run.model, run.on, p), norm, f"the {p}-norm", TOLERANCE)
        clip_gradients(run.model, 0.5, grad_norm(run.model, run.on))
        close(grad_norm(run.model, run.on), torch.tensor(0.5, dtype=torch.float64), "clipped norm", TOLERANCE)
        run.model.zero_grad()
        run.evaluate()
        for stage in run.stages:
            reshard(stage)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("schedule", ["1f1b", "zb", "interleaved", "zbv", "dualpipev"])
def test_pitfall_14_24_30_33_every_zero_stage_in_every_kind_of_pipeline_gives_the_dense_gradients(
    ranks, schedule, zero, tied
):
    ranks(4, check_gradients, {"pp": 2, "dp": 2}, zero, schedule, tie_embeddings=tied)


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("sizes", [{"dp": 4}, {"tp": 2, "dp": 2}, {"dp": 2, "cp": 2}], ids=str)
def test_pitfall_24_30_every_zero_stage_gives_the_dense_gradients(ranks, sizes, zero):
    ranks(4, check_gradients, sizes, zero, "1f1b", tie_embeddings=True, kv_heads=1)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_pitfall_24_30_shards_replicated_over_nodes_give_the_dense_gradients(ranks, zero):
    ranks(4, check_gradients, {"dp": 4}, zero, "1f1b", replicate=2, tie_embeddings=True)
    ranks(4, check_gradients, {"dp": 4}, zero, "zbv", replicate=2, tie_embeddings=True)
