"""Convert weights between a Hugging Face folder, an mpcore checkpoint and a model on any layout."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpcore.checkpoint.folders import read_complete, resolve
from mpcore.checkpoint.format import DTYPES, Chunk, Entry, Manifest, dtype_name, write_manifest
from mpcore.checkpoint.loading import check_weights, copy_box, fill
from mpcore.checkpoint.pieces import check_finite, held_by_model
from mpcore.checkpoint.saving import write_beside
from mpcore.checkpoint.tensor_file import Files, host_memory
from mpcore.interop.hugging_face.architectures import LENGTH
from mpcore.interop.hugging_face.config import ModelSpec, config_to_hf
from mpcore.interop.hugging_face.extra_files import (
    FOLDER,
    GENERATION,
    carried_by_checkpoint,
    carried_by_hf,
    tokenizer_files,
)
from mpcore.interop.hugging_face.folder import ROUTER_BIAS, ROUTER_STATISTICS, Part, Source, open_hf, parts_of
from mpcore.interop.hugging_face.writing import (
    SHARD_BYTES,
    check_new,
    new_folder,
    write_files,
    write_json,
    write_weights,
)  # fmt: skip
from mpcore.mesh.agreement import together
from mpcore.mesh.axis import Mesh
from mpcore.sharding.local import reshard


def load_hf(folder: str | os.PathLike[str], model: nn.Module, mesh: Mesh = Mesh(), *, spec: ModelSpec) -> Source:
    """Load the weights of a Hugging Face folder into a model on any layout. All ranks of the mesh must call it.

    Return the open folder. Each rank reads only what it holds, cast to its parameters' dtype. A router's bias and
    statistics keep their values, except that the bias is loaded from DeepSeek-V3.

    Args:
        folder: a folder with config.json and safetensors files.
        model: a model with the folder's configuration (`read_config`), or this rank's stages of it, sharded over data
            or not.
        mesh: the mesh that the model is on.
        spec: the names and shapes of your model.

    Raises:
        ValueError: on every rank and before any value changes, if the folder can't be read or doesn't fit the model.
    """
    reshard(model)

    def plan() -> tuple[Source, list[Any]]:
        source, items = open_hf(folder, spec=spec), []
        for held in held_by_model(model, mesh):
            name = held.name.removeprefix("model/")
            entry = source.entries.get(name)
            if entry is None and name.endswith((ROUTER_BIAS, ROUTER_STATISTICS)):
                continue
            if entry is None or entry.shape != held.shape:
                found = "nothing" if entry is None else f"shape {entry.shape}"
                raise ValueError(f"{held.name}: expected shape {held.shape}, found {found} in {folder}")
            items.append((held, entry))
        check_weights(items, source.tensor, str(folder))
        return source, items

    source, items = together(mesh.world, plan)
    together(mesh.world, lambda: fill(items, source.tensor))
    return source


def import_hf(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    spec: ModelSpec,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a checkpoint of mpcore from a Hugging Face folder, with one tensor in memory at a time.

    Args:
        folder: a folder with config.json and safetensors files.
        path: the checkpoint to write, which is returned. It has step 0 and no optimizer. One there is replaced.
        spec: the names and shapes of your model.
        dtype: the floating-point dtype, of 16 bits or more, of the tensors in the checkpoint. None: that of the folder.
        shard_bytes: the largest size of a file in bytes. A single larger tensor gets a file of its own.

    Raises:
        ValueError: if `folder` can't be read, or a value is NaN or infinite in `dtype`. No partial checkpoint is left.
    """
    source, path = open_hf(folder, spec=spec), Path(path)
    pieces: dict[str, tuple[str, Entry, Chunk]] = {}
    likes: dict[str, Tensor] = {}
    for name, entry in source.entries.items():
        for chunk in entry.chunks:
            key = name if chunk.shape == entry.shape else f"{name}@{','.join(map(str, chunk.start))}"
            pieces[key] = name, entry, chunk
            likes[key] = torch.empty(chunk.shape, dtype=_written_as(name, entry, dtype), device="meta")
    held: list[Chunk] = []

    def read(key: str) -> Tensor:
        while held:
            source.forget(held.pop())
        _, entry, chunk = pieces[key]
        tensor, like = source.tensor(entry, chunk), likes[key]
        held.append(chunk)
        if tensor.dtype != like.dtype or not tensor.is_contiguous():
            tensor = host_memory(like.shape, like.dtype).copy_(tensor)  # malloc may not return freed memory
        check_finite([(key, tensor, True)], f"{source.folder} as {like.dtype}")
        return tensor

    with new_folder(path) as new:
        files, where = write_files(new, likes, read, shard_bytes, lambda i, n: f"model-{i:05d}.safetensors")
        chunks: dict[str, list[Chunk]] = {}
        for key, (file, found) in where.items():
            name, _, box = pieces[key]
            chunks.setdefault(name, []).append(Chunk(file, key, box.start, box.shape, found))
        tensors = {
            f"model/{name}": Entry(entry.shape, dtype_name(_written_as(name, entry, dtype)), tuple(chunks[name]))
            for name, entry in sorted(source.entries.items())
        }
        carried = carried_by_hf(source.folder, source.values)
        beside = write_beside(new, carried.beside)
        config = {"model": dataclasses.asdict(source.config)}
        manifest = Manifest(0, config=config, extra=carried.extra, files=files, tensors=tensors, beside=beside)
        write_manifest(new, manifest)
    return path


def export_hf(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    spec: ModelSpec,
    dtype: torch.dtype | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a Hugging Face folder from a checkpoint of any layout, with one tensor in memory at a time.

    Args:
        path: the checkpoint, of a training run or of `import_hf`. Every byte of its model is checked.
        folder: the folder to create, which is returned.
        spec: the names and shapes of your model.
        dtype: the floating-point dtype, of 16 bits or more, of the tensors in the folder. None: that of the checkpoint.
        tokenizer: a tokenizer.json, or a folder whose tokenizer files to copy. None: those stored in the checkpoint.
            The checkpoint's generation_config.json is written in any case, unless the folder has one.
        shard_bytes: the largest size of a file in bytes. A single larger tensor gets a file of its own. If there are
            several files, an index is written.

    Raises:
        ValueError: if the checkpoint is damaged, a value is NaN or infinite in `dtype`, no architecture expresses the
            model (for example a nonzero router bias), `tokenizer` has no such file, or `folder` exists and is not
            empty. No partial folder is left.
    """
    folder = Path(folder)
    manifest, files, config = open_checkpoint(path, spec=spec)
    first = manifest.extra.get(FOLDER, {}).get("config", {}).get("model_type")
    pieces = _pieces(path, manifest, parts_of(config, spec=spec, first=first))
    likes = {
        part.key: torch.empty(part.stored, dtype=_written_as(name, entry, dtype), device="meta")
        for name, entry, part in pieces.values()
    }
    check_new(folder)
    _check_model(manifest, files, {name for name, _, _ in pieces.values()})
    carried = carried_by_checkpoint(path)
    beside = {n: x for n, x in carried.files.items() if tokenizer is None or n == GENERATION}
    beside |= {} if tokenizer is None else tokenizer_files(tokenizer)
    values = {**carried.config, **config_to_hf(config, spec=spec, first=first)}
    values["torch_dtype"] = str(next(iter(likes.values())).dtype).removeprefix("torch.")
    if LENGTH in carried.config:
        values[LENGTH] = max(values[LENGTH], carried.config[LENGTH])
    held: list[Chunk] = []

    def read(key: str) -> Tensor:
        while held:
            chunk = held.pop()
            files[chunk.file].forget(chunk.key)
        _, entry, part = pieces[key]
        stored = host_memory(part.stored, likes[key].dtype)
        copy_box(part.box(stored), part.start, entry, files.tensor)
        check_finite([(key, stored, True)], f"{path} as {stored.dtype}")
        held.extend(entry.chunks)
        return stored

    with new_folder(folder) as new:
        write_weights(new, likes, read, shard_bytes)
        write_json(new / "config.json", values)
        write_beside(new, beside)
    return folder


def open_checkpoint(path: str | os.PathLike[str], *, spec: ModelSpec) -> tuple[Manifest, Files, Any]:
    """Open a checkpoint of mpcore. Return the manifest, the files, and the configuration of the model in it."""
    manifest = read_complete(resolve(path))
    try:
        config = spec.config(**manifest.config["model"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no such model: {error}") from None
    return manifest, Files(resolve(path), manifest), config


def _pieces(
    path: str | os.PathLike[str], manifest: Manifest, parts: Mapping[str, tuple[tuple[int, ...], list[Part]]]
) -> dict[str, tuple[str, Entry, Part]]:
    """Return, for each Hugging Face tensor, the mpcore tensor that holds it (name and entry) and its box there."""
    pieces = {}
    for name, (shape, found) in parts.items():
        entry = manifest.tensors.get(f"model/{name}")
        if entry is None or entry.shape != shape:
            raise ValueError(f"{path}: model/{name} has shape {entry and entry.shape}, its config makes it {shape}")
        pieces |= {part.key: (name, entry, part) for part in found}
    left = {name for name in manifest.tensors if name.startswith("model/") and name[6:] not in parts}
    if left:
        raise ValueError(f"{path} has tensors that the model of its config does not: {sorted(left)[:20]}")
    return pieces


def _check_model(manifest: Manifest, files: Files, exported: set[str]) -> None:
    """Check all bytes, and refuse a nonzero router bias that the Hugging Face architecture has no tensor for."""
    for problem in files.damage("model/"):
        raise ValueError(problem)
    for name in manifest.tensors:
        if name.startswith("model/") and name.endswith(ROUTER_BIAS) and name.removeprefix("model/") not in exported:
            bias = files.assemble(name)
            if bias.any():
                raise ValueError(f"{name} is not zero (up to {bias.abs().max():.3g}): only deepseek_v3 has such a bias")


def _written_as(name: str, entry: Entry, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None and not (dtype.is_floating_point and dtype.itemsize > 1):
        raise ValueError(f"dtype {dtype} can't hold {name}: give torch.float32, torch.bfloat16 or torch.float16")
    # a router's bias keeps its dtype: it changes by steps that are too small for 16 bits
    return DTYPES[entry.dtype] if dtype is None or name.endswith(ROUTER_BIAS) else dtype
