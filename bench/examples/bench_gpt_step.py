"""A training step of the example's GPT on one thread, beside the same model in plain `torch.nn` and Hugging Face's."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.interleave import interleave, judge, spread
from bench.protocol import device_times
from examples.gpt.config import PRESETS, GPTConfig
from examples.gpt.console import PEAK_FLOPS
from examples.gpt.model import GPT, flops_of_token
from mpcore import vocab_parallel_cross_entropy

# GPT-2 small with a sixth of its width and a third of its layers; its heads have 64 dimensions, as there.
CONFIG = dataclasses.replace(PRESETS["gpt2"], vocab_size=2048, seq_len=256, layers=4, d_model=128, heads=2)
BATCH = 2


class PlainBlock(nn.Module):
    """GPT-2's block as one writes it in torch."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        D = c.d_model
        self.heads = c.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attention = nn.ModuleDict({"qkv": nn.Linear(D, 3 * D), "output": nn.Linear(D, D)})
        self.mlp = nn.ModuleDict({"up": nn.Linear(D, 4 * D), "down": nn.Linear(4 * D, D)})

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        B, T, D = x.shape
        qkv = self.attention["qkv"](self.attention_norm(x)).split(D, dim=-1)
        q, k, v = (t.view(B, T, self.heads, D // self.heads).transpose(1, 2) for t in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.attention["output"](y)
        return x + self.mlp["down"](F.gelu(self.mlp["up"](self.mlp_norm(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """GPT-2 in `torch.nn`; its parameters bear the names of the example's."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.seq_len, c.d_model)
        self.blocks = nn.ModuleList(PlainBlock(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, V]."""
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


HUGGING_FACE_NAMES = {
    "embedding": "transformer.wte", "position": "transformer.wpe", "blocks": "transformer.h", "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn", "attention.output": "attn.c_proj", "mlp_norm": "ln_2", "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj", "head": "lm_head",
}  # fmt: skip


def hugging_face(c: GPTConfig, state: dict[str, Tensor]) -> nn.Module:
    """transformers' GPT-2 with these weights, as its user gets it but without dropout."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_positions": c.seq_len, "n_embd": c.d_model, "n_layer": c.layers, "n_head": c.heads}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(vocab_size=c.vocab_size, **sizes, **off, bos_token_id=None, eos_token_id=None)
    model = transformers.GPT2LMHeadModel(config)
    renamed = {}
    for name, value in state.items():
        for ours, theirs in HUGGING_FACE_NAMES.items():
            name = name.replace(f"{ours}.", f"{theirs}.")
        name = name.replace("norm.", "transformer.ln_f.") if name.startswith("norm.") else name
        stored_transposed = ".c_" in name and name.endswith("weight")
        renamed[name] = value.t() if stored_transposed else value
    model.load_state_dict(renamed)
    return model.train()


def trainer(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], float]:
    """Forward, backward and AdamW, as the example trains; returns the loss before the step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)

    def step() -> float:
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(value.detach())

    return step


def training_steps(
    c: GPTConfig, batch: int, device: torch.device, dtype: torch.dtype
) -> tuple[dict[str, Callable[[], float]], int]:
    """Return by name a training step of the same weights and tokens, on a GPU compiled too, and how many tokens."""
    torch.manual_seed(0)
    ours, plain = GPT(c, device=device, dtype=dtype), PlainGPT(c).to(device, dtype)
    plain.load_state_dict(ours.state_dict())
    theirs = hugging_face(c, {name: x.cpu() for name, x in ours.state_dict().items()}).to(device, dtype)
    tokens = torch.randint(c.vocab_size, (batch, c.seq_len + 1), device=device)
    x, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def by_torch(model: nn.Module, forward: Callable[[Tensor], Tensor]) -> Callable[[], float]:
        return trainer(model, lambda: F.cross_entropy(forward(x).flatten(0, 1).float(), target.flatten()))

    calls = {
        "mpcore": trainer(ours, lambda: vocab_parallel_cross_entropy(ours(x), target)),
        "torch.nn": by_torch(plain, plain),
    }
    if device.type == "cuda":
        again = copy.deepcopy(plain)
        calls["torch.compile"] = by_torch(again, torch.compile(again, dynamic=False))
    calls["transformers"] = trainer(theirs, lambda: theirs(input_ids=x, labels=target, shift_labels=target).loss)
    return calls, x.numel()


@pytest.mark.benchmark(group="GPT training step")
def test_gpt_step(benchmark) -> None:
    """Targets: as many tokens a second as plain `torch.nn`, and 1.2 times as many as Hugging Face.

    Equal losses are asserted, speed is judged (`bench.interleave.judge`).
    """
    c = CONFIG
    calls, tokens = training_steps(c, BATCH, torch.device("cpu"), torch.float32)
    for _ in range(3):  # the second and third loss are equal only if gradients and updates are
        loss = calls["mpcore"]()
        assert calls["torch.nn"]() == pytest.approx(loss, rel=1e-6)
        assert calls["transformers"]() == pytest.approx(loss, rel=1e-5)

    times = interleave(calls, rounds=24, iterations=1, warmup=1)
    to_plain, to_theirs = times.ratio("torch.nn", "mpcore"), times.ratio("transformers", "mpcore")
    benchmark.extra_info |= {
        "shape": f"{c.layers} layers, width {c.d_model}, vocabulary {c.vocab_size}, tokens [{BATCH}, {c.seq_len}]",
        "tokens_per_second": {name: round(tokens / times.median(name)) for name in times},
        "ratios": {
            "tokens/s / the same model in torch.nn (at least 1.0)": round(to_plain, 3),
            "tokens/s / transformers GPT-2 (at least 1.2)": round(to_theirs, 3),
        },
    }
    benchmark.pedantic(calls["mpcore"], rounds=5, iterations=1)
    judge(benchmark.extra_info, "tokens/s over torch.nn's", times.ratios("torch.nn", "mpcore"), at_least=1.0)
    judge(benchmark.extra_info, "tokens/s over transformers'", times.ratios("transformers", "mpcore"), at_least=1.2)


ON_GPU = dataclasses.replace(PRESETS["gpt2"], vocab_size=50304, seq_len=2048, layers=8, d_model=2048, heads=16)
BATCH_ON_GPU = 8


def measure_on_gpu() -> dict[str, Any]:
    """Time a training step in bfloat16 on a GPU, beside plain `torch.nn`, the same compiled, and transformers.

    Returns:
        A row: shape, providers, ratios, and the kernels of one step of ours that take the GPU longest.
    """
    c = ON_GPU
    calls, tokens = training_steps(c, BATCH_ON_GPU, torch.device("cuda"), torch.bfloat16)
    first = {}
    for name, call in list(calls.items()):
        try:
            first[name] = call()
        except Exception as error:  # a peer that can't run is left out, and named
            if name == "mpcore":
                raise
            first[name] = f"{type(error).__name__}: {error}"[:200]
            del calls[name]
    for name in calls:
        assert first[name] == pytest.approx(first["mpcore"], rel=5e-3), first
    times = device_times(calls, 0.0)
    flops = flops_of_token(c) * tokens
    providers = {}
    for name, seconds in times.items():
        low, middle, high = spread(seconds)
        providers[name] = {
            "ms": round(1e3 * middle, 2), "ms_p20": round(1e3 * low, 2), "ms_p80": round(1e3 * high, 2),
            "tokens_per_second": round(tokens / middle), "mfu": round(flops / middle / PEAK_FLOPS["H100"], 4),
        }  # fmt: skip
    return {
        "shape": f"GPT-2 with {c.layers} layers, width {c.d_model}, vocabulary {c.vocab_size}, tokens "
        f"[{BATCH_ON_GPU}, {c.seq_len}], bfloat16 weights, fused AdamW",
        "first losses": first,
        "providers": providers,
        "ratios": {name: round(times.ratio(name, "mpcore"), 3) for name in times if name != "mpcore"},
        "kernels": longest(calls["mpcore"]),
    }


def longest(call: Callable[[], object], most: int = 30) -> list[tuple[str, float, int]]:
    """The kernels of a call that take the GPU longest: name, milliseconds and launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    found = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    return [(event.key[:90], round(event.self_device_time_total / 1e3, 3), event.count) for event in found[:most]]


@pytest.mark.benchmark(group="GPT training step on a GPU")
def test_gpt_step_on_a_gpu(benchmark) -> None:
    """Target: as many tokens a second as plain `torch.nn`, eager. First losses agree, or the bench is red."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    row = measure_on_gpu()
    benchmark.extra_info |= row | {"ratios": {f"time of {n} / ours": ratio for n, ratio in row["ratios"].items()}}
    benchmark.pedantic(torch.cuda.synchronize, rounds=1)
