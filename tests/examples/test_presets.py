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
    "layers_spec": None, "linear": None, "gate": None, "sinks": False, "post_norm": False, "embedding_scale": 1.0,
    "mtp": 0, "mtp_weight": 0.3,
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
    "dispatch": None, "latent_dim": None, "biased": False,
}  # fmt: skip
SIGMOID = {**MIXTURE, "score": "sigmoid", "normalize": True, "bias_rate": 0.001, "shared_experts": 1, "experts": 256,
           "top_k": 8}  # fmt: skip
LINEAR = {"heads": 32, "head_dim": 128, "key_heads": None, "key_dim": None, "state_dim": 16, "groups": 1,
          "convolution": 4}  # fmt: skip
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
    # `config.json` of Qwen/Qwen3-Next-80B-A3B-Instruct, and the defaults of transformers' Qwen3NextConfig (seq_len).
    "qwen3-next-80b-a3b": {
        **LLAMA, "vocab_size": 151936, "seq_len": 32768, "layers": 48, "d_model": 2048, "heads": 16, "kv_heads": 2,
        "head_dim": 256, "qk_norm": True, "rope_base": 1e7, "rope_fraction": 0.25, "gate": "channel",
        "layers_spec": ("delta", "delta", "delta", "full"), "linear": {**LINEAR, "key_heads": 16},
        "moe": {**MIXTURE, "experts": 512, "top_k": 10, "shared_experts": 1, "d_ff": 512, "aux_coefficient": 0.001}},
    # OpenAI 2025, arXiv:2508.10925, section 2 and table 1; `config.json` of openai/gpt-oss-20b.
    "gpt-oss-20b": {
        **LLAMA, "vocab_size": 201088, "seq_len": 131072, "layers": 24, "d_model": 2880, "heads": 64, "kv_heads": 8,
        "head_dim": 64, "norm_eps": 1e-5, "qkv_bias": True, "output_bias": True, "sinks": True, "rope_base": 150000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False,
                         "original_max_position_embeddings": 4096},
        "layers_spec": ("window=128", "full"),
        "moe": {**MIXTURE, "experts": 32, "top_k": 4, "d_ff": 2880, "biased": True, "aux_coefficient": 0.001}},
    # Gemma Team 2025, arXiv:2503.19786, section 2 and table 1: 302M of embeddings, 698M of others.
    "gemma-3-1b": {
        **LLAMA, "vocab_size": 262144, "seq_len": 32768, "layers": 26, "d_model": 1152, "heads": 4, "kv_heads": 1,
        "head_dim": 256, "d_ff": 6912, "activation": "geglu_tanh", "qk_norm": True, "rope_base": 1e6, "post_norm": True,
        "layers_spec": ("window=512+rope=1e4",) * 5 + ("full",), "embedding_scale": 1152**0.5, "tie_embeddings": True},
    # Kimi Team 2025, arXiv:2510.26692, sections 4 and 5; `config.json` of moonshotai/Kimi-Linear-48B-A3B-Instruct.
    "kimi-linear-48b": {
        **LLAMA, "vocab_size": 163840, "seq_len": 2**20, "layers": 27, "d_model": 2304, "heads": 32, "d_ff": 9216,
        "norm_eps": 1e-5, "linear": LINEAR, "layers_spec": (*(("kimi",) * 3 + ("full+no-rope",)) * 6, "kimi", "kimi",
                                                            "full+no-rope"),
        "latent": {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                   "v_head_dim": 128},
        "moe": {**SIGMOID, "d_ff": 1024, "dense": 1, "routed_scale": 2.446, "aux_loss": None}},
    # DeepSeek-AI 2024, arXiv:2412.19437, sections 4.2 and 2.2.
    "deepseek-v3": {
        **LLAMA, "vocab_size": 129280, "seq_len": 4096, "layers": 61, "d_model": 7168, "heads": 128, "d_ff": 18432,
        "mtp": 1, "latent": {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                             "v_head_dim": 128},
        "moe": {**SIGMOID, "d_ff": 2048, "dense": 3, "routed_scale": 2.5, "groups": 8, "top_groups": 4,
                "aux_coefficient": 0.0001}},
}  # fmt: skip


def test_the_presets_are_the_published_models():
    assert {name: dataclasses.asdict(config) for name, config in PRESETS.items()} == PUBLISHED


@pytest.mark.parametrize(("name", "parameters"), [
    ("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200),
    ("llama-7b", 6_738_415_616), ("llama-13b", 13_015_864_320), ("llama-65b", 65_285_660_672),
    ("llama3-70b", 70_553_706_496), ("llama3-1b", 1_235_814_400),
    ("llama3-8b", 8_030_261_248), ("mixtral-8x7b", 46_702_792_704), ("gemma-3-1b", 999_885_952),
    ("kimi-linear-48b", 49_122_675_072),  # these are transformers' own counts, less what `PRESETS` says is missing
    ("qwen3-next-80b-a3b", 79_674_391_296 - 48 * 2048), ("gpt-oss-20b", 20_914_757_184 - 24 * 32),
    ("deepseek-v3", 682_636_472_320),  # 671B, and the 14B of the MTP module without the two tables that it shares
])  # fmt: skip
def test_a_preset_has_as_many_parameters_as_the_published_weights(name, parameters):
    assert count_parameters(PRESETS[name]) == parameters
