"""Every number of every preset is that of the published model, or of the page that describes it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from examples.gpt.config import PRESETS
from examples.gpt.model import count_parameters

LLAMA: dict[str, Any] = {
    "kv_heads": None, "head_dim": None, "d_ff": None, "activation": "swiglu", "norm": "rms", "norm_eps": None,
    "qk_norm": False, "positions": "rope", "rope_base": 10000.0, "rope_scaling": None, "rope_fraction": 1.0,
    "window": None, "bias": False, "qkv_bias": None, "output_bias": None, "mlp_bias": None, "dropout": 0.0,
    "tie_embeddings": False, "init_std": 0.02, "moe": None, "latent": None, "attention_dropout": 0.0,
}  # fmt: skip
# Radford et al. 2019, and `config.json` of openai-community/gpt2: learned positions, gelu_new, biases, one table.
GPT2 = {**LLAMA, "vocab_size": 50257, "seq_len": 1024, "activation": "gelu_tanh", "norm": "layer",
        "positions": "learned", "bias": True, "tie_embeddings": True}  # fmt: skip
# Grattafiori et al. 2024, arXiv:2407.21783, table 3, and the models' `config.json`; samples are those of pretraining.
LLAMA3 = {**LLAMA, "vocab_size": 128256, "seq_len": 8192, "kv_heads": 8, "rope_base": 500000.0, "norm_eps": 1e-5}
MIXTURE = {
    "experts": 8, "top_k": 2, "shared_experts": 0, "d_ff": None, "every": 1, "dense": 0, "score": "softmax",
    "normalize": None, "routed_scale": 1.0, "groups": 1, "top_groups": None, "aux_loss": "sequence",
    "aux_coefficient": 0.01, "z_loss": 0.0, "bias_rate": 0.0, "bias": None, "jitter": 0.0, "capacity_factor": None,
    "dispatch": None,
}  # fmt: skip
LATENTS = {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
TINY = {**LLAMA, "vocab_size": 257, "seq_len": 256, "layers": 4, "d_model": 128, "heads": 4}  # docs/start.md
PUBLISHED: dict[str, dict[str, Any]] = {
    "tiny": TINY,
    "tiny-moe": {**TINY, "moe": {**MIXTURE, "d_ff": 192}},
    "tiny-mla": {**TINY, "latent": LATENTS},
    "gpt2": {**GPT2, "layers": 12, "d_model": 768, "heads": 12},
    "gpt2-medium": {**GPT2, "layers": 24, "d_model": 1024, "heads": 16},
    "gpt2-large": {**GPT2, "layers": 36, "d_model": 1280, "heads": 20},
    "gpt2-xl": {**GPT2, "layers": 48, "d_model": 1600, "heads": 25},
    # Touvron et al. 2023, arXiv:2302.13971, table 2, and the models' `params.json` (norm_eps).
    "llama-7b": {**LLAMA, "vocab_size": 32000, "seq_len": 2048, "layers": 32, "d_model": 4096, "heads": 32,
                 "d_ff": 11008},
    "llama-13b": {**LLAMA, "vocab_size": 32000, "seq_len": 2048, "layers": 40, "d_model": 5120, "heads": 40,
                  "d_ff": 13824},
    "llama-65b": {**LLAMA, "vocab_size": 32000, "seq_len": 2048, "layers": 80, "d_model": 8192, "heads": 64,
                  "d_ff": 22016, "norm_eps": 1e-5},
    "llama3-1b": {**LLAMA3, "layers": 16, "d_model": 2048, "heads": 32, "d_ff": 8192, "tie_embeddings": True},
    "llama3-8b": {**LLAMA3, "layers": 32, "d_model": 4096, "heads": 32, "d_ff": 14336},
    "llama3-70b": {**LLAMA3, "layers": 80, "d_model": 8192, "heads": 64, "d_ff": 28672},
    "llama3-405b": {**LLAMA3, "layers": 126, "d_model": 16384, "heads": 128, "d_ff": 53248},
    # Jiang et al. 2024, arXiv:2401.04088, table 1, and `config.json` (rope_theta, router_aux_loss_coef, rms_norm_eps).
    "mixtral-8x7b": {**LLAMA, "vocab_size": 32000, "seq_len": 32768, "layers": 32, "d_model": 4096, "heads": 32,
                     "kv_heads": 8, "d_ff": 14336, "rope_base": 1e6, "norm_eps": 1e-5,
                     "moe": {**MIXTURE, "aux_coefficient": 0.02}},
    # Narayanan et al. 2021, arXiv:2104.04473, table 1, the row of 1.7 billion; section 5: V = 51,200, s = 2048.
    "megatron-gpt": {**GPT2, "vocab_size": 51200, "seq_len": 2048, "layers": 24, "d_model": 2304, "heads": 24},
    "megatron-gpt-rope": {**GPT2, "vocab_size": 131072, "seq_len": 4096, "layers": 30, "d_model": 4096, "heads": 32,
                          "positions": "rope", "tie_embeddings": False},
    # Parmar et al. 2024, arXiv:2402.16819, table 1 and section 2.1: squared ReLU, no biases, tables not
    # tied, and `partial_rotary_factor` of transformers' NemotronConfig.
    "nemotron4-15b": {**LLAMA, "vocab_size": 256000, "seq_len": 4096, "layers": 32, "d_model": 6144, "heads": 48,
                      "kv_heads": 8, "d_ff": 24576, "activation": "relu_squared", "norm": "layer",
                      "rope_fraction": 0.5},
}  # fmt: skip


def test_the_presets_are_the_published_models():
    assert {name: dataclasses.asdict(config) for name, config in PRESETS.items()} == PUBLISHED


@pytest.mark.parametrize(("name", "parameters"), [
    ("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200),
    ("llama-7b", 6_738_415_616), ("llama-13b", 13_015_864_320), ("llama3-1b", 1_235_814_400),
    ("llama3-8b", 8_030_261_248), ("mixtral-8x7b", 46_702_792_704),
])  # fmt: skip
def test_a_preset_has_as_many_parameters_as_the_published_weights(name, parameters):
    assert count_parameters(PRESETS[name]) == parameters
