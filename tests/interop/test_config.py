"""How a config.json is read and written: each rule at its edges, and each architecture's fields written out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from mpcore.interop.hugging_face import config as module
from mpcore.interop.hugging_face.architectures import ARCHITECTURES
from mpcore.interop.hugging_face.config import RULES, Fields, ModelSpec, config_from_hf, config_to_hf

SIZES = {"vocab_size": 8, "max_position_embeddings": 32, "num_hidden_layers": 4, "hidden_size": 16,
         "num_attention_heads": 2, "intermediate_size": 24, "hidden_act": "silu"}  # fmt: skip
GPT2 = {"vocab_size": 8, "n_positions": 32, "n_layer": 4, "n_embd": 16, "n_head": 2}
OURS = {"vocab_size": 8, "seq_len": 32, "layers": 4, "d_model": 16, "heads": 2, "d_ff": 24, "tie_embeddings": False,
        "init_std": 0.02}  # fmt: skip
DECODER = OURS | {"activation": "swiglu", "kv_heads": 2, "head_dim": None, "norm_eps": 1e-6, "rope_base": 10000.0,
                  "rope_scaling": None}  # fmt: skip
PLAIN = {"qkv_bias": False, "output_bias": False, "mlp_bias": False}
LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK = OURS | {"qkv_bias": False, "output_bias": False, "norm_eps": 1e-6, "rope_base": 10000.0,
                   "rope_scaling": None, "latent": LATENT}  # fmt: skip
# What each architecture reads from the fields that it needs.
READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt2": (GPT2, OURS | {"d_ff": 64, "tie_embeddings": True, "norm_eps": 1e-5, "activation": "gelu_tanh",
                           "norm": "layer", "positions": "learned", "bias": True}),
    "llama": (SIZES, DECODER | PLAIN),
    "mistral": (SIZES | {"num_key_value_heads": 2}, DECODER | PLAIN | {"window": 4096}),
    "qwen2": (SIZES, DECODER | PLAIN | {"qkv_bias": True, "window": None}),
    "qwen3": (SIZES, DECODER | PLAIN | {"qk_norm": True, "head_dim": 128, "window": None}),
    "mixtral": (SIZES | {"num_key_value_heads": 2}, DECODER | PLAIN | {
        "window": None, "norm_eps": 1e-5, "rope_base": 1e6,
        "moe": {"experts": 8, "top_k": 2, "aux_coefficient": 0.001, "jitter": 0.0, "normalize": True}}),
    "phi3": (SIZES, DECODER | PLAIN | {"norm_eps": 1e-5, "window": None}),
    "qwen3_moe": (SIZES | {"num_key_value_heads": 2}, DECODER | PLAIN | {
        "qk_norm": True, "window": None,
        "moe": {"experts": 128, "top_k": 8, "aux_coefficient": 0.001, "d_ff": 768, "normalize": False, "every": 1}}),
    "deepseek_v2": (SIZES | {"num_experts_per_tok": 6}, DEEPSEEK | {
        "moe": {"experts": 64, "top_k": 6, "shared_experts": 2, "d_ff": 1407, "dense": 0, "routed_scale": 1.0,
                "aux_coefficient": 0.001, "score": "softmax", "normalize": False, "groups": 1, "top_groups": 1}}),
    "deepseek_v3": (SIZES, DEEPSEEK | {
        "moe": {"experts": 256, "top_k": 8, "shared_experts": 1, "d_ff": 2048, "dense": 3, "routed_scale": 2.5,
                "aux_coefficient": 0.001, "score": "sigmoid", "normalize": True, "groups": 8, "top_groups": 4,
                "bias": True}}),
}  # fmt: skip


@dataclass
class Config:
    """A model's configuration, whatever its fields are."""

    fields: dict[str, Any] = field(default_factory=dict)


def describe(config):
    """The fields, with the experts' width where it is that of the MLP."""
    moe = config.fields.get("moe")
    return config.fields | ({"moe": {"d_ff": config.fields["d_ff"], **moe}} if moe else {})


SPEC = ModelSpec(lambda **fields: Config(fields), describe, lambda config: {})


def described(kind, **changes):
    """A configuration of ours with what an export reads besides."""
    return Config(READ[kind][1] | {"window": READ[kind][1].get("window"), "dropout": 0.3} | changes)


@pytest.mark.parametrize("kind", READ)
def test_what_each_architecture_reads_and_writes(kind):
    values, ours = READ[kind]
    assert config_from_hf({"model_type": kind, **values}, spec=SPEC).fields == ours
    written = config_to_hf(described(kind), spec=SPEC, first=kind)
    assert (written["model_type"], written["architectures"]) == (kind, [ARCHITECTURES[kind].class_name])
    assert config_from_hf(written, spec=SPEC).fields == ours


@pytest.mark.parametrize(("values", "experts"), [
    ({}, 8), ({"num_experts": 3}, 3), ({"num_local_experts": 5}, 5), ({"num_local_experts": None, "num_experts": 3}, 3),
])  # fmt: skip
def test_experts_have_two_names(values, experts):
    ours, problems = module._read(ARCHITECTURES["mixtral"], SIZES | {"num_key_value_heads": 2} | values, "x")
    assert (ours["moe"]["experts"], problems) == (experts, [])


def read(rule, values, ours):
    """What a rule adds to our fields, and the problems."""
    c, before, ours = Fields(values, "x"), dict(ours), dict(ours)
    RULES[rule][0](c, ours)
    return {name: value for name, value in ours.items() if before.get(name, ...) != value}, c.problems, c.left


@pytest.mark.parametrize(("kv_heads", "head_dim", "found"), [
    (None, None, {"kv_heads": 4}), (2, 4, {"head_dim": None}), (2, 8, {}), (4, 16, {}),
    (0, 0, {"kv_heads": 4, "head_dim": None}),
])  # fmt: skip
def test_heads(kv_heads, head_dim, found):
    ours = {"heads": 4, "d_model": 16, "kv_heads": kv_heads, "head_dim": head_dim}
    assert read("heads", {}, ours)[:2] == (found, [])
    assert read("heads", {}, ours | {"d_model": 18, "head_dim": None})[0]["head_dim"] == 4  # 18 // 4, of 16 in all


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("values", "base", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 500}, 500.0, None),
        ({"rope_theta": 500, "rope_scaling": None, "rope_parameters": None}, 500.0, None),
        ({"rope_parameters": {"rope_theta": 700.0, "rope_type": "default"}}, 700.0, None),
        ({"rope_parameters": {"rope_theta": 700.0}, "rope_theta": 500.0}, 700.0, None),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 500.0}, 500.0,
         {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 10000.0, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": {"type": "x", "rope_type": "linear", "factor": 2.0}}, 10000.0,
         {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}, 10000.0,
         {"rope_type": "linear", "factor": 2.0}),
        ({"rope_parameters": {"rope_type": "llama3", **LLAMA3, "attention_factor": None}}, 10000.0,
         {"rope_type": "llama3", "original_max_position_embeddings": 32, **LLAMA3}),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}}, 10000.0,
         {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}),
        ({"rope_parameters": {"partial_rotary_factor": 1.0}, "partial_rotary_factor": None}, 10000.0, None),
    ],
)  # fmt: skip
def test_rope(values, base, scaling):
    found, problems, left = read("rope", values, {"seq_len": 32})
    assert (found, problems, left) == ({"rope_base": base, "rope_scaling": scaling}, [], {})
    assert type(found["rope_base"]) is float
    assert RULES["rope"][1](found) == {"rope_theta": base, "rope_scaling": scaling}


F, S = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("window", "types", "fits"),
    [(None, None, True), (None, [F, F], True), (None, [F, S], False), (None, [S, S], False), (4, [S, S], True),
     (4, [F, S], False), (4, [F, F], False), (4, None, True), (4, [], True)],
)  # fmt: skip
def test_layers_with_a_window(window, types, fits):
    problems = read("window", {"layer_types": types}, {"window": window})[1]
    assert problems == ([] if fits else [f"layer_types {types} are not supported: all layers have the same attention"])
    assert read("window", {}, {"window": window})[1] == []


@pytest.mark.parametrize(("values", "window", "types"), [
    ({}, None, None),
    ({"sliding_window": 5}, None, None),
    ({"use_sliding_window": True, "max_window_layers": 0}, 4096, None),
    ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}, 5, None),
    ({"use_sliding_window": True, "sliding_window": None}, None, None),
    ({"use_sliding_window": True, "sliding_window": 5}, None, None),  # from layer 28 on, of 4
    ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 4}, None, None),
    ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}, 5, [F, F, F, S]),
    ({"sliding_window": 5, "layer_types": [S] * 4}, 5, None),
    ({"sliding_window": 5, "layer_types": [F, S, F, S]}, 5, [F, S, F, S]),
    ({"sliding_window": 5, "layer_types": [F] * 4, "use_sliding_window": True}, None, None),
])  # fmt: skip
def test_the_window_of_qwen(values, window, types):
    found, problems, left = read("qwen_window", values, {"layers": 4})
    assert (found, left) == ({"window": window}, {})
    assert problems == (
        [] if types is None else [f"layer_types {types} are not supported: all layers have the same attention"]
    )
    fields = {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 0}
    assert RULES["qwen_window"][1](found) == fields
    assert RULES["qwen_moe_window"][1](found) == fields


def test_the_window_of_qwens_mixtures_begins_with_the_first_layer():
    on = {"use_sliding_window": True, "sliding_window": 5}
    assert read("qwen_moe_window", on, {"layers": 4})[:2] == ({"window": 5}, [])
    assert read("qwen_moe_window", on | {"max_window_layers": 0}, {"layers": 4})[1] == []
    unclear = read("qwen_moe_window", on | {"max_window_layers": 4}, {"layers": 4})[1]
    assert unclear == ["max_window_layers 4 means different things to different transformers: only 0 is clear"]
    assert read("qwen_moe_window", {"max_window_layers": 4}, {"layers": 4})[1] == []  # it means nothing without one
    for given in ({"layer_types": [S] * 4}, on | {"layer_types": [F] * 4}):  # transformers' mixtures don't read types
        assert read("qwen_moe_window", given, {"layers": 4})[1] != []


@pytest.mark.parametrize(
    ("step", "dense", "layers", "every"),
    [(1, [], 4, 1), (2, [], 4, 2), (2, [], 5, 2), (1, [0, 2], 4, 2), (3, None, 6, 3), (4, [], 4, 4),
     (1, [0, 1], 6, None), (1, [1], 4, None), (5, [], 4, None), (1, [0, 1, 2, 3], 4, None), (2, [3], 6, None),
     (1, [0], 2, 2)],
)  # fmt: skip
def test_which_layers_have_experts(step, dense, layers, every):
    values = {"decoder_sparse_step": step, "mlp_only_layers": dense}
    found, problems, left = read("sparse_layers", values, {"layers": layers})
    assert (len(problems), left) == (every is None, {})
    if every is not None:
        assert found == {"moe.every": every}
        assert RULES["sparse_layers"][1](found) == {"decoder_sparse_step": every, "mlp_only_layers": []}
    else:
        assert f"decoder_sparse_step {step} and mlp_only_layers {dense} put experts" in problems[0]
    assert read("sparse_layers", {}, {"layers": 3})[0] == {"moe.every": 1}


OF_V3 = {"latent.qk_nope_head_dim": 6, "latent.qk_rope_head_dim": 4, "heads": 3, "moe.shared_experts": 1,
         "moe.top_k": 4, "moe.groups": 4, "moe.top_groups": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "ours", "problem"),
    [
        ({}, {}, None),
        ({"num_key_value_heads": 3, "head_dim": 4, "qk_head_dim": 10}, {}, None),
        ({"num_key_value_heads": 1}, {}, "num_key_value_heads 1 is not supported: only 3 is"),
        ({"head_dim": 6}, {}, "head_dim 6 is not supported: only 4 is"),
        ({"qk_head_dim": 2}, {}, "qk_head_dim 2 is not supported: only 10 is"),
        ({}, {"moe.shared_experts": 0}, "n_shared_experts 0 is not supported: it must be 1 or more"),
        ({}, {"moe.top_k": 3}, None),  # 2 of each of two groups, rounded up
        ({}, {"moe.top_k": 2}, "num_experts_per_tok 2 and topk_group 2 of 4: transformers ranks groups by their two "
                               "best experts, mpcore by as many as a group gives, 1"),
        ({}, {"moe.top_k": 5}, "num_experts_per_tok 5 and topk_group 2 of 4: transformers ranks groups by their two "
                               "best experts, mpcore by as many as a group gives, 3"),
        ({}, {"moe.top_k": 5, "moe.top_groups": 4}, None),  # all groups: none is ranked
        ({}, {"moe.top_k": 2, "moe.groups": 1, "moe.top_groups": 1}, None),
    ],
)  # fmt: skip
def test_deepseek(values, ours, problem):
    found, problems, left = read("deepseek", values, OF_V3 | ours)
    assert (found, problems, left) == ({}, [] if problem is None else [problem], {})
    assert RULES["deepseek"][1](OF_V3) == {
        "num_key_value_heads": 3, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0
    }  # fmt: skip


def test_the_first_architecture_that_gives_the_same_model_is_written():
    """Llama comes before Mistral and the others; one that is asked for comes first if it fits."""
    plain = described("llama")
    assert module.architecture_of(plain, spec=SPEC) == "llama"
    assert module.architecture_of(plain, spec=SPEC, first="phi3") == "phi3"
    assert module.architecture_of(plain, spec=SPEC, first="qwen2") == "llama"  # whose projections have biases
    scaled = described("llama", rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert module.architecture_of(scaled, spec=SPEC, first="phi3") == "llama"  # transformers refuses it of Phi-3
    for kind in ("longrope", "linear"):  # of which transformers takes the first
        problems = read("plain_rope", {}, {"rope_scaling": {"rope_type": kind}})[1]
        assert problems == [f"rope_type '{kind}' is not supported: of this architecture only 'default' is"]
    window = described("mistral", window=5)
    assert module.architecture_of(window, spec=SPEC) == "mistral"
    assert module.architecture_of(window, spec=SPEC, first="phi3") == "phi3"
    assert module.architecture_of(window, spec=SPEC, first="llama") == "mistral"
    written = config_to_hf(window, spec=SPEC, first="phi3")
    assert (written["model_type"], written["architectures"], written["sliding_window"]) == (
        "phi3", ["Phi3ForCausalLM"], 5
    )  # fmt: skip
    with pytest.raises(ValueError, match="the closest is llama, but: mlp_bias None would be False"):
        module.architecture_of(described("llama", mlp_bias=None), spec=SPEC)
    latent = Config({**described("llama").fields, "latent": LATENT})
    with pytest.raises(ValueError, match="no supported Hugging Face architecture has latent attention without experts"):
        module.architecture_of(latent, spec=SPEC)
