"""Rotary embedding against Hugging Face's tables, and against multiplication by complex numbers."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mpcore import RotaryEmbedding, apply_rope
from tests.equality import close, draw

B, T, H, K = 2, 9, 3, 8
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "default": {"rope_type": "default"}, "linear": {"rope_type": "linear", "factor": 4.0}, "llama3": LLAMA3,
    "llama3 of a long model": {**LLAMA3, "original_max_position_embeddings": 8192}, "yarn": YARN,
    "yarn with its own betas": {**YARN, "beta_fast": 8, "beta_slow": 2},
    "yarn with its own amplitude": {**YARN, "attention_factor": 1.7},
    "yarn of DeepSeek": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn of gpt-oss": {**YARN, "truncate": False}, "yarn that shrinks": {**YARN, "factor": 1.0},
}  # fmt: skip


def huggingface(head_dim, base, scaling):
    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=256,
        rope_parameters={**scaling, "rope_theta": base},
    )  # fmt: skip
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [K, 64])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_are_huggingfaces(name, head_dim, base):
    theirs, ours = huggingface(head_dim, base, SCALINGS[name]), RotaryEmbedding(head_dim, base, scaling=SCALINGS[name])
    close(ours.inv_freq / theirs.inv_freq, torch.ones_like(ours.inv_freq), "frequencies", 1e-6)
    positions = torch.arange(T)
    cos, sin = ours(positions)
    cos_theirs, sin_theirs = theirs(torch.zeros(1), positions[None])
    close(cos, cos_theirs[0, :, : head_dim // 2], "cos", 1e-5)
    close(sin, sin_theirs[0, :, : head_dim // 2], "sin", 1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("batched", [False, True])
def test_turning_is_multiplication_by_a_unit_complex_number(interleaved, fraction, batched):
    rope = RotaryEmbedding(K, 100.0, fraction=fraction, interleaved=interleaved)
    turning = int(K * fraction)
    positions = torch.randint(0, 50, (B, T) if batched else (T,), generator=torch.Generator().manual_seed(3))
    x = draw(1, B, T, H, K).requires_grad_()
    y = apply_rope(x, *rope(positions, torch.float64), interleaved)
    frequencies = torch.tensor([100.0 ** (-2 * i / turning) for i in range(turning // 2)])
    angles = (positions[..., None].double() * frequencies.double()).expand(B, T, turning // 2)[:, :, None]
    front = x.detach()[..., :turning]
    real, imaginary = (front[..., 0::2], front[..., 1::2]) if interleaved else front.chunk(2, -1)
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)
    pairs = (turned.real, turned.imag)
    front = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    close(y.detach(), torch.cat([front, x.detach()[..., turning:]], -1), "turned", 1e-6)
    close(y.detach().norm(dim=-1), x.detach().norm(dim=-1), "length")
    y.backward(y.detach())  # the transpose of a turn is the turn back
    close(x.grad, x.detach(), "gradient")


def test_a_model_in_bfloat16_keeps_its_frequencies():
    rope = RotaryEmbedding(K)
    before = rope.inv_freq.clone()
    for moved in (rope.to(torch.bfloat16), rope.half(), rope.double(), rope.to("meta"), rope.to_empty(device="cpu")):
        assert moved.inv_freq.dtype == torch.float32
        assert torch.equal(moved.inv_freq, before)
    assert not list(rope.state_dict())
    with torch.device("meta"):
        assert torch.equal(RotaryEmbedding(K).inv_freq, before)
