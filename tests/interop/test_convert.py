"""Folders, checkpoints and back, of a model of one layer: parts and boxes, dtypes, files, and every refusal."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mpcore.checkpoint import inspect
from mpcore.interop.hugging_face import ModelSpec, convert
from mpcore.interop.hugging_face.folder import open_hf


@dataclass(frozen=True)
class Config:
    """A llama's fields, as mpcore names them."""

    vocab_size: int = 5
    seq_len: int = 8
    layers: int = 1
    d_model: int = 4
    heads: int = 2
    d_ff: int = 6
    tie_embeddings: bool = False
    init_std: float = 0.02
    activation: str = "swiglu"
    kv_heads: int = 1
    head_dim: Any = None
    norm_eps: float = 1e-6
    rope_base: float = 10000.0
    rope_scaling: Any = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False


def shapes(c):
    block = {
        "attention_norm": (4,), "mlp_norm": (4,), "attention.qkv": (8, 4), "attention.output": (4, 4),
        "mlp.up": (12, 4), "mlp.down": (4, 6),
    }  # fmt: skip
    found = {"embedding.weight": (5, 4)}
    found |= {f"blocks.{i}.{name}.weight": shape for i in range(c.layers) for name, shape in block.items()}
    return found | {"norm.weight": (4,)} | ({} if c.tie_embeddings else {"head.weight": (5, 4)})


def describe(c):
    return {**vars(c), "head_dim": c.head_dim or c.d_model // c.heads, "latent": None, "moe": None, "window": None}


SPEC = ModelSpec(Config, describe, shapes)
VALUES = {
    "model_type": "llama", "vocab_size": 5, "max_position_embeddings": 8, "num_hidden_layers": 1, "hidden_size": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 6, "hidden_act": "silu", "eos_token_id": 2,
}  # fmt: skip
LAYER = "model.layers.0."
TENSORS = {
    "model.embed_tokens.weight": (5, 4), "model.norm.weight": (4,), "lm_head.weight": (5, 4),
    f"{LAYER}input_layernorm.weight": (4,), f"{LAYER}post_attention_layernorm.weight": (4,),
    f"{LAYER}self_attn.q_proj.weight": (4, 4), f"{LAYER}self_attn.k_proj.weight": (2, 4),
    f"{LAYER}self_attn.v_proj.weight": (2, 4), f"{LAYER}self_attn.o_proj.weight": (4, 4),
    f"{LAYER}mlp.gate_proj.weight": (6, 4), f"{LAYER}mlp.up_proj.weight": (6, 4),
    f"{LAYER}mlp.down_proj.weight": (4, 6),
}  # fmt: skip


def drawn(dtype=torch.float32, **others):
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in TENSORS.items()}
    return made | others


def folder_of(path, tensors=None, **values):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(VALUES | values))
    (path / "tokenizer.json").write_text("{}")
    save_file(drawn() if tensors is None else tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("change", "values", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), {}, "has no tensor 'model.norm.weight', which norm.weight needs$"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), {},
         r"model.safetensors: model.norm.weight has shape \(3,\), config.json makes it \(4,\)$"),
        (lambda t: t.update({"model.norm.weight": torch.ones(4).int()}), {}, "norm.weight has dtype I32: weights are"),
        (lambda t: t.update({f"{LAYER}mlp.up_proj.weight": torch.ones(6, 4).half()}), {},
         "blocks.0.mlp.up.weight would consist of several dtypes: "),
        (lambda t: t.update({"model.odd": torch.ones(1)}), {}, r"has tensors that .* does not: \['model.odd'\]$"),
        (lambda t: t.update({"model.layers.1.x": torch.ones(1)}), {}, r"does not: \['model.layers.1.x'\]$"),
        (lambda t: t, {"tie_word_embeddings": True}, "lm_head isn't the embedding: set tie_word_embeddings=false"),
        (lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"][:4].clone()}),
         {"tie_word_embeddings": True}, "lm_head isn't the embedding"),
        (lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].double()}),
         {"tie_word_embeddings": True}, "lm_head isn't the embedding"),
    ],
)  # fmt: skip
def test_folders_of_another_model_are_refused(change, values, message, tmp_path):
    tensors = drawn()
    change(tensors)
    with pytest.raises(ValueError, match=message):
        open_hf(folder_of(tmp_path / "hf", tensors, **values), spec=SPEC)


def test_what_may_lie_beside_the_weights(tmp_path):
    tied = drawn()
    tied["lm_head.weight"] = tied["model.embed_tokens.weight"].clone()
    source = open_hf(folder_of(tmp_path / "tied", tied, tie_word_embeddings=True), spec=SPEC)
    assert "head.weight" not in source.entries
    tables = drawn(**{f"{LAYER}self_attn.rotary_emb.inv_freq": torch.ones(1), "model.h.attn.bias": torch.ones(1)})
    assert open_hf(folder_of(tmp_path / "tables", tables), spec=SPEC).config == Config()
    bare = {key.removeprefix("model."): x for key, x in tied.items() if key != "lm_head.weight"}
    source = open_hf(folder_of(tmp_path / "bare", bare, tie_word_embeddings=True), spec=SPEC)
    entry = source.entries["norm.weight"]
    assert torch.equal(source.tensor(entry, entry.chunks[0]), tied["model.norm.weight"])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("shard_bytes", [10**9, 200])
def test_there_and_back_again(dtype, shard_bytes, tmp_path):
    hf = folder_of(tmp_path / "hf")
    path = convert.import_hf(hf, tmp_path / "ckpt", spec=SPEC, dtype=dtype, shard_bytes=shard_bytes)
    assert path == tmp_path / "ckpt"
    manifest = inspect(path)
    assert (manifest.step, manifest.config) == (0, {"model": vars(Config())})
    assert {name: (e.shape, e.dtype) for name, e in manifest.tensors.items()} == {
        f"model/{name}": (shape, "BF16" if dtype else "F32") for name, shape in sorted(shapes(Config()).items())
    }
    assert list(manifest.tensors) == sorted(manifest.tensors)
    assert set(manifest.files) == {f"model-{i:05d}.safetensors" for i in range(len(manifest.files))}
    assert (len(manifest.files) > 1) == (shard_bytes == 200)
    assert manifest.extra["hugging_face"]["config"] == {"model_type": "llama", "eos_token_id": 2}
    out = convert.export_hf(path, tmp_path / "out", spec=SPEC, shard_bytes=shard_bytes)
    files = sorted(out.glob("*.safetensors"))
    assert (out / "model.safetensors.index.json").exists() == (len(files) > 1) == (shard_bytes == 200)
    found = {key: x for file in files for key, x in load_file(file).items()}
    assert found.keys() == TENSORS.keys()
    for key, x in drawn(dtype or torch.float32).items():
        assert torch.equal(found[key], x), key
    said = json.loads((out / "config.json").read_text())
    assert (said["model_type"], said["architectures"], said["torch_dtype"], said["eos_token_id"]) == (
        "llama", ["LlamaForCausalLM"], "bfloat16" if dtype else "float32", 2
    )  # fmt: skip
    assert (out / "tokenizer.json").read_text() == "{}"
    wide = convert.export_hf(path, tmp_path / "wide", spec=SPEC, dtype=torch.float64)
    assert {x.dtype for x in load_file(wide / "model.safetensors").values()} == {torch.float64}
    other = tmp_path / "mine.json"
    other.write_text('{"model": {}}')
    named = convert.export_hf(path, tmp_path / "named", spec=SPEC, tokenizer=other)
    assert (named / "tokenizer.json").read_bytes() == other.read_bytes()


def test_what_cannot_be_exported(tmp_path):
    path = convert.import_hf(folder_of(tmp_path / "hf"), tmp_path / "ckpt", spec=SPEC)
    less = ModelSpec(Config, describe, lambda c: {k: v for k, v in shapes(c).items() if k != "norm.weight"})
    with pytest.raises(
        ValueError, match=r"has tensors that the model of its config does not: \['model/norm.weight'\]$"
    ):
        convert.export_hf(path, tmp_path / "out", spec=less)
    more = ModelSpec(Config, describe, lambda c: {**shapes(c), "norm.weight": (3,)})
    with pytest.raises(ValueError, match=r"model/norm.weight has shape \(4,\), its config makes it \(3,\)$"):
        convert.export_hf(path, tmp_path / "out", spec=more)
    wider = ModelSpec(Config, describe, lambda c: {**shapes(c), "blocks.0.mlp.down.bias": (4,)})
    with pytest.raises(ValueError, match=r"model/blocks.0.mlp.down.bias has shape None, its config makes it \(4,\)$"):
        convert.export_hf(path, tmp_path / "out", spec=wider)
    odd = ModelSpec(lambda **fields: Config(), describe, shapes)
    with pytest.raises(ValueError, match="holds no such model: "):
        convert.open_checkpoint(path, spec=ModelSpec(lambda a: None, describe, shapes))
    assert convert.open_checkpoint(path, spec=odd)[2] == Config()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(ValueError, match=r"exists: it is not overwritten, so pass another folder$"):
        convert.export_hf(path, tmp_path / "out", spec=SPEC)
