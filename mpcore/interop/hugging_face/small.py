"""Make a small copy of a model of transformers, with all its layers, to test a cut before the model has values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mpcore.interop.hugging_face.stored import class_of, transformers_module
from mpcore.interop.lora.adapters import factor_names
from mpcore.interop.parallelize.model_copy import choose_plain_kernels
from mpcore.sharding.declarations import shardings

SIZES: dict[str, Any] = {  # by the names that configs have for them; 2, 3 and 4 divide the 12 heads
    "vocab_size": 66, "hidden_size": 48, "n_embd": 48, "d_model": 48, "embedding_size": 48, "word_embed_proj_dim": 48,
    "emb_dim": 48, "dim": 48,
    "num_attention_heads": 12, "n_head": 12, "n_heads": 12, "num_heads": 12, "encoder_attention_heads": 12,
    "decoder_attention_heads": 12, "num_key_value_heads": 6, "num_kv_heads": 6, "head_dim": 4, "d_kv": 4,
    "intermediate_size": 36, "ffn_dim": 36, "n_inner": 36, "d_ff": 36, "encoder_ffn_dim": 36, "decoder_ffn_dim": 36,
    "dff": 36, "ffn_hidden_size": 36, "dim_ff": 36, "d_inner": 36, "intermediate_size_mlp": 36,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_k": 2, "moe_topk": 2, "n_shared_experts": 1, "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12, "shared_intermediate_size": 12, "expert_ffn_hidden_size": 12, "n_group": 1,
    "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 4, "rotary_dim": 4, "sliding_window": 4, "state_size": 4, "num_mel_bins": 4,
    "max_source_positions": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "rotary_pct": 1.0,
    "partial_rotary_factor": 1.0, "image_size": 8, "patch_size": 4, "projection_dim": 48,
    "linear_num_heads": 12, "linear_head_dim": 4, "mamba_chunk_size": 8,
}  # fmt: skip
MOST = 2**27  # parameters of a small copy


def sizes_of(config: Any, sizes: Mapping[str, Any] = SIZES) -> dict[str, Any]:
    """Return small sizes, under the names that a config and the configs within it have for them."""
    names = {**{name: name for name in sizes}, **getattr(config, "attribute_map", {})}
    given = {}
    for name, value in sizes.items():
        if getattr(config, names[name], None) is not None or name in ("head_dim", "pad_token_id"):
            given[name] = value
    if "kv_lora_rank" in given and "num_key_value_heads" in given:
        given["num_key_value_heads"] = given["num_attention_heads"]  # latent attention has no groups
    for name, inner in vars(config).items():
        if name in config.sub_configs and isinstance(inner, transformers_module().PretrainedConfig):
            given[name] = sizes_of(inner, sizes)
    fields = config.to_dict()
    return {name: value for name, value in given.items() if name in fields}


def small_copy(model: nn.Module) -> nn.Module:
    """Return a model of the same class, with the same names and layers, small sizes and random weights, on the CPU."""
    kind: Any = class_of(model)
    config: Any = model.config
    try:
        values = _merged(config.to_dict(), sizes_of(config))
        values.pop("dtype", None)
        with torch.device("meta"):
            small = kind(type(config).from_dict(values))
        if sum(p.numel() for p in small.parameters()) > MOST:
            raise ValueError(f"it still has more than {MOST} parameters")
        small = choose_plain_kernels(kind(type(config).from_dict(values)))
    except Exception as error:
        raise ValueError(
            f"no small {kind.__name__} can be made of its config ({type(error).__name__}: {error}): read the model "
            f"with from_pretrained(defer=False)"
        ) from error
    here, there = shardings(model).keys() - factor_names(model), shardings(small).keys()
    if here != there:
        raise ValueError(
            f"the model was changed, its config has no {sorted(here ^ there)[:4]}: read it with "
            f"from_pretrained(defer=False)"
        )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in small.parameters():
            if p.is_floating_point():
                p.normal_(0.0 if p.dim() > 1 else 0.5, 0.2, generator=generator)
    return small


def _merged(values: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the values with the sizes put in, also within the configs that a config holds."""
    inner = {n: _merged(values[n], v) for n, v in sizes.items() if isinstance(v, dict) and isinstance(values[n], dict)}
    return {**values, **sizes, **inner}
