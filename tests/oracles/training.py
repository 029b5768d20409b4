"""The training loop written out, from first weights and batches that it is given. It imports torch alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.oracles.gpt import GPT, Call
from tests.oracles.muon import Muon
from tests.oracles.settings import Settings

Batch = tuple[Tensor, Tensor, Tensor]  # tokens [B, T], targets [B, T], samples [B]


@dataclass
class Trace:
    """What happened: a number for each step, the validation loss after the last one, and the weights."""

    loss: list[float] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    scale: list[float] = field(default_factory=list)  # after the step
    skipped: list[int] = field(default_factory=list)
    validation: float = math.nan
    weights: dict[str, Tensor] = field(default_factory=dict)


def rate(s: Settings, step: int) -> float:
    """The learning rate of a step: step `warmup - 1` has the highest; the step after the last would have the lowest.

    Sources: Loshchilov and Hutter 2017, equation 5; Hu et al. 2024, section 4 (a fifth of the run descends).
    """
    low = s.lr / 10 if s.min_lr is None else s.min_lr
    if step < s.warmup:
        return s.lr * (step + 1) / s.warmup
    first = s.warmup if s.lr_schedule != "wsd" else max(s.steps - s.steps // 5, s.warmup)
    done = min(max(step - first, 0) / max(s.steps - first, 1), 1)
    if s.lr_schedule == "cosine":
        return low + (s.lr - low) * (1 + math.cos(math.pi * done)) / 2
    return s.lr - (s.lr - low) * done


def build_optimizers(s: Settings, w: Mapping[str, Tensor]) -> tuple[torch.optim.AdamW, Muon | None]:
    """AdamW of torch, where matrices alone decay; with Muon it has tables, head and vectors."""
    trained = {name: p for name, p in w.items() if p.requires_grad}
    tables = ("embedding.weight", "position.weight", "head.weight")
    muon = None
    if s.optimizer == "muon":
        parts = []
        H, G, K = s.heads, s.kv_heads or s.heads, s.d_model // s.heads
        for name, p in list(trained.items()):
            if p.dim() > 1 and name not in tables:
                heights = {"qkv.weight": (H * K, G * K, G * K), "mlp.up.weight": (s.d_ff, s.d_ff)}
                whole = (p.shape[-2],)
                gated = s.preset != "gpt2" and name.endswith(("shared.up.weight", "experts.gate_up.weight"))
                found = next((v for end, v in heights.items() if name.endswith(end)), whole)
                found = (p.shape[-2] // 2,) * 2 if gated else found
                found = whole if s.preset == "gpt2" and name.endswith("mlp.up.weight") else found
                parts.append((trained.pop(name), found))
        muon = Muon(parts, s.weight_decay)
    named = trained.keys() & {"embedding.weight", "head.weight"} if s.embedding_lr_scale != 1 else ()
    ends = [trained.pop(name) for name in sorted(named)]
    matrices, vectors = ([p for p in trained.values() if (p.dim() > 1) is wide] for wide in (True, False))
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": s.weight_decay}]
    groups += [{"params": vectors, "weight_decay": 0.0}]
    groups += [{"params": ends, "weight_decay": s.weight_decay, "times": s.embedding_lr_scale}]
    return torch.optim.AdamW(groups, lr=s.lr, betas=s.betas, eps=s.eps), muon


def follow(
    s: Settings,
    first: Mapping[str, Tensor],
    batches: Sequence[Batch],
    held_out: Batch,
    *,
    scaler: torch.amp.GradScaler | None = None,
    half: torch.dtype | None = None,
) -> Trace:
    """Train, and measure the held-out samples at the end.

    Args:
        s: the run.
        first: weights by name; a name without a gradient in the run (biases of routers) has none here.
        batches: the samples of each step.
        held_out: the samples that are measured.
        scaler: torch's, of a run in float16.
        half: the dtype of matrix products in a run in half precision.
    """
    w = {name: p.clone().requires_grad_(not name.endswith(("expert_bias", "fractions"))) for name, p in first.items()}
    model, trace, fractions = GPT(s, w, half), Trace(), {}
    adamw, muon = build_optimizers(s, w)
    trained = [p for p in w.values() if p.requires_grad]
    for step, (tokens, targets, samples) in enumerate(batches):
        lr, total, counts = rate(s, step), 0.0, {}
        for group in adamw.param_groups:
            group["lr"] = lr * group.get("times", 1)
        for micro in torch.arange(len(tokens)).split(s.micro_batch):  # the last may be short
            call = Call(samples[micro], training=True, fractions=fractions)
            loss = cross_entropy(model.logits(tokens[micro], call), targets[micro])
            total += float(loss.detach())
            mean = (loss + call.extra) / targets.numel()
            (mean if scaler is None else scaler.scale(mean)).backward()
            counts = {name: counts.get(name, 0) + found for name, found in call.counts.items()}
        if scaler is not None:
            scaler.unscale_(adamw)
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in trained if p.grad is not None))
        if s.clip > 0 and norm > s.clip:
            for p in trained:
                p.grad.mul_(s.clip / norm) if p.grad is not None else None
        finite = math.isfinite(norm) and math.isfinite(total)
        if scaler is not None:
            scaler.step(adamw)
            scaler.update()
        elif finite:
            adamw.step()
            muon.step(lr) if muon is not None else None
        for p in trained:
            p.grad = None
        for name, count in counts.items():
            fractions[name] = count / count.mean()
            if f"{name}.fractions" in w:
                w[f"{name}.fractions"] = fractions[name]
            if s.balance == "bias":
                w[f"{name}.expert_bias"] += s.bias_rate * (count.mean() - count).sign()
        trace.loss.append(total / targets.numel())
        trace.norm.append(norm)
        trace.lr.append(lr)
        trace.scale.append(1.0 if scaler is None else scaler.get_scale())
        trace.skipped += [] if finite else [step]
    tokens, targets, samples = held_out
    with torch.no_grad():
        logits = model.logits(tokens, Call(samples, training=False, fractions=fractions))
        trace.validation = float(cross_entropy(logits, targets)) / targets.numel()
    trace.weights = {name: p.detach() for name, p in w.items()}
    return trace


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum over tokens, in nats."""
    return (logits.logsumexp(-1) - logits.gather(-1, targets[..., None])[..., 0]).sum()
