"""Save models of transformers, on any layout, as its `save_pretrained` does, with one full tensor in memory at a time.

Each rank sends the boxes of each tensor that it owns to rank 0, which writes the files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpcore.checkpoint import pieces
from mpcore.checkpoint.pieces import check_finite, held_by_model
from mpcore.checkpoint.tensor_file import host_memory
from mpcore.interop.hugging_face.boxes import pieces as pieces_of
from mpcore.interop.hugging_face.stored import Group, dense_shape, stored_groups, stored_names, stored_tensors
from mpcore.interop.hugging_face.writing import SHARD_BYTES, check_new, new_folder, write_weights
from mpcore.interop.lora.adapters import FACTORS, adapters_of, factor_names, factor_prefix, weight_with
from mpcore.interop.lora.layers import is_transposed
from mpcore.mesh.agreement import merged, together
from mpcore.mesh.axis import Mesh, check_mesh
from mpcore.pipeline.partition import join_stages
from mpcore.sharding.declarations import declarations, persistent_buffers
from mpcore.sharding.declare import Sharding, check_lies_on
from mpcore.sharding.local import reshard
from mpcore.sharding.state_dict import all_names, check_present

PIECE = 2**20  # bytes that a rank sends at once

Held = dict[str, tuple[Tensor, Sharding]]
Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]  # start and shape of each
Gathered = Iterator[tuple[Group, dict[str, Tensor]]]
_Sent = tuple[list[str], list[tuple[str, torch.dtype, tuple[int, ...]]]]  # model tensors, and the file tensors


class _Owned(NamedTuple):
    """What a rank holds: by name dtype, shape and the boxes that it sends; scale, orientation, prefix of adapters."""

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], Boxes]]
    adapters: dict[str, tuple[float, bool, str]]
    factors: set[str]


def save_pretrained(
    model: nn.Module | Sequence[nn.Module],
    folder: str | os.PathLike[str],
    mesh: Mesh = Mesh(),
    *,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the folder that transformers' `save_pretrained` writes for the unsharded model. All ranks must call it.

    The folder has config.json, generation_config.json if the model can generate, and the weights as safetensors with
    the architecture's names, experts and fused projections included. If there are several files, it has an index. Rank
    0 writes: it needs memory for its shard and for one full tensor, which may be all experts of a layer. The other
    ranks send it their shards in pieces of 1 MiB.

    Args:
        model: a model of transformers on any layout: sharded over tp and ep by `parallelize`, over data by
            `shard_data_parallel` or `prepare`, this rank's stage of `pipeline_stages`, or a list of its stages.
        folder: the folder to create. It must not exist, or be empty.
        mesh: the mesh that the model is on.
        shard_bytes: the largest size of a file in bytes. A single larger tensor gets a file of its own.

    Returns:
        The folder.

    Raises:
        ValueError: on every rank and before anything is written, if the model is not one of transformers, the ranks
            together have other tensors than its config says, a weight is NaN or infinite, or the folder isn't empty.
            Also on every rank if the folder can't be written; no partial folder is left.

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
    folder = Path(folder)
    stage, likes, tensors = _hf_tensors(model, mesh, lambda: check_new(folder), f"{folder} isn't written", False)

    def write() -> None:
        if mesh.world.rank == 0:
            _write(folder, stage, likes, tensors, shard_bytes)
        for _ in tensors:  # on the other ranks: send
            pass

    together(mesh.world, write)
    return folder


def hf_tensors(
    model: nn.Module | Sequence[nn.Module], mesh: Mesh = Mesh(), *, every_rank: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the full tensors of the unsharded model, one at a time, with their names in Hugging Face files.

    These are the tensors that `save_pretrained` writes. All ranks must call it and run the loop. If a rank leaves the
    loop early, the remaining tensors are still sent. The model's memory stays as it is.

    Args:
        model: the model, as `save_pretrained` takes it.
        mesh: the mesh that the model is on.
        every_rank: True: every rank yields every tensor, on `mesh.device`. False: rank 0 yields the tensors, in host
            memory; the other ranks send their shards and yield nothing.

    Yields:
        The name and the full tensor. Without sharding it may share the model's memory: don't write to it.

    Raises:
        ValueError: as `save_pretrained`, on every rank and before the first tensor.

    Note:
        - Memory: the tensors made from one group of parameters, usually one tensor. If an architecture stores each
          expert apart, a group is all experts of a layer. The caller's last tensor stays while the next is gathered;
          `del` it first.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from mpcore.interop.hugging_face import hf_tensors
        >>> config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=1)
        >>> model = mpcore.parallelize(LlamaForCausalLM(config), tp=mpcore.Mesh().tp)
        >>> dict(hf_tensors(model))["lm_head.weight"].shape
        torch.Size([8, 8])
    """
    return _hf_tensors(model, mesh, lambda: None, "no tensor is sent", every_rank)[2]


def _hf_tensors(
    model: nn.Module | Sequence[nn.Module], mesh: Mesh, check: Callable[[], None], otherwise: str, every_rank: bool
) -> tuple[Any, dict[str, Tensor], Iterator[tuple[str, Tensor]]]:
    """Return a stage with its config, the file tensors on the meta device, and the generator of full tensors."""
    check_mesh(mesh)
    stages = [getattr(stage, "_orig_mod", stage) for stage in ([model] if isinstance(model, nn.Module) else model)]
    whole = stages[0] if len(stages) == 1 else join_stages(stages)
    for stage in stages:
        reshard(stage)
    held: dict[str, pieces.LocalTensor] = {}
    owned: list[_Owned] = []
    groups: list[Group] = []
    dense: Any = None

    def mine() -> _Owned:
        for name, parameter, sharding in declarations(whole):
            check_lies_on(name, parameter, sharding, mesh)
        held.update({item.name.removeprefix("model/"): item for item in held_by_model(whole, mesh)})
        weights = {name for name, _ in whole.named_parameters()}
        check_finite(((name, x.tensor, name in weights) for name, x in held.items()), otherwise)
        boxes = {name: [(box.start, box.shape) for box in x.boxes if box.owned] for name, x in held.items()}
        tensors = {name: (x.tensor.dtype, x.shape, boxes[name]) for name, x in held.items()}
        adapters = {
            name: (layer.scaling, is_transposed(layer), factor_prefix(name, layer))
            for name, layer in adapters_of(whole).items()
        }
        return _Owned(tensors, adapters, factor_names(whole))

    def plan(found: list[_Owned]) -> tuple[list[_Sent], set[tuple[int, str]]]:
        nonlocal dense
        check()
        dense = dense_shape(stages[0])
        owned.extend(_Owned(*each) for each in found)  # named tuples travel as tuples
        groups.extend(stored_groups(dense, saved_state(dense, _logical(dense, owned))))
        first = {name: names[0] for names in all_names(dense) for name in names}
        order: list[_Sent] = []
        for group in groups:
            sent = [name for source in group.sources for name in _names(first[source], owned)]
            order.append((sent, [(key, like.dtype, tuple(like.shape)) for key, like in group.files.items()]))
        return order, _repeated([name for sent, _ in order for name in sent], owned)

    order, repeated = merged(mesh.world, mine, plan)
    likes = {key: torch.empty(shape, dtype=dtype, device="meta") for _, files in order for key, dtype, shape in files}

    def stream() -> Iterator[tuple[str, Tensor]]:
        gathered = _gather(dense, groups, owned, repeated, held, mesh)
        for names, files in order:
            made: dict[str, Tensor] = {}
            if mesh.world.rank == 0:
                made = stored_tensors(dense, *next(gathered))
            for name in names if mesh.world.rank else ():
                if name in held and (mesh.world.rank, name) not in repeated:
                    _send(held[name], mesh)
            for key, _, _ in files:
                if every_rank:
                    x = made.pop(key, likes[key]).to(mesh.device) if mesh.world.rank == 0 else torch.empty_like(
                        likes[key], device=mesh.device
                    )  # fmt: skip
                    x = x.contiguous()
                    if mesh.world.size > 1:
                        dist.broadcast(x, group=mesh.world.group, group_src=0)
                    yield key, x
                    del x
                elif made:
                    yield key, made.pop(key)

    def finished(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        try:
            yield from iter(lambda: next(tensors, None), None)  # pyright: ignore[reportReturnType]
        finally:
            for _ in tensors:  # the other ranks wait until their tensors are received
                pass

    return stages[0], likes, finished(stream())


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
    """Return the state dict to save, on the meta device."""
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
    folder: Path, model: Any, likes: Mapping[str, Tensor], tensors: Iterator[tuple[str, Tensor]], shard_bytes: int
) -> None:
    """Write the tensors of the generator, in the order of `likes`."""
    try:
        with new_folder(folder) as new:
            _write_configs(new, model)
            write_weights(new, likes, lambda _: next(tensors)[1], shard_bytes)
    finally:
        for _ in tensors:  # after an error too: the other ranks wait until their tensors are received
            pass


def _write_configs(folder: Path, model: Any) -> None:
    dense = dense_shape(model)
    dense.config.architectures = [type(dense).__name__]
    dense.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _logical(dense: Any, owned: list[_Owned]) -> Held:
    """Return the tensors that the ranks hold together, without the adapters, under all their names, on "meta"."""
    found: Held = {}
    for each in owned:
        for name, (dtype, shape, _) in each.tensors.items():
            if name not in each.factors:
                found[name] = torch.empty(shape, dtype=dtype, device="meta"), Sharding(shape)
    for first, *others in all_names(dense):
        found |= dict.fromkeys(others, found[first]) if first in found else {}
    return found


def _names(name: str, owned: list[_Owned]) -> list[str]:
    """Return a tensor's name, followed by those of its adapter's factors if it has one."""
    prefix = next((each.adapters[name][2] for each in owned if name in each.adapters), None)
    return [name, *(f"{prefix}{leaf}.weight" for leaf in FACTORS if prefix is not None)]


def _repeated(order: list[str], owned: list[_Owned]) -> set[tuple[int, str]]:
    """Return the (rank, name) of tensors that a lower rank holds in full: buffers that several stages share."""
    repeated = set()
    for name in order:
        sizes = {}
        for rank, each in enumerate(owned):
            _, shape, boxes = each.tensors.get(name, (None, (), []))
            if boxes:
                sizes[rank] = sum(math.prod(size) for _, size in boxes)
                repeated |= {(rank, name)} if sizes[min(sizes)] == math.prod(shape) and len(sizes) > 1 else set()
    return repeated


@torch.no_grad()
def _send(held: pieces.LocalTensor, mesh: Mesh) -> None:
    for box in held.boxes:
        for _, piece in pieces_of(box.start, box.of(held.tensor), held.tensor.itemsize, PIECE) if box.owned else ():
            dist.send(piece.to(mesh.device).contiguous(), group=mesh.world.group, group_dst=0)


def _gather(
    dense: Any,
    groups: list[Group],
    owned: list[_Owned],
    repeated: set[tuple[int, str]],
    held: Mapping[str, pieces.LocalTensor],
    mesh: Mesh,
) -> Gathered:
    """Yield on rank 0 each group with its full tensors, adapters merged, in the order in which the ranks send."""
    first = {name: names[0] for names in (all_names(dense) if groups else ()) for name in names}

    def merge(name: str) -> Tensor:
        x, *factors = (_whole(sent, owned, repeated, held, mesh) for sent in _names(name, owned))
        how = next((each.adapters[name] for each in owned if name in each.adapters), None)
        return x if how is None else weight_with(x, factors[0], factors[1], *how[:2])

    for group in groups:
        yield group, {name: merge(first[name]) for name in group.sources}


@torch.no_grad()
def _whole(
    name: str, owned: list[_Owned], repeated: set[tuple[int, str]], held: Mapping[str, pieces.LocalTensor], mesh: Mesh
) -> Tensor:
    """Return a full tensor in host memory, of this rank's boxes and those that the other ranks send."""
    senders = [rank for rank, each in enumerate(owned) if name in each.tensors and (rank, name) not in repeated]
    dtype, shape, _ = owned[senders[0]].tensors[name]
    if name in held and held[name].tensor.shape == shape:
        return held[name].tensor.cpu()
    full = host_memory(shape, dtype)
    for rank in senders:
        mine = [box for box in held[name].boxes if box.owned] if rank == 0 else []
        for i, (start, size) in enumerate(owned[rank].tensors[name][2]):
            part = full[tuple(slice(at, at + length) for at, length in zip(start, size, strict=True))]
            if rank == 0:
                part.copy_(mine[i].of(held[name].tensor))
                continue
            for _, piece in pieces_of(start, part, part.itemsize, PIECE):
                buffer = torch.empty(piece.shape, dtype=dtype, device=mesh.device)
                dist.recv(buffer, group=mesh.world.group, group_src=rank)
                piece.copy_(buffer)
    return full
