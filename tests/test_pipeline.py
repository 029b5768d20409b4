"""A step over micro-batches, stages and data ranks against one backward of the dense model on the whole batch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from examples.gpt.config import GPTConfig
from examples.gpt.model import GPT
from mpcore import Mesh, vocab_parallel_cross_entropy
from mpcore.collectives import all_reduce
from mpcore.gradients import grad_norm, reduce_gradients
from mpcore.layers import materialize
from mpcore.parallel.data import shard_data_parallel
from mpcore.pipeline import Pipeline
from mpcore.sharding import shardings
from mpcore.sharding.state_dict import full_tensor
from tests.equality import close
from tests.pool import mesh

CONFIG = {"vocab_size": 31, "seq_len": 8, "layers": 4, "d_model": 12, "heads": 3, "d_ff": 16, "dropout": 0.2}
BATCH = 8


def build(on: Mesh, **options) -> GPT:
    return materialize(GPT(GPTConfig(**CONFIG, **options), on, device="meta", dtype=torch.float64), seed=5)  # type: ignore[return-value]


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, targets of which each sample has another number that count (one has none), sample indices."""
    g = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(31, (2, BATCH, 8), generator=g)
    valid = torch.arange(8) < torch.tensor([8, 1, 3, 0, 7, 2, 5, 8])[:, None]
    return tokens, targets.masked_fill(~valid, -100), torch.arange(100, 100 + BATCH)


def dense(**options) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = build(Mesh(), **options)
    tokens, targets, samples = batch()
    loss = vocab_parallel_cross_entropy(model(tokens, samples), targets)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def parallel(on: Mesh, micro_batches: int, frozen: tuple[str, ...] = (), **options):
    model = build(on, **options)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen) if frozen else True)
    shard_data_parallel(model, on, model.blocks.values())
    tokens, targets, samples = (t.chunk(on.data.size)[on.data.rank] for t in batch())
    count = all_reduce((targets != -100).sum(), on.data)

    def loss(logits, target):
        total = vocab_parallel_cross_entropy(logits, target, tp=on.tp, vocab_size=31, reduction="sum")
        return total / count

    total = Pipeline(model, on, micro_batches, loss).forward_backward(tokens, targets, samples=samples)
    reduce_gradients(model)
    return model, all_reduce(total, on.data)


def check_step(sizes: dict, micro_batches: int, frozen: tuple[str, ...] = (), **options) -> None:
    want_loss, want = dense(**options)
    model, loss = parallel(mesh(**sizes), micro_batches, frozen, **options)
    close(loss, want_loss, "loss")
    declared = shardings(model)
    for name, parameter in model.named_parameters():
        if frozen and name.endswith(frozen):
            assert parameter.grad is None, f"{name} is frozen, but got a gradient"
            continue
        assert parameter.grad is not None, f"{name} got no gradient"
        close(full_tensor(parameter.grad, declared[name]), want[name], f"gradient of {name}")
    if not frozen:
        for p in (1.0, 2.0, float("inf")):
            norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in want.values()]), p)
            close(grad_norm(model, mesh(**sizes), p), norm, f"{p}-norm")


GRID = [({}, 4), ({"pp": 2}, 2), ({"pp": 2}, 8), ({"pp": 4}, 4), ({"dp": 4}, 2), ({"pp": 2, "dp": 2}, 4),
        ({"tp": 2, "pp": 2}, 2), ({"tp": 3}, 2), ({"pp": 3}, 4)]  # fmt: skip


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True], ids=["untied", "tied"])
@pytest.mark.parametrize(("sizes", "micro_batches"), GRID, ids=str)
def test_pitfall_14_24_25_26_30_every_cut_of_the_batch_gives_the_dense_gradients(ranks, sizes, micro_batches, tied):
    """Unequal token counts, dropout: one division, nothing rescaled, and each element counts once in the norm."""
    ranks(math.prod(sizes.values()), check_step, sizes, micro_batches, tie_embeddings=tied)


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}, {"dp": 2}, {"tp": 2}], ids=str)
def test_pitfall_33_43_frozen_weights_get_no_gradient_and_break_no_other(ranks, sizes):
    size = 2 if sizes else 1
    ranks(size, check_step, sizes, 2, ("embedding.weight", "qkv.weight", "mlp_norm.weight"))
    ranks(size, check_step, sizes, 2, ("embedding.weight",), tie_embeddings=True)


def check_forward(sizes: dict) -> None:
    """PITFALL 35: at pp=2 the next stage is the one before; batches of changing shapes keep their order."""
    on = mesh(**sizes)
    whole, model = build(Mesh()).eval(), build(on).eval()
    pipeline = Pipeline(model, on, 4, lambda y, t: y.sum())
    g = torch.Generator().manual_seed(1)
    batches = [torch.randint(31, (b, t), generator=g) for b, t in itertools.product((1, 3), (1, 5, 8))]
    for x, y in zip(batches, pipeline.forward(batches), strict=True):
        with torch.no_grad():
            want = whole(x)
        got = pipeline.from_last(y if on.pp.rank == on.pp.size - 1 else torch.zeros_like(want))
        close(got, want, f"logits of {tuple(x.shape)}")


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_pitfall_35_forward_through_stages_with_changing_shapes(ranks, stages):
    ranks(stages, check_forward, {"pp": stages})
