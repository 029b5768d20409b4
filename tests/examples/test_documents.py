"""Documents in a sample: every layout has the loss and gradients of a dense model that runs each by itself."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.gpt.config import GPTConfig, LatentConfig, MoEConfig
from examples.gpt.model import GPT, build_stages
from mpcore import (
    AdamW,
    Compile,
    RotaryEmbedding,
    Zero,
    document_ids,
    prepare,
    shard_sequence,
    vocab_parallel_cross_entropy,
)
from mpcore.layers import materialize
from mpcore.pipeline.partition import partition
from mpcore.pipeline.schedules import find_schedule
from mpcore.sharding import shardings
from mpcore.sharding.state_dict import full_tensor
from mpcore.tools.verify import verify
from tests.equality import close
from tests.pool import mesh
from tests.quick import some

T, V, END = 12, 11, 0
TOLERANCE = 1e-10
ENDS = [  # the tokens that end a document, of each sample
    [],  # a document spans the sample
    [11],
    [5],  # where ring, all-to-all and two levels cut the sequence in two
    [2, 8],  # where zigzag and all-gather cut it
    [0, 1, 2],  # documents of one token
    list(range(12)),
    [5, 6],  # two ends in a row, at a cut
    [3, 4, 10],
]
DENSE = GPTConfig(vocab_size=V, seq_len=T, layers=2, d_model=16, heads=4, kv_heads=2, d_ff=12, init_std=0.4)
MODELS = {
    "rope": DENSE,
    "four blocks": GPTConfig(**{**vars(DENSE), "layers": 4}),
    "learned": GPTConfig(**{**vars(DENSE), "positions": "learned"}),
    "window": GPTConfig(**{**vars(DENSE), "window": 3}),
    "experts": GPTConfig(**{**vars(DENSE), "moe": MoEConfig(experts=4, top_k=2, d_ff=6, aux_loss=None)}),
    "latent": GPTConfig(**{**vars(DENSE), "kv_heads": None, "latent": LatentConfig(8, 6, 4, 2, 4)}),
}


def batch() -> tuple[Tensor, Tensor]:
    """Inputs and next tokens [8, T]; the next token of a document's last is the first of the next document."""
    text = torch.randint(1, V, (len(ENDS), T + 1), generator=torch.Generator().manual_seed(3))
    for row, ends in enumerate(ENDS):
        text[row, ends] = END
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


@cache
def apart(config: GPTConfig) -> tuple[float, dict[str, Tensor]]:
    """The mean loss over all tokens, and its gradients, of one process that runs each document by itself."""
    model = materialize(GPT(config, device="meta", dtype=torch.float64), 0)
    tokens, targets = batch()
    total = 0.0
    for row, target in zip(tokens, targets, strict=True):
        cuts = [0, *(int(i) + 1 for i in (row == END).nonzero()), T]
        for a, b in itertools.pairwise(cuts):
            if a < b:
                loss = model.loss(model(row[None, a:b]), target[None, a:b]) / tokens.numel()
                loss.backward()
                total += float(loss.detach())
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def build(model: str, sizes: dict[str, int], options: dict[str, Any], micro_batches: int):
    on, config = mesh(**sizes), MODELS[model]
    plan = find_schedule(options.get("schedule", "1f1b"), on.pp.size, micro_batches, options.get("virtual"))
    blocks = partition([1.0] * config.layers, plan.stages, last=0.0)
    stages = build_stages(
        config, on, blocks, [plan.rank_of[i] for i in range(plan.stages)], sequence_parallel=options.get("sp", False),
        context=options.get("kind", "zigzag"), device="meta", dtype=torch.float64,
    )  # fmt: skip
    run = prepare(
        stages, on, blocks={int(i): block for stage in stages for i, block in stage.blocks.items()},
        loss=stages[-1].loss, optimizer=lambda model: AdamW(model, lr=0.1), seed=0, micro_batches=micro_batches,
        schedule=plan, data=Zero(options.get("zero", 1)), recompute=options.get("recompute", "none"),
        precision="float64", compile=options.get("compile"),
    )  # fmt: skip
    return on, run


def same_gradients(run, want: dict[str, Tensor]) -> None:
    run.finish_gradients()
    declared = shardings(run.model)
    found = {n: full_tensor(p.grad, declared[n]) for n, p in run.model.named_parameters() if p.grad is not None}
    assert found
    for name, grad in found.items():
        close(grad, want[name], f"gradient of {name}", TOLERANCE)


def check_layout(model: str, sizes: dict[str, int], options: dict[str, Any], want) -> None:
    on, run = build(model, sizes, options, micro_batches=2)
    tokens, targets = batch()
    mine = run.share(len(tokens))
    mine = slice(mine.start, mine.stop)
    documents = document_ids(tokens, END)[mine]
    x, y = (shard_sequence(t[mine], on.cp, options.get("kind", "zigzag")) for t in (tokens, targets))
    arguments: dict[str, Any] = {"samples": torch.arange(len(x)), "documents": documents}
    loss, gradients = want
    evaluated = run.evaluate(list(zip(x.split(2), y.split(2), strict=True)), documents=documents.split(2))
    assert evaluated == pytest.approx(loss, rel=TOLERANCE)
    assert float(run.forward_backward(x, y, **arguments)) == pytest.approx(loss, rel=TOLERANCE)
    same_gradients(run, gradients)


SP = {"sp": True}
LAYOUTS = [
    ("rope", {"tp": 3}, {}), ("rope", {"tp": 2}, SP),
    ("rope", {"cp": 2}, {"kind": "alltoall"}),
    ("rope", {"cp": 4, "cp_inner": 2}, {"kind": "two-level"}),
    ("four blocks", {"pp": 2}, {"schedule": "zbv", "virtual": 2}),
    ("rope", {"dp": 2}, {"zero": 3, "recompute": "full"}), ("learned", {"cp": 2, "tp": 2}, {"kind": "zigzag", **SP}),
    ("window", {"cp": 2}, {"kind": "zigzag", "recompute": "selective"}), ("experts", {"dp": 2, "ep": 2}, {}),
    ("latent", {"cp": 2}, {"kind": "zigzag"}),
    ("latent", {"tp": 2, "pp": 2}, SP),
]  # fmt: skip


@pytest.mark.parametrize(("model", "sizes", "options"), some(
    *LAYOUTS, of=[("rope", {"tp": 2}, {**SP, "compile": Compile("aot_eager")}),
                  ("experts", {"cp": 2, "tp": 2}, {"kind": "ring"})],
), ids=str)  # fmt: skip
def test_every_layout_runs_each_document_as_if_it_were_alone(ranks, model, sizes, options):
    """Two micro-batches of several samples."""
    count = math.prod(size for axis, size in sizes.items() if axis in ("tp", "pp", "cp", "dp"))
    ranks(count, check_layout, model, sizes, options, apart(MODELS[model]))


def test_rotary_positions_restart_in_each_document():
    """Rotation shows distances alone, so that no loss above would tell."""
    tokens, model = batch()[0], GPT(DENSE, device="meta")
    calls = model.calls(T, None, torch.float64, tokens.device, documents=document_ids(tokens, END))
    ((cos, sin), *_) = [arguments["rotary"] for _, arguments in calls]
    begins = [[max((k + 1 for k in range(q) if row[k] == END), default=0) for q in range(T)] for row in tokens]
    places = torch.arange(T) - torch.tensor(begins)
    for found, wanted in zip((cos, sin), RotaryEmbedding(DENSE.head_width)(places, torch.float64), strict=True):
        assert torch.equal(found, wanted)


def verified(mesh, sequence_parallel=False) -> GPT:
    return GPT(MODELS["rope"], mesh, sequence_parallel=sequence_parallel, device="meta")


def verified_loss(output, target, mesh) -> Tensor:
    return vocab_parallel_cross_entropy(output, target, tp=mesh.tp, vocab_size=V, reduction="sum")


def test_verify_takes_documents(ranks):
    """It cuts what is [B, T] over cp, so documents, which every rank takes whole, are [B, 1, T]."""
    tokens, targets = batch()
    given = {"x": tokens, "target": targets, "documents": document_ids(tokens, END)[:, None]}
    for verdict in verify(verified, given, ["tp2", "tp2sp", "cp2", "pp2", "dp2"], loss=verified_loss, pool=ranks):
        assert verdict.equal, verdict
