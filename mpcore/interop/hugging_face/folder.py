"""Open a Hugging Face folder as if it were a checkpoint of mpcore, and check it before use."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from einops import rearrange
from torch import Tensor

from mpcore.checkpoint.format import DTYPES, Chunk, Entry
from mpcore.checkpoint.other_formats import refuse_other_format
from mpcore.checkpoint.tensor_file import TensorFile, checksum, raw
from mpcore.interop.hugging_face.architectures import ARCHITECTURES, FURTHER
from mpcore.interop.hugging_face.config import ModelSpec, architecture_of, read_config, read_json

INDEX = "model.safetensors.index.json"
_TABLES = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # buffers that old files hold
# Parameters of mpcore's routers besides the weight. Only DeepSeek-V3 has the bias: for other models it must be 0.
ROUTER_BIAS, ROUTER_STATISTICS = ".router.expert_bias", ".router.fractions"


@dataclass(frozen=True)
class Part:
    """One Hugging Face tensor, as a box of an mpcore tensor."""

    key: str  # the name of the Hugging Face tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]
    transposed: bool = False  # whether the Hugging Face tensor is the transpose of the box

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape in the Hugging Face file, where each expert has its own matrices."""
        return self.shape[::-1] if self.transposed else self.shape[-2:]

    def box(self, tensor: Tensor) -> Tensor:
        """Return a view of the Hugging Face tensor that has the shape of the box."""
        if self.transposed:
            return rearrange(tensor, "inputs outputs -> outputs inputs")
        return tensor.view(self.shape)


def parts_of(
    config: Any, *, spec: ModelSpec, first: str | None = None
) -> dict[str, tuple[tuple[int, ...], list[Part]]]:
    """Return, for each mpcore tensor, its logical shape and the Hugging Face tensors that it consists of.

    They are in the order of the mpcore tensor's rows. A router's bias and statistics have none, except that DeepSeek-V3
    has the bias. If a parameter has no counterpart, it raises ValueError.
    """
    kind = architecture_of(config, spec=spec, first=first)
    architecture, ours = ARCHITECTURES[kind], spec.describe(config)
    names = {**architecture.ends, **{f"blocks.{{}}.{module}": key for module, key in architecture.block.items()}}
    names |= {f"{module}.{{}}": key for module, key in architecture.further.items()}
    if ours["latent"] is not None and ours["latent"]["q_lora_rank"] is None:
        names["blocks.{}.attention.q_up"] = "self_attn.q_proj"
    qkv = [heads * ours["head_dim"] for heads in (ours["heads"], ours["kv_heads"], ours["kv_heads"])]
    found: dict[str, tuple[tuple[int, ...], list[Part]]] = {}
    for name, shape in spec.shapes(config).items():
        found[name] = shape, []
        no_bias = "expert_bias" not in architecture.leaves
        if name.endswith(ROUTER_STATISTICS) or (name.endswith(ROUTER_BIAS) and no_bias):
            continue
        module, _, leaf = name.rpartition(".")
        of_list = re.match(r"(mtp\.)?\w+\.(\d+)\b", module)  # a block, or a part of a `MultiTokenPrediction`
        pattern = module if of_list is None else re.sub(r"\.\d+\b", ".{}", module, count=1).removeprefix("mtp.")
        if pattern not in names:
            raise ValueError(f"{name} has no counterpart in {kind}: known are {sorted(names)}")
        where = ""
        if of_list is not None:
            where = f"{architecture.layers}.{int(of_list[2]) + (ours['layers'] if of_list[1] else 0)}."
        leaf = architecture.leaves.get(leaf, leaf)
        keys = [f"{where}{key}.{leaf}" for key in names[pattern].split()]
        flipped = len(shape) == 2 and pattern.removeprefix("blocks.{}.") in architecture.transposed
        found[name] = shape, list(_rows(keys, shape, qkv if len(keys) == 3 else None, flipped))
    return found


def _rows(keys: list[str], shape: tuple[int, ...], sizes: list[int] | None, transposed: bool) -> Iterator[Part]:
    """Yield one part per key: the rows of a tensor [(experts,) rows(, columns)] split into `sizes`, or evenly."""
    experts = shape[:-2]
    rows, *columns = shape[len(experts) :]
    sizes = sizes or [rows // len(keys)] * len(keys)
    starts = [0, *itertools.accumulate(sizes[:-1])]
    for expert in itertools.product(*map(range, experts)):  # without experts: one empty index
        for key, start, size in zip(keys, starts, sizes, strict=True):
            corner, box = (*expert, start, *(0 for _ in columns)), (*(1 for _ in expert), size, *columns)
            yield Part(key.format(*expert), corner, box, transposed)


@dataclass
class Source:
    """An open Hugging Face folder, as `open_hf` returns it."""

    folder: Path
    config: Any  # of your model
    values: dict[str, Any]  # the content of config.json
    entries: dict[str, Entry]  # by mpcore name, each mpcore tensor and the files and boxes that it consists of
    files: dict[str, TensorFile] = field(default_factory=dict)  # by name
    parts: dict[str, Part] = field(default_factory=dict)  # by the name of the Hugging Face tensor

    def tensor(self, entry: Entry, chunk: Chunk) -> Tensor:
        """Return a Hugging Face tensor as a view with the shape of its box. Its bytes are read when they are used."""
        return self.parts[chunk.key].box(self.files[chunk.file].whole(chunk.key))

    def forget(self, chunk: Chunk) -> None:
        self.files[chunk.file].forget(chunk.key)


def open_hf(folder: str | os.PathLike[str], *, spec: ModelSpec) -> Source:
    """Open a folder that `save_pretrained` wrote: config.json and safetensors files. No tensor is read.

    Raises:
        ValueError: if the weights are pickles, or if a file, tensor or field is missing, unknown or damaged, or a
            tensor has another shape than config.json says.
    """
    folder = Path(folder)
    refuse_other_format(folder)
    values, config = read_json(folder / "config.json"), read_config(folder, spec=spec)
    files, where = open_files(folder)
    check_counts(folder / "config.json", values, files)
    parts = parts_of(config, spec=spec, first=values["model_type"])
    prefix = ARCHITECTURES[values["model_type"]].prefix
    bare = not any(key.startswith(prefix) for key in where)  # saved from the base model, without a head
    source = Source(folder, config, values, {}, files)
    for name, (shape, found) in parts.items():
        keys = {part.key.removeprefix(prefix) if bare else part.key: part for part in found}
        source.parts |= keys
        dtypes = {key: _check_tensor(source, where, key, part, name) for key, part in keys.items()}
        if len(set(dtypes.values())) > 1:
            raise ValueError(f"{folder}: {name} would consist of several dtypes: {dtypes}")
        chunks = tuple(Chunk(where[key], key, part.start, part.shape, 0) for key, part in keys.items())
        source.entries[name] = Entry(shape, next(iter(dtypes.values())), chunks)
    further = values.get(FURTHER) or values.get("num_mtp_layers") or 0
    layers = spec.describe(config)["layers"]
    ignored = tuple(f"{'' if bare else prefix}layers.{layers + i}." for i in range(further))
    left = {key for key in where.keys() - source.parts if not key.endswith(_TABLES) and not key.startswith(ignored)}
    if "head.weight" not in parts and "lm_head.weight" in left:
        _check_tie(source, where["lm_head.weight"])
        left.discard("lm_head.weight")
    if left:
        raise ValueError(f"{folder} has tensors that the model of its config.json does not: {sorted(left)[:20]}")
    return source


def _check_tensor(source: Source, where: dict[str, str], key: str, part: Part, name: str) -> str:
    if key not in where:
        raise ValueError(f"{source.folder} has no tensor {key!r}, which {name} needs")
    path, header = source.folder / where[key], source.files[where[key]].header[key]
    if tuple(header["shape"]) != part.stored:
        raise ValueError(f"{path}: {key} has shape {tuple(header['shape'])}, config.json makes it {part.stored}")
    if not DTYPES[header["dtype"]].is_floating_point:
        raise ValueError(f"{path}: {key} has dtype {header['dtype']}: weights are floating-point numbers")
    return header["dtype"]


def _check_tie(source: Source, file: str) -> None:
    (chunk,) = source.entries["embedding.weight"].chunks
    head, table = source.files[file].whole("lm_head.weight"), source.files[chunk.file].whole(chunk.key)
    if head.shape != table.shape or head.dtype != table.dtype or checksum(raw(head)) != checksum(raw(table)):
        raise ValueError(f"{source.folder}: lm_head isn't the embedding: set tie_word_embeddings=false in its config")
    source.files[file].forget("lm_head.weight")
    source.forget(chunk)


def open_files(folder: Path) -> tuple[dict[str, TensorFile], dict[str, str]]:
    """Open a folder's safetensors files."""
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} holds a model and an adapter, which transformers reads together: give the adapter_* files a "
            f"folder of their own, and read them with load_lora"
        )
    names = ["model.safetensors"]
    index: dict[str, str] = {}
    if (folder / INDEX).is_file() and not (folder / names[0]).is_file():  # as transformers chooses
        index = read_json(folder / INDEX).get("weight_map", {})
        if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
            raise ValueError(f"{folder / INDEX} has no weight_map of file names")
        names = sorted(set(index.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):  # a name must not lead out of the folder
            raise ValueError(f"{folder / INDEX} names {name!r}, which is no safetensors file of this folder")
    if not (folder / names[0]).is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        if pickles:
            raise ValueError(
                f"{folder} holds its weights as pickles ({pickles[0]}), which run code when they are read: if you "
                f"trust them, convert them to safetensors with save_pretrained of transformers"
            )
        raise ValueError(f"{folder / names[0]} is missing")
    files = {name: TensorFile(folder / name) for name in names}
    where = {key: name for name, file in files.items() for key in file.header}
    for key, name in index.items():
        if where.get(key) != name:
            raise ValueError(f"{folder / INDEX} says that {key} is in {name}, which does not hold it")
    return files, where


def check_counts(path: Path, values: Mapping[str, Any], files: Mapping[str, TensorFile]) -> None:
    """Raise ValueError if config.json has more layers or experts than the files can hold, before a model is built.

    Without files, 1024 are the most.
    """
    tensors = [about for file in files.values() for about in file.header.values()]
    widest = max((size for about in tensors for size in about["shape"]), default=0)  # experts may lie in one tensor
    for key, value in values.items():
        if isinstance(value, dict):
            check_counts(path, value, files)
        elif key in _COUNTS and type(value) is int and value > max(_FEW, len(tensors), widest * ("expert" in key)):
            held = f"but the files beside it hold {len(tensors)} tensors" if files else f"more than {_FEW}"
            raise ValueError(f"{path} has {key} {value}, {held}")


_FEW = 1024  # layers or experts, which are built in a second
_COUNTS = {
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
    "num_nextn_predict_layers", "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts",
    "moe_num_experts",
}  # fmt: skip
