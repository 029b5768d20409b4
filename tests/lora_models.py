"""A Hugging Face model with LoRA in plain torch, and the same on a mesh: what the tests of LoRA compare."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import mpcore as mp
from mpcore.interop.lora import add_lora
from tests.pool import mesh

hf = pytest.importorskip("transformers")

V, T, STEPS, RANK, ALPHA = 33, 6, 8, 3, 5.0
LLAMA = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 4}
LLAMA |= {"num_key_value_heads": 2, "intermediate_size": 10, "max_position_embeddings": 16}
GPT2 = {"vocab_size": V, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "decoder_sparse_step": 1}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**LLAMA, pad_token_id=None)),
    "qwen3 moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**LLAMA, **MIXTURE)),
}


class Plain(nn.Module):
    """LoRA in plain torch, from the paper's formula: what everything here is compared with."""

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor, scaling: float) -> None:
        super().__init__()
        self.base, self.a, self.b, self.scaling = base, nn.Parameter(a), nn.Parameter(b), scaling

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scaling * (x @ self.a.T @ self.b.T)


class PlainGrouped(Plain):
    """The same for one weight of all experts."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scaling * self.b @ self.a


def fill(model: nn.Module) -> None:
    """Random logical values in all parameters, the same on every layout: B too, which begins as 0."""
    declared = mp.sharding.shardings(model)
    for name, p in model.named_parameters():
        draws = torch.Generator().manual_seed(sum(map(ord, name)))
        full = torch.rand(declared[name].shape, generator=draws, dtype=torch.float64) - 0.5
        with torch.no_grad():
            p.copy_(declared[name].take(full))


TARGETS = {
    "llama": ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj"),
    "phi3": ("qkv_proj", "gate_up_proj", "down_proj"),
    "qwen3 moe": ("q_proj", "experts.gate_up_proj", "experts.down_proj"),
}


def build(name: str) -> nn.Module:
    """The dense model, with random values in every parameter."""
    model = MODELS[name]().double()
    if name == "qwen3 moe":
        model.set_experts_implementation("eager")  # torch's grouped product has no float64
    fill(model)
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Four samples that count upwards, of one of which targets are missing."""
    first = torch.randint(V, (4, 1), generator=torch.Generator().manual_seed(step))
    text = (first + torch.arange(T + 1)) % V
    target = text[:, 1:].clone()
    target[1, : step % T] = -100
    return text[:, :-1], target


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")


def dense_losses(name: str, seed: int = 0) -> tuple[list[float], dict[str, Tensor]]:
    """Train the formula in plain torch; also the merged weights."""
    model = build(name)
    factors = {}
    for key, layer in list(model.named_modules()):
        if key.rpartition(".")[2] in TARGETS[name]:
            n_in, n_out = (
                (layer.in_features, layer.out_features) if hasattr(layer, "in_features") else layer.weight.shape
            )
            a, b = torch.empty(RANK, n_in, dtype=torch.float64), torch.zeros(n_out, RANK, dtype=torch.float64)
            draws = mp.random.generator(seed, f"{key}.lora_A.weight")
            nn.init.kaiming_uniform_(a, a=5**0.5, generator=draws)
            parent, _, child = key.rpartition(".")
            factors[key] = Plain(layer, a, b, ALPHA / RANK)
            setattr(model.get_submodule(parent), child, factors[key])
    for key, weight in list(model.named_parameters()):
        if any(key.endswith(f".{target}") for target in TARGETS[name]):
            a = torch.empty(len(weight), RANK, weight.shape[2], dtype=torch.float64)
            draws = mp.random.generator(seed, f"{key}_lora.lora_A.weight")
            nn.init.uniform_(a, -(weight.shape[2] ** -0.5), weight.shape[2] ** -0.5, generator=draws)
            b = torch.zeros(*weight.shape[:2], RANK, dtype=torch.float64)
            factors[key] = PlainGrouped(nn.Module(), a, b, ALPHA / RANK)
            parent, _, leaf = key.rpartition(".")
            parametrize.register_parametrization(model.get_submodule(parent), leaf, factors[key])
    model.requires_grad_(False)
    trained = [p.requires_grad_() for layer in factors.values() for p in (layer.a, layer.b)]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    losses = []
    for step in range(STEPS):
        x, target = batch(step)
        loss = token_loss(model(x).logits, target) / (target != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        merged = build(name).state_dict()
        for key, layer in factors.items():
            product = layer.scaling * layer.b @ layer.a
            if key in merged:
                merged[key] += product
                continue
            merged[f"{key}.weight"] += (
                product if merged[f"{key}.weight"].shape == product.shape and name != "gpt2" else product.T
            )
    return losses, merged


def start(name: str, sizes: dict[str, int], beside: tuple[str, ...] = (), patterns: Any = None, **told) -> mp.Run:
    """The same model with adapters on a mesh. The modules `beside` are trained, too."""
    on = mesh(**sizes)
    model = mp.parallelize(build(name), tp=on.tp, ep=on.ep, etp=on.etp, check=False)
    add_lora(model, RANK, ALPHA, TARGETS[name], **(patterns or {}))
    for module in beside:
        model.get_submodule(module).requires_grad_()
    return mp.prepare(
        model, on, blocks=next(m for m in model.modules() if isinstance(m, nn.ModuleList)), initialize=False,
        loss=lambda out, target: token_loss(out.logits, target),
        optimizer=lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02), **told,
    )  # fmt: skip


def train(run: mp.Run, steps: int = STEPS) -> list[float]:
    losses = []
    while run.step < steps:
        x, target = batch(run.step)
        share = run.share(len(x))
        run.forward_backward(x[share.start : share.stop], target[share.start : share.stop])
        losses.append(run.optimizer_step().loss)
    return losses


def same_losses(got: list[float], want: list[float]) -> None:
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        assert abs(a - b) <= 1e-9 * abs(b), f"step {step}: {a!r}, wanted {b!r}"


LAYOUTS = {
    "alone": (1, {}, {}), "tp2": (2, {"tp": 2}, {}), "dp2": (2, {}, {"data": mp.Zero(0), "micro_batches": 2}),
    "zero1": (2, {}, {"data": mp.Zero(1)}), "zero2": (2, {}, {"data": mp.Zero(2), "micro_batches": 2}),
    "zero3": (2, {}, {"data": mp.Zero(3), "recompute": "full"}), "tp2 zero3": (4, {"tp": 2}, {"data": mp.Zero(3)}),
    "ep2": (2, {"ep": 2}, {"data": mp.Zero(0)}), "tp2 ep2": (4, {"tp": 2, "ep": 2}, {"data": mp.Zero(1)}),
    "tp2 ep2 etp1": (2, {"tp": 2, "ep": 2, "etp": 1}, {}), "ep2 zero3": (4, {"ep": 2}, {"data": mp.Zero(3)}),
}  # fmt: skip
