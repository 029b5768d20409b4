"""Documents in a sample: every layout has the loss and gradients of a dense model whose mask is written out."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

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
from tests.layers.moe_oracle import oracle as experts_oracle
from tests.pool import mesh

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
    "experts": GPTConfig(**{**vars(DENSE), "moe": MoEConfig(experts=4, top_k=2, d_ff=6, aux_coefficient=0.3)}),
    "latent": GPTConfig(**{**vars(DENSE), "kv_heads": None, "latent": LatentConfig(8, 6, 4, 2, 4)}),
}


def batch() -> tuple[Tensor, Tensor]:
    """Inputs and next tokens [8, T]; the next token of a document's last is the first of the next document."""
    text = torch.randint(1, V, (len(ENDS), T + 1), generator=torch.Generator().manual_seed(3))
    for row, ends in enumerate(ENDS):
        text[row, ends] = END
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def written_out(tokens: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Whether query q sees key k, [B, T, T], and positions [B, T], one pair of tokens at a time."""
    B, length = tokens.shape
    see, places = torch.zeros(B, length, length, dtype=torch.bool), torch.zeros(B, length, dtype=torch.int64)
    for b in range(B):
        for q in range(length):
            first = max((k + 1 for k in range(q) if tokens[b, k] == END), default=0)
            places[b, q] = q - first
            for k in range(first, q + 1):
                see[b, q, k] = window is None or q - k < window
    return see, places


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def rotated(x: Tensor, places: Tensor) -> Tensor:
    """[B, T, H, K], by frequencies that are rounded to float32 as Hugging Face's are."""
    half = x.shape[-1] // 2
    frequencies = torch.tensor([10000.0 ** (-j / half) for j in range(half)], dtype=torch.float32).double()
    angles = (places.double()[..., None] * frequencies)[:, :, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def dense(p: dict[str, Tensor], config: GPTConfig, tokens: Tensor, targets: Tensor, count: int) -> tuple[Tensor, ...]:
    """The sum of the tokens' losses, and the balance losses of experts."""
    see, places = written_out(tokens, config.window)
    x, balance = p["embedding.weight"][tokens], torch.zeros((), dtype=torch.float64)
    if config.positions == "learned":
        x = x + p["position.weight"][places]
    K, H, G = config.head_width, config.heads, config.kv_heads or config.heads
    for i in range(config.layers):
        of = {n.removeprefix(f"blocks.{i}."): t for n, t in p.items() if n.startswith(f"blocks.{i}.")}
        qkv = rms(x, of["attention_norm.weight"]) @ of["attention.qkv.weight"].T
        q, k, v = (t.unflatten(-1, (-1, K)) for t in qkv.split([H * K, G * K, G * K], -1))
        if config.positions == "rope":
            q, k = rotated(q, places), rotated(k, places)
        k, v = (t.repeat_interleave(H // G, 2) for t in (k, v))
        scores = torch.einsum("bqhk,bshk->bhqs", q, k) / math.sqrt(K)
        weights = scores.masked_fill(~see[:, None], -math.inf).softmax(-1)
        y = torch.einsum("bhqs,bshk->bqhk", weights, v).flatten(2)
        x = x + y @ of["attention.output.weight"].T
        h = rms(x, of["mlp_norm.weight"])
        if config.moe is None:
            gate, up = (h @ of["mlp.up.weight"].T).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ of["mlp.down.weight"].T
        else:
            own = {n.removeprefix("mlp."): t for n, t in of.items()}
            told = {"top_k": 2, "aux_loss": "sequence", "aux_coefficient": 0.3, "scale": 1 / count}
            y, loss, _ = experts_oracle(own, h, torch.ones_like(tokens, dtype=torch.bool), **told)
            x, balance = x + y, balance + loss
    logits = rms(x, p["norm.weight"]) @ p["head.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), balance


def parameters(config: GPTConfig) -> dict[str, Tensor]:
    """The whole model's first values, as every layout draws them."""
    whole = GPT(config, device="meta", dtype=torch.float64)
    materialize(whole, 0)
    return {name: p.detach().clone().requires_grad_() for name, p in whole.named_parameters()}


def truth(config: GPTConfig, parts: list[tuple[Tensor, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """The mean loss over all tokens and the gradients of the step."""
    p, count = parameters(config), sum(targets.numel() for _, targets in parts)
    total = torch.zeros((), dtype=torch.float64)
    for tokens, targets in parts:
        loss, balance = dense(p, config, tokens, targets, count)
        total = total + loss.detach() / count
        (loss / count + balance).backward()
    return float(total), {name: t.grad for name, t in p.items() if t.grad is not None}


def apart(config: GPTConfig) -> tuple[float, dict[str, Tensor]]:
    """As `truth`, of a model in one process that runs each document by itself: no mask, no documents."""
    model = GPT(config, dtype=torch.float64)
    model.load_state_dict({name: t.detach() for name, t in parameters(config).items()}, strict=False)
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
    if MODELS[model].moe is not None:
        arguments["loss_factor"] = run.loss_factor(run.count_tokens(y)).repeat(len(x))
    loss, gradients = want
    evaluated = run.evaluate(list(zip(x.split(2), y.split(2), strict=True)), documents=documents.split(2))
    assert evaluated == pytest.approx(loss, rel=TOLERANCE)
    assert float(run.forward_backward(x, y, **arguments)) == pytest.approx(loss, rel=TOLERANCE)
    same_gradients(run, gradients)


SP = {"sp": True}
LAYOUTS = [
    ("rope", {"tp": 3}, {}), ("rope", {"tp": 2}, {**SP, "compile": Compile("aot_eager")}),
    ("rope", {"cp": 2}, {"kind": "alltoall"}),
    ("rope", {"cp": 4, "cp_inner": 2}, {"kind": "two-level"}),
    ("four blocks", {"pp": 2}, {"schedule": "zbv", "virtual": 2}),
    ("rope", {"dp": 2}, {"zero": 3, "recompute": "full"}), ("learned", {"cp": 2, "tp": 2}, {"kind": "zigzag", **SP}),
    ("window", {"cp": 2}, {"kind": "zigzag", "recompute": "selective"}), ("experts", {"dp": 2, "ep": 2}, {}),
    ("experts", {"cp": 2, "tp": 2}, {"kind": "ring"}), ("latent", {"cp": 2}, {"kind": "zigzag"}),
    ("latent", {"tp": 2, "pp": 2}, SP),
]  # fmt: skip
_truths: dict[str, Any] = {}


@pytest.mark.parametrize(("model", "sizes", "options"), LAYOUTS, ids=str)
def test_every_layout_is_the_dense_model_with_its_mask_written_out(ranks, model, sizes, options):
    """Two micro-batches of several samples; latent attention against each document by itself."""
    if model not in _truths:
        _truths[model] = apart(MODELS[model]) if model == "latent" else truth(MODELS[model], [batch()])
    count = math.prod(size for axis, size in sizes.items() if axis in ("tp", "pp", "cp", "dp"))
    ranks(count, check_layout, model, sizes, options, _truths[model])


def test_rotary_positions_restart_in_each_document():
    """Rotation shows distances alone, so that no loss above would tell."""
    tokens, model = batch()[0], GPT(DENSE, device="meta")
    calls = model.calls(T, None, torch.float64, tokens.device, documents=document_ids(tokens, END))
    ((cos, sin), *_) = [arguments["rotary"] for _, arguments in calls]
    places = written_out(tokens, None)[1]
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
