"""Every number of every preset is that of the published model, or of the page that describes it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from examples.gpt.config import GPTConfig, LatentConfig, Layout, MoEConfig
from examples.gpt.flops import count_active_parameters, count_parameters
from examples.gpt.presets import PRESETS
from mpcore import Mesh

LLAMA: dict[str, Any] = {
    "kv_heads": None, "head_dim": None, "d_ff": None, "activation": "swiglu", "norm": "rms", "norm_eps": None,
    "qk_norm": False, "positions": "rope", "rope_base": 10000.0, "rope_scaling": None, "window": None, "bias": False,
    "qkv_bias": None, "output_bias": None, "mlp_bias": None, "dropout": 0.0, "tie_embeddings": False,
    "init_std": 0.02, "moe": None, "latent": None,
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
    # Parmar et al. 2024, arXiv:2402.16819, table 1: squared ReLU, RoPE, no biases, tables not tied.
    "nemotron4-15b": {**LLAMA, "vocab_size": 256000, "seq_len": 4096, "layers": 32, "d_model": 6144, "heads": 48,
                      "kv_heads": 8, "d_ff": 24576, "activation": "relu_squared", "norm": "layer"},
}  # fmt: skip


def test_the_presets_are_the_published_models():
    assert {name: dataclasses.asdict(config) for name, config in PRESETS.items()} == PUBLISHED


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200),
        ("llama-7b", 6_738_415_616), ("llama3-1b", 1_235_814_400), ("llama3-8b", 8_030_261_248),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)  # fmt: skip
def test_a_preset_has_as_many_parameters_as_the_published_weights(name, parameters):
    assert count_parameters(PRESETS[name]) == parameters


def test_a_token_of_mixtral_uses_two_of_eight_experts():
    """12.9 billion parameters: 46.7 less six of the eight experts, of three matrices, in each of 32 layers."""
    unused = 32 * 6 * 3 * 4096 * 14336
    assert count_active_parameters(PRESETS["mixtral-8x7b"]) == 46_702_792_704 - unused


# --- the rules that derive what a configuration does not say ----------------------------------------------------------


def test_a_configuration_derives_what_it_does_not_say():
    c = GPTConfig()
    assert [GPTConfig(norm=n, norm_eps=e).eps for n, e in (("rms", None), ("layer", None), ("rms", 0.0))] == [
        1e-6,
        1e-5,
        0,
    ]
    assert (c.head_width, GPTConfig(head_dim=24).head_width, GPTConfig(d_model=96).head_width) == (32, 24, 24)
    assert c.hidden == 384  # 8/3 of 128 is 341.3: six times 64
    assert GPTConfig(d_model=96).hidden == 256, "8/3 of 96 is a multiple of 64 itself"
    assert [GPTConfig(d_model=d, heads=1).hidden for d in (24, 25, 97)] == [64, 128, 320]
    assert GPTConfig(d_ff=100).hidden == 100
    assert [GPTConfig(activation=a).hidden for a in ("geglu", "gelu", "relu_squared")] == [384, 512, 512]
    assert GPTConfig(layers=8, init_std=0.4).output_std == pytest.approx(0.1, rel=1e-12)
    assert GPTConfig(bias=True).biases == (True, True, True)
    assert GPTConfig(qkv_bias=True).biases == (True, False, False)
    assert GPTConfig(output_bias=True).biases == (False, True, False)
    assert GPTConfig(bias=True, mlp_bias=False).biases == (True, True, False)


def test_a_configuration_is_a_key_and_a_layout_is_of_one_process():
    scaled = GPTConfig(rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert hash(scaled) == hash(GPTConfig())  # `lru_cache` takes it; a dict has no hash
    assert scaled != GPTConfig()
    assert Layout() == Layout(Mesh(), "zigzag", sequence_parallel=False, device=None, dtype=None)


def test_blocks_that_have_experts():
    def which(layers: int, **moe: int) -> list[int]:
        config = GPTConfig(layers=layers, moe=MoEConfig(**moe))
        return [i for i in range(layers) if config.has_experts(i)]

    assert which(4) == [0, 1, 2, 3]
    assert which(6, every=2) == [1, 3, 5]
    assert which(6, every=3) == [2, 5]
    assert which(5, dense=2) == [2, 3, 4]
    assert which(6, dense=2, every=2) == [3, 5]
    assert which(4, every=4) == [3]
    assert not any(GPTConfig().has_experts(i) for i in range(4))


def test_a_configuration_reads_its_parts_from_a_checkpoint():
    for config in (PRESETS["tiny-moe"], PRESETS["tiny-mla"]):
        assert GPTConfig(**dataclasses.asdict(config)) == config


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        *(({name: 0}, f"{name} 0 is smaller than 1") for name in ("vocab_size", "seq_len", "layers", "d_model")),
        ({"heads": 0}, "heads 0 is smaller than 1"),
        ({"layers": 10_001}, "layers 10001 is more than 10000"),
        ({"heads": 3}, "d_model 128 is not a multiple of heads 3"),
        ({"kv_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
        ({"kv_heads": 0}, "heads 4 is not a multiple of kv_heads 0"),
        ({"norm": "batch"}, "norm 'batch' must be 'rms' or 'layer'"),
        ({"positions": "alibi"}, "positions 'alibi' 'rope' or 'learned'"),
        ({"latent": LatentConfig(), "kv_heads": 2}, "latent attention has no {'kv_heads': 2}"),
        ({"latent": LatentConfig(), "head_dim": 32}, "latent attention has no {'head_dim': 32}"),
        ({"latent": LatentConfig(), "qk_norm": True}, "latent attention has no {'qk_norm': True}"),
        ({"latent": LatentConfig(), "qkv_bias": True}, "latent attention has no biases of one projection alone"),
        ({"latent": LatentConfig(), "output_bias": True}, "latent attention has no biases of one projection alone"),
        ({"moe": MoEConfig(experts=6), "bias": True}, "6 experts in the place of an MLP with biases"),
        ({"moe": MoEConfig(every=0)}, "moe every 0 is not between 1 and the 4 layers"),
        ({"moe": MoEConfig(every=5)}, "moe every 5 is not between 1 and the 4 layers"),
        ({"moe": MoEConfig(dense=-1)}, "moe dense -1 leaves no experts in the 4 layers"),
        ({"moe": MoEConfig(dense=4)}, "moe dense 4 leaves no experts in the 4 layers"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        GPTConfig(**changes)


def test_the_limits_of_a_configuration_are_legal():
    for changes in (
        {"vocab_size": 1, "seq_len": 1, "layers": 1, "d_model": 1, "heads": 1},
        {"layers": 10_000},
        {"heads": 3, "head_dim": 5},
        {"kv_heads": 4},
        {"kv_heads": 1},
        {"latent": LatentConfig(), "bias": True},
        {"latent": LatentConfig(), "heads": 3},
        {"latent": LatentConfig(), "qkv_bias": True, "output_bias": True},
        {"moe": MoEConfig(every=4)},
        {"moe": MoEConfig(dense=3)},
        {"moe": MoEConfig(), "bias": True, "mlp_bias": False},
    ):
        GPTConfig(**changes)  # type: ignore[arg-type]
