"""Hugging Face models: the same logits after import on every layout, the same model after export."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from examples.gpt.config import GPTConfig, MoEConfig
from examples.gpt.generate import main as generate_main
from examples.gpt.hf import SPEC, open_checkpoint
from examples.gpt.model import GPT
from examples.gpt.prepare import prepare
from examples.gpt.pretrain import Trainer, parse
from examples.gpt.tokenizer import train_tokenizer
from mpcore import Mesh, checkpoint, from_pretrained
from mpcore.__main__ import main as mpcore_main
from mpcore.checkpoint import inspect, load, save, saving, step_path, verify
from mpcore.collectives import gather
from mpcore.experimental import shift_tokens
from mpcore.interop import hugging_face as hf
from mpcore.interop.hugging_face import read_json
from mpcore.interop.hugging_face.config import JSON_LIMIT
from mpcore.layers import materialize
from mpcore.parallel.data import shard_data_parallel
from mpcore.pipeline import Pipeline
from tests.examples.corpora import write
from tests.examples.test_pretrain import save_as, trainer
from tests.pool import mesh
from tests.quick import some

config_from_hf, config_to_hf, open_hf, parts_of, export_hf, import_hf, load_hf = (
    partial(f, spec=SPEC)
    for f in (hf.config_from_hf, hf.config_to_hf, hf.open_hf, hf.parts_of, hf.export_hf, hf.import_hf, hf.load_hf)
)
CONVERT = ["convert", "examples.gpt.hf:SPEC"]
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
DEEPSEEK_YARN = YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 8.0, "beta_slow": 1.0}
DEEPSEEK = SIZES | {  # latents of even widths, which transformers' V2 wants
    "num_key_value_heads": 6, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7,
    "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
    "moe_intermediate_size": 13, "routed_scaling_factor": 1.7,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "gpt2 untied": lambda: transformers.GPT2Config(**GPT2, n_inner=31, tie_word_embeddings=False),
    "llama2": lambda: transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 6}, rms_norm_eps=1e-5),
    "llama3": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "llama biased": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, head_dim=8),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=5),
    "phi3": lambda: transformers.Phi3Config(**SIZES, sliding_window=7, pad_token_id=None),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, rope_parameters=YARN),
    "qwen3": lambda: transformers.Qwen3Config(
        **SIZES, head_dim=8, use_sliding_window=True, sliding_window=7, max_window_layers=0
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, router_jitter_noise=0.1),
    "qwen3 moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=3, moe_intermediate_size=13, decoder_sparse_step=2,
        use_sliding_window=True, sliding_window=7, attention_bias=True, router_aux_loss_coef=0.02,
    ),
    "deepseek v2": lambda: transformers.DeepseekV2Config(
        **DEEPSEEK, q_lora_rank=None, first_k_dense_replace=1, rope_parameters=DEEPSEEK_YARN,
    ),
    "deepseek v3": lambda: transformers.DeepseekV3Config(
        **DEEPSEEK, q_lora_rank=9, first_k_dense_replace=1, attention_bias=True, rope_parameters=DEEPSEEK_YARN,
    ),
    "deepseek v3 narrow": lambda: transformers.DeepseekV3Config(
        **DEEPSEEK | {"n_group": 1, "topk_group": 1}, q_lora_rank=None, first_k_dense_replace=0, norm_topk_prob=False,
        tie_word_embeddings=True,
    ),
}  # fmt: skip
MIXTURES = ("mixtral", "qwen3 moe", "deepseek v2", "deepseek v3")
LONG = (
    "gpt2", "llama2", "llama biased", "qwen2", "qwen3", "mistral", "deepseek v2", "deepseek v3 narrow",
)  # like others  # fmt: skip
IDS = torch.randint(53, (2, 12), generator=torch.Generator().manual_seed(3))


class Each(dict):
    """Values that are made when they are asked for."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        self.make = make

    def __missing__(self, name: str) -> Any:
        self[name] = self.make(name)
        return self[name]


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A folder of each family, every parameter random, biases and norms too, in several shards."""
    root = tmp_path_factory.mktemp("hf")

    def make(name: str) -> Path:
        torch.manual_seed(len(name))
        model = transformers.AutoModelForCausalLM.from_config(FAMILIES[name]())
        with torch.no_grad():
            for parameter in (*model.parameters(), *(b for n, b in model.named_buffers() if "bias" in n)):
                parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
        folder = root / name.replace(" ", "-")
        model.save_pretrained(folder, max_shard_size="8KB")
        (folder / "tokenizer.json").write_text('{"made": "up"}')
        return folder

    return Each(make)


@pytest.fixture(scope="session")
def wanted(folders) -> dict[str, Tensor]:
    """Their logits."""
    return Each(torch.no_grad()(lambda name: theirs(folders[name])(IDS).logits))


def theirs(folder: Path):
    options: dict[str, Any] = {"dtype": torch.float32, "experts_implementation": "eager"}  # grouped want even sizes
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


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


LAYOUTS = [({}, False), ({"tp": 2}, False), ({"tp": 4}, False), ({"pp": 2}, False)]


@pytest.mark.parametrize(
    ("sizes", "zero"), some(({"tp": 2, "dp": 2}, True), ({"dp": 2, "ep": 2}, False), of=LAYOUTS), ids=str
)
def test_pitfall_15_16_17_an_import_has_the_same_logits_on_every_layout(ranks, folders, wanted, sizes, zero):
    """Show 3: fp32, no conversion step between; fused projections, replicated KV heads, 53 words over 4 ranks."""
    count = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("dp", 1)
    here = [name for name in FAMILIES if ("ep" not in sizes or name in MIXTURES) and not (zero and name in LONG)]
    for got in ranks(count, check_import, {name: str(folders[name]) for name in here}, sizes, zero):
        for name in here:
            error = (got[name] - wanted[name]).abs().max() / wanted[name].abs().max()
            assert error < 1e-5, f"{name}: {error:.1e}"


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {key: tensor for file in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(file).items()}


def same_tensors(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert got[key].dtype == tensor.dtype, key
        assert torch.equal(got[key], tensor), key


@torch.no_grad()
def greedy(model: GPT, count: int) -> list[int]:
    ids = IDS[:1]
    for _ in range(count):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    return ids[0].tolist()


@pytest.mark.parametrize("name", some(*(name for name in FAMILIES if name not in LONG), of=LONG))
def test_an_export_is_the_same_model_to_transformers(folders, tmp_path, name):
    """Show 3: the bits come back, the logits are ours, and 50 greedy tokens agree; the checkpoint is sound."""
    import_hf(folders[name], tmp_path / "step", shard_bytes=8000)
    assert not verify(tmp_path / "step")
    assert len(inspect(tmp_path / "step").files) > 3
    back = export_hf(tmp_path / "step", tmp_path / "back", shard_bytes=8000)
    same_tensors(tensors_of(back), tensors_of(folders[name]))
    assert (back / "tokenizer.json").read_bytes() == (folders[name] / "tokenizer.json").read_bytes()
    assert (back / hf.INDEX).is_file()
    config = open_hf(back).config
    assert config == open_hf(folders[name]).config == GPTConfig(**inspect(tmp_path / "step").config["model"])
    model, other = build(config), theirs(back)
    load(tmp_path / "step", model, mesh=Mesh())
    with torch.no_grad():
        want, got = model(IDS), other(IDS).logits
    assert (got - want).abs().max() < 1e-5 * want.abs().max()
    with torch.no_grad():
        continued = other.generate(IDS[:1], do_sample=False, max_new_tokens=50, min_new_tokens=50, pad_token_id=0)
    assert continued[0].tolist() == greedy(model, 50)


def check_saved_wide(folder: str, path: str) -> None:
    on = mesh(tp=2, pp=2)
    model = build(open_hf(folder).config, on)
    load_hf(folder, model, on)
    save(path, model, mesh=on, step=3, config={"model": asdict(model.config), "corpus": {}})


@pytest.mark.parametrize("name", some("gpt2", "mixtral", "deepseek v3", of=("qwen2", "qwen3")))
def test_pitfall_16_17_a_checkpoint_of_any_layout_exports(ranks, folders, tmp_path, name):
    """Chunks of tp 2 x pp 2, the fused projections cut across theirs; one file, cast on the way if asked."""
    ranks(4, check_saved_wide, str(folders[name]), str(tmp_path / "step"))
    back = export_hf(tmp_path / "step", tmp_path / "back", tokenizer=folders[name])
    same_tensors(tensors_of(back), tensors_of(folders[name]))
    with safe_open(back / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers 4 refuses a file that doesn't say so (mlx #743)
    assert sorted(p.name for p in back.iterdir()) == ["config.json", "generation_config.json", "model.safetensors",
                                                      "tokenizer.json"]  # fmt: skip
    carried = import_hf(folders[name], tmp_path / "carried")
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    other = export_hf(carried, tmp_path / "other", tokenizer=tmp_path / "tokenizer.json")
    assert sorted(p.name for p in other.iterdir()) == sorted(p.name for p in back.iterdir())
    half = export_hf(tmp_path / "step", tmp_path / "half", dtype=torch.bfloat16)
    bias = "e_score_correction_bias"  # moves by steps that bfloat16 loses
    same_tensors(tensors_of(half), {k: t if k.endswith(bias) else t.bfloat16() for k, t in tensors_of(back).items()})
    assert read_json(half / "config.json")["torch_dtype"] == "bfloat16"
    whole = import_hf(half, tmp_path / "whole", dtype=torch.float32)
    same_tensors(tensors_of(export_hf(whole, tmp_path / "again")), {k: t.float() for k, t in tensors_of(half).items()})


_DEEPSPEED = "in pickles, .*zero_to_fp32.py with --safe_serialization"


@pytest.mark.parametrize(
    ("names", "match"),
    [
        ("a/b/__0_0.distcp a/b/.metadata", r"torch.distributed.checkpoint \(a/b/.* mpcore checkpoint convert"),
        (".metadata", "torch.distributed.checkpoint .*mpcore checkpoint convert"),
        ("iter_1/__0_0.distcp iter_1/.metadata iter_1/common.pt", "torch_dist .*in pickles, .*Megatron Bridge"),
        ("g/mp_rank_00_model_states.pt", rf"DeepSpeed \(.*{_DEEPSPEED}"),
        ("g/zero_pp_rank_0_mp_rank_00_model_states.pt", rf"ZeRO-3 .*{_DEEPSPEED}"),
        ("mp_rank_00_model_states.pt bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", rf"ZeRO-2 .*{_DEEPSPEED}"),
        ("u/zero/model.weight/fp32.pt", "DeepSpeed, universal .*go back to the checkpoint it was made of"),
        ("iter_1/mp_rank_00/model_optim_rng.pt", "Megatron-LM .*Megatron Bridge"),
        ("config.json pytorch_model.bin", "transformers .*in pickles, .*save_pretrained of transformers"),
    ],
)
def test_checkpoints_of_other_libraries_are_refused_with_the_way_out(tmp_path, names, match, capsys):
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    reads = [open_hf, open_checkpoint, from_pretrained, checkpoint.inspect]
    reads.append(lambda path: checkpoint.load(path, torch.nn.Linear(1, 1), mesh=Mesh()))  # as run.load and --resume
    for read in reads:
        with pytest.raises(ValueError, match=match):
            read(tmp_path)
    assert mpcore_main(["checkpoint", "inspect", str(tmp_path)]) == 2
    assert re.search(match, capsys.readouterr().err)
    (tmp_path / "model.safetensors").write_bytes(b"")  # a Trainer leaves both: this one is readable
    with pytest.raises(ValueError, match=r"model.safetensors has 0 bytes|config.json"):
        open_hf(tmp_path)


LLAMA = {"model_type": "llama", **SIZES, "hidden_act": "silu"}
QWEN3_MOE = {**LLAMA, "model_type": "qwen3_moe", "num_hidden_layers": 4}
DEEPSEEK_V3 = {**DEEPSEEK, "model_type": "deepseek_v3", "hidden_act": "silu", "first_k_dense_replace": 1}
REFUSED = [
    *(
        ({"model_type": kind}, rf"model_type '{kind}', which the blocks here cannot be: .*from_pretrained")
        for kind in ("gemma2", "gemma3_text", "gpt_neox", "gpt_oss", "olmo2", "smollm3")
    ),
    ({**LLAMA, "model_type": "opt"}, r"model_type 'opt'. Supported are .* Train it as it is, with mpcore"),
    ({**LLAMA, "final_logit_softcapping": 30.0}, r"final_logit_softcapping': 30.0"),
    ({**LLAMA, "quantization_config": {"bits": 4}}, r"quantization_config"),
    ({**LLAMA, "sliding_window": 5}, r"sliding_window"),
    ({**LLAMA, "is_causal": False}, "is_causal False is not supported: only True is"),
    ({**LLAMA, "hidden_size": True}, "hidden_size True must be a whole number"),
    ({**LLAMA, "vocab_size": 8.0}, "vocab_size 8.0 must be a whole number"),
    ({n: v for n, v in LLAMA.items() if n != "model_type"}, r"model_type None\. Supported are"),
    ({**LLAMA, "rms_norm_eps": "1e-6"}, r"rms_norm_eps '1e-6' must be a number, not text"),
    ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"rope_type 'dynamic' is unknown"),
    ({**LLAMA, "rope_scaling": [1]}, r"config.json describes no model: 'list' object has no"),
    ({**LLAMA, "model_type": ["llama"]}, r"model_type \['llama'\]\. Supported are"),
    ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, r"lacks \['high_freq_factor'"),
    ({n: v for n, v in LLAMA.items() if n != "hidden_size"}, r"config.json has no hidden_size"),
    ({"model_type": "gpt2", **GPT2, "activation_function": "quick_gelu"}, r"activation_function 'quick_gelu'"),
    ({"model_type": "gpt2", **GPT2, "scale_attn_weights": False}, r"scale_attn_weights False"),
    ({**QWEN3_MOE, "moe_intermediate_size": 0}, r"moe d_ff 0 is not supported: it must be 1 or more"),
    ({**QWEN3_MOE, "mlp_only_layers": [1, 3]}, r"put experts in the layers \[0, 2\] of 4"),
    ({**DEEPSEEK_V3, "moe_layer_freq": 2}, r"moe_layer_freq 2 is not supported: only 1 is"),
    ({**DEEPSEEK_V3, "mlp_bias": True}, r"mlp_bias True"),
    ({**DEEPSEEK_V3, "scoring_func": "softmax"}, r"scoring_func 'softmax'"),
    (
        {**DEEPSEEK_V3, "model_type": "deepseek_v2", "topk_method": "group_limited_greedy"},
        r"topk_method 'group_limited",
    ),
    ({**DEEPSEEK_V3, "model_type": "deepseek_v2", "norm_topk_prob": True}, r"norm_topk_prob True"),
    ({**DEEPSEEK_V3, "first_k_dense_replace": 2}, r"moe dense 2 leaves no experts in the 2 layers"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_what_would_be_a_silently_different_model_is_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(values)


def test_a_model_of_no_family_is_not_exported(tmp_path, capsys):
    config = GPTConfig(vocab_size=53, layers=1, d_model=8, heads=2, activation="relu_squared")
    save(tmp_path / "step", build(config), mesh=Mesh(), step=0, config={"model": asdict(config)})
    with pytest.raises(ValueError, match=r"closest is llama, but: .*activation 'relu_squared' would be None"):
        export_hf(tmp_path / "step", tmp_path / "back")
    assert generate_main(["--checkpoint", str(tmp_path / "step"), "--tokenizer", "byte"]) == 2
    assert "the tokenizer has 257 tokens, the model 53" in capsys.readouterr().err
    save(tmp_path / "other", build(config), mesh=Mesh(), step=0)
    with pytest.raises(ValueError, match="holds no such model"):
        export_hf(tmp_path / "other", tmp_path / "back")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "step"]


def test_a_checkpoint_whose_config_is_of_another_model_is_not_exported(tmp_path):
    small = GPTConfig(vocab_size=53, layers=1, d_model=8, heads=2)
    for name, config, message in (
        ("wider", replace(small, d_model=16), r"has shape \(53, 8\), its config makes it \(53, 16\)"),
        ("deeper", replace(small, layers=2), r"model/blocks\.1\.\S+ has shape None, its config makes it"),
        ("shallower", replace(small, layers=1), r"that the model of its config does not: \['model/blocks\.1"),
    ):
        model = build(replace(small, layers=2) if name == "shallower" else small)
        save(tmp_path / name, model, mesh=Mesh(), step=0, config={"model": asdict(config)})
        with pytest.raises(ValueError, match=message):
            export_hf(tmp_path / name, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_layers_that_predict_further_tokens_equal_the_parts_of_transformers(folders, tmp_path):
    """Published files of DeepSeek-V3 hold a layer behind the model's, which transformers leaves out."""
    folder = shutil.copytree(folders["deepseek v3"], tmp_path / "published")
    values, dense = read_json(folder / "config.json"), theirs(folder)
    D, last, draw = values["hidden_size"], values["num_hidden_layers"], torch.Generator().manual_seed(1)
    beside = {"enorm": (D,), "hnorm": (D,), "eh_proj": (D, 2 * D), "shared_head.norm": (D,)}
    beside = {name: torch.randn(shape, generator=draw) for name, shape in beside.items()}
    layer = {key: t.clone() for key, t in tensors_of(folder).items() if key.startswith(f"model.layers.{last - 1}.")}
    more = {key.replace(f".{last - 1}.", f".{last}.", 1): t * 1.125 for key, t in layer.items()}
    more |= {f"model.layers.{last}.{name}.weight": t for name, t in beside.items()}
    table = tensors_of(folder)["model.embed_tokens.weight"].clone()
    change_tensors(folder, lambda t: t.update(more | {f"model.layers.{last}.embed_tokens.weight": table}))
    for count in (0, 1):
        (folder / "config.json").write_text(json.dumps(values | {"num_nextn_predict_layers": count}))
        if not count:
            with pytest.raises(ValueError, match=rf"does not: \['model.layers.{last}."):
                open_hf(folder)
    config = open_hf(folder).config
    assert config == replace(open_hf(folders["deepseek v3"]).config, mtp=1)
    assert open_hf(folder, spec=replace(SPEC, further=False)).config == replace(config, mtp=0)
    model = GPT(config)
    load_hf(folder, model, spec=SPEC)
    (later,), _ = shift_tokens(IDS, 1)
    with torch.no_grad():
        eps, base = values["rms_norm_eps"], dense.model
        states = []
        base.norm.register_forward_pre_hook(lambda _, given: states.append(given[0]))
        logits = dense(IDS).logits
        parts = [F.rms_norm(x, (D,), beside[name], eps) for name, x in
                 (("enorm", base.embed_tokens(later)), ("hnorm", states[0]))]  # fmt: skip
        x = torch.cat(parts, -1) @ beside["eh_proj"].T
        mask = torch.full((IDS.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        where = torch.arange(IDS.shape[1])[None]
        block = copy.deepcopy(base.layers[-1])
        for p in (*block.parameters(), *block.buffers()):
            p.mul_(1.125)
        x = block(x, attention_mask=mask, position_embeddings=base.rotary_emb(x, where))
        x = F.rms_norm(x[0] if isinstance(x, tuple) else x, (D,), beside["shared_head.norm"], eps)
        got = model.eval()(IDS, later=later[:, None])
        want = torch.cat([logits, dense.lm_head(x)], 1)
    assert (got - want).abs().max() < 1e-5 * want.abs().max()
    back = export_hf(import_hf(folder, tmp_path / "checkpoint"), tmp_path / "back")
    assert read_json(back / "config.json")["num_nextn_predict_layers"] == 1
    found, files = tensors_of(back), tensors_of(folder)
    del files[f"model.layers.{last}.embed_tokens.weight"]  # the model's own table again
    assert found.keys() == files.keys()
    assert all(torch.equal(found[key], t) for key, t in files.items())


MIXTURE = GPTConfig(vocab_size=53, layers=2, d_model=8, heads=2, d_ff=12, moe=MoEConfig(experts=4, d_ff=6))


@pytest.mark.parametrize(("latent", "changes", "of_mixture", "message"), [
    (True, {}, {"score": "softmax", "groups": 1, "top_groups": 1}, "deepseek_v2, but: moe.normalize True would be"),
    (True, {}, {"score": "softmax", "normalize": False}, "deepseek_v3, but: moe.score 'softmax' would be 'sigmoid'"),
    (True, {}, {"shared_experts": 0}, "n_shared_experts 0 is not supported: it must be 1 or more"),
    (True, {}, {"bias": None}, "deepseek_v3, but: moe.bias False would be True"),
    (True, {}, {"dense": 0, "every": 2}, "but: moe.every 2 would be 1"),
    (True, {}, {"capacity_factor": 1.5}, "but: moe.capacity_factor 1.5 would be None"),
    (True, {"norm_eps": 1e-5}, {}, "but: norm_eps 1e-05 would be 1e-06"),
    (True, {"window": 5}, {}, "but: window 5 would be None"),
    (False, {}, {"shared_experts": 1}, "mixtral, but: moe.shared_experts 1 would be 0"),
    (False, {}, {"groups": 2, "top_groups": 1}, "mixtral, but: moe.groups 2 would be 1"),
    (False, {}, {"dense": 1}, "mixtral, but: moe.dense 1 would be 0"),
], ids=str)  # fmt: skip
def test_a_mixture_that_no_family_can_say_is_not_exported(latent, changes, of_mixture, message):
    config = config_from_hf(DEEPSEEK_V3) if latent else MIXTURE
    assert config.moe is not None
    with pytest.raises(ValueError, match=f"no supported Hugging Face architecture is .*{message}"):
        config_to_hf(replace(config, **changes, moe=replace(config.moe, **of_mixture)))


def test_what_routers_keep_besides_their_weight_is_left_out_unless_it_counts(folders, tmp_path, capsys):
    """Fractions of the balance loss go, a bias of zero goes, another one is refused; no import needs them."""
    assert MIXTURE.moe is not None
    config = replace(MIXTURE, vocab_size=257, moe=replace(MIXTURE.moe, bias_rate=0.1, aux_loss="global"))
    model = build(config)
    options: dict[str, Any] = {"mesh": Mesh(), "config": {"model": asdict(config)}}
    zero = save(tmp_path / "zero", model, step=0, **options)
    assert open_checkpoint(zero)[2] == config
    back = export_hf(zero, tmp_path / "back")
    assert not [key for key in tensors_of(back) if "router" in key]
    with torch.no_grad():
        want = model(IDS)
        assert (theirs(back)(IDS).logits - want).abs().max() < 1e-5 * want.abs().max()
        again = build(config)
        for parameter in again.parameters():
            parameter += 1.0
        load_hf(back, again)
        for name, parameter in model.named_parameters():
            began = name.endswith(("expert_bias", "fractions"))
            assert torch.equal(again.get_parameter(name), parameter + 1.0 if began else parameter), name
        model.get_parameter("blocks.1.mlp.router.expert_bias")[2] = -0.5
    save(tmp_path / "biased", model, step=1, **options)
    with pytest.raises(ValueError, match=r"blocks.1.mlp.router.expert_bias is not zero \(up to 0.5\)"):
        export_hf(tmp_path / "biased", tmp_path / "more")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "biased", "zero"]
    assert generate_main(["--checkpoint", str(tmp_path / "biased"), "--prompt", "def ", "--new-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("def ")


class Payload:
    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (self.canary,)


def one_file(folder: Path) -> Path:
    """All tensors in model.safetensors, no index."""
    tensors = tensors_of(folder)
    for file in (*folder.glob("*.safetensors"), folder / hf.INDEX):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def pickles_only(folder: Path) -> None:
    one_file(folder).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(str(folder / "ran"))))


def change_config(folder: Path, **values: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**read_json(folder / "config.json"), **values}))


def change_tensors(folder: Path, change: Callable[[dict], Any]) -> None:
    file = one_file(folder)
    tensors = load_file(file)
    change(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file)


NORM, UP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickles only": (pickles_only, r"\(pytorch_model.bin\), .* pickles"),
    "pickled safetensors": (lambda f: one_file(f).write_bytes(pickle.dumps(Payload(str(f / "ran")))),
                            r"model.safetensors is damaged: a header of \d+ bytes"),
    "wrong type": (lambda f: change_config(f, num_attention_heads=None, head_dim=None),
                   r"num_attention_heads None must be"),
    "no config": (lambda f: (f / "config.json").unlink(), r"config.json is missing"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON: "),
    "a deep config": (lambda f: (f / "config.json").write_text("[" * 100000), "config.json is not JSON: "),
    "no object": (lambda f: (f / "config.json").write_text("[1]"), "config.json holds no JSON object"),
    "no norm": (lambda f: change_tensors(f, lambda t: t.pop(NORM)), f"no tensor '{NORM}', which norm.weight needs$"),
    "another shape": (lambda f: change_tensors(f, lambda t: t.update({NORM: torch.ones(3)})),
                      rf"{NORM} has shape \(3,\), config.json makes it \(24,\)$"),
    "integers": (lambda f: change_tensors(f, lambda t: t.update({NORM: t[NORM].int()})), "has dtype I32: weights are"),
    "two dtypes": (lambda f: change_tensors(f, lambda t: t.update({UP: t[UP].half()})), "consist of several dtypes"),
    "an odd tensor": (lambda f: change_tensors(f, lambda t: t.update({"model.odd": torch.ones(1)})),
                      r"has tensors that .* does not: \['model.odd'\]$"),
    "no layers": (lambda f: change_config(f, num_hidden_layers=None, num_nextn_predict_layers=1),
                  "num_hidden_layers None must be a whole number"),
    "an adapter beside": (lambda f: (f / "adapter_config.json").write_text("{}"), "holds a model and an adapter"),
    "an index of nothing": (lambda f: (change_config(f, num_nextn_predict_layers=1), (f / hf.INDEX).write_text("{}")),
                            "index.json has no weight_map of file names"),
    "another head": (lambda f: change_config(f, tie_word_embeddings=True), "lm_head isn't the embedding: set tie_word"),
    "giant config": (lambda f: os.truncate(f / "config.json", JSON_LIMIT + 1),
                     rf"config.json has {JSON_LIMIT + 1} bytes, more than {JSON_LIMIT}"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_can_not_be_read_is_refused_by_name_and_changes_nothing(folders, tmp_path, damage):
    model = build(open_hf(folders["mistral"]).config)
    before = {name: p.clone() for name, p in model.named_parameters()}
    folder = tmp_path / "hf"
    shutil.copytree(folders["mistral"], folder)
    change, message = DAMAGES[damage]
    change(folder)
    with pytest.raises(ValueError, match=message):
        load_hf(folder, model)
    with pytest.raises(ValueError, match=message):
        import_hf(folder, tmp_path / "step")
    assert not (folder / "ran").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])


def test_a_base_model_and_the_tables_of_old_files_are_read(folders, tmp_path):
    """GPT-2 as it was first published: no prefix, masks among the tensors; a head that is the table again."""
    folder = tmp_path / "hf"
    shutil.copytree(folders["gpt2"], folder)
    file = one_file(folder)
    tensors = {key.removeprefix("transformer."): tensor for key, tensor in load_file(file).items()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64) for i in range(2)}
    save_file(tensors | {"lm_head.weight": tensors["wte.weight"].clone()}, file)
    first, second = build(open_hf(folders["gpt2"]).config), build(open_hf(folder).config)
    load_hf(folders["gpt2"], first)
    load_hf(folder, second)
    assert torch.equal(logits_of(first), logits_of(second))


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.int64, torch.float8_e4m3fn], ids=str)
def test_pitfall_60_values_that_a_dtype_cannot_hold_are_not_converted(folders, tmp_path, dtype):
    """float16 held infinity, integers were rounded to 0, and NaN came back as it was."""
    value, said = torch.nan if dtype is None else 1e6, "norm.weight .* holds NaN or infinity"
    model = build(config := open_hf(folders["mistral"]).config)
    with torch.no_grad():
        model.norm.weight[0] = value
    with mock.patch.object(saving, "check_finite"):  # as an older release wrote it
        path = save(tmp_path / "step", model, mesh=Mesh(), step=0, config={"model": asdict(config)})
    shutil.copytree(folders["mistral"], tmp_path / "hf")
    change_tensors(tmp_path / "hf", lambda tensors: tensors[NORM].view(-1)[:1].fill_(value))
    said = said if dtype in (None, torch.float16) else rf"dtype {dtype} can't hold embedding.weight: give torch.float32"
    with pytest.raises(ValueError, match=said):
        export_hf(path, tmp_path / "back", dtype=dtype)
    with pytest.raises(ValueError, match=said):
        import_hf(tmp_path / "hf", tmp_path / "import", dtype=dtype)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "step"]


def test_an_export_from_damage_or_onto_something_is_refused_and_leaves_nothing(folders, tmp_path):
    path = import_hf(folders["mistral"], tmp_path / "step")
    (tmp_path / "back").mkdir()
    export_hf(path, tmp_path / "back")
    with pytest.raises(ValueError, match="back exists"):
        export_hf(path, tmp_path / "back")
    kept = (path / hf.FOLDER / "tokenizer.json").read_bytes()
    (path / hf.FOLDER / "tokenizer.json").write_text('{"made": "anew"}')
    with pytest.raises(ValueError, match=r"tokenizer\.json has 16 bytes, written were"):
        export_hf(path, tmp_path / "more")
    (path / hf.FOLDER / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        export_hf(path, tmp_path / "more")
    data = bytearray((path / "model-00000.safetensors").read_bytes())
    data[-5] ^= 1
    (path / "model-00000.safetensors").write_bytes(data)
    (path / hf.FOLDER / "tokenizer.json").write_bytes(kept)
    with pytest.raises(ValueError, match="damaged: its checksum"):
        export_hf(path, tmp_path / "more")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "step"]


MEASURE = r"""
import re, sys
from examples.gpt.hf import SPEC
from mpcore.interop.hugging_face import export_hf, import_hf
import torch
def peak(): return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1])
torch.ones(10).sum()
base = peak()
import_hf(sys.argv[1], sys.argv[2], spec=SPEC, shard_bytes=2**26)
middle = peak()
export_hf(sys.argv[2], sys.argv[3], spec=SPEC, shard_bytes=2**26)
print(middle - base, peak() - base)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.slow
def test_a_conversion_holds_one_tensor_at_a_time(tmp_path):
    """GPT-2's transposed matrices are the worst of it: a file of 120 MB, the largest tensor 16 MiB."""
    d, layers = 1024, 3
    values = {**GPT2, "model_type": "gpt2", "n_embd": d, "n_head": 16, "n_layer": layers, "vocab_size": 4096}
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    parts = parts_of(config_from_hf(values))
    tensors = {p.key: torch.ones(p.stored) for _, found in parts.values() for p in found}
    save_file(tensors, folder / "model.safetensors")
    total, largest = (f(t.nbytes for t in tensors.values()) for f in (sum, max))
    command = [sys.executable, "-c", MEASURE, str(folder), str(tmp_path / "step"), str(tmp_path / "back")]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    constant = 16 * 2**20
    assert total > 2 * (2 * largest + constant)
    for used in map(int, run.stdout.split()):
        assert 0 < used < 2 * largest + constant, (
            f"{used / 2**20:.0f} MiB for a largest tensor of {largest / 2**20:.0f}"
        )
    same_tensors(tensors_of(tmp_path / "back"), tensors)


def test_the_command_converts_both_ways(folders, tmp_path, capsys):
    step, back = str(tmp_path / "step"), str(tmp_path / "back")
    assert mpcore_main([*CONVERT, "--from-hf", str(folders["gpt2"]), "--to", step]) == 0
    assert mpcore_main([*CONVERT, "--from-hf", str(folders["gpt2"]), "--to", step]) == 2
    assert f"error: {step} exists: --force replaces it" in capsys.readouterr().err
    assert mpcore_main([*CONVERT, "--from-hf", str(folders["gpt2"]), "--to", step, "--force"]) == 0
    assert mpcore_main([*CONVERT, "--from", step, "--to-hf", back, "--dtype", "bfloat16"]) == 0
    assert tensors_of(tmp_path / "back")["transformer.wte.weight"].dtype == torch.bfloat16
    assert mpcore_main([*CONVERT, "--from", step, "--to-hf", back]) == 2
    assert "exists: it is not overwritten" in capsys.readouterr().err
    for path in (tmp_path, tmp_path / "gone.json"):
        assert mpcore_main([*CONVERT, "--from", step, "--to-hf", str(tmp_path / "new"), "--tokenizer", str(path)]) == 2
        assert f"error: {path} is no tokenizer.json, and no folder with one of tok" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "step"]
    (tmp_path / "mine.json").write_text('{"model": {}}')
    named = ["--tokenizer", str(tmp_path / "mine.json")]
    assert mpcore_main([*CONVERT, "--from", step, "--to-hf", str(tmp_path / "new"), *named]) == 0
    assert (tmp_path / "new" / "tokenizer.json").read_text() == '{"model": {}}'
    with pytest.raises(SystemExit):
        mpcore_main([*CONVERT, "--from-hf", step])


def check_training(folder: str, out: str, sizes: dict, flags: list[str]) -> tuple[float, list[float]]:
    t = trainer("--init-from", folder, "--tokenizer", "byte", "--out", out, "--lr", "1e-3", *flags, **sizes)
    value = t.evaluate()
    losses = [t.step()["loss"] for i in range(2)]
    if not sizes:
        t.checkpoints.save()
    return value, losses


def check_training_refused(folder: str, out: str) -> None:
    for flags, message in (
        (["--tokenizer", "byte", "--preset", "gpt2"], r"--preset gpt2 and a model to begin with: the shape is that of"),
        (["--tokenizer", "byte", "--d-ff", "32"], r"--d-ff 32 is not the 24 of"),
        ([], r"carries no tokenizer, and its vocabulary of 300 is not the 257 of bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer("--init-from", folder, "--out", out, *flags, tp=2)


def test_training_begins_with_a_model_of_theirs_on_any_layout(ranks, tmp_path, capsys):
    """The first loss is theirs, the next ones those of one process; then it exports and generates."""
    config = transformers.Qwen2Config(
        vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    folder, out = str(tmp_path / "hf"), str(tmp_path / "out")
    model.save_pretrained(folder)
    bare = str(import_hf(folder, tmp_path / "bare"))
    ((value, want),) = ranks(1, check_training, bare, out, {}, [])
    for found, losses in ranks(4, check_training, bare, out, {"pp": 2, "tp": 2}, ["--sequence-parallel"]):
        assert found == pytest.approx(value, rel=1e-5)
        assert losses == pytest.approx(want, rel=1e-5)
    ranks(2, check_training_refused, bare, out)
    step = tmp_path / "out" / "checkpoints" / "step-00000002"
    export_hf(step, tmp_path / "trained", tokenizer=folder)
    trained = theirs(tmp_path / "trained")
    sample = IDS[:1]
    ours = build(open_checkpoint(step)[2])
    load(step, ours, mesh=Mesh())
    with torch.no_grad():
        assert (trained(sample).logits - ours(sample)).abs().max() < 1e-5
        assert not torch.allclose(trained(sample).logits, model.eval()(sample).logits, atol=1e-4)
    sample_of = ["--checkpoint", str(step), "--prompt", "def ", "--new-tokens", "5"]
    for named in ([], ["--tokenizer", "byte"]):  # the checkpoint says it too
        assert generate_main([*sample_of, *named]) == 0
        assert capsys.readouterr().out.startswith("def ")
    for there, message in ((bare, "vocabulary of 300 is not the 257"), (folder, "is no complete checkpoint")):
        assert generate_main(["--checkpoint", there]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_training_begins_with_an_import_in_half_precision(tmp_path, dtype):
    """`--init-from` makes the run's float32 of it, to the bit."""
    config = GPTConfig(vocab_size=257, layers=2, d_model=16, heads=4, kv_heads=2, d_ff=24)
    step = save(tmp_path / "step", build(config).to(dtype), mesh=Mesh(), step=0, config={"model": asdict(config)})
    data = write(tmp_path / "corpus", [[*b"def f(): return 1\n" * 99, 256]])
    flags = ["--data", data, "--tokenizer", "byte", "--out", str(tmp_path / "out")]
    cast, want = trainer(*flags, "--init-from", str(step)).model, build(config).to(dtype)
    for p, q in zip(cast.parameters(), want.parameters(), strict=True):
        assert p.dtype == torch.float32
        assert torch.equal(p, q.float())
    with pytest.raises(ValueError, match=r"model/embedding.weight: expected dtype F32, found B?F16 in model-00000"):
        load(step, cast, mesh=Mesh())


def test_a_run_that_began_with_another_model_goes_on_without_its_weights(tmp_path):
    """They would be read over; without the flag the refusal says that it is missing."""
    config = GPTConfig(vocab_size=257, layers=2, d_model=16, heads=4, d_ff=28)
    first = save(tmp_path / "step", build(config), mesh=Mesh(), step=0, config={"model": asdict(config)})
    data = write(tmp_path / "corpus", [[*b"def f(): return 1\n" * 99, 256]])
    flags = ["--data", data, "--tokenizer", "byte", "--seq-len", "8"]
    here, begin = [*flags, "--out", str(tmp_path / "out")], ["--init-from", str(first)]
    begun = Trainer(parse([*here, *begin]), mesh())
    begun.step()
    begun.checkpoints.save()
    (weights,) = first.glob("*.safetensors")
    weights.write_bytes(bytes(weights.stat().st_size))
    went_on = Trainer(parse([*here, *begin, "--resume", "auto"]), mesh())
    assert went_on.run.step == 1
    for p, q in zip(went_on.model.parameters(), begun.model.parameters(), strict=True):
        assert torch.equal(p, q)
    with pytest.raises(ValueError, match=r"d_ff is 28 .* If it began with --init-from, give that again"):
        Trainer(parse([*here, "--resume", "auto"]), mesh())


TEXT = "".join(f"def f{i}(): return {i * i}\n" for i in range(200))


def check_carried(folder: str, data: str, out: str) -> None:
    """Saves 1 from their folder, in the background; 2 from that; 3 and 4 with another tokenizer."""
    step = step_path(Path(out) / "checkpoints", 1)
    other = f"{Path(folder).parent}/other.json"
    again = ["--init-from", str(step)]
    imported = str(import_hf(folder, f"{folder}-imported"))
    begins = (["--init-from", imported, "--set", "async_save=true"], again, [*again, "--tokenizer", other],
              [*again, "--tokenizer", "byte"])  # fmt: skip
    for i, begin in enumerate(begins):
        t = Trainer(parse([*begin, "--data", data, "--seq-len", "8", "--out", out]), mesh())
        save_as(i + 1, t)
        if t.checkpoints.saving is not None:
            t.checkpoints.saving.wait()


def test_what_goes_along_with_a_model_stays_with_it_through_training(ranks, tmp_path, capsys):
    """Token ids, tokenizer and generation config; of a run with another tokenizer that one alone."""
    folder, out = tmp_path / "hf", tmp_path / "out"
    tokenizer = train_tokenizer([TEXT], 290, tmp_path / "tokenizer.json")
    train_tokenizer([TEXT], 280, tmp_path / "other.json")
    data = write(tmp_path / "corpus", [[*TEXT.encode(), 256]] * 4)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=4, max_position_embeddings=64, bos_token_id=3, eos_token_id=[5, 7],
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    shutil.move(tmp_path / "tokenizer.json", folder)
    ranks(1, check_carried, str(folder), data, str(out))
    steps = [step_path(out / "checkpoints", i + 1) for i in range(4)]
    files = ["generation_config.json", "tokenizer.json"]
    for i, (step, carried) in enumerate(
        zip(steps, (files, files, [*files[1:], "tokenizer_config.json"], []), strict=True)
    ):
        back = export_hf(step, tmp_path / f"back{i}")
        assert sorted({p.name for p in back.iterdir()} - {"config.json", "model.safetensors"}) == carried
        for name in carried[:2] if i < 2 else carried[:1]:
            source = folder / name if i < 2 else tmp_path / "other.json"
            assert (back / name).read_bytes() == source.read_bytes()
        ids = json.loads((back / "config.json").read_text())
        assert (ids["bos_token_id"], ids["eos_token_id"]) == ((3, [5, 7]), (3, [5, 7]), (None, 0), (None, 256))[i]
        assert ids["max_position_embeddings"] == 64, "the run's 8 tokens are no limit of the model"
        assert generate_main(["--checkpoint", str(step), "--prompt", "def ", "--new-tokens", "3"]) == 0
        assert capsys.readouterr().out.startswith("def ")
    at = steps[0] / hf.FOLDER / "tokenizer.json"
    at.write_bytes(at.read_bytes() + b" ")
    assert generate_main(["--checkpoint", str(steps[0])]) == 2
    assert "bytes, written were" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["byte", "json", "json of another name"])
@torch.no_grad()
def test_what_was_trained_here_stops_at_the_end_of_a_document_there(tmp_path, capsys, kind):
    """With nothing but what the folder says: models of no import had ids 1 and 2 of their family."""
    from transformers import AutoTokenizer

    (tmp_path / "text").write_text(TEXT)
    file = tmp_path / "tokenizer.json"
    trained = train_tokenizer([TEXT], 290, file)
    named, flags, name = str(file) if kind != "byte" else "byte", [], "<|endoftext|>"
    if kind == "json of another name":
        name, flags = "<stop>", ["--set", "end_of_document=<stop>"]
        file.write_text(file.read_text().replace("<|endoftext|>", name))
    prepare([tmp_path / "text"] * 4, tmp_path / "corpus", tokenizer=named, end_of_document=name if flags else None)
    named_there = ["--tokenizer", named, *(["--end-of-document", name] if flags else [])]
    flags += ["--tokenizer", named]
    t = trainer("--data", str(tmp_path / "corpus"), *flags, "--out", str(tmp_path / "out"))
    end = t.setup.tokenizer.end_of_document
    for parameter in t.model.parameters():
        parameter.zero_()
    stage = t.stages[0]
    for parameter in (stage.embedding.weight, stage.norm.weight, stage.head.weight[end]):
        parameter.fill_(1.0)  # whatever there is, a document ends
    save_as(1, t)
    back = export_hf(step_path(t.checkpoints.path, 1), tmp_path / "back")
    assert theirs(back).generate(torch.tensor([[65]]), max_new_tokens=9).tolist() == [[65, end]]
    saved = str(t.checkpoints.path / "step-00000001")
    assert generate_main(["--checkpoint", saved, "--prompt", "d", *named_there]) == 0
    assert capsys.readouterr().out == "d\n"
    if kind != "byte":
        tokenizer = AutoTokenizer.from_pretrained(back)
        assert (tokenizer.eos_token, tokenizer.eos_token_id) == (name, end)
        assert tokenizer("def f(1)")["input_ids"] == trained.encode("def f(1)").tolist()
