"""Read what torchtitan wrote for Llama 3: a folder of `torch.distributed.checkpoint` with names of its own.

Source: torchtitan, `models/llama3/state_dict_adapter.py` (b5bcd76): its names, and the order of the rows of wq and wk.
torchtitan rotates neighbors (2i, 2i + 1) of a head, transformers rotates (i, i + head_dim / 2).
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from mpcore.checkpoint.pieces import check_finite
from mpcore.interop.dcp import BoxedTensor, dcp_state_dict
from mpcore.mesh.agreement import merged, together
from mpcore.mesh.axis import Mesh
from mpcore.sharding.local import is_dtensor
from mpcore.sharding.state_dict import all_names

_PARTS = {  # transformers, torchtitan
    "model.embed_tokens.": "tok_embeddings.", "model.norm.": "norm.", "model.layers.": "layers.",
    ".self_attn.q_proj.": ".attention.qkv_linear.wq.", ".self_attn.k_proj.": ".attention.qkv_linear.wk.",
    ".self_attn.v_proj.": ".attention.qkv_linear.wv.", ".self_attn.o_proj.": ".attention.wo.",
    ".mlp.gate_proj.": ".feed_forward.w1.", ".mlp.up_proj.": ".feed_forward.w3.", ".mlp.down_proj.":
    ".feed_forward.w2.", ".input_layernorm.": ".attention_norm.", ".post_attention_layernorm.": ".ffn_norm.",
}  # fmt: skip
_BEFORE_2026 = {".attention.qkv_linear.": ".attention.", "lm_head.": "output."}


@torch.no_grad()
def load_torchtitan(model: nn.Module, folder: str | os.PathLike[str], head_dim: int, mesh: Mesh = Mesh()) -> None:
    """Load the weights of a torchtitan Llama 3 into a `LlamaForCausalLM`, sharded over tp or not, before `prepare`.

    All ranks must call it. Each reads its own shards. DCP reads pickles, which may run code: trust the folder.

    Args:
        model: the model, after `parallelize`.
        folder: a step of torchtitan's checkpoints, with `.metadata` in it.
        head_dim: the size of one attention head.

    Raises:
        ValueError: on every rank, if a rank can't read the folder, its tensors are not those of the model, or hold NaN,
            tied weights differ, `head_dim` is not that of the model's config, or ZeRO has sharded the model already.
    """
    state, names = dcp_state_dict(model, mesh), dict[str, str]()

    def check() -> dict[str, Any]:
        stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        for name in state:
            new = _replace(name, _PARTS)
            names[name] = new if new in stored else _replace(new, _BEFORE_2026)
        own = getattr(getattr(model, "config", None), "head_dim", None) or head_dim
        if own != head_dim:
            raise ValueError(f"head_dim {head_dim} is not the {own} of the model's config: give {own}")
        missing = [theirs for theirs in names.values() if theirs not in stored]
        for name, tensor in state.items():
            if names[name] in stored and (found := getattr(stored[names[name]], "size", None)) != tensor.shape:
                raise ValueError(f"{folder} has {names[name]} of shape {found}, and {name} has {tuple(tensor.shape)}")
        if missing or any(map(is_dtensor, model.parameters())):
            why = f"{folder} lacks {len(missing)} tensors, such as {missing[0]}" if missing else "ZeRO shards the model"
            raise ValueError(f"{why}: give a Llama 3 of torchtitan and the model after parallelize, before prepare")
        for tied in (each for each in all_names(model) if len(each) > 1):
            copies = [replace(state[name].held, tensor=state[name].held.tensor.clone()) for name in tied]
            boxed = {names[name]: BoxedTensor.of(copy) for name, copy in zip(tied, copies, strict=True)}
            dcp.load(boxed, checkpoint_id=folder, no_dist=True)
            if any(not torch.equal(copies[0].tensor, copy.tensor) for copy in copies):
                raise ValueError(
                    f"{folder} has {len(tied)} different tensors for {' and '.join(tied)}, which are one in this "
                    f"{type(model).__name__}: make the model with tie_word_embeddings=False"
                )
        return stored

    def check_others(of_ranks: list[list[str]]) -> None:
        known = set().union(*of_ranks)
        parts = {name.partition(".")[0] for name in known}  # of a model; others are the optimizer's
        if others := sorted(name for name in stored if name not in known and name.partition(".")[0] in parts):
            raise ValueError(f"{folder} has {len(others)} more tensors, such as {others[0]}: make the model as large")

    def read() -> None:
        dcp.load({names[name]: tensor for name, tensor in state.items()}, checkpoint_id=folder, no_dist=True)
        check_finite(((name, p, True) for name, p in model.named_parameters()), str(folder))

    stored = together(mesh.world, check)
    merged(mesh.world, lambda: [*names.values()], check_others)
    together(mesh.world, read)
    for name, p in model.named_parameters():
        if names[name].endswith((".wq.weight", ".wk.weight")):  # each rank holds full heads
            p.copy_(p.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(p.shape))


def _replace(name: str, parts: dict[str, str]) -> str:
    for old, new in parts.items():
        name = name.replace(old, new)
    return name
