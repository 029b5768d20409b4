"""Hugging Face models both ways: `python -m examples.gpt.hf convert --from-hf DIR --to CKPT`, or `--from`, `--to-hf`.

GPT-2, Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, DeepSeek-V2-Lite and V3, as `AutoModelForCausalLM` reads and
writes them. A folder of theirs is seen as one of our checkpoints: each of their tensors is a box of one of ours, in
place or transposed. So it loads straight into any layout, and converts tensor by tensor. What the config has that this
model hasn't is refused by name.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from examples.gpt.config import GPTConfig, LatentConfig, MoEConfig
from examples.gpt.model import GPT
from examples.gpt.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer
from mpcore import Mesh
from mpcore.checkpoint import inspect
from mpcore.checkpoint.folders import check_sizes, discard, prepare, publish, resolve, temporary
from mpcore.checkpoint.format import (
    DTYPES,
    Chunk,
    Entry,
    FileRecord,
    Files,
    Manifest,
    TensorFile,
    checksum,
    dtype_name,
    raw,
    sync_folder,
    write_manifest,
    write_tensors,
)
from mpcore.checkpoint.loading import copy_box, fill
from mpcore.checkpoint.pages import host_memory
from mpcore.checkpoint.pieces import held_by_model
from mpcore.checkpoint.ranks import together, world_group
from mpcore.checkpoint.saving import write_beside
from mpcore.data_parallel import reshard
from mpcore.layers.rope import rope_frequencies

SHARD_BYTES = 5 * 10**9  # of a file that is written
JSON_LIMIT = 100 * 2**20  # bytes
INDEX = "model.safetensors.index.json"
CARRIED = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
FOLDER = "hugging_face"  # of a checkpoint: what is carried along
LENGTH = "max_position_embeddings"
_FURTHER = "num_nextn_predict_layers"

# --- configs ------------------------------------------------------------------------------------------------------

_ACTIVATIONS = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}
_GPT2_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"}
# What doesn't change the numbers of a trained model: it is passed over, and what is no description of weights and
# layers comes back in an export.
_TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"}
_HARMLESS = _TOKENS | {
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout",
    "dtype", "gradient_checkpointing", "id2label", "initializer_range", "keys_to_ignore_at_inference", "label2id",
    "max_window_layers", "model_type", "n_ctx", "num_labels", "output_attentions", "output_hidden_states",
    "output_router_logits", "pretraining_tp", "problem_type", "return_dict", "task_specific_params", "tokenizer_class",
    "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
_GPT2_HARMLESS = _HARMLESS | {
    "attn_pdrop", "embd_pdrop", "resid_pdrop", "reorder_and_upcast_attn", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
}  # fmt: skip
_DEEPSEEK_HARMLESS = _HARMLESS | {"auto_map", "ep_size", "num_mtp_layers", "seq_aux", _FURTHER}
# Defaults of each family where its config.json leaves a field out; `heads`: the number of attention heads.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": "heads", "head_dim": None, "attention_bias": False, "mlp_bias": False},
    "mistral": {"num_key_value_heads": 8, "head_dim": None, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8, "head_dim": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen2": {"num_key_value_heads": "heads", "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": "heads", "head_dim": 128, "attention_bias": False, "sliding_window": 4096},
    "qwen3_moe": {"num_key_value_heads": 4, "head_dim": None, "attention_bias": False, "sliding_window": 4096},
}


# Of DeepSeek's mixtures, in the order of `_deepseek_from_hf`; what has none must be there.
_DEEPSEEK_DEFAULTS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "deepseek_v2": ((64,), (), (2,), (1407,), (0,), (1.0,), (1,), (1,)),
    "deepseek_v3": ((256,), (8,), (1,), (2048,), (3,), (2.5,), (8,), (4,)),
}


class _Fields:
    """A config.json that knows which of its fields nobody has asked for."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.left, self.where = dict(values), where

    def take(self, name: str, *default: Any) -> Any:
        """A field, or its default; without one it must be there."""
        if name not in self.left and not default:
            raise ValueError(f"{self.where} has no {name}")
        found = self.left.pop(name, *default)
        if isinstance(found, str) and default and isinstance(default[0], (int, float)):
            raise ValueError(f"{self.where} has {name} {found!r}: it must be a number, not text")
        return found

    def expect(self, name: str, wanted: Any) -> None:
        """Refuse any other value than the one that this model has."""
        found = self.take(name, wanted)
        if found != wanted:
            raise ValueError(f"{self.where} has {name} {found!r}: this model has only {wanted!r}")

    def finish(self, harmless: set[str]) -> None:
        """Refuse what is left and may change the numbers."""
        unknown = {name: value for name, value in self.left.items() if name not in harmless}
        unknown = {name: value for name, value in unknown.items() if value not in (None, False, "", [], {})}
        if unknown:
            raise ValueError(f"{self.where} has fields that may change the model, and that it has not: {unknown}")


def config_from_hf(values: Mapping[str, Any], where: str = "config.json") -> GPTConfig:
    """Our config from one of theirs. Dropout is left at 0: it is the run's choice.

    Args:
        values: what their config.json holds.
        where: its name, for messages.

    Raises:
        ValueError: naming what this model can't be: the family, an activation, a kind of rotary scaling, a window on
            some layers only, experts in other layers than every n-th, or any field that is not known to be harmless.
    """
    c, family = _Fields(values, where), values.get("model_type")
    if family == "gpt2":
        return _gpt2_from_hf(c)
    if family in _DEEPSEEK_DEFAULTS:
        return _deepseek_from_hf(c, family)
    if family not in _DEFAULTS:
        known = ["gpt2", *_DEEPSEEK_DEFAULTS, *_DEFAULTS]
        raise ValueError(f"{where} is of the family {family!r}: it is one of {known}")
    defaults = _DEFAULTS[family]
    heads, layers = c.take("num_attention_heads"), c.take("num_hidden_layers")
    kv_heads = c.take("num_key_value_heads", None) or defaults["num_key_value_heads"]
    d_model = c.take("hidden_size")
    head_dim = c.take("head_dim", defaults.get("head_dim")) or d_model // heads
    attention_bias = bool(c.take("attention_bias", False)) if "attention_bias" in defaults else family == "qwen2"
    activation = c.take("hidden_act")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"{where} has hidden_act {activation!r}: it is one of {sorted(_ACTIVATIONS)}")
    length = c.take("max_position_embeddings")
    base, scaling = _rope_from_hf(c, length, defaults.get("rope_theta", 10000.0))
    config = GPTConfig(
        vocab_size=c.take("vocab_size"),
        seq_len=length,
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=heads if kv_heads == "heads" else kv_heads,
        head_dim=None if head_dim * heads == d_model else head_dim,
        d_ff=c.take("intermediate_size"),
        activation=_ACTIVATIONS[activation],
        norm_eps=c.take("rms_norm_eps", defaults.get("rms_norm_eps", 1e-6)),
        qk_norm=family.startswith("qwen3"),
        rope_base=base,
        rope_scaling=scaling,
        window=_window_from_hf(c, family, layers),
        qkv_bias=attention_bias,
        output_bias=attention_bias and family != "qwen2",
        mlp_bias=bool(c.take("mlp_bias", False)) if "mlp_bias" in defaults else False,
        tie_embeddings=c.take("tie_word_embeddings", False),
        init_std=c.take("initializer_range", 0.02),
        moe=_moe_from_hf(c, family, layers),
    )
    c.finish(_HARMLESS)
    return config


def read_config(folder: str | os.PathLike[str]) -> GPTConfig:
    """Our config of the model in a folder of theirs; see `config_from_hf`."""
    path = Path(folder) / "config.json"
    try:
        return config_from_hf(read_json(path), str(path))
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{path} describes no model: {error}") from None


def _gpt2_from_hf(c: _Fields) -> GPTConfig:
    activation = c.take("activation_function", "gelu_new")
    if activation not in _GPT2_ACTIVATIONS:
        raise ValueError(f"{c.where} has activation_function {activation!r}: it is one of {sorted(_GPT2_ACTIVATIONS)}")
    c.expect("scale_attn_weights", True)
    d_model = c.take("n_embd")
    config = GPTConfig(
        vocab_size=c.take("vocab_size"),
        seq_len=c.take("n_positions"),
        layers=c.take("n_layer"),
        d_model=d_model,
        heads=c.take("n_head"),
        d_ff=c.take("n_inner", None) or 4 * d_model,
        activation="gelu",
        norm="layer",
        norm_eps=c.take("layer_norm_epsilon", 1e-5),
        positions="learned",
        bias=True,
        tie_embeddings=c.take("tie_word_embeddings", True),
        init_std=c.take("initializer_range", 0.02),
    )
    c.finish(_GPT2_HARMLESS)
    return config


def _deepseek_from_hf(c: _Fields, family: str) -> GPTConfig:
    """DeepSeek: latent attention, experts behind the first layers. Its further layers, which predict further tokens,
    are left out, as transformers leaves them."""
    layers, heads, length = c.take("num_hidden_layers"), c.take("num_attention_heads"), c.take(LENGTH)
    latent = LatentConfig(
        kv_lora_rank=c.take("kv_lora_rank", 512),
        q_lora_rank=c.take("q_lora_rank", 1536),
        qk_nope_head_dim=c.take("qk_nope_head_dim", 128),
        qk_rope_head_dim=c.take("qk_rope_head_dim", 64),
        v_head_dim=c.take("v_head_dim", 128),
    )
    names = ("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size",
             "first_k_dense_replace", "routed_scaling_factor", "n_group", "topk_group")  # fmt: skip
    found = [c.take(name, *default) for name, default in zip(names, _DEEPSEEK_DEFAULTS[family], strict=True)]
    experts, top_k, shared, d_ff, dense, scale, groups, top_groups = found
    third = family == "deepseek_v3"
    if not third:  # "greedy" knows of no groups
        groups = top_groups = 1
    elif top_groups < groups and -(-top_k // top_groups) != 2:
        raise ValueError(
            f"{c.where} has num_experts_per_tok {top_k} and topk_group {top_groups} of {groups}: theirs ranks groups "
            f"by their two best experts, this model by as many as a group is to give, {-(-top_k // top_groups)}"
        )
    moe = MoEConfig(
        experts=experts,
        top_k=top_k,
        shared_experts=shared,
        d_ff=d_ff,
        dense=dense,
        score="sigmoid" if third else "softmax",
        normalize=third and c.take("norm_topk_prob", True),
        routed_scale=scale,
        groups=groups,
        top_groups=top_groups,
        aux_coefficient=c.take("aux_loss_alpha", 0.001),
        bias=True if third else None,
    )
    base, scaling = _rope_from_hf(c, length, 10000.0)
    bias = bool(c.take("attention_bias", False))
    fixed = {"num_key_value_heads": heads, "head_dim": latent.qk_rope_head_dim, "rope_interleave": True}
    fixed |= {"qk_head_dim": latent.qk_nope_head_dim + latent.qk_rope_head_dim, "rms_norm_eps": 1e-6}
    fixed |= {"hidden_act": "silu", "moe_layer_freq": 1, "mlp_bias": False, "scoring_func": moe.score}
    fixed |= {"topk_method": "noaux_tc"} if third else {"topk_method": "greedy", "norm_topk_prob": False}
    for name, wanted in fixed.items():
        c.expect(name, wanted)
    config = GPTConfig(
        vocab_size=c.take("vocab_size"),
        seq_len=length,
        layers=layers,
        d_model=c.take("hidden_size"),
        heads=heads,
        d_ff=c.take("intermediate_size"),
        norm_eps=1e-6,
        rope_base=base,
        rope_scaling=scaling,
        qkv_bias=bias,
        output_bias=bias,
        tie_embeddings=c.take("tie_word_embeddings", False),
        init_std=c.take("initializer_range", 0.02),
        moe=moe,
        latent=latent,
    )
    c.finish(_DEEPSEEK_HARMLESS)
    return config


def _moe_from_hf(c: _Fields, family: str, layers: int) -> MoEConfig | None:
    """The mixture; coefficients and noise of training come along, for our losses and our router."""
    if family not in ("mixtral", "qwen3_moe"):
        return None
    qwen = family == "qwen3_moe"
    count = c.take("num_local_experts", None) or c.take("num_experts", 128 if qwen else 8)
    options: dict[str, Any] = {"experts": count, "top_k": c.take("num_experts_per_tok", 8 if qwen else 2)}
    options["aux_coefficient"] = c.take("router_aux_loss_coef", 0.001)
    if not qwen:
        return MoEConfig(**options, jitter=c.take("router_jitter_noise", 0.0))
    options |= {"d_ff": c.take("moe_intermediate_size", 768), "normalize": c.take("norm_topk_prob", False)}
    step, dense = c.take("decoder_sparse_step", 1), c.take("mlp_only_layers", None) or []
    mixed = [i for i in range(layers) if i not in dense and (i + 1) % step == 0]
    every = mixed[0] + 1 if mixed else 0
    if not mixed or mixed != list(range(mixed[0], layers, every)):
        raise ValueError(
            f"{c.where} has decoder_sparse_step {step} and mlp_only_layers {dense}, so experts in the layers {mixed} "
            f"of {layers}: this model has them in every n-th layer, the n-th first"
        )
    return MoEConfig(**options, every=every)


def _rope_from_hf(c: _Fields, length: int, default: float) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from `rope_parameters` or from the older `rope_theta` and `rope_scaling`."""
    old, new = c.take("rope_scaling", None), c.take("rope_parameters", None)
    rope = {name: value for name, value in (old or new or {}).items() if value is not None}
    base = c.take("rope_theta", None)
    base = rope.pop("rope_theta", base) or default
    for fraction in (rope.pop("partial_rotary_factor", 1.0), c.take("partial_rotary_factor", 1.0)):
        if fraction not in (None, 1.0):
            raise ValueError(f"{c.where} has partial_rotary_factor {fraction}: this model has only 1.0")
    older_name = rope.pop("type", "default")
    kind = rope.pop("rope_type", older_name)
    if kind in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", length)
    scaling = {"rope_type": kind, **rope}
    try:
        rope_frequencies(2, base, scaling)
    except ValueError as error:
        raise ValueError(f"{c.where}: {error}") from None
    return float(base), None if kind == "default" else scaling


def _window_from_hf(c: _Fields, family: str, layers: int) -> int | None:
    if family == "llama":
        return None
    window, types = c.take("sliding_window", _DEFAULTS[family].get("sliding_window")), c.take("layer_types", None)
    if family.startswith("qwen"):
        on = bool(c.take("use_sliding_window", False)) and window is not None
        full = c.take("max_window_layers", 0 if family == "qwen3_moe" else 28)
        if family == "qwen3_moe" and on and full:
            raise ValueError(
                f"{c.where} has max_window_layers {full}, which not all transformers heed: only 0 is clear"
            )
        if types is None:
            types = ["sliding_attention" if on and i >= full else "full_attention" for i in range(layers)]
        window = window if "sliding_attention" in types else None
    if types and set(types) != {"full_attention" if window is None else "sliding_attention"}:
        raise ValueError(f"{c.where} has layer_types {types}: this model has one kind of attention in all layers")
    return window


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Their config.json of one of our configs.

    Raises:
        ValueError: if no family of theirs is such a model.
    """
    c, family = config, family_of(config)
    names = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
    names |= {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    names |= {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
    names |= {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
    values: dict[str, Any] = {"architectures": [names[family]], "model_type": family, "vocab_size": c.vocab_size}
    values |= {"tie_word_embeddings": c.tie_embeddings, "initializer_range": c.init_std}
    if family == "gpt2":
        return values | {
            "n_positions": c.seq_len, "n_embd": c.d_model, "n_layer": c.layers, "n_head": c.heads, "n_inner": c.hidden,
            "activation_function": "gelu_new", "layer_norm_epsilon": c.eps, "resid_pdrop": c.dropout,
            "embd_pdrop": c.dropout, "attn_pdrop": 0.0,
        }  # fmt: skip
    activation = next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == c.activation)
    values |= {
        "max_position_embeddings": c.seq_len, "hidden_size": c.d_model, "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads or c.heads, "intermediate_size": c.hidden,
        "hidden_act": activation, "rms_norm_eps": c.eps, "rope_theta": c.rope_base, "rope_scaling": c.rope_scaling,
    }  # fmt: skip
    if c.latent is not None and c.moe is not None:
        return values | dataclasses.asdict(c.latent) | {
            "num_key_value_heads": c.heads, "attention_bias": c.biases[0], "rope_interleave": True,
            "n_routed_experts": c.moe.experts, "num_experts_per_tok": c.moe.top_k, "n_group": c.moe.groups,
            "topk_group": c.moe.top_groups or c.moe.groups, "n_shared_experts": c.moe.shared_experts,
            "moe_intermediate_size": c.moe.d_ff or c.hidden, "first_k_dense_replace": c.moe.dense,
            "norm_topk_prob": c.moe.normalize, "routed_scaling_factor": c.moe.routed_scale,
            "scoring_func": c.moe.score, "topk_method": "noaux_tc" if family == "deepseek_v3" else "greedy",
            _FURTHER: 0,
            "aux_loss_alpha": c.moe.aux_coefficient if c.moe.aux_loss else 0.0,
        }  # fmt: skip
    head_dim = {"head_dim": c.head_width}
    window = {"use_sliding_window": c.window is not None, "sliding_window": c.window, "max_window_layers": 0}
    bias = {"attention_bias": c.biases[0]}
    experts: dict[str, Any] = {}
    if c.moe is not None:
        experts = {"num_experts_per_tok": c.moe.top_k}
        experts["router_aux_loss_coef"] = c.moe.aux_coefficient if c.moe.aux_loss else 0.0
    if family == "mixtral" and c.moe is not None:
        experts |= {"num_local_experts": c.moe.experts, "intermediate_size": c.moe.d_ff or c.hidden}
        experts |= {"router_jitter_noise": c.moe.jitter}
    elif c.moe is not None:
        experts |= {"num_experts": c.moe.experts, "moe_intermediate_size": c.moe.d_ff or c.hidden}
        experts |= {"norm_topk_prob": c.moe.normalize, "decoder_sparse_step": c.moe.every, "mlp_only_layers": []}
    return (
        values
        | {
            "llama": {**head_dim, **bias, "mlp_bias": c.biases[2]},
            "mistral": {**head_dim, "sliding_window": c.window},
            "mixtral": {**head_dim, "sliding_window": c.window},
            "qwen2": window,
            "qwen3": {**head_dim, **bias, **window},
            "qwen3_moe": {**head_dim, **bias, **window},
        }[family]
        | experts
    )


def family_of(config: GPTConfig) -> str:
    """Which family of theirs a model is, by what it is made of.

    Raises:
        ValueError: if it is none of them.
    """
    c = config
    qkv, output, mlp = c.biases
    plain = c.head_dim in (None, c.d_model / c.heads)
    if c.latent is not None:
        return _deepseek_of(c)
    if c.norm == "layer" and c.positions == "learned" and c.activation == "gelu":
        if qkv and output and mlp and plain and c.kv_heads in (None, c.heads) and not c.qk_norm and c.window is None:
            return "gpt2"
    elif c.norm == "rms" and c.positions == "rope" and c.activation in _ACTIVATIONS.values():
        if c.moe is not None:
            _check_mixture(c.moe)
            if c.qk_norm and qkv == output:
                return "qwen3_moe"
            if not c.qk_norm and not (qkv or output) and c.moe.normalize and c.moe.every == 1:
                return "mixtral"
            raise ValueError(f"neither mixtral nor qwen3_moe is made as this mixture is: {c}")
        if c.qk_norm and qkv == output and not mlp:
            return "qwen3"
        if not c.qk_norm and qkv and not output and not mlp and plain:
            return "qwen2"
        if not c.qk_norm and c.window is not None and not (qkv or output or mlp):
            return "mistral"
        if not c.qk_norm and c.window is None and qkv == output:
            return "llama"
    raise ValueError(f"no Hugging Face family is made as this model is: {c}")


def _deepseek_of(c: GPTConfig) -> str:
    moe, like = c.moe, (c.norm, c.eps, c.positions, c.activation, c.window)
    if moe is not None and like == ("rms", 1e-6, "rope", "swiglu", None) and moe.shared_experts > 0:
        plain = moe.every == 1 and moe.capacity_factor is None and not moe.jitter
        ungrouped = moe.top_groups in (None, moe.groups)
        if plain and moe.score == "softmax" and not moe.normalize and ungrouped:
            return "deepseek_v2"
        biased = moe.bias or (moe.bias is None and moe.bias_rate > 0)
        if plain and moe.score == "sigmoid" and biased and (ungrouped or -(-moe.top_k // (moe.top_groups or 1)) == 2):
            return "deepseek_v3"
    raise ValueError(f"neither deepseek_v2 nor deepseek_v3 is made as this model with latent attention is: {c}")


def _check_mixture(moe: MoEConfig) -> None:
    """Refuse what their routers can't be told."""
    own = {
        "dense": moe.dense > 0,
        "shared_experts": moe.shared_experts > 0,
        "score": moe.score != "softmax",
        "routed_scale": moe.routed_scale != 1,
        "top_groups": moe.top_groups not in (None, moe.groups),
        "capacity_factor": moe.capacity_factor is not None,
    }
    found = {name: getattr(moe, name) for name, there in own.items() if there}
    if found:
        raise ValueError(f"neither mixtral nor qwen3_moe has what this mixture has: {found}")


# --- names --------------------------------------------------------------------------------------------------------

_LLAMA = {
    "embedding": ("model.embed_tokens",),
    "blocks.{}.attention_norm": ("model.layers.{}.input_layernorm",),
    "blocks.{}.attention.qkv": tuple(f"model.layers.{{}}.self_attn.{part}_proj" for part in "qkv"),
    "blocks.{}.attention.q_norm": ("model.layers.{}.self_attn.q_norm",),
    "blocks.{}.attention.k_norm": ("model.layers.{}.self_attn.k_norm",),
    "blocks.{}.attention.output": ("model.layers.{}.self_attn.o_proj",),
    "blocks.{}.mlp_norm": ("model.layers.{}.post_attention_layernorm",),
    "blocks.{}.mlp.up": ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
    "blocks.{}.mlp.down": ("model.layers.{}.mlp.down_proj",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
}
_MIXTRAL = _LLAMA | {  # the second number is the expert's
    "blocks.{}.mlp.router": ("model.layers.{}.block_sparse_moe.gate",),
    "blocks.{}.mlp.experts.gate_up": tuple(f"model.layers.{{}}.block_sparse_moe.experts.{{}}.w{i}" for i in (1, 3)),
    "blocks.{}.mlp.experts.down": ("model.layers.{}.block_sparse_moe.experts.{}.w2",),
}
_QWEN3_MOE = _LLAMA | {
    "blocks.{}.mlp.router": ("model.layers.{}.mlp.gate",),
    "blocks.{}.mlp.experts.gate_up": tuple(
        f"model.layers.{{}}.mlp.experts.{{}}.{part}_proj" for part in ("gate", "up")
    ),
    "blocks.{}.mlp.experts.down": ("model.layers.{}.mlp.experts.{}.down_proj",),
}
_DEEPSEEK = _QWEN3_MOE | {
    "blocks.{}.attention.q_down": ("model.layers.{}.self_attn.q_a_proj",),
    "blocks.{}.attention.q_norm": ("model.layers.{}.self_attn.q_a_layernorm",),
    "blocks.{}.attention.q_up": ("model.layers.{}.self_attn.q_b_proj",),
    "blocks.{}.attention.kv_down": ("model.layers.{}.self_attn.kv_a_proj_with_mqa",),
    "blocks.{}.attention.kv_norm": ("model.layers.{}.self_attn.kv_a_layernorm",),
    "blocks.{}.attention.kv_up": ("model.layers.{}.self_attn.kv_b_proj",),
    "blocks.{}.mlp.shared.up": tuple(f"model.layers.{{}}.mlp.shared_experts.{part}_proj" for part in ("gate", "up")),
    "blocks.{}.mlp.shared.down": ("model.layers.{}.mlp.shared_experts.down_proj",),
}
_GPT2 = {
    "embedding": ("transformer.wte",),
    "position": ("transformer.wpe",),
    "blocks.{}.attention_norm": ("transformer.h.{}.ln_1",),
    "blocks.{}.attention.qkv": ("transformer.h.{}.attn.c_attn",),
    "blocks.{}.attention.output": ("transformer.h.{}.attn.c_proj",),
    "blocks.{}.mlp_norm": ("transformer.h.{}.ln_2",),
    "blocks.{}.mlp.up": ("transformer.h.{}.mlp.c_fc",),
    "blocks.{}.mlp.down": ("transformer.h.{}.mlp.c_proj",),
    "norm": ("transformer.ln_f",),
    "head": ("lm_head",),
}
_TABLES = {"gpt2": _GPT2, "mixtral": _MIXTRAL, "qwen3_moe": _QWEN3_MOE}  # else _LLAMA
_TABLES |= {"deepseek_v2": _DEEPSEEK, "deepseek_v3": _DEEPSEEK}
# Of these only DeepSeek-V3 has the bias, in float32: elsewhere one of 0 says nothing.
ROUTER_BIAS, ROUTER_STATISTICS = ".router.expert_bias", ".router.fractions"
_LEAVES = {"expert_bias": "e_score_correction_bias"}  # else as ours
_CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # GPT-2 keeps these as [in, out]
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # tables that old files hold


@dataclass(frozen=True)
class Part:
    """A tensor of theirs, as a box of one of ours: its key, where it begins, its shape there."""

    key: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def transposed(self) -> bool:
        """Whether their file has rows and columns exchanged."""
        return self.key.endswith(_CONV1D) and self.key.startswith("transformer.")

    @property
    def stored(self) -> tuple[int, ...]:
        """Its shape in their file, where each expert has matrices of its own."""
        return self.shape[::-1] if self.transposed else self.shape[-2:]

    def box(self, tensor: Tensor) -> Tensor:
        """Their tensor, seen as that box of ours."""
        return tensor.t() if self.transposed else tensor.view(self.shape)


def parts_of(config: GPTConfig) -> dict[str, tuple[tuple[int, ...], list[Part]]]:
    """For each of our tensors its logical shape, and the tensors of theirs that it is made of, first rows first.

    What a router keeps besides its weight is made of none, but for the bias of DeepSeek-V3's.
    """
    family = family_of(config)
    table = _TABLES.get(family, _LLAMA)
    unsaid = (ROUTER_STATISTICS,) if family == "deepseek_v3" else (ROUTER_BIAS, ROUTER_STATISTICS)
    if config.latent is not None and config.latent.q_lora_rank is None:
        table = table | {"blocks.{}.attention.q_up": ("model.layers.{}.self_attn.q_proj",)}
    K, kv_heads = config.head_width, config.kv_heads or config.heads
    qkv = (config.heads * K, kv_heads * K, kv_heads * K)
    found = {}
    for name, parameter in GPT(config, device="meta").named_parameters():
        shape, parts = tuple(parameter.shape), []
        found[name] = shape, parts
        if name.endswith(unsaid):
            continue
        module, _, leaf = name.rpartition(".")
        number = next((piece for piece in module.split(".") if piece.isdigit()), "")
        theirs = table[module.replace(f".{number}.", ".{}.", 1) if number else module]
        matrix = shape[-2:]
        sizes = qkv if len(theirs) == 3 else (matrix[0] // len(theirs),) * len(theirs)
        for expert in itertools.product(*map(range, shape[:-2])):  # one empty index where there are none
            start = 0
            for key, size in zip(theirs, sizes, strict=True):
                key = f"{key.format(number, *expert)}.{_LEAVES.get(leaf, leaf)}"
                corner = (*expert, start, *(0 for _ in matrix[1:]))
                parts.append(Part(key, corner, (*(1 for _ in expert), size, *matrix[1:])))
                start += size
    return found


# --- a folder of theirs -------------------------------------------------------------------------------------------


@dataclass
class Source:
    """A folder of theirs, seen as one of our checkpoints: open it with `open_hf`.

    Attributes:
        config: of the model.
        values: what config.json holds.
        entries: by our name, where each box of each of our tensors lies.
    """

    folder: Path
    config: GPTConfig
    values: dict[str, Any]
    entries: dict[str, Entry]
    _files: dict[str, TensorFile] = field(default_factory=dict)
    _parts: dict[str, Part] = field(default_factory=dict)

    def tensor(self, entry: Entry, chunk: Chunk) -> Tensor:
        """One of their tensors as it lies in ours: not read until used."""
        return self._parts[chunk.key].box(self._files[chunk.file].whole(chunk.key))

    def forget(self, chunk: Chunk) -> None:
        """Let go of the memory that reading it took."""
        self._files[chunk.file].forget(chunk.key)


def open_hf(folder: str | os.PathLike[str]) -> Source:
    """Look into a folder as `save_pretrained` writes it: config.json and safetensors files. Reads no tensor.

    Raises:
        ValueError: if there are pickles only, or a file, key or field is missing, unknown, damaged or of another shape.
    """
    folder = Path(folder)
    values, config = read_json(folder / "config.json"), read_config(folder)
    files, where = _open_files(folder)
    parts = parts_of(config)
    known = {part.key: part for _, found in parts.values() for part in found}
    prefix = "transformer." if values["model_type"] == "gpt2" else "model."
    bare = not any(key.startswith(prefix) for key in where)  # as the base model is saved, without a head
    stored_as = {key: key.removeprefix(prefix) if bare else key for key in known}
    source = Source(folder, config, values, {}, files, {stored_as[key]: part for key, part in known.items()})
    for name, (shape, found) in parts.items():
        chunks, dtypes = [], {}
        for part in found:
            key = stored_as[part.key]
            if key not in where:
                raise ValueError(f"{folder} has no tensor {key!r}, of which {name} is made")
            header = files[where[key]].header[key]
            if tuple(header["shape"]) != part.stored:
                raise ValueError(
                    f"{folder / where[key]}: {key} has shape {tuple(header['shape'])}, "
                    f"config.json makes it {part.stored}"
                )
            if not DTYPES[header["dtype"]].is_floating_point:
                raise ValueError(f"{folder / where[key]}: {key} holds {header['dtype']}, which are no weights")
            dtypes[key] = header["dtype"]
            chunks.append(Chunk(where[key], key, part.start, part.shape, 0))
        if len(set(dtypes.values())) > 1:
            raise ValueError(f"{folder}: {name} would be made of several dtypes: {dtypes}")
        source.entries[name] = Entry(shape, next(iter(dtypes.values())), tuple(chunks))
    further = values.get(_FURTHER) or values.get("num_mtp_layers") or 0
    ignored = tuple(f"{'' if bare else prefix}layers.{config.layers + i}." for i in range(further))
    left = {key for key in where if key not in stored_as.values() and not key.endswith(_BUFFERS)}
    left = {key for key in left if not key.startswith(ignored)}
    if config.tie_embeddings and "lm_head.weight" in left:
        _check_tie(source, where["lm_head.weight"])
        left.discard("lm_head.weight")
    if left:
        raise ValueError(f"{folder} has tensors that the model of its config.json does not: {sorted(left)[:20]}")
    return source


def _check_tie(source: Source, file: str) -> None:
    (chunk,) = source.entries["embedding.weight"].chunks
    head, table = source._files[file].whole("lm_head.weight"), source._files[chunk.file].whole(chunk.key)
    if head.shape != table.shape or head.dtype != table.dtype or checksum(raw(head)) != checksum(raw(table)):
        raise ValueError(f"{source.folder} has an lm_head of its own, but its config.json ties it to the embedding")
    source._files[file].forget("lm_head.weight")
    source.forget(chunk)


def _open_files(folder: Path) -> tuple[dict[str, TensorFile], dict[str, str]]:
    """The folder's safetensors files, and which one holds each key."""
    names = ["model.safetensors"]
    index: dict[str, str] = {}
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX).get("weight_map", {})
        if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
            raise ValueError(f"{folder / INDEX} has no weight_map of file names")
        names = sorted(set(index.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):  # never a way out of the folder
            raise ValueError(f"{folder / INDEX} names {name!r}, which is no safetensors file of this folder")
    if not (folder / names[0]).is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        if pickles:
            raise ValueError(
                f"{folder} holds its weights as pickles ({pickles[0]}), which run code when they are read: where you "
                f"trust them, convert them to safetensors with save_pretrained of transformers"
            )
        raise ValueError(f"{folder / names[0]} is missing")
    files = {name: TensorFile(folder / name) for name in names}
    where = {key: name for name, file in files.items() for key in file.header}
    for key, name in index.items():
        if where.get(key) != name:
            raise ValueError(f"{folder / INDEX} says that {key} is in {name}, which does not hold it")
    return files, where


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a file.

    Raises:
        ValueError: naming the file, if it is missing, too large or something else.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    if path.stat().st_size > JSON_LIMIT:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, more than {JSON_LIMIT}")
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no JSON object")
    return values


def load_hf(folder: str | os.PathLike[str], model: nn.Module, mesh: Mesh = Mesh()) -> Source:
    """Read a Hugging Face model straight into ours, on any layout: a collective on all ranks of the mesh.

    Each rank reads the ranges that it holds, and casts them to its parameters' dtype. What routers of ours keep besides
    their weights stays as it began.

    Args:
        folder: with config.json and safetensors files.
        model: a `GPT` of `open_hf(folder).config`, or this rank's stages of it, sharded over data or not.
        mesh: the mesh it lies on.

    Raises:
        ValueError: on every rank and with nothing changed, if the folder can't be read or the model is another one.
    """
    group = world_group(mesh)
    reshard(model)

    def plan() -> tuple[Source, list]:
        source, held = open_hf(folder), held_by_model(model, mesh)
        ours = (ROUTER_BIAS, ROUTER_STATISTICS)
        named = [(item.name.removeprefix("model/"), item) for item in held]
        held = [item for name, item in named if name in source.entries or not name.endswith(ours)]
        for item in held:
            entry = source.entries.get(item.name.removeprefix("model/"))
            if entry is None or entry.shape != item.shape:
                found = "nothing" if entry is None else f"shape {entry.shape}"
                raise ValueError(f"{item.name}: expected shape {item.shape}, found {found} in {folder}")
        return source, held

    source, held = together(group, plan)
    items = [(item, source.entries[item.name.removeprefix("model/")]) for item in held]
    together(group, lambda: fill(items, source.tensor))
    return source


# --- conversion ---------------------------------------------------------------------------------------------------


def import_hf(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a checkpoint of ours from a folder of theirs, holding one tensor at a time.

    Args:
        folder: theirs.
        path: the checkpoint to make; step 0, no optimizer.
        dtype: of the tensors written; None: as they are.
        shard_bytes: of a file, unless one tensor is larger.

    Raises:
        ValueError: if `folder` can't be read. OSError if `path` can't be written. Nothing partial is left.
    """
    source, path = open_hf(folder), Path(path)
    pieces = {}
    for name, entry in source.entries.items():
        for chunk in entry.chunks:
            key = name if chunk.shape == entry.shape else f"{name}@{','.join(map(str, chunk.start))}"
            like = torch.empty(chunk.shape, dtype=_written_as(name, entry, dtype), device="meta")
            pieces[key] = name, entry, chunk, like
    prepare(path)
    try:
        files: dict[str, FileRecord] = {}
        chunks: dict[str, list[Chunk]] = {}
        for number, keys in enumerate(_shards({key: piece[3].nbytes for key, piece in pieces.items()}, shard_bytes)):
            file = f"model-{number:05d}.safetensors"

            def read(key: str) -> tuple[Tensor, Callable[[], None]]:
                _, entry, chunk, like = pieces[key]
                found = source.tensor(entry, chunk)
                if found.dtype != like.dtype or not found.is_contiguous():
                    found = host_memory(like.shape, like.dtype).copy_(found)  # malloc may keep what is freed
                return found, lambda: source.forget(chunk)

            files[file], sums = _write_each(temporary(path) / file, {key: pieces[key][3] for key in keys}, read)
            for key, found in sums.items():
                name, _, chunk, _ = pieces[key]
                chunks.setdefault(name, []).append(Chunk(file, key, chunk.start, chunk.shape, found))
        tensors = {
            f"model/{name}": Entry(entry.shape, dtype_name(_written_as(name, entry, dtype)), tuple(chunks[name]))
            for name, entry in sorted(source.entries.items())
        }
        carried = carried_by_hf(source.folder, source.values)
        for name, data in carried.beside.items():
            write_beside(temporary(path) / name, data)
        about = Manifest(0, config={"model": dataclasses.asdict(source.config)}, extra=carried.extra)
        write_manifest(temporary(path), dataclasses.replace(about, files=files, tensors=tensors))
        publish(path)
    except BaseException:
        discard(path)
        raise
    return path


def export_hf(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a folder of theirs from a checkpoint of ours, of any layout, holding one tensor at a time.

    Args:
        path: the checkpoint, checked as it is read; of training or of `import_hf`.
        folder: what to make.
        dtype: of the tensors written; None: as they are.
        tokenizer: a folder whose tokenizer files go along, or a tokenizer.json; None: those that came with an import.
        shard_bytes: of a file, unless one tensor is larger; an index is written where there are several.

    Raises:
        ValueError: if the checkpoint is damaged, `tokenizer` has no such file, no family of theirs is such a model, be
            it for a router's bias, or `folder` is there and holds something. OSError if it can't be written. Nothing
            partial is left.
    """
    folder = Path(folder)
    manifest, files, config = open_checkpoint(path)
    parts = parts_of(config)
    pieces: dict[str, tuple[Entry, Part, Tensor]] = {}
    for name, (shape, found) in parts.items():
        entry = manifest.tensors.get(f"model/{name}")
        if entry is None or entry.shape != shape:
            raise ValueError(f"{path}: model/{name} has shape {entry and entry.shape}, its config makes it {shape}")
        for part in found:
            like = torch.empty(part.stored, dtype=_written_as(name, entry, dtype), device="meta")
            pieces[part.key] = entry, part, like
    left = {name for name in manifest.tensors if name.startswith("model/") and name[6:] not in parts}
    if left:
        raise ValueError(f"{path} has tensors that the model of its config does not: {sorted(left)[:20]}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there: it is not overwritten")
    _verify(manifest, files)
    for name, (_, found) in parts.items():
        if name.endswith(ROUTER_BIAS) and not found:
            _check_bias(name, manifest.tensors[f"model/{name}"], files)
    carried = carried_by_checkpoint(path)
    beside = carried.files if tokenizer is None else _tokenizer_files(Path(tokenizer))
    new = temporary(folder)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:

        def read(key: str) -> tuple[Tensor, Callable[[], None]]:
            entry, part, like = pieces[key]
            stored = host_memory(part.stored, like.dtype)
            copy_box(part.box(stored), part.start, entry, lambda e, c: files[c.file].tensor(e, c))

            def forget() -> None:
                for chunk in entry.chunks:
                    files[chunk.file].forget(chunk.key)

            return stored, forget

        shards = list(_shards({key: piece[2].nbytes for key, piece in pieces.items()}, shard_bytes))
        index: dict[str, str] = {}
        for number, keys in enumerate(shards, 1):
            one = len(shards) == 1
            file = "model.safetensors" if one else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            _write_each(new / file, {key: pieces[key][2] for key in keys}, read)
            index |= dict.fromkeys(keys, file)
        if len(shards) > 1:
            size = sum(piece[2].nbytes for piece in pieces.values())
            _write_json(new / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))})
        written = next(iter(pieces.values()))[2].dtype
        values = {
            **carried.config,
            **config_to_hf(config),
            "torch_dtype": str(written).removeprefix("torch."),
        }
        if LENGTH in carried.config:
            values[LENGTH] = max(values[LENGTH], carried.config[LENGTH])
        _write_json(new / "config.json", values)
        for name, data in beside.items():
            write_beside(new / name, data)
        sync_folder(new)
        if folder.exists():
            folder.rmdir()
        os.rename(new, folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    return folder


def open_checkpoint(path: str | os.PathLike[str]) -> tuple[Manifest, Files, GPTConfig]:
    """A checkpoint of ours, and the config of the GPT in it.

    Raises:
        ValueError: if it is none, or is incomplete.
    """
    manifest = inspect(path)
    check_sizes(resolve(path), manifest)
    try:
        config = GPTConfig(**manifest.config["model"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no GPT of this example: {error}") from None
    return manifest, Files(resolve(path), manifest), config


def _written_as(name: str, entry: Entry, dtype: torch.dtype | None) -> torch.dtype:
    """A bias of experts moves by small steps, which half precision would lose: it stays as it is."""
    return DTYPES[entry.dtype] if dtype is None or name.endswith(ROUTER_BIAS) else dtype


def _write_each(
    file: Path, like: Mapping[str, Tensor], read: Callable[[str], tuple[Tensor, Callable[[], None]]]
) -> tuple[FileRecord, dict[str, int]]:
    """As `write_tensors`; of each tensor that is read the memory is let go before the next one."""
    forget: list[Callable[[], None]] = []

    def one(key: str) -> Tensor:
        while forget:
            forget.pop()()
        tensor, after = read(key)
        forget.append(after)
        return tensor

    result = write_tensors(file, like, one)
    while forget:
        forget.pop()()
    return result


def _shards(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Keys of each file, in their order."""
    keys: list[str] = []
    total = 0
    for key, size in sizes.items():
        if keys and total + size > limit:
            yield keys
            keys, total = [], 0
        keys.append(key)
        total += size
    yield keys


def _verify(manifest: Manifest, files: Files) -> None:
    for name, entry in manifest.tensors.items():
        for chunk in entry.chunks if name.startswith("model/") else ():
            for problem in files.problems([(name, entry, chunk)]):
                raise ValueError(problem)
            files[chunk.file].forget(chunk.key)


def _check_bias(name: str, entry: Entry, files: Files) -> None:
    bias = torch.zeros(entry.shape)
    copy_box(bias, (0,), entry, lambda e, c: files[c.file].tensor(e, c))
    if bias.any():
        raise ValueError(
            f"{name} is not zero (up to {bias.abs().max():.3g}): of their families deepseek_v3 alone has one"
        )


@dataclass(frozen=True)
class Carried:
    """What goes along with a model besides its weights.

    Attributes:
        config: the token ids of its config.json, and the length where that is larger than the run's.
        files: by name, the tokenizer's and the like.
    """

    config: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def extra(self) -> dict[str, Any]:
        """What a manifest says of it."""
        sums = {name: zlib.crc32(data) for name, data in self.files.items()}
        return {FOLDER: {"config": self.config, "files": sums}} if self.config or self.files else {}

    @property
    def beside(self) -> dict[str, bytes]:
        """The files by their path in a checkpoint."""
        return {f"{FOLDER}/{name}": data for name, data in self.files.items()}

    def with_tokenizer(self, content: bytes | None, tokenizer: Tokenizer) -> Carried:
        """This, where the tokenizer is its own one; else the other alone, or for None (bytes) nothing.

        Either says what ends a document: without it their families have one of their own, at which nothing stops.
        """
        own = content == self.files.get("tokenizer.json")
        if own and "eos_token_id" in self.config:
            return self
        ids = {"bos_token_id": None, "eos_token_id": tokenizer.end_of_document}
        if own:
            return dataclasses.replace(self, config=ids | self.config)
        if content is None or not isinstance(tokenizer, JsonTokenizer):
            return Carried(ids)
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end_of_document_name}
        return Carried(ids, {"tokenizer.json": content, "tokenizer_config.json": json.dumps(about, indent=2).encode()})


def carried_by_hf(folder: Path, values: Mapping[str, Any]) -> Carried:
    """What a folder of theirs, with these values in its config.json, has to go along."""
    return Carried({name: value for name, value in values.items() if name in _TOKENS}, _read_files(folder))


def carried_by_checkpoint(path: str | os.PathLike[str]) -> Carried:
    """What a checkpoint of ours has.

    Raises:
        ValueError: if it can't be read, or a file is missing or damaged.
    """
    found = inspect(path).extra.get(FOLDER, {})
    return Carried(found.get("config", {}), _read_files(resolve(path) / FOLDER, found.get("files", {})))


def tokenizer_of_hf(folder: str | os.PathLike[str]) -> Path:
    """The tokenizer.json of a folder of theirs.

    Raises:
        ValueError: if it has none, or is none of theirs, naming what it has.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        read_json(path.with_name("config.json"))
        there = ", ".join(sorted(other.name for other in path.parent.iterdir()))
        raise ValueError(
            f"{folder} has no tokenizer.json, but {there}: --tokenizer says which its model was trained with, a "
            f"tokenizer.json or byte"
        )
    return path


def tokenizer_of_checkpoint(path: str | os.PathLike[str]) -> Path | str:
    """The tokenizer.json that goes along with a checkpoint of ours, or "byte".

    Raises:
        ValueError: if the checkpoint can't be read, or has none, nor says that bytes it was, nor has their vocabulary.
    """
    if "tokenizer.json" in carried_by_checkpoint(path).files:
        return resolve(path) / FOLDER / "tokenizer.json"
    manifest, _, config = open_checkpoint(path)
    vocab_size = config.vocab_size
    if manifest.config.get("tokenizer") != ByteTokenizer.fingerprint and vocab_size != ByteTokenizer.vocab_size:
        raise ValueError(
            f"{path} carries no tokenizer, and its vocabulary of {vocab_size} is not the {ByteTokenizer.vocab_size} of "
            f"bytes: --tokenizer says which it was trained with"
        )
    return "byte"


def _read_files(folder: Path, sums: Mapping[str, int] | None = None) -> dict[str, bytes]:
    """The tokenizer's files, each held against its CRC-32 where there are such."""
    found = {}
    for name in CARRIED:
        if not (folder / name).is_file():
            if sums and name in sums:
                raise ValueError(f"{folder / name} is missing")
            continue
        found[name] = (folder / name).read_bytes()
        if sums is not None and sums.get(name) != zlib.crc32(found[name]):
            raise ValueError(
                f"{folder / name} is damaged: its CRC-32 is {zlib.crc32(found[name]):08x}, written was {sums.get(name)}"
            )
    return found


def _tokenizer_files(path: Path) -> dict[str, bytes]:
    """Those of a folder, or a file as tokenizer.json."""
    found = {"tokenizer.json": path.read_bytes()} if path.is_file() else _read_files(path)
    if not found:
        raise ValueError(f"{path} is no tokenizer.json, and no folder with one of {', '.join(CARRIED)}")
    return found


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    with open(path, "w") as file:
        json.dump(values, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """The command.

    Returns:
        0: done; 2: it can't be.
    """
    parser = argparse.ArgumentParser(prog="python -m examples.gpt.hf", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    convert = commands.add_parser("convert", help="Hugging Face to a checkpoint, or back")
    convert.add_argument("--from-hf", metavar="DIR", help="with config.json and safetensors files")
    convert.add_argument("--to", metavar="CKPT", help="the checkpoint to make of it")
    convert.add_argument("--from", metavar="CKPT", dest="source", help="a checkpoint, of any layout")
    convert.add_argument("--to-hf", metavar="DIR", help="the folder to make of it")
    convert.add_argument("--force", action="store_true", help="with --to: replace the checkpoint that is there")
    convert.add_argument(
        "--tokenizer", metavar="PATH", help="with --to-hf: a tokenizer.json, or a folder whose tokenizer files go along"
    )
    convert.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="cast to it (default: as it is)")
    args = parser.parse_args(argv)
    dtype = getattr(torch, args.dtype) if args.dtype else None
    try:
        if args.from_hf and args.to and not (args.source or args.to_hf):
            if resolve(args.to).exists() and not args.force:
                raise ValueError(f"{args.to} is there: --force replaces it")
            print(f"wrote {import_hf(args.from_hf, args.to, dtype=dtype)}")
        elif args.source and args.to_hf and not (args.from_hf or args.to):
            print(f"wrote {export_hf(args.source, args.to_hf, dtype=dtype, tokenizer=args.tokenizer)}")
        else:
            parser.error("give --from-hf and --to, or --from and --to-hf")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
