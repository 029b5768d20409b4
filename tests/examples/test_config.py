"""The rules by which a configuration derives what it does not say, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from examples.gpt.config import PRESETS, GPTConfig, LatentConfig, LinearConfig, MoEConfig


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
    for config in (PRESETS["tiny-moe"], PRESETS["tiny-mla"], PRESETS["kimi-linear-48b"]):
        assert GPTConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config


@pytest.mark.parametrize(("changes", "sentence"), [
    *(({name: 0}, f"{name} 0 is smaller than 1") for name in ("vocab_size", "seq_len", "layers", "d_model")),
    ({"heads": 0}, "heads 0 is smaller than 1"), ({"layers": 10_001}, "layers 10001 is more than 10000"),
    ({"heads": 3}, "d_model 128 is not a multiple of heads 3"),
    ({"kv_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
    ({"kv_heads": 0}, "heads 4 is not a multiple of kv_heads 0"),
    ({"norm": "batch"}, "norm 'batch' must be 'rms' or 'layer'"),
    ({"positions": "alibi"}, "positions 'alibi' 'rope' or 'learned'"),
    ({"positions": "learned", "rope_fraction": 0.5}, "rope_fraction 0.5 needs positions 'rope'"),
    ({"latent": LatentConfig(), "rope_fraction": 0.5}, "rope_fraction 0.5 needs positions 'rope' and no latent"),
    ({"latent": LatentConfig(), "kv_heads": 2}, "latent attention has no {'kv_heads': 2}"),
    ({"latent": LatentConfig(), "head_dim": 32}, "latent attention has no {'head_dim': 32}"),
    ({"latent": LatentConfig(), "qk_norm": True}, "latent attention has no {'qk_norm': True}"),
    ({"latent": LatentConfig(), "qkv_bias": True}, "latent attention has no biases of one projection alone"),
    ({"latent": LatentConfig(), "output_bias": True}, "latent attention has no biases of one projection alone"),
    ({"latent": LatentConfig(), "attention_dropout": 0.1}, "attention_dropout 0.1 needs attention without latents"),
    ({"moe": MoEConfig(experts=6), "bias": True}, "6 experts in the place of an MLP with biases"),
    ({"moe": MoEConfig(every=0)}, "moe every 0 is not between 1 and the 4 layers"),
    ({"moe": MoEConfig(every=5)}, "moe every 5 is not between 1 and the 4 layers"),
    ({"moe": MoEConfig(dense=-1)}, "moe dense -1 leaves no experts in the 4 layers"),
    ({"moe": MoEConfig(dense=4)}, "moe dense 4 leaves no experts in the 4 layers"),
    ({"moe": MoEConfig(biased=True), "activation": "geglu"}, "moe biased has a clamped SwiGLU, and the"),
    ({"latent": LatentConfig(), "gate": "head"}, "latent attention has no {'gate': 'head'}"), ({"mtp": -1}, "mtp -1"),
    ({"sinks": True, "attention_dropout": 0.1}, "attention_dropout 0.1 needs attention without latents, gate None"),
    *(({"layers_spec": (text,), "moe": MoEConfig()}, f"layers_spec: {word!r} in {text!r} is none of window=N,")
      for text, word in {"deta": "deta", "full+moe=3": "moe=3", "window=": "window=", "rope=-1": "rope=-1"}.items()),
    ({"layers_spec": ("full+window=3",)}, "layers_spec: two words of 'full+window=3' set window: give one"),
    ({"layers_spec": ("kimi+rope=5",)}, "layers_spec: two words of 'kimi+rope=5' set rope_base: give one"),
    ({"layers_spec": ("delta",) * 5}, "layers_spec has 5 kinds for 4 layers: give from 1 to 4"),
    ({"layers_spec": ()}, "layers_spec has 0 kinds for 4"), ({"layers_spec": ("moe",)}, "layers_spec has moe, but the"),
    ({"layers_spec": ("dense", "moe"), "moe": MoEConfig(every=2)}, "moe every 2 and dense 0, and layers_spec"),
    *(({"layers_spec": spec, **given}, f"no block of layers_spec {list(spec)} has {name}: leave it out")
      for spec, given, name in ((("dense",), {"moe": MoEConfig()}, "moe"), (("full",), {"window": 3}, "window"),
                                (("mamba",), {"kv_heads": 2}, "kv_heads"),
                                (("full",), {"linear": LinearConfig()}, "linear"),
                                (("kimi",), {"linear": LinearConfig(groups=2)}, "linear.groups"))),
])  # fmt: skip
def test_a_configuration_that_contradicts_itself_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        GPTConfig(**changes)
