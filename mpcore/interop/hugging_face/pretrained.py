"""Save sharded models of transformers as its `save_pretrained` does, with one full tensor in memory at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpcore.checkpoint.pieces import check_finite
from mpcore.checkpoint.ranks import together
from mpcore.checkpoint.tensor_file import host_memory
from mpcore.interop.hugging_face.stored import Group, dense_shape, stored_groups, stored_names, stored_tensors
from mpcore.interop.hugging_face.writing import SHARD_BYTES, check_new, new_folder, write_weights
from mpcore.interop.lora.adapters import adapters_of, factor_names, merged_weight
from mpcore.interop.lora.layers import LoRALayer, factors
from mpcore.mesh.axis import Mesh, check_mesh
from mpcore.sharding.declarations import declarations, persistent_buffers
from mpcore.sharding.declare import Sharding, check_lies_on
from mpcore.sharding.local import is_dtensor, local_tensor, reshard
from mpcore.sharding.state_dict import all_names, check_present

PIECE = 2**20  # bytes that the ranks gather in one collective

Held = dict[str, tuple[Tensor, Sharding]]
Gathered = Iterator[tuple[Group, dict[str, Tensor]]]


def save_pretrained(
    model: nn.Module, folder: str | os.PathLike[str], mesh: Mesh = Mesh(), *, shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write the folder that transformers' `save_pretrained` writes for the unsharded model. All ranks must call it.

    The folder has config.json, generation_config.json if the model can generate, and the weights as safetensors with
    the architecture's names, experts and fused projections included. If there are several files, it has an index. Rank
    0 writes: it needs memory for its shard and for one full tensor, which may be all experts of a layer. The ranks
    gather the tensors in pieces, which need about 20 MB on each rank.

    Args:
        model: a model of transformers that `parallelize` sharded over tp. It may also be sharded over data by
            `shard_data_parallel`.
        folder: the folder to create. It must not exist, or be empty.
        mesh: the mesh that the model is on.
        shard_bytes: the largest size of a file in bytes. A single larger tensor gets a file of its own.

    Returns:
        The folder.

    Raises:
        ValueError: on every rank and before anything is written, if the model is not one of transformers, is one stage
            of a pipeline, has other tensors than its config says, a weight is NaN or infinite, or the folder isn't
            empty. Also on every rank if the folder can't be written; no partial folder is left.

    Note:
        - Adapters of `add_lora` are merged into the weights that are written; the model keeps them. `save_lora` writes
          only the adapters.
        - The tokenizer is not part of the model. Call `tokenizer.save_pretrained(folder)` afterwards, on one rank.
        - Needs transformers 5.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from mpcore.interop.hugging_face import save_pretrained
        >>> config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=1)
        >>> model = mpcore.parallelize(LlamaForCausalLM(config), tp=mpcore.Mesh().tp)
        >>> import os, tempfile
        >>> sorted(os.listdir(save_pretrained(model, tempfile.mkdtemp())))
        ['config.json', 'generation_config.json', 'model.safetensors']
    """
    check_mesh(mesh)
    model, folder = getattr(model, "_orig_mod", model), Path(folder)
    reshard(model)

    def plan() -> tuple[Any, Held, list[Group]]:
        dense, held = dense_shape(model), held_tensors(model, mesh)
        weights = ((name, local_tensor(x), isinstance(x, nn.Parameter)) for name, (x, _) in held.items())
        check_finite(weights, f"{folder} isn't written")
        if mesh.world.rank == 0:
            check_new(folder)
        return dense, held, stored_groups(dense, saved_state(dense, held))

    dense, held, groups = together(mesh.world, plan)
    gathered = _gather(held, groups, adapters_of(model), mesh.world.rank == 0)
    together(mesh.world, lambda: _write(folder, model, dense, groups, gathered, mesh, shard_bytes))
    return folder


def held_tensors(model: nn.Module, mesh: Mesh) -> Held:
    """Return the tensors of the state dict with their declarations, under all their names."""
    held: Held = {}
    for name, parameter, sharding in declarations(model):
        check_present(name, parameter)
        check_lies_on(name, parameter, sharding, mesh)
        held[name] = parameter, sharding
    for name in factor_names(model):
        held.pop(name, None)
    held |= {name: (buffer, Sharding(tuple(buffer.shape))) for name, _, _, buffer in persistent_buffers(model)}
    for first, *others in all_names(model):
        held |= dict.fromkeys(others, held[first]) if first in held else {}
    return held


def saved_state(dense: Any, held: Held) -> dict[str, Tensor]:
    """Return the state dict to save, on the meta device.

    Raises:
        ValueError: if the model has other tensors than its config says.
    """
    names, state = stored_names(dense), {}
    for name, x in dense.state_dict().items():
        if name not in held or held[name][1].shape != tuple(x.shape):
            found = f"with shape {held[name][1].shape}" if name in held else "not there"
            raise ValueError(
                f"{name} is {found}, but has shape {tuple(x.shape)} by the model's config: save an unsharded model"
            )
    if more := sorted(held.keys() - dense.state_dict().keys()):
        raise ValueError(f"the model's config has no {more[:20]}: from_pretrained would not read them")
    for name in names:
        state[name] = torch.empty(held[name][1].shape, dtype=held[name][0].dtype, device="meta")
    return state


def _write(
    folder: Path, model: Any, dense: Any, groups: list[Group], gathered: Gathered, mesh: Mesh, shard_bytes: int
) -> None:
    """Write on rank 0 the tensors that all ranks gather."""
    if mesh.world.rank:
        for _ in gathered:
            pass
        return
    current: dict[str, Tensor] = {}

    def read(key: str) -> Tensor:
        while key not in current:
            current.clear()
            group, tensors = next(gathered)
            current.update(stored_tensors(dense, group, tensors))
        return current[key]

    try:
        with new_folder(folder) as new:
            _write_configs(new, model, dense)
            likes = {key: like for group in groups for key, like in group.files.items()}
            write_weights(new, likes, read, shard_bytes)
    finally:
        for _ in gathered:  # after an error too: the other ranks wait for this rank in the gathers
            pass


def _write_configs(folder: Path, model: Any, dense: Any) -> None:
    dense.config.architectures = [type(dense).__name__]
    dense.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _gather(held: Held, groups: list[Group], adapters: Mapping[str, LoRALayer], keep: bool) -> Gathered:
    for group in groups:
        yield group, {name: _merged_on_host(held[name], adapters.get(name), keep) for name in group.sources}


def _merged_on_host(where: tuple[Tensor, Sharding], adapter: LoRALayer | None, keep: bool) -> Tensor:
    """Return the logical tensor (`_whole_on_host`), with the adapter's product added if there is an adapter."""
    whole = _whole_on_host(*where, keep)
    if adapter is None:
        return whole
    a, b = (_whole_on_host(factor.weight, factor.shardings["weight"], keep) for _, factor in factors(adapter))
    return merged_weight(adapter, whole, a, b) if keep else whole


@torch.no_grad()
def _whole_on_host(x: Tensor, sharding: Sharding, keep: bool) -> Tensor:
    """Gather the logical tensor into host memory, in pieces. With `keep=False` return an empty tensor."""
    local = (x.full_tensor() if is_dtensor(x) else x).detach()
    split = {shard.dim for shard in sharding.shards if shard.axis.size > 1}
    if not split:
        return local.cpu() if keep else local.new_empty(0)
    full = host_memory(sharding.shape, local.dtype) if keep else local.new_empty(0)
    # The tensor is divided into pieces along a dimension that isn't sharded. A sharded vector has no such dimension.
    dim = max(set(range(local.dim())) - split, key=lambda d: local.shape[d], default=min(split))
    length = sharding.shape[dim]
    step = length if dim in split else max(1, PIECE * length // (math.prod(sharding.shape) * local.itemsize))
    for start in range(0, length, step):
        size = min(step, length - start)
        shape = (*sharding.shape[:dim], size, *sharding.shape[dim + 1 :])
        part = local if dim in split else local.narrow(dim, start, size)
        piece = replace(sharding, shape=shape).assemble(part)
        if keep:
            full.narrow(dim, start, size).copy_(piece)
    return full
