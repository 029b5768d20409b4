"""Save models of transformers, on any layout, as its `save_pretrained` does, with one full tensor in memory at a time.

Each rank sends the boxes of each tensor that it owns to rank 0, which writes the files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpcore.checkpoint.format import Place, overlap
from mpcore.checkpoint.pieces import LocalTensor, check_finite, held_by_model
from mpcore.checkpoint.tensor_file import host_memory
from mpcore.interop.hugging_face.boxes import pieces as pieces_of
from mpcore.interop.hugging_face.stored import Group, dense_shape, stored_groups, stored_names, stored_tensors
from mpcore.interop.hugging_face.writing import SHARD_BYTES, check_new, new_folder, write_weights
from mpcore.interop.lora.adapters import (
    FACTORS,
    adapters_of,
    check_merged,
    factor_names,
    factor_prefix,
    weight_with,
)
from mpcore.interop.lora.layers import is_transposed
from mpcore.mesh.agreement import merged, together
from mpcore.mesh.axis import Mesh, check_mesh
from mpcore.pipeline.partition import join_stages
from mpcore.sharding.cross_replica_hash import cross_replica_hash
from mpcore.sharding.declarations import declarations
from mpcore.sharding.declare import check_lies_on
from mpcore.sharding.local import reshard
from mpcore.sharding.state_dict import all_names

PIECE = 2**20  # bytes that a rank sends at once

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]  # start and shape of each
_Sent = tuple[  # the model's tensors, each with the ranks that send it, and the file's tensors
    list[tuple[str, list[int]]], list[tuple[str, torch.dtype, tuple[int, ...]]]
]  # fmt: skip


class _Owned(NamedTuple):
    """What a rank holds, by name: dtype, shape and the boxes that it sends; scale, orientation and prefix of adapters.

    `tied` has start, shape and hash of each box of the weights that the config ties to another.
    """

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], Boxes]]
    adapters: dict[str, tuple[float, bool, str]]
    factors: set[str]
    tied: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], int]]]


def save_pretrained(
    model: nn.Module | Sequence[nn.Module],
    folder: str | os.PathLike[str],
    mesh: Mesh = Mesh(),
    *,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the folder that transformers' `save_pretrained` writes for the unsharded model. All ranks must call it.

    The folder has config.json, generation_config.json if the model can generate, and the weights as safetensors with
    the architecture's names, experts and fused projections included, with an index if there are several files. Rank 0
    writes: it needs memory for its shard and for one full tensor, which may be all experts of a layer.

    Args:
        model: a model of transformers on any layout: sharded over tp and ep by `parallelize`, over data by
            `shard_data_parallel` or `prepare`, this rank's stage of `pipeline_stages`, or a list of its stages.
        folder: the folder to create, which is returned. It must not exist, or be empty.
        mesh: the mesh that the model is on.
        shard_bytes: the largest size of a file in bytes. A single larger tensor gets a file of its own.

    Raises:
        ValueError: on every rank and before anything is written, if the model is not one of transformers, the ranks
            together have other tensors than its config says, a weight is NaN or infinite, two weights differ that the
            config ties, also on two pipeline stages, or the folder isn't empty.
            Also on every rank if the folder can't be written, or a weight overflows with its adapter merged; no partial
            folder is left.

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
    stage, dense, likes, tensors = _hf_tensors(model, mesh, lambda: check_new(folder), f"{folder} isn't written", False)

    def write() -> None:
        try:
            if mesh.world.rank == 0:
                with new_folder(folder) as new:
                    dense.config.architectures = [type(dense).__name__]
                    dense.config.save_pretrained(new)
                    if stage.can_generate():
                        stage.generation_config.save_pretrained(new)
                    write_weights(new, likes, lambda _: next(tensors)[1], shard_bytes)
        finally:
            for _ in tensors:  # the other ranks send; after an error, too, they wait until all is received
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
        ValueError: as `save_pretrained`, on every rank and before the first tensor. On the ranks that yield tensors, if
            a weight overflows with its adapter merged.

    Note:
        - Memory: one full tensor, or all experts of a layer if an architecture stores each apart. The caller's last
          tensor stays while the next is gathered; `del` it first.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from mpcore.interop.hugging_face import hf_tensors
        >>> config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=1)
        >>> model = mpcore.parallelize(LlamaForCausalLM(config), tp=mpcore.Mesh().tp)
        >>> dict(hf_tensors(model))["lm_head.weight"].shape
        torch.Size([8, 8])
    """
    return _hf_tensors(model, mesh, lambda: None, "no tensor is sent", every_rank)[3]


def _hf_tensors(
    model: nn.Module | Sequence[nn.Module], mesh: Mesh, check: Callable[[], None], otherwise: str, every_rank: bool
) -> tuple[Any, Any, dict[str, Tensor], Iterator[tuple[str, Tensor]]]:
    """Return a stage, the unsharded model and the file tensors on the meta device, and the full tensors' generator."""
    check_mesh(mesh)
    stages = [getattr(stage, "_orig_mod", stage) for stage in ([model] if isinstance(model, nn.Module) else model)]
    whole = stages[0] if len(stages) == 1 else join_stages(stages)
    for stage in stages:
        reshard(stage)
    held: dict[str, LocalTensor] = {}
    owned: list[_Owned] = []
    groups: list[Group] = []
    dense: Any = None
    copied: dict[str, Tensor] = getattr(stages[0], "unread_tensors", dict)()  # of from_pretrained's folder

    def mine() -> _Owned:
        nonlocal dense
        dense = dense_shape(stages[0])
        for name, parameter, sharding in declarations(whole):
            check_lies_on(name, parameter, sharding, mesh)
        held.update({item.name.removeprefix("model/"): item for item in held_by_model(whole, mesh)})
        for first, *others in all_names(whole):  # also those that were tied after the model was made
            held.update(dict.fromkeys(others, held[first]) if first in held else {})
        weights = {name for name, _ in whole.named_parameters()}
        check_finite(((name, x.tensor, name in weights) for name, x in held.items()), otherwise)
        boxes = {name: [(box.start, box.shape) for box in x.boxes if box.owned] for name, x in held.items()}
        tensors = {name: (x.tensor.dtype, x.shape, boxes[name]) for name, x in held.items()}
        layers = adapters_of(whole).items()
        adapters = {name: (x.scaling, is_transposed(x), factor_prefix(name, x)) for name, x in layers}
        tied: dict[str, Any] = {}
        for names in ([name for name in each if name in held] for each in all_names(dense) if len(each) > 1):
            if mesh.pp.size > 1 or len({id(held[name]) for name in names}) > 1:
                tied |= {name: _hashes(held[name]) for name in names}
        return _Owned(tensors, adapters, factor_names(whole), tied)

    def plan(found: list[_Owned]) -> list[_Sent]:
        check()
        owned.extend(_Owned(*each) for each in found)  # named tuples travel as tuples
        held = [(n, x) for each in owned for n, x in each.tensors.items() if n not in each.factors]
        state = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape, _) in held}
        groups.extend(stored_groups(dense, saved_state(dense, state)))
        _check_tied(all_names(dense), owned)
        first = {name: names[0] for names in all_names(dense) for name in names}
        order: list[_Sent] = []
        for group in groups:
            sent = [(name, _senders(name, owned)) for at in group.sources for name in _names(first[at], owned)]
            order.append((sent, [(key, like.dtype, tuple(like.shape)) for key, like in group.files.items()]))
        order += [([], [(key, x.dtype, tuple(x.shape))]) for key, x in copied.items()]
        return order

    order = merged(mesh.world, mine, plan)
    likes = {key: torch.empty(shape, dtype=dtype, device="meta") for _, files in order for key, dtype, shape in files}

    def stream() -> Iterator[tuple[str, Tensor]]:
        """Gather the tensors in one order on all ranks: rank 0 receives what the others send."""
        for at, (sent, files) in enumerate(order):
            made: dict[str, Tensor] = {}
            if mesh.world.rank == 0 and at >= len(groups):
                made = {key: copied[key] for key, _, _ in files}
            elif mesh.world.rank == 0:
                made = stored_tensors(dense, groups[at], _merged(groups[at], sent, owned, held, mesh))
            for name, senders in sent if mesh.world.rank else ():
                if mesh.world.rank in senders:
                    _send(held[name], mesh)
            for key, _, _ in files:
                if every_rank:
                    x = made.pop(key) if mesh.world.rank == 0 else torch.empty_like(likes[key], device=mesh.device)
                    x = x.to(mesh.device).contiguous()
                    if mesh.world.size > 1:
                        dist.broadcast(x, group=mesh.world.group, group_src=0)
                    yield key, x
                    del x
                elif made:
                    yield key, made.pop(key)

    merges = {key for sent, files in order for key, *_ in files if any(FACTORS[0] in name for name, _ in sent)}

    def finished(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        try:
            for key, x in tensors:
                if key in merges:
                    check_merged(key, x)
                yield key, x
                del x
        finally:
            for _ in tensors:  # the other ranks wait until their tensors are received
                pass

    return stages[0], dense, likes, finished(stream())


@torch.no_grad()
def _hashes(held: LocalTensor) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Return start, shape and hash of each box. Both zeros have one hash."""
    return [(box.start, box.shape, int(cross_replica_hash(box.of(held.tensor) + 0.0))) for box in held.boxes]


def _check_tied(tied: Iterable[Sequence[str]], owned: Sequence[_Owned]) -> None:
    """Raise ValueError if names of one weight have different values on any ranks."""
    for first, *others in tied:
        seen: dict[Place, tuple[int, str, int]] = {}
        boxes = [(rank, n, x) for rank, of in enumerate(owned) for n in (first, *others) for x in of.tied.get(n, ())]
        for rank, name, (start, shape, value) in boxes:
            if (start, shape) not in seen and any(overlap((start, shape), box) is not None for box in seen):
                raise ValueError(
                    f"{others[0]} and {first}, which the config ties, are sharded differently: shard both alike, or "
                    f"set tie_word_embeddings=False in the config of the model"
                )
            other, before, wanted = seen.setdefault((start, shape), (rank, name, value))
            if value != wanted:
                where = f" (ranks {other} and {rank})" if other != rank else ""
                raise ValueError(
                    f"{others[0] if name == before else name} isn't {before}{where}: set tie_word_embeddings=False in "
                    f"the config of the model, or give both one value"
                )


def saved_state(dense: Any, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict to save, on the meta device, of the tensors that the ranks hold together."""
    named = dict(held)
    for first, *others in all_names(dense):
        named |= dict.fromkeys(others, held[first]) if first in held else {}
    for name, x in dense.state_dict().items():
        if name not in named or named[name].shape != x.shape:
            found = f"with shape {tuple(named[name].shape)}" if name in named else "not there"
            raise ValueError(f"{name} is {found}, but has shape {tuple(x.shape)} by its config: save it unsharded")
    if more := sorted(named.keys() - dense.state_dict().keys()):
        raise ValueError(f"a model of this config has no {more[:20]}: remove them, as from_pretrained won't load them")
    return {name: torch.empty_like(named[name], device="meta") for name in stored_names(dense)}


def _names(name: str, owned: list[_Owned]) -> list[str]:
    """Return a tensor's name, followed by those of its adapter's factors if it has one."""
    prefix = next((each.adapters[name][2] for each in owned if name in each.adapters), None)
    return [name, *(f"{prefix}{leaf}.weight" for leaf in FACTORS if prefix is not None)]


def _senders(name: str, owned: list[_Owned]) -> list[int]:
    """Return the ranks that send a tensor, and no rank that repeats a buffer which a lower rank holds in full."""
    held = {rank: each.tensors[name] for rank, each in enumerate(owned) if name in each.tensors}
    sizes = {rank: sum(math.prod(size) for _, size in boxes) for rank, (_, _, boxes) in held.items() if boxes}
    full = bool(sizes) and sizes[min(sizes)] == math.prod(held[min(sizes)][1])
    return [rank for rank in held if not (full and rank in sizes and rank > min(sizes))]


@torch.no_grad()
def _send(held: LocalTensor, mesh: Mesh) -> None:
    for box in held.boxes:
        for _, piece in pieces_of(box.start, box.of(held.tensor), held.tensor.itemsize, PIECE) if box.owned else ():
            dist.send(piece.to(mesh.device).contiguous(), group=mesh.world.group, group_dst=0)


def _merged(
    group: Group, sent: list[tuple[str, list[int]]], owned: list[_Owned], held: Mapping[str, LocalTensor], mesh: Mesh
) -> dict[str, Tensor]:
    """Return on rank 0 the full tensors of a group, adapters merged, in the order in which the ranks send."""
    rest, found = iter(sent), {}
    for source in group.sources:
        name, senders = next(rest)
        x = _whole(name, senders, owned, held, mesh)
        how = next((each.adapters[name] for each in owned if name in each.adapters), None)
        if how is not None:
            a, b = (_whole(*next(rest), owned, held, mesh) for _ in FACTORS)
            x = weight_with(x, a, b, *how[:2])
        found[source] = x
    return found


@torch.no_grad()
def _whole(name: str, senders: list[int], owned: list[_Owned], held: Mapping[str, LocalTensor], mesh: Mesh) -> Tensor:
    """Return a full tensor in host memory, of this rank's boxes and those that the other ranks send."""
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
