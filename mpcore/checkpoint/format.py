"""The files of a checkpoint: tensors as safetensors, everything else in one JSON manifest. Reading runs no code.

A checkpoint is a directory:

    manifest.json                what is inside, and where each chunk of each tensor lies
    model-00000.safetensors      parameters and buffers; the number is the rank that wrote them
    optimizer-00000.safetensors  optimizer state

A tensor has its logical name and shape, whichever layout wrote it. It is stored in chunks: boxes that tile the logical
tensor exactly once. Each chunk has a `checksum`, so that damage is detected and reported by name. The headers and the
manifest have a CRC-32.

Source: the safetensors format, https://huggingface.co/docs/safetensors/index#format. This package reads and writes the
format itself, because the safetensors library copies all tensors into memory before it writes, doesn't sync the file,
and computes no checksums.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import torch

from mpcore.checkpoint.other_formats import other_format
from mpcore.checkpoint.remote import store_of
from mpcore.checkpoint.schema import Size, convert, read_json
from mpcore.checkpoint.store import MANIFEST

FORMAT, VERSION = "mpcore checkpoint", 2
MANIFEST_LIMIT, JSON_LIMIT = 2**30, 2**24  # bytes: about 5 million chunks, and config and extra together
DIMENSIONS = 64  # torch's limit
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Place = tuple[tuple[int, ...], tuple[int, ...]]  # of a box in a tensor: start and shape


def overlap(box: Place, other: Place) -> list[tuple[int, int]] | None:
    """Return what two boxes have in common, as a range of each dimension; None: nothing."""
    common = [(max(a, b), min(a + n, b + m)) for a, n, b, m in zip(*box, *other, strict=True)]
    return common if all(first < end for first, end in common) else None


@dataclass(frozen=True)
class Chunk:
    """A box of a logical tensor, stored in a file.

    Attributes:
        file: the name of the file.
        key: the tensor's name in the file.
        start: the index in the logical tensor at which the box begins, one number per dimension.
        shape: the shape of the box.
        checksum: the checksum of its bytes (`tensor_file.checksum`).
    """

    file: str
    key: str
    start: tuple[Size, ...]
    shape: tuple[Size, ...]
    checksum: Size


@dataclass(frozen=True)
class Entry:
    """A logical tensor of a checkpoint, and the chunks that tile it."""

    shape: tuple[Size, ...]
    dtype: str  # its name in safetensors, such as "BF16"
    chunks: tuple[Chunk, ...]

    def size(self, chunk: Chunk) -> int:
        """Return the size of a chunk in bytes."""
        return math.prod(chunk.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class FileRecord:
    """A safetensors file of a checkpoint: its size in bytes, and the CRC-32 of its header."""

    bytes: Size
    header_crc32: Size


@dataclass(frozen=True)
class SmallFile:
    """A file beside the tensors of a checkpoint, such as a tokenizer."""

    bytes: Size
    crc32: Size


class _Group(TypedDict):
    options: dict[str, Any]
    params: list[str]


class Group(_Group, total=False):
    """A parameter group: options, names of parameters, the blocks that Muon splits, and the optimizer's class."""

    blocks: dict[str, list[Size]]
    kind: str  # an older checkpoint lacks it


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint: everything except the tensors' values.

    Attributes:
        step: optimizer steps done.
        sample: global index of the next sample.
        seed: the run's seed. None: none was given.
        config, extra: JSON values that the caller passed to `save`.
        mesh: the sizes of the mesh that wrote the checkpoint. A mesh of other sizes can read it.
        optimizer: the parameter groups, each `{"options": {...}, "params": [names], "kind": class}`, of Muon's matrices
            with `"blocks": {name: sizes}`. None: no optimizer was saved.
        files: the files by name.
        tensors: the tensors, by `model/NAME` or `optimizer/SLOT/NAME`.
        beside: the other files, by their path within the checkpoint. A checkpoint of mpcore 0.2 lists none.
    """

    step: Size
    sample: Size = 0
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, Size] = field(default_factory=dict)
    optimizer: list[Group] | None = None
    files: dict[str, FileRecord] = field(default_factory=dict)
    tensors: dict[str, Entry] = field(default_factory=dict)
    beside: dict[str, SmallFile] = field(default_factory=dict)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest. It is the last file of a checkpoint: after it the checkpoint is complete."""
    body = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    text = json.dumps(body | {"crc32": sign(body)}, allow_nan=False, indent=1)
    store_of(folder).write(folder / MANIFEST, text.encode())


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest and check it for consistency."""
    path = folder / MANIFEST
    if not path.is_file():
        inside = [file.parent for where in ("", "checkpoints/") for file in folder.glob(f"{where}*/{MANIFEST}")]
        newest = max((file for file in inside if not file.name.startswith(".")), key=lambda f: f.name, default=None)
        why = f"it has no {MANIFEST}" if folder.exists() else "there is no such folder"
        if not newest and (other := other_format(folder)):
            raise ValueError(f"{folder} is no complete checkpoint of mpcore: {other}")
        why += f"; the newest in it is {newest}" if newest else ""
        raise ValueError(f"{folder} is no complete checkpoint: {why}")
    headers = store_of(folder).tensor_bytes(folder)  # each chunk of the manifest is in one, in some 100 bytes
    limit = MANIFEST_LIMIT if headers is None else min(MANIFEST_LIMIT, 2 * JSON_LIMIT + 16 * headers)
    body = read_json(path, limit, MANIFEST_LIMIT)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ValueError(f"{path} is not the manifest of an {FORMAT}")
    if body.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {body.get('version')!r}, this mpcore reads version {VERSION}: "
            f"read it with the mpcore that wrote it"
        )
    found = body.pop("crc32", None)
    if found != sign(body):
        raise ValueError(f"{path} is damaged: its CRC-32 is {sign(body)}, written was {found!r}")
    del body["format"], body["version"]
    manifest = convert(Manifest, body, str(path))
    try:
        _check(manifest)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return manifest


def sign(body: Mapping[str, Any]) -> int:
    """Return the CRC-32 of a manifest without its own CRC-32 field. The order of the fields doesn't matter."""
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _check(manifest: Manifest) -> None:
    for name in manifest.files:
        if Path(name).name != name or name in ("", ".", ".."):  # a name must not lead out of the checkpoint's directory
            raise ValueError(f"{name!r} is not a plain file name")
    for name in manifest.beside:
        check_inside(name)
    places: dict[tuple[str, str], str] = {}
    for name, entry in manifest.tensors.items():
        if entry.dtype not in DTYPES:
            raise ValueError(f"{name} has the unknown dtype {entry.dtype!r}")
        if len(entry.shape) > DIMENSIONS:
            raise ValueError(f"{name} has {len(entry.shape)} dimensions, more than {DIMENSIONS}")
        if any(len(entry.shape) != len(c.shape) or len(c.shape) != len(c.start) for c in entry.chunks):
            raise ValueError(f"the chunks of {name} do not have the {len(entry.shape)} dimensions of its shape")
        if not tiles([tuple(zip(c.start, c.shape, strict=True)) for c in entry.chunks], entry.shape):
            raise ValueError(f"the {len(entry.chunks)} chunks of {name} do not tile its shape {entry.shape}")
        for chunk in entry.chunks:
            if chunk.file not in manifest.files:
                raise ValueError(f"{name} lies in {chunk.file!r}, which is not among the files")
            if (other := places.setdefault((chunk.file, chunk.key), name)) != name:
                raise ValueError(f"{other} and {name} are both {chunk.key!r} of {chunk.file}")


def check_inside(name: str) -> None:
    """Raise ValueError if the path of a file within a checkpoint leads out of it."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{name!r} leads out of the checkpoint")


def tiles(boxes: Sequence[tuple[tuple[int, int], ...]], shape: Sequence[int]) -> bool:
    """Return whether boxes cover a shape exactly once.

    The boxes must form a nested grid: one division of dimension 0 into ranges, then one division of dimension 1 within
    each range, and so on. The boxes of every sharding over tp and data form such a grid.
    """
    if 0 in shape:
        return not boxes
    if not shape:
        return len(boxes) == 1
    runs: dict[tuple[int, int], list[Any]] = {}
    for (start, size), *inner in boxes:
        runs.setdefault((start, size), []).append(inner)
    end = 0
    for (start, size), inner in sorted(runs.items()):
        if start != end or size < 1 or not tiles(inner, shape[1:]):
            return False
        end = start + size
    return end == shape[0]


def dtype_name(dtype: torch.dtype) -> str:
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"safetensors has no dtype for {dtype}")
    return DTYPE_NAMES[dtype]
