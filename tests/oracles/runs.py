"""The example in one process beside the oracle: the cases, both runs of each, and how far they are apart."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from functools import cache
from typing import Any

import numpy as np
import torch

from mpcore import Mesh
from tests.oracles.settings import Settings
from tests.oracles.training import Batch, Trace, follow

MOE = {"experts": 4, "kv_heads": 2}
CASES: dict[str, dict[str, Any]] = {
    "all defaults": {}, "grouped queries": {"kv_heads": 2}, "one key head": {"kv_heads": 1},
    "tied embeddings": {"tie_embeddings": True}, "gpt2": {"preset": "gpt2"},
    "gpt2, dropout": {"preset": "gpt2", "dropout": 0.3}, "latent attention": {"preset": "tiny-mla"},
    "latent attention, dropout": {"preset": "tiny-mla", "dropout": 0.2}, "dropout": {"dropout": 0.2, "kv_heads": 2},
    "one token a micro-batch": {"seq_len": 1, "micro_batch": 1},
    "odd sizes": {
        "layers": 3, "d_model": 30, "heads": 5, "d_ff": 17, "seq_len": 13, "global_batch": 3, "micro_batch": 1,
    },
    "no accumulation": {"micro_batch": 4}, "four micro-batches": {"micro_batch": 1}, "clipped hard": {"clip": 0.05},
    "not clipped": {"clip": 0.0, "lr": 0.03}, "no warm-up": {"warmup": 0}, "warm-up longer than the run": {"warmup": 9},
    "linear": {"lr_schedule": "linear", "steps": 6, "warmup": 1},
    "stable and decay": {"lr_schedule": "wsd", "steps": 8, "warmup": 2},
    "a floor of the rate": {"min_lr": 1e-3, "steps": 6}, "decay to zero": {"min_lr": 0.0, "steps": 6},
    "attention dropout": {"attention_dropout": 0.3, "dropout": 0.1, "kv_heads": 2}, "a large eps": {"eps": 0.01},
    "tables of another rate": {"embedding_lr_scale": 0.25},
    "a tied table of another rate": {"embedding_lr_scale": 3.0, "tie_embeddings": True},
    "other betas": {"betas": (0.8, 0.99)}, "strong weight decay": {"weight_decay": 0.9, "preset": "gpt2", "lr": 0.02},
    "no weight decay": {"weight_decay": 0.0}, "muon": {"optimizer": "muon", "kv_heads": 2},
    "muon, gpt2": {"optimizer": "muon", "preset": "gpt2", "lr_schedule": "wsd", "steps": 6},
    "muon, latent attention": {"optimizer": "muon", "preset": "tiny-mla", "tie_embeddings": True},
    "muon, experts": {"optimizer": "muon", **MOE, "shared_experts": 1}, "experts": {**MOE},
    "experts, strong balance of sequences": {**MOE, "aux_coefficient": 0.5, "micro_batch": 1},
    "experts, balance of micro-batches": {**MOE, "aux_loss": "micro_batch", "aux_coefficient": 0.5},
    "experts, balance of the step before": {**MOE, "aux_loss": "global", "aux_coefficient": 0.5, "micro_batch": 1},
    "experts, bias": {**MOE, "balance": "bias", "bias_rate": 0.05, "steps": 6},
    "experts, no balance": {**MOE, "balance": "none", "top_k": 3, "routed_scale": 3.0},
    "experts, z-loss": {**MOE, "router_z_loss": 0.1},
    "experts, jitter and dropout": {**MOE, "router_jitter": 0.2, "dropout": 0.1},
    "experts, capacity": {**MOE, "capacity_factor": 0.7, "micro_batch": 1},
    "experts in every second block, shared": {**MOE, "moe_every": 2, "shared_experts": 2, "expert_d_ff": 5},
    "another seed": {"seed": 3, "dropout": 0.1}, "one held-out sample": {"eval_samples": 1},
}  # fmt: skip
ALWAYS = ("layers", "d_model", "heads", "d_ff", "seq_len", "global_batch", "micro_batch", "steps", "warmup", "dtype",
          "eval_samples")  # fmt: skip


@dataclasses.dataclass
class Both:
    """A case: the example's run and the oracle's."""

    settings: Settings
    got: Trace
    want: Trace
    trainer: Any
    first: dict[str, torch.Tensor]
    batches: list[Batch]
    held_out: Batch

    def errors(self) -> dict[str, float]:
        """How far the two are apart: numbers relative to the oracle's, weights to the largest of each tensor's."""
        got, want = self.got, self.want

        def relative(a: list[float], b: list[float]) -> float:
            pairs = [(x, y) for x, y in zip(a, b, strict=True) if math.isfinite(x) or math.isfinite(y)]
            return max(abs(x - y) / max(abs(y), 1e-300) for x, y in pairs)

        weights = [
            float((value - want.weights[name]).abs().max() / want.weights[name].abs().max().clamp(min=1e-300))
            for name, value in got.weights.items()
        ]
        return {
            "loss": relative(got.loss, want.loss), "norm": relative(got.norm, want.norm),
            "lr": relative(got.lr, want.lr), "scale": relative(got.scale, want.scale),
            "validation": relative([got.validation], [want.validation]), "weights": max(weights),
        }  # fmt: skip


@cache
def folder() -> tempfile.TemporaryDirectory:
    """A folder as long as the process lives."""
    return tempfile.TemporaryDirectory(prefix="oracle")


@cache
def corpus(seed: int = 0) -> str:
    """The prefix of a corpus whose held-out documents have other bytes than those for training.

    The samples of a run come from the library; here the two kinds are told apart by what they hold.
    """
    from examples.gpt.indexed_dataset import IndexedDatasetWriter
    from examples.gpt.samples import split_documents

    prefix, dice = f"{folder().name}/corpus{seed}", np.random.default_rng(seed)
    held_out = set(split_documents(60)[1].tolist())
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for i in range(60):
            low = 200 if i in held_out else 0
            writer.add_document([*dice.integers(low, low + (50 if low else 200), 40).tolist(), 256])
    return prefix


def flags_of(case: dict[str, Any]) -> list[str]:
    """The command of a case: what it doesn't name has the command's own default."""
    from examples.gpt.plan import with_set

    s, words = Settings(**case), []
    named = [*ALWAYS, *(name for name in case if name not in ALWAYS)]
    named += ["expert_d_ff"] if s.experts and "expert_d_ff" not in case else []
    for name in named:
        value = getattr(s, name)
        told = [] if value is True else [str(x) for x in (value if isinstance(value, tuple) else (value,))]
        words += [f"--{name.replace('_', '-')}", *told]
    words = with_set(words)
    if "balance" in case:  # of the example, aux_loss and bias_rate say it
        words = [word for word in words if word not in ("--balance", s.balance)]
        words += ["--set", "moe.aux_loss=none"] * (s.balance != "aux")
        words += ["--set", f"moe.bias_rate={s.bias_rate}"] * (s.balance == "bias")
    words += ["--set", "autocast=true"] if s.dtype == "bfloat16" else []
    return [*words, "--data", corpus(), "--device", "cpu", "--eval-every", "1", "--out", "unused"]


def build(case: dict[str, Any], *flags: str) -> Any:
    """The example's trainer of a case, with its first weights."""
    from examples.gpt.pretrain import Trainer, parse

    return Trainer(parse([*flags_of(case), *flags]), Mesh())


def batch(trainer: Any, samples: Any, indices: range) -> Batch:
    """Tokens, targets and global indices of these samples."""
    tokens, targets, arguments = trainer.batch(samples, indices)
    return tokens, targets, arguments["samples"]


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """A copy of each parameter; tied ones once."""
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def compare(case: dict[str, Any], half: torch.dtype | None = None, scaling: dict[str, Any] | None = None) -> Both:
    """Run a case in the example and in the oracle.

    Args:
        case: what is not default.
        half: the dtype in which the oracle rounds products.
        scaling: arguments of `torch.amp.GradScaler`, which the example's scaler gets too.
    """
    trainer, s = build(case), Settings(**case)
    scaler = None
    if scaling is not None:
        scaler = torch.amp.GradScaler("cpu", **scaling)
        trainer.run.scaler.scale = scaling["init_scale"]
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            setattr(trainer.run.scaler, name, scaling[name])
    first = weights_of(trainer)
    batches = [batch(trainer, trainer.train_samples, trainer.share(step)) for step in range(s.steps)]
    held_out = batch(trainer, trainer.setup.held_out, range(s.eval_samples))
    assert [int(i) for *_, samples in batches for i in samples] == list(range(s.steps * s.global_batch))
    assert all(torch.equal(tokens[:, 1:], targets[:, :-1]) for tokens, targets, _ in batches)
    assert all(int(x.max()) < 200 or int(x.max()) == 256 for x, *_ in batches)
    assert all(int(x[x < 256].min()) >= 200 for x in held_out[:2] if (x < 256).any())
    first = {name: p if half is None else p.float() for name, p in first.items()}  # as masters begin
    want = follow(s, first, batches, held_out, scaler=scaler, half=half)
    got = Trace()
    for step in range(s.steps):
        before = weights_of(trainer)
        entry = trainer.step()
        got.loss.append(entry["loss"])
        got.norm.append(entry["grad_norm"])
        got.lr.append(entry["lr"])
        got.scale.append(trainer.run.scaler.scale if trainer.run.scaler else 1.0)
        kept = all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
        got.skipped += [step] if kept else []
    got.validation, got.weights = trainer.evaluate(), weights_of(trainer)
    return Both(s, got, want, trainer, first, batches, held_out)
