"""The example with its sequences cut over cp, against the same run in one process."""

from __future__ import annotations

import math

import pytest
import torch

from mpcore import Mesh, shard_sequence, unshard_sequence
from mpcore.collectives import all_reduce, gather
from mpcore.gradients import grad_norm, reduce_gradients
from mpcore.layers import materialize, vocab_parallel_cross_entropy
from mpcore.pipeline import Pipeline
from tests.equality import close, full_gradients
from tests.examples.test_pretrain import trainer
from tests.pool import mesh

TOKENS = 12


def check_gradients(sizes, kind, changes, options, zero=None):
    """Loss, every gradient and their norm, where most targets are masked and ranks have unequal shares of the rest."""
    from examples.gpt.config import GPTConfig
    from examples.gpt.model import GPT
    from mpcore.parallel.data import shard_data_parallel

    axes = mesh(**sizes)
    config = GPTConfig(13, TOKENS, 2, 8, 4, 2, 12, **changes)
    text = torch.randint(0, 13, (2, TOKENS + 1), generator=torch.Generator().manual_seed(5))
    tokens, targets = text[:, :-1], text[:, 1:].clone()
    targets[0, 3:] = targets[1, 5:9] = -100
    samples = torch.tensor([7, 2**33])

    def loss(logits, target):
        total = vocab_parallel_cross_entropy(logits, target, tp=axes.tp, vocab_size=13, reduction="sum")
        return total / 11

    dense = materialize(GPT(config, dtype=torch.float64), 3)
    logits = dense(tokens, samples)
    want = vocab_parallel_cross_entropy(logits, targets, vocab_size=13, reduction="sum") / 11
    want.backward()
    model = materialize(GPT(config, axes, context=kind, dtype=torch.float64, **options), 3)
    if zero is not None:
        shard_data_parallel(model, axes, model.blocks.values(), zero=zero)
    here = (tokens, targets, samples)
    *here, samples = (t.chunk(axes.dp.size)[axes.dp.rank] for t in here)
    here = shard_sequence(dict(enumerate(here)), axes.cp, kind)
    assert all_reduce((here[1] != -100).sum(), axes.data) == 11
    pipeline = Pipeline(model, axes, 2 // axes.dp.size, loss)
    total = all_reduce(pipeline.forward_backward(here[0], here[1], samples=samples), axes.data)
    reduce_gradients(model, *([axes.data] if zero is None else []))
    close(total, want.detach(), "loss")
    wanted, got = full_gradients(dense), full_gradients(model)
    assert got.keys() <= wanted.keys()
    assert axes.pp.size > 1 or len(got) == len(wanted)
    for name in got:
        close(got[name], wanted[name], f"gradient of {name}")
    close(grad_norm(model, axes), grad_norm(dense, Mesh()), "norm")
    if axes.pp.size == 1 and axes.dp.size == 1:
        y = gather(model(here[0], samples), axes.tp, -1, 13)
        close(unshard_sequence(y, axes.cp, kind, 1).detach(), logits.detach(), "logits")


LEARNED = {"positions": "learned", "tie_embeddings": True, "dropout": 0.2}
WHOLE = [
    ({"cp": 4, "cp_inner": 2}, "two-level", LEARNED, {}),
    ({"cp": 2, "tp": 2}, "zigzag", {"positions": "learned", "tie_embeddings": True}, {"sequence_parallel": True}),
    ({"cp": 2, "tp": 2}, "alltoall", {"dropout": 0.2}, {}),
    ({"cp": 2, "pp": 2}, "zigzag", {"dropout": 0.2, "tie_embeddings": True}, {}),
    ({"cp": 2, "dp": 2}, "allgather", {"tie_embeddings": True, "norm": "layer"}, {}, 2),
    ({"cp": 2, "dp": 2}, "ring", {"dropout": 0.2}, {}, 3),
]  # fmt: skip


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: f"{case[0]}-{case[1]}-{case[4:]}")
def test_pitfall_24_25_the_whole_model_has_the_dense_models_gradients(ranks, case):
    ranks(math.prod(case[0][axis] for axis in case[0] if axis != "cp_inner"), check_gradients, *case)


def check_masked(sizes, kind):
    """A step whose batch has one valid token in all."""
    t = trainer("--dtype", "float64", "--cp-kind", kind, "--micro-batch", "2", **sizes)
    whole = t.train_samples.batch

    def batch(indices):
        tokens, targets = whole(indices)
        masked = torch.full_like(targets, -100)
        if 0 in indices:
            masked[0, 5] = targets[0, 5]
        return tokens, masked

    t.train_samples.batch = batch
    return t.step()


@pytest.mark.parametrize("sizes", [{"cp": 4}, {"cp": 2, "dp": 2}], ids=str)
def test_pitfall_25_one_valid_token_in_the_whole_batch(ranks, sizes):
    (want,) = ranks(1, check_masked, {}, "zigzag")
    assert want["grad_norm"] > 0
    for got in ranks(math.prod(sizes.values()), check_masked, sizes, "zigzag"):
        assert got == pytest.approx(want, rel=1e-10)
