"""Latent attention in the example: sizes on paper, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from examples.gpt.config import PRESETS, GPTConfig, LatentConfig
from examples.gpt.hf import SPEC
from examples.gpt.model import GPT, count_parameters
from mpcore.interop.hugging_face import architecture_of


def test_the_model_is_what_its_config_says():
    """Weights and biases of a block counted by hand; DeepSeek-V2-Lite's attention at its size."""
    latent = LatentConfig(kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    config = GPTConfig(layers=1, d_model=2048, heads=16, latent=latent, rope_base=1e4)
    block = GPT(config, device="meta").blocks["0"]
    attention = 2048 * 16 * 192 + 2048 * (512 + 64) + 512 + 512 * 16 * (128 + 128) + 16 * 128 * 2048
    assert sum(p.numel() for p in block.get_submodule("attention").parameters()) == attention
    again = GPTConfig(**dataclasses.asdict(config))
    assert again == config
    assert count_parameters(again) == count_parameters(config)
    assert GPT(PRESETS["tiny-mla"], device="meta").ropes[1e4].interleaved


def test_what_latent_attention_has_not_is_refused():
    latent = LatentConfig()
    with pytest.raises(ValueError, match="architecture has latent attention without experts"):
        architecture_of(GPTConfig(latent=latent), spec=SPEC)
    assert torch.is_tensor(GPT(GPTConfig(layers=1, latent=latent, bias=True), device="cpu")(torch.zeros(1, 2).long()))
