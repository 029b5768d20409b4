"""The tables of Hugging Face's architectures, beside the classes of transformers and written out by hand."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mpcore.interop.hugging_face.architectures import _PLAIN, ARCHITECTURES, NEEDED, REFUSED

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
    "gpt2": {"n_inner"},
    "llama": {"num_key_value_heads", "head_dim"},
    "mistral": {"head_dim"},
    "qwen2": {"num_key_value_heads", "head_dim"},
    "qwen3": {"num_key_value_heads"},
    "mixtral": {"head_dim", "sliding_window"},
    "phi3": {"num_key_value_heads", "head_dim", "sliding_window"},
    "qwen3_moe": {"head_dim"},
    "deepseek_v2": set(),
    "deepseek_v3": set(),
}
TRAINED = {"dropout"}
MIXTURE = TRAINED | {f"moe.{n}" for n in ("aux_loss", "aux_coefficient", "z_loss", "bias_rate", "bias", "dispatch")}
FORGOTTEN = dict.fromkeys(KINDS, TRAINED) | {
    "gpt2": TRAINED | {"rope_base", "rope_scaling"},
    "mixtral": MIXTURE | {"d_ff"},
    "qwen3_moe": MIXTURE | {"moe.jitter"},
    "deepseek_v2": MIXTURE,
    "deepseek_v3": MIXTURE - {"moe.bias"},
}
RULES = {
    "gpt2": ("gpt2",),
    "llama": ("heads", "rope"),
    "mistral": ("heads", "rope", "window"),
    "qwen2": ("heads", "rope", "qwen_window"),
    "qwen3": ("heads", "rope", "qwen_window"),
    "mixtral": ("heads", "rope", "window", "mixtral"),
    "phi3": ("heads", "rope", "window"),
    "qwen3_moe": ("heads", "rope", "qwen_moe_window", "sparse_layers"),
    "deepseek_v2": ("rope", "deepseek"),
    "deepseek_v3": ("rope", "deepseek"),
}
COMMON = {"_name_or_path", "architectures", "attention_dropout", "dtype", "torch_dtype", "transformers_version"}
COMMON |= {
    "model_type",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "output_hidden_states",
    "label2id",
}
COMMON |= {"sep_token_id", "unk_token_id", "_attn_implementation", "gradient_checkpointing", "initializer_range"}
FURTHER = "num_nextn_predict_layers"
OWN = {
    "gpt2": {"attn_pdrop", "embd_pdrop", "resid_pdrop", "reorder_and_upcast_attn", "summary_activation", "summary_type",
             "summary_first_dropout", "summary_proj_to_labels", "summary_use_proj"},
    "phi3": {"embd_pdrop", "resid_pdrop", "original_max_position_embeddings"},
    "deepseek_v2": {"auto_map", "ep_size", "n_group", "topk_group", "num_mtp_layers", "seq_aux", FURTHER},
    "deepseek_v3": {"auto_map", "ep_size", "n_group", "topk_group", "num_mtp_layers", "seq_aux", FURTHER},
}  # fmt: skip


def theirs(kind):
    return type(AutoConfig.for_model(kind))


def test_the_architectures_by_their_names_and_classes():
    assert tuple(ARCHITECTURES) == KINDS
    for kind, architecture in ARCHITECTURES.items():
        assert architecture.class_name == AutoModelForCausalLM._model_mapping[theirs(kind)].__name__
        mixture, latent = kind in ("mixtral", "qwen3_moe"), kind.startswith("deepseek")
        assert architecture.kind == (mixture or latent, latent)
        assert architecture.prefix == ("transformer." if kind == "gpt2" else "model.")
        assert architecture.rules == RULES[kind]
    assert not REFUSED.keys() & ARCHITECTURES.keys()


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


def test_the_one_value_that_is_supported():
    deepseek = {"rope_interleave": True, "rms_norm_eps": 1e-6, "hidden_act": "silu", "moe_layer_freq": 1}
    deepseek["mlp_bias"] = False
    softmax = {"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False}
    wanted = {
        "gpt2": {"scale_attn_weights": True},
        "deepseek_v2": deepseek | softmax,
        "deepseek_v3": deepseek | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    }
    assert {kind: dict(each.only) for kind, each in ARCHITECTURES.items()} == {kind: {} for kind in KINDS} | wanted


@pytest.mark.parametrize("kind", KINDS)
def test_what_may_be_left_out_and_what_an_export_forgets(kind):
    architecture = ARCHITECTURES[kind]
    assert architecture.forgotten == FORGOTTEN[kind]
    assert architecture.ignored >= COMMON | OWN.get(kind, set())
    others = set().union(*OWN.values()) - OWN.get(kind, set())
    assert not architecture.ignored & others
    read = architecture.fields.keys() | architecture.only.keys()
    assert not (architecture.ignored & read) - {"initializer_range", "n_group", "topk_group"}


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


def test_names_of_experts_and_of_what_routers_hold():
    for kind, (gate, up, down) in {
        "mixtral": (
            "block_sparse_moe.experts.{}.w1",
            "block_sparse_moe.experts.{}.w3",
            "block_sparse_moe.experts.{}.w2",
        ),
        "qwen3_moe": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
        "deepseek_v3": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
    }.items():
        block = ARCHITECTURES[kind].block
        assert block["mlp.experts.gate_up"] == f"{gate} {up}"
        assert block["mlp.experts.down"] == down
    leaves = {kind: dict(each.leaves) for kind, each in ARCHITECTURES.items() if each.leaves}
    assert leaves == {"deepseek_v3": {"expert_bias": "e_score_correction_bias"}}


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
