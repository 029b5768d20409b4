"""The supported Hugging Face architectures, as data: how each `model_type` names mpcore's fields and tensors.

To add an architecture, write its `Architecture`. Import, export and the errors for unsupported fields follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

NEEDED = ...  # in place of a default: the field is required


@dataclass(frozen=True)
class Field:
    """How a field of config.json maps to an mpcore field, or to several with the same value, separated by spaces."""

    ours: str  # "moe." and "latent." begin the names of nested fields
    default: Any = NEEDED
    alias: str | None = None  # another Hugging Face name of the field
    words: Mapping[Any, Any] | None = None  # mpcore's value for each Hugging Face value; None: the same


@dataclass(frozen=True)
class Architecture:
    """A Hugging Face architecture. In the comments "theirs" means Hugging Face's names, "ours" means mpcore's."""

    class_name: str  # in transformers
    fields: dict[str, Field]  # by their name: the fields that map one to one
    rules: tuple[str, ...] = ()  # for all other fields, applied after `fields`: names of `config.RULES`
    ours: Mapping[str, Any] = field(default_factory=dict)  # values of our fields that config.json does not have
    only: Mapping[str, Any] = field(default_factory=dict)  # their fields with the one value that is supported
    ignored: frozenset[str] = frozenset()  # their fields that do not change the numbers of a trained model
    forgotten: frozenset[str] = frozenset()  # our fields that an export drops: only training reads them
    layers: str = "model.layers"  # their name of the list of layers
    ends: Mapping[str, str] = field(default_factory=dict)  # modules outside the layers: our name -> their name
    # Modules of a layer: our name -> their names. One of our modules may concatenate the rows of several of theirs.
    # {} is the number of an expert: they store each expert's matrices separately.
    block: Mapping[str, str] = field(default_factory=dict)
    further: Mapping[str, str] = field(default_factory=dict)  # of a layer that predicts further tokens, beside `block`
    leaves: Mapping[str, str] = field(default_factory=dict)  # parameters with another name: our name -> their name
    transposed: tuple[str, ...] = ()  # our modules whose weights they store as [in, out]

    @property
    def prefix(self) -> str:
        """The prefix of all tensor names except the head's. `save_pretrained` of a base model leaves it out."""
        return self.layers.partition(".")[0] + "."

    @property
    def kind(self) -> tuple[bool, bool]:
        """Whether the architecture has experts, and whether it has latent attention."""
        names = " ".join(each.ours for each in self.fields.values())
        return "moe." in names, "latent." in names


TOKENS = frozenset({"bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"})
FURTHER = "num_nextn_predict_layers"  # DeepSeek's multi-token prediction layers, which transformers skips
LENGTH = "max_position_embeddings"
_IGNORED = TOKENS | {
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout",
    "dtype", "gradient_checkpointing", "id2label", "initializer_range", "keys_to_ignore_at_inference", "label2id",
    "max_window_layers", "model_type", "n_ctx", "num_labels", "output_attentions", "output_hidden_states",
    "output_router_logits", "pretraining_tp", "problem_type", "return_dict", "task_specific_params", "tokenizer_class",
    "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
_FORGOTTEN = frozenset({"dropout"})
_MOE_FORGOTTEN = _FORGOTTEN | {
    f"moe.{name}" for name in ("aux_loss", "aux_coefficient", "z_loss", "bias_rate", "bias", "dispatch")
}


def _words(ours: str) -> dict[str, str]:
    """Return mpcore's name of an activation for each Hugging Face name.

    Several Hugging Face names mean the same function.
    """
    tanh = dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh"), f"{ours}_tanh")
    return tanh | {"gelu": ours, "gelu_python": ours}


_PLAIN = {"gelu_new": "gelu_tanh"} | _words("gelu") | {"relu": "relu", "silu": "silu"}

# --- fields ---------------------------------------------------------------------------------------------------------

_ENDS = {
    "vocab_size": Field("vocab_size"), "tie_word_embeddings": Field("tie_embeddings", False),
    "initializer_range": Field("init_std", 0.02),
}  # fmt: skip
_SIZES = _ENDS | {
    LENGTH: Field("seq_len"), "num_hidden_layers": Field("layers"), "hidden_size": Field("d_model"),
    "num_attention_heads": Field("heads"), "intermediate_size": Field("d_ff"),
}  # fmt: skip
_DECODER = _SIZES | {
    "num_key_value_heads": Field("kv_heads", None), "head_dim": Field("head_dim", None),
    "hidden_act": Field("activation", words={"silu": "swiglu", **_words("geglu")}),
    "rms_norm_eps": Field("norm_eps", 1e-6),
}  # fmt: skip
_BIASES = {"attention_bias": Field("qkv_bias output_bias", False)}
_NO_BIASES = {"qkv_bias": False, "output_bias": False, "mlp_bias": False}


def _deepseek(experts: int, top_k: Any, shared: int, d_ff: int, dense: int, scale: float) -> dict[str, Field]:
    """Return the fields that DeepSeek-V2 and V3 share. Only the defaults differ."""
    return _SIZES | _BIASES | {
        "kv_lora_rank": Field("latent.kv_lora_rank", 512), "q_lora_rank": Field("latent.q_lora_rank", 1536),
        "qk_nope_head_dim": Field("latent.qk_nope_head_dim", 128), "v_head_dim": Field("latent.v_head_dim", 128),
        "qk_rope_head_dim": Field("latent.qk_rope_head_dim", 64), "n_routed_experts": Field("moe.experts", experts),
        "num_experts_per_tok": Field("moe.top_k", top_k), "n_shared_experts": Field("moe.shared_experts", shared),
        "moe_intermediate_size": Field("moe.d_ff", d_ff), "first_k_dense_replace": Field("moe.dense", dense),
        "routed_scaling_factor": Field("moe.routed_scale", scale),
        "aux_loss_alpha": Field("moe.aux_coefficient", 0.001),
    }  # fmt: skip


_DEEPSEEK_ONLY = {
    "rope_interleave": True, "rms_norm_eps": 1e-6, "hidden_act": "silu", "moe_layer_freq": 1, "mlp_bias": False,
}  # fmt: skip

# --- tensors --------------------------------------------------------------------------------------------------------

_LLAMA_ENDS = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_LLAMA_BLOCK = {
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "attention.output": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
    "mlp.up": "mlp.gate_proj mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip
_MIXTRAL_BLOCK = _LLAMA_BLOCK | {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.gate_up": "block_sparse_moe.experts.{}.w1 block_sparse_moe.experts.{}.w3",
    "mlp.experts.down": "block_sparse_moe.experts.{}.w2",
}
_QWEN3_MOE_BLOCK = _LLAMA_BLOCK | {
    "mlp.router": "mlp.gate", "mlp.experts.gate_up": "mlp.experts.{}.gate_proj mlp.experts.{}.up_proj",
    "mlp.experts.down": "mlp.experts.{}.down_proj",
}  # fmt: skip
_DEEPSEEK_BLOCK = _QWEN3_MOE_BLOCK | {
    "attention.q_down": "self_attn.q_a_proj", "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj", "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm", "attention.kv_up": "self_attn.kv_b_proj",
    "mlp.shared.up": "mlp.shared_experts.gate_proj mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}  # fmt: skip

# --- architectures --------------------------------------------------------------------------------------------------

_GPT2 = Architecture(
    "GPT2LMHeadModel",
    fields=_ENDS | {
        "tie_word_embeddings": Field("tie_embeddings", True), "n_positions": Field("seq_len"),
        "n_layer": Field("layers"), "n_embd": Field("d_model"), "n_head": Field("heads"),
        "n_inner": Field("d_ff", None), "layer_norm_epsilon": Field("norm_eps", 1e-5),
        "activation_function": Field("activation", "gelu_new", words=_PLAIN),
    },
    rules=("gpt2",), ours={"norm": "layer", "positions": "learned", "bias": True}, only={"scale_attn_weights": True},
    ignored=_IGNORED | {
        "attn_pdrop", "embd_pdrop", "resid_pdrop", "reorder_and_upcast_attn", "summary_activation",
        "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    },
    forgotten=_FORGOTTEN | {"rope_base", "rope_scaling"}, layers="transformer.h",
    ends={"embedding": "transformer.wte", "position": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"},
    block={
        "attention_norm": "ln_1", "attention.qkv": "attn.c_attn", "attention.output": "attn.c_proj", "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    },
    transposed=("attention.qkv", "attention.output", "mlp.up", "mlp.down"),
)  # fmt: skip
_LLAMA = Architecture(
    "LlamaForCausalLM", fields=_DECODER | _BIASES | {"mlp_bias": Field("mlp_bias", False)}, rules=("heads", "rope"),
    ignored=_IGNORED, forgotten=_FORGOTTEN, ends=_LLAMA_ENDS, block=_LLAMA_BLOCK,
)  # fmt: skip
_MISTRAL = replace(
    _LLAMA, class_name="MistralForCausalLM",
    fields=_DECODER | {"num_key_value_heads": Field("kv_heads", 8), "sliding_window": Field("window", 4096)},
    rules=(*_LLAMA.rules, "window"), ours=_NO_BIASES,
)  # fmt: skip
_PHI3 = replace(
    _MISTRAL, class_name="Phi3ForCausalLM",
    fields=_DECODER | {"rms_norm_eps": Field("norm_eps", 1e-5), "sliding_window": Field("window", None)},
    rules=(*_MISTRAL.rules, "plain_rope"),
    ignored=_IGNORED | {"embd_pdrop", "original_max_position_embeddings", "resid_pdrop"},  # 2nd: only longrope reads it
    block=_LLAMA_BLOCK | {"attention.qkv": "self_attn.qkv_proj", "mlp.up": "mlp.gate_up_proj"},
)  # fmt: skip
_QWEN2 = replace(
    _LLAMA, class_name="Qwen2ForCausalLM", fields=_DECODER, rules=(*_LLAMA.rules, "qwen_window"),
    ours=_NO_BIASES | {"qkv_bias": True},
)  # fmt: skip
_QWEN3 = replace(
    _QWEN2, class_name="Qwen3ForCausalLM", fields=_DECODER | _BIASES | {"head_dim": Field("head_dim", 128)},
    ours={"qk_norm": True, "mlp_bias": False},
)  # fmt: skip
_MIXTRAL = replace(
    _MISTRAL, class_name="MixtralForCausalLM",
    fields=_MISTRAL.fields | {
        "sliding_window": Field("window", None), "rms_norm_eps": Field("norm_eps", 1e-5),
        "num_local_experts": Field("moe.experts", 8, alias="num_experts"), "num_experts_per_tok": Field("moe.top_k", 2),
        "router_aux_loss_coef": Field("moe.aux_coefficient", 0.001), "router_jitter_noise": Field("moe.jitter", 0.0),
    },
    rules=(*_MISTRAL.rules, "mixtral"), ours=_NO_BIASES | {"rope_base": 1e6, "moe.normalize": True},
    forgotten=_MOE_FORGOTTEN | {"d_ff"}, block=_MIXTRAL_BLOCK,
)  # fmt: skip
_QWEN3_MOE = replace(
    _QWEN3, class_name="Qwen3MoeForCausalLM",
    fields=_DECODER | _BIASES | {
        "num_experts": Field("moe.experts", 128, alias="num_local_experts"),
        "num_key_value_heads": Field("kv_heads", 4), "num_experts_per_tok": Field("moe.top_k", 8),
        "router_aux_loss_coef": Field("moe.aux_coefficient", 0.001), "moe_intermediate_size": Field("moe.d_ff", 768),
        "norm_topk_prob": Field("moe.normalize", False),
    },
    rules=(*_LLAMA.rules, "qwen_moe_window", "sparse_layers"), forgotten=_MOE_FORGOTTEN | {"moe.jitter"},
    block=_QWEN3_MOE_BLOCK,
)  # fmt: skip
_DEEPSEEK_V2 = Architecture(
    "DeepseekV2ForCausalLM", fields=_deepseek(64, NEEDED, 2, 1407, 0, 1.0), rules=("rope", "deepseek"),
    ours={"norm_eps": 1e-6, "moe.score": "softmax", "moe.normalize": False, "moe.groups": 1, "moe.top_groups": 1},
    only=_DEEPSEEK_ONLY | {"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False},
    ignored=_IGNORED | {"auto_map", "ep_size", "n_group", "num_mtp_layers", "seq_aux", "topk_group", FURTHER},
    forgotten=_MOE_FORGOTTEN, ends=_LLAMA_ENDS, block=_DEEPSEEK_BLOCK,
)  # fmt: skip
_DEEPSEEK_V3 = replace(
    _DEEPSEEK_V2, class_name="DeepseekV3ForCausalLM",
    fields=_deepseek(256, 8, 1, 2048, 3, 2.5) | {
        "n_group": Field("moe.groups", 8), "topk_group": Field("moe.top_groups", 4),
        "norm_topk_prob": Field("moe.normalize", True),
    },
    ours={"norm_eps": 1e-6, "moe.score": "sigmoid", "moe.bias": True},
    only=_DEEPSEEK_ONLY | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    forgotten=_MOE_FORGOTTEN - {"moe.bias"},
    further={
        "embedding_norms": "enorm", "hidden_norms": "hnorm", "projections": "eh_proj", "norms": "shared_head.norm",
    },
    leaves={"expert_bias": "e_score_correction_bias"},
)  # fmt: skip
ARCHITECTURES = {
    "gpt2": _GPT2, "llama": _LLAMA, "mistral": _MISTRAL, "qwen2": _QWEN2, "qwen3": _QWEN3, "mixtral": _MIXTRAL,
    "phi3": _PHI3, "qwen3_moe": _QWEN3_MOE, "deepseek_v2": _DEEPSEEK_V2, "deepseek_v3": _DEEPSEEK_V3,
}  # fmt: skip
REFUSED = {  # architectures that mpcore's blocks cannot express, and why
    "falcon": "it adds attention and MLP to the residual stream in parallel",
    "gemma": "it multiplies the embeddings by sqrt(hidden_size), and its norms by 1 + weight",
    "gemma2": "it caps logits softly, has norms after attention and MLP too, and multiplies its norms by 1 + weight",
    "gemma3_text": "it has norms after attention and MLP too, and another RoPE in the layers with a window",
    "gpt_neox": "it rotates a part of each head, adds attention and MLP in parallel, and packs Q, K and V head by head",
    "gpt_oss": "its attention has sinks, every second layer a window, and its experts have biases and a clamped GLU",
    "olmo2": "its norms come after attention and MLP, and those of queries and keys run over all heads together",
    "smollm3": "every fourth layer has no RoPE (no_rope_layers)",
}
