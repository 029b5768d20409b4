"""The tables of Hugging Face's architectures, beside the classes of transformers and written out by hand."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mpcore.interop.hugging_face.architectures import _PLAIN, ARCHITECTURES, NEEDED

KINDS = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "phi3", "qwen3_moe", "deepseek_v2", "deepseek_v3")
DENSE = {"vocab_size", "max_position_embeddings", "num_hidden_layers", "hidden_size", "num_attention_heads"}
DENSE |= {"intermediate_size", "hidden_act"}
# Fields without which a config.json is refused: the others have the default of transformers.
REQUIRED = dict.fromkeys(KINDS, DENSE) | {
    "gpt2": {"vocab_size", "n_positions", "n_layer", "n_embd", "n_head"},
    "deepseek_v2": DENSE - {"hidden_act"} | {"num_experts_per_tok"},
    "deepseek_v3": DENSE - {"hidden_act"},
}
# None: from other fields, or nothing.
DERIVED = {
    "gpt2": {"n_inner"}, "llama": {"num_key_value_heads", "head_dim"}, "mistral": {"head_dim"},
    "qwen2": {"num_key_value_heads", "head_dim"}, "qwen3": {"num_key_value_heads"},
    "mixtral": {"head_dim", "sliding_window"}, "phi3": {"num_key_value_heads", "head_dim", "sliding_window"},
    "qwen3_moe": {"head_dim"}, "deepseek_v2": set(), "deepseek_v3": set(),
}  # fmt: skip


def theirs(kind):
    return type(AutoConfig.for_model(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_is_left_out_has_the_value_of_transformers_class(kind):
    fields, config = ARCHITECTURES[kind].fields, theirs(kind)()
    assert {name for name, field in fields.items() if field.default is NEEDED} == REQUIRED[kind]
    assert {name for name, field in fields.items() if field.default is None} == DERIVED[kind]
    of_training = {"aux_loss_alpha": 0.001}  # not in transformers' class; DeepSeek's own has this value
    for name, field in fields.items():
        if name not in REQUIRED[kind] | DERIVED[kind]:
            assert field.default == (of_training[name] if name in of_training else getattr(config, name)), name
    for name, only in ARCHITECTURES[kind].only.items():
        assert getattr(config, name, only) == only, name


@pytest.mark.parametrize("kind", KINDS)
def test_the_tensors_are_those_of_transformers_model(kind):
    """Every module that holds tensors has a name here: with a dense first layer, and all norms and projections."""
    small = {
        "vocab_size": 8, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8,
        "max_position_embeddings": 8, "num_experts": 2, "num_local_experts": 2, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 4, "first_k_dense_replace": 1, "q_lora_rank": 4,
        "kv_lora_rank": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "n_group": 1, "topk_group": 1,
        "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
        "attention_bias": True, "mlp_bias": kind == "llama", "mlp_only_layers": [0],
    }  # fmt: skip
    config = theirs(kind)()
    for name, value in small.items():
        if hasattr(config, name) and not (kind.startswith("deepseek") and name == "head_dim"):
            setattr(config, name, value)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    state = model.state_dict()
    mixed = {name.rpartition(".")[0] for name in state if ".mlp.experts." in name}  # stored expert by expert on disk
    modules = {name.rpartition(".")[0] for name in state} - mixed
    architecture = ARCHITECTURES[kind]
    names = [*architecture.ends.values()]
    for layer in range(2):
        for theirs_ in architecture.block.values():
            names += [f"{architecture.layers}.{layer}.{each}" for each in theirs_.split() if "{}" not in each]
    known = {name.replace("block_sparse_moe.gate", "mlp.gate") for name in names}  # mixtral's, renamed at the load
    assert modules <= known, modules - known
    weights = {name for name in state if name.endswith("weight")}
    stored = {ours: f"{architecture.layers}.0.{architecture.block[ours]}.weight" for ours in architecture.transposed}
    assert stored.keys() == ({"attention.qkv", "attention.output", "mlp.up", "mlp.down"} if kind == "gpt2" else set())
    assert set(stored.values()) <= weights
    if kind == "gpt2":
        assert state[stored["attention.qkv"]].shape == (16, 48)  # [in, out]


def test_names_of_activations():
    """By what each computes, in transformers and here."""
    from transformers.activations import ACT2FN

    from mpcore.layers.mlp import ACTIVATIONS

    x = torch.linspace(-3, 3, 33, dtype=torch.float64)
    tables = [(_PLAIN, 1), (ARCHITECTURES["llama"].fields["hidden_act"].words, 2)]
    assert set(tables[0][0]) == set(tables[1][0]) | {"relu"}
    assert next(iter(_PLAIN)) == "gelu_new"  # the name that an export writes
    for words, halves in tables:
        for name, ours in words.items():
            activation = ACTIVATIONS[ours]
            given = x if halves == 1 else torch.cat([x, torch.ones_like(x)])
            torch.testing.assert_close(activation(given), ACT2FN[name](x), rtol=1e-6, atol=1e-6)
