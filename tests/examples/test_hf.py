"""Hugging Face models: the same logits after import on every layout, the same model after export."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.gpt import hf
from examples.gpt.hf import config_from_hf, config_to_hf, export_hf, import_hf, load_hf, main, open_hf
from examples.gpt.model import GPT, GPTConfig
from mpcore import Mesh, full_state_dict, materialize
from mpcore.checkpoint import diff, inspect, load, save, verify
from mpcore.collectives import gather
from mpcore.data_parallel import shard_data_parallel
from mpcore.pipeline import Pipeline
from tests.pool import mesh

SIZES = {
    "vocab_size": 53, "hidden_size": 24, "intermediate_size": 21, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
GPT2 = {"vocab_size": 53, "n_positions": 64, "n_embd": 24, "n_layer": 2, "n_head": 6,
        "bos_token_id": None, "eos_token_id": None}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 16}
FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "gpt2 untied": lambda: transformers.GPT2Config(**GPT2, n_inner=31, tie_word_embeddings=False),
    "llama2": lambda: transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 6}, rms_norm_eps=1e-5),
    "llama3": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "llama biased": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, head_dim=8),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=5),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, rope_parameters=YARN),
    "qwen3": lambda: transformers.Qwen3Config(
        **SIZES, head_dim=8, use_sliding_window=True, sliding_window=7, max_window_layers=0
    ),
}
IDS = torch.randint(53, (2, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A folder of each family, every parameter random, biases and norms too, in several shards."""
    root = tmp_path_factory.mktemp("hf")
    for name, config in FAMILIES.items():
        torch.manual_seed(len(name))
        model = transformers.AutoModelForCausalLM.from_config(config())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
        folder = root / name.replace(" ", "-")
        model.save_pretrained(folder, max_shard_size="8KB")
        (folder / "tokenizer.json").write_text('{"made": "up"}')
    return {name: root / name.replace(" ", "-") for name in FAMILIES}


def theirs(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits_of(model: GPT, on: Mesh = Mesh()) -> Tensor:
    """Whole logits on every rank."""
    pipeline = Pipeline(model, on, on.pp.size, lambda y, t: y.sum())
    (y,) = pipeline.forward([IDS])
    whole = gather(y.double(), on.tp, -1, model.config.vocab_size) if model.last else torch.zeros(2, 12, 53).double()
    return pipeline.from_last(whole).float()


def build(config: GPTConfig, on: Mesh = Mesh(), zero: bool = False) -> GPT:
    model = GPT(config, on, device="meta")
    materialize(model, 7)
    if zero:
        shard_data_parallel(model, on, model.blocks.values())
    return model.eval()


def check_import(folders: dict[str, str], sizes: dict, zero: bool) -> dict[str, Tensor]:
    """Straight from each folder into this layout: the logits of all families."""
    found = {}
    for name, folder in folders.items():
        on = mesh(**sizes)
        model = build(open_hf(folder).config, on, zero)
        load_hf(folder, model, on)
        found[name] = logits_of(model, on)
    return found


LAYOUTS = [({}, False), ({"tp": 2}, False), ({"tp": 4}, False), ({"pp": 2}, False), ({"tp": 2, "dp": 2}, True)]


@pytest.mark.parametrize(("sizes", "zero"), LAYOUTS, ids=str)
def test_pitfall_15_16_17_an_import_has_the_same_logits_on_every_layout(ranks, folders, sizes, zero):
    """Show 3: fp32, no conversion step between; fused projections, replicated KV heads, 53 words over 4 ranks."""
    count = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("dp", 1)
    want = {}
    for name, folder in folders.items():
        with torch.no_grad():
            want[name] = theirs(folder)(IDS).logits
    for got in ranks(count, check_import, {n: str(f) for n, f in folders.items()}, sizes, zero):
        for name in want:
            error = (got[name] - want[name]).abs().max() / want[name].abs().max()
            assert error < 1e-5, f"{name}: {error:.1e}"
