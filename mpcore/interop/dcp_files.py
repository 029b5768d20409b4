"""Convert folders of `torch.distributed.checkpoint` (DCP) to checkpoints and back, one tensor at a time."""

from __future__ import annotations

import dataclasses
import enum
import io
import os
import pickle
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from mpcore.checkpoint.folders import read_complete, resolve
from mpcore.checkpoint.format import DTYPES, Chunk, Entry, Manifest, check_inside, dtype_name, tiles, write_manifest
from mpcore.checkpoint.pieces import Box, LocalTensor
from mpcore.checkpoint.saving import write_beside
from mpcore.checkpoint.schema import convert
from mpcore.checkpoint.store import check_local
from mpcore.checkpoint.tensor_file import HEADER_LIMIT, TENSOR_LIMIT, Files, host_memory
from mpcore.interop.dcp import BoxedTensor
from mpcore.interop.hugging_face.config import read_json
from mpcore.interop.hugging_face.writing import SHARD_BYTES, check_new, new_folder, write_files, write_json

METADATA, ABOUT = ".metadata", "mpcore.json"


def import_dcp(
    folder: str | os.PathLike[str], path: str | os.PathLike[str], *, config: dict[str, Any] | None = None
) -> list[str]:
    """Write a checkpoint of mpcore from a DCP folder. No code of its pickles runs.

    Args:
        folder: a folder that `dcp.save` or `export_dcp` wrote. Tensors keep their names, without a leading "model".
        config: the configuration to store in it. None: that of `export_dcp`, or none.
    """
    folder, path = Path(folder), Path(path)
    check_new(path)
    try:
        return _import(folder, path, config)
    except (ValueError, OSError):
        raise
    except Exception as error:  # damaged pickles and archives raise errors of any kind
        raise ValueError(f"{folder} is damaged: {type(error).__name__}: {str(error).split(chr(10))[0]}") from None


def _read_metadata(file: Path) -> Metadata:
    if file.stat().st_size > HEADER_LIMIT:
        raise ValueError(f"{file} has {file.stat().st_size} bytes, more than {HEADER_LIMIT}")
    metadata = _Unpickler(io.BytesIO(file.read_bytes())).load()
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{file} holds a {type(metadata).__name__}, not the metadata of DCP")
    if (count := len(metadata.state_dict_metadata)) > TENSOR_LIMIT:
        raise ValueError(f"{file} lists {count} entries, more than {TENSOR_LIMIT}")
    for info in (metadata.storage_data or {}).values():
        check_inside(info.relative_path)
    return metadata


def _import(folder: Path, path: Path, config: dict[str, Any] | None) -> list[str]:
    metadata = _read_metadata(folder / METADATA)
    about = read_json(folder / ABOUT) if (folder / ABOUT).is_file() else {}
    paths = {
        name: tuple(map(str, (metadata.planner_data or {}).get(name, (name,)))) for name in metadata.state_dict_metadata
    }
    nested = any(where[0] == "model" for where in paths.values())
    names: dict[str, str] = {}
    for name, where in paths.items():
        if isinstance(metadata.state_dict_metadata[name], TensorStorageMetadata):
            if where[0] == "model" or not (nested or where[0] in ("optimizer", "optim")):
                names[f"model/{'.'.join(where[where[0] == 'model' :])}"] = name
            elif about and where[:2] == ("optimizer", "state") and len(where) == 4:
                names[f"optimizer/{where[3]}/{where[2]}"] = name
    if not names:
        raise ValueError(f"{folder} holds no tensors of a model: its names are {sorted(paths)[:5]}")
    found = {ours: metadata.state_dict_metadata[name] for ours, name in names.items()}
    stored = {ours: each for ours, each in found.items() if isinstance(each, TensorStorageMetadata)}
    for ours, tensor in stored.items():
        boxes = {tuple(zip(box.offsets, box.sizes, strict=True)) for box in tensor.chunks if 0 not in box.sizes}
        if not tiles([*boxes], tensor.size):
            raise ValueError(f"{folder}: the {len(boxes)} chunks of {names[ours]} don't tile shape {[*tensor.size]}")
    likes = {ours: torch.empty(each.size, dtype=each.properties.dtype, device="meta") for ours, each in stored.items()}
    reader = dcp.FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, True)

    def read(ours: str) -> Tensor:
        tensor = host_memory(likes[ours].shape, likes[ours].dtype)
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner({names[ours]: tensor}, metadata, True)
        reader.read_data(planner.create_local_plan(), planner).wait()
        return tensor

    with new_folder(path) as new:
        kinds = {kind: {n: x for n, x in likes.items() if n.startswith(kind)} for kind in ("model", "optimizer")}
        files, tensors = {}, {}
        for kind, each in kinds.items():
            if each:
                more, where = write_files(
                    new, each, read, SHARD_BYTES, lambda i, n, kind=kind: f"{kind}-{i:05d}.safetensors"
                )
                files |= more
                for name, (file, checksum) in where.items():
                    shape = tuple(likes[name].shape)
                    chunks = () if 0 in shape else (Chunk(file, name, (0,) * len(shape), shape, checksum),)
                    tensors[name] = Entry(shape, dtype_name(likes[name].dtype), chunks)
        small = list(about.pop("beside", {}))
        for name in small:
            check_inside(name)
        beside = write_beside(new, {name: (folder / name).read_bytes() for name in small})
        known = convert(Manifest, {"step": 0, **about, "files": {}, "tensors": {}, "beside": {}}, str(folder / ABOUT))
        known = dataclasses.replace(known, config=known.config if config is None else config)
        write_manifest(new, dataclasses.replace(known, files=files, tensors=tensors, beside=beside))
        read_complete(new)
    return sorted(paths.keys() - names.values())


def export_dcp(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> Path:
    """Write a DCP folder from a checkpoint of any layout, as `dcp.save(dcp_state_dict(model, mesh, optimizer))` does.

    A file `mpcore.json` beside it keeps the rest, such as step and config, for `import_dcp`.
    """
    source, folder = resolve(path), check_local(Path(folder))
    manifest = read_complete(source)
    files = Files(source, manifest)
    check_new(folder)
    for problem in [*files.damage(), *files.problems_beside()]:
        raise ValueError(problem)
    state: dict[str, Any] = {"model": {}, "optimizer": {"state": {}}}
    for name, entry in manifest.tensors.items():
        kind, _, rest = name.partition("/")
        slot, _, of = rest.partition("/")
        to, key = (state["model"], rest) if kind == "model" else (state["optimizer"]["state"].setdefault(of, {}), slot)
        to[key] = _StoredTensor.of_entry(name, entry, files)
    with new_folder(folder) as new, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        writer = dcp.FileSystemWriter(new, thread_count=1)
        dcp.save(state if manifest.optimizer is not None else state["model"], storage_writer=writer, no_dist=True)
        about = dataclasses.asdict(dataclasses.replace(manifest, files={}, tensors={}))
        write_json(new / ABOUT, {name: value for name, value in about.items() if name not in ("files", "tensors")})
        write_beside(new, {name: (source / name).read_bytes() for name in manifest.beside})
    return folder


class _StoredTensor(BoxedTensor):
    """A `BoxedTensor` whose boxes are chunks of a checkpoint's files. DCP writes one after the other."""

    stored: tuple[Entry, Files]

    @staticmethod
    def of_entry(name: str, entry: Entry, files: Files) -> _StoredTensor:
        boxes = tuple(Box((0,) * len(chunk.shape), chunk.start, chunk.shape, True) for chunk in entry.chunks)
        held = LocalTensor(name, torch.empty(0, dtype=DTYPES[entry.dtype]), entry.shape, boxes)
        tensor = BoxedTensor.of(held).as_subclass(_StoredTensor)
        tensor.held, tensor.stored = held, (entry, files)
        return tensor

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        entry, files = self.stored
        if not entry.chunks:
            return super().__get_tensor_shard__(index)
        chunk = next(chunk for chunk in entry.chunks if torch.Size(chunk.start) == index.offset)
        tensor = files.tensor(entry, chunk).clone()
        files[chunk.file].forget(chunk.key)
        return tensor


class _Unpickler(pickle.Unpickler):
    """Reads DCP's metadata. Its records, dtypes, sizes and paths are the only objects: nothing else is imported."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = [("torch.serialization", "_get_layout"), ("torch", "Size"), ("collections", "OrderedDict"),
                   *(("pathlib", kind) for kind in ("Path", "PosixPath", "WindowsPath"))]  # fmt: skip
        if module.startswith("torch.distributed.checkpoint.") or module == "torch" or (module, name) in allowed:
            found = vars(import_module(module)).get(name)
            record = isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum))
            if isinstance(found, torch.dtype) or (record and found.__module__ == module) or (module, name) in allowed:
                return found
        raise ValueError(f"the metadata of torch.distributed.checkpoint names {module}.{name}, which it never holds")
