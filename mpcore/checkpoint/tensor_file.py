"""Write and read safetensors files with checksums, in several threads."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import mmap
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpcore.checkpoint.format import DIMENSIONS, DTYPES, Chunk, Entry, FileRecord, Manifest, dtype_name
from mpcore.checkpoint.remote import store_of
from mpcore.checkpoint.schema import Size, convert, load_json
from mpcore.checkpoint.store import THREADS, MappedFile, in_threads, stamp
from mpcore.mesh.secret import printable

WORDS, ROWS = 1021, 63  # block size of `checksum`: a prime, and fewer rows than a disk sector has words
HEADER_LIMIT = 100_000_000  # bytes, the limit of the safetensors library
TENSOR_LIMIT = 2**18  # of a file
LARGE_PAGE = 2**21  # bytes


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor] | None = None
) -> tuple[FileRecord, dict[str, int]]:
    """Write tensors to a new safetensors file, and sync it to the disk.

    Args:
        tensors: the tensors by key, on any device. They are copied to the CPU one at a time.
        read: returns the tensor of a key. It is called once per key, in the order of `tensors`, whose tensors may then
            be on the meta device. None: the values are those of `tensors`.
    """
    head, header, end = file_head(tensors)
    sums = dict.fromkeys(tensors, 0)  # in the order of `tensors`, whichever thread ends first

    def data(key: str) -> memoryview:
        found = raw(tensors[key] if read is None else read(key))
        sums[key] = checksum(found)
        return found

    blocks = [(len(head) + header[key]["data_offsets"][0], functools.partial(data, key)) for key in tensors]
    store_of(path).write_blocks(path, len(head) + end, [(0, lambda: head), *blocks], THREADS if read is None else 1)
    return FileRecord(len(head) + end, zlib.crc32(head)), sums


def file_head(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, Any], int]:
    """Return a safetensors file's header as bytes and by key, and how many bytes of data follow it."""
    # The widest dtypes first, as the safetensors library does, so that each tensor is aligned to its element size.
    keys = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    if "__metadata__" in tensors:
        raise ValueError("a safetensors file can't hold a tensor named __metadata__: give the parameter another name")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in keys:
        tensor, start = tensors[key], end
        end += tensor.numel() * tensor.element_size()
        header[key] = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)} | {"data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, header, end


def raw(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in row-major order.

    A contiguous CPU tensor is not copied: the result shares its memory.
    """
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def checksum(data: memoryview) -> int:
    """Return a checksum that is as fast as memory: a CRC-32 of sums of 64-bit words, not of all bytes.

    The data are rows of `WORDS` 64-bit words. The sum of each `ROWS` rows is computed column by column, modulo 2^64.
    The CRC-32 is computed over these sums, and then over the remaining bytes that fill no row.

    Every change within the length of one row (8 KB) changes the CRC-32's input: a bit, a word, or a page that became
    zero. So does a swap of two blocks that lie 512 bytes or a larger power of two apart, because no such distance
    within `ROWS` rows is a multiple of the prime `WORDS`. The checksum misses changes in several places that cancel
    each other, such as the same bit of the same column, cleared in one row and set in another.
    """
    rows = np.frombuffer(data, np.uint64, len(data) // (8 * WORDS) * WORDS).reshape(-1, WORDS)
    crc = 0
    for first in range(0, len(rows), ROWS):
        crc = zlib.crc32(np.add.reduce(rows[first : first + ROWS], axis=0), crc)
    return zlib.crc32(data[rows.nbytes :], crc)


class TensorFile:
    """A safetensors file, of which only the parts that are used are read.

    Args:
        record: the file's record in the manifest. None: another library wrote the file.

    Attributes:
        header: by key the dtype's name, the shape, and the tensor's offsets in the data.
    """

    def __init__(self, path: Path, record: FileRecord | None = None) -> None:
        self.path = path
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        self.file: MappedFile = store_of(path).open(path)
        size = self.file.size
        if size < 8 or (record is not None and size != record.bytes):
            written = "" if record is None else f", written were {record.bytes}"
            raise ValueError(f"{path} has {size} bytes{written}")
        (length,) = struct.unpack("<Q", self.file.read(0, 8))
        if length > min(HEADER_LIMIT, size - 8):
            raise ValueError(
                f"{path} is damaged: a header of {length} bytes, in a file of {size} and at most {HEADER_LIMIT}"
            )
        text = bytes(self.file.read(8, 8 + length))
        found = zlib.crc32(text, zlib.crc32(struct.pack("<Q", length)))
        if record is not None and found != record.header_crc32:
            want = f"written was {record.header_crc32:08x}"
            raise ValueError(f"{path} is damaged: the CRC-32 of its header is {found:08x}, {want}")
        self._data = 8 + length
        self.header: dict[str, Any] = read_header(text, size - self._data, str(path))

    def check(self, entry: Entry, chunk: Chunk) -> None:
        """Raise ValueError if the file lacks a chunk, or has it with another shape or dtype."""
        found = self.header.get(chunk.key)
        if found is None:
            raise ValueError(f"{self.path} has no tensor {chunk.key!r}")
        want = {"dtype": entry.dtype, "shape": list(chunk.shape)}
        if any(found.get(name) != value for name, value in want.items()):
            raise ValueError(f"{self.path}: {chunk.key} is {found}, expected {want}")

    def whole(self, key: str) -> Tensor:
        """Return the tensor of a key as a view of the file. Its bytes are read when they are used."""
        found = self.header[key]
        dtype, shape = DTYPES[found["dtype"]], found["shape"]
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.file.read(*self._place(key)), dtype=dtype).view(shape)

    def forget(self, key: str) -> None:
        """Free the memory that reading a tensor used. The tensor can be read again."""
        self.file.advise(*self._place(key), needed=False)

    def _place(self, key: str) -> tuple[int, int]:
        start, end = (self._data + offset for offset in self.header[key]["data_offsets"])
        return start, end

    def problem(self, entry: Entry, chunk: Chunk) -> str | None:
        """Read a chunk and return a description of its damage, or None if there is none."""
        self.check(entry, chunk)
        self.file.advise(*self._place(chunk.key), needed=True)
        found = checksum(memoryview(self.file.read(*self._place(chunk.key))))
        if found == chunk.checksum:
            return None
        return f"{self.path}: {chunk.key} is damaged: its checksum is {found:08x}, written was {chunk.checksum:08x}"


def read_header(text: bytes, room: int, path: str) -> dict[str, Any]:
    """Return a safetensors file's header by key; raise ValueError unless it fits `room` bytes of data exactly."""
    header = convert(dict[str, Any], load_json(text, path, TENSOR_LIMIT), path)
    header = {k: v for k, v in header.items() if k != "__metadata__"}
    for key, said in header.items():
        if not _fits(said, room):
            found = f"its header says {key[:200]} is {str(said)[:200]}, of {room} bytes"
            raise ValueError(f"{path} is damaged: {printable(found)}")
    end = 0
    for start, stop in sorted(said["data_offsets"] for said in header.values()):
        if start != end:  # as the format demands: no holes, and no bytes of two tensors
            raise ValueError(f"{path} is damaged: a tensor begins at byte {start} of the data, the last ends at {end}")
        end = stop
    if end != room:
        raise ValueError(f"{path} is damaged: its tensors have {end} bytes, its data {room}")
    return header


def _fits(found: Any, room: int) -> bool:
    """Return whether a header's entry is consistent and fits a file with `room` bytes of data."""
    try:
        start, end = convert(tuple[Size, Size], found["data_offsets"], "data_offsets")
        if len(found["shape"]) > DIMENSIONS:
            return False
        size = math.prod(convert(tuple[Size, ...], found["shape"], "shape")) * DTYPES[found["dtype"]].itemsize
    except (KeyError, TypeError, ValueError):
        return False
    return end - start == size and end <= room


class Files:
    """The files of one checkpoint. Each is opened at its first use."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._open: dict[str, TensorFile] = {}

    def __getitem__(self, name: str) -> TensorFile:
        if name not in self._open:
            self._open[name] = TensorFile(self.folder / name, self.manifest.files[name])
        return self._open[name]

    def tensor(self, entry: Entry, chunk: Chunk) -> Tensor:
        """Return a chunk as a view of its file. Its bytes are read when they are used."""
        self[chunk.file].check(entry, chunk)
        return self[chunk.file].whole(chunk.key)

    def problems(self, chunks: Sequence[tuple[str, Entry, Chunk]]) -> list[str]:
        """Return a description of the damage of these chunks, by tensor, key and file.

        A damaged file is reported once.
        """

        def one(item: tuple[str, Entry, Chunk]) -> str | None:
            name, entry, chunk = item
            try:
                problem = self[chunk.file].problem(entry, chunk)
            except (ValueError, OSError) as error:
                return str(error)
            return None if problem is None else f"{name}: {problem}"

        return list(dict.fromkeys(told for told in in_threads(one, chunks) if told is not None))

    def damage(self, kind: str = "") -> Iterator[str]:
        """Yield `problems` of all tensors of a kind, such as "model/", and free the memory that reading them used."""
        for name, entry in self.manifest.tensors.items():
            for chunk in entry.chunks if name.startswith(kind) else ():
                yield from self.problems([(name, entry, chunk)])
                self[chunk.file].forget(chunk.key)

    def problems_beside(self) -> list[str]:
        """Read the files beside the tensors and return a description of their damage."""
        found = []
        for name, record in self.manifest.beside.items():
            path = self.folder / name
            try:
                if not path.is_file():  # opening a pipe would wait for its writer
                    raise OSError("it is no file")
                with path.open("rb") as file:
                    data = file.read(record.bytes + 1)
            except OSError as error:
                found.append(f"{path} can't be read: {error}")
                continue
            if (len(data), zlib.crc32(data)) != (record.bytes, record.crc32):
                found.append(f"{path} is damaged: it is not the file of {record.bytes} bytes that was written")
        return found

    def unchanged(self) -> None:
        """Raise ValueError if an open file has changed: the ranks share out the checks, so another may have read it."""
        for file in self._open.values():
            if file.file.stamp != stamp(file.path.stat()):
                raise ValueError(f"{file.path} changed while it was read: load again, the values read are not safe")

    def assemble(self, name: str) -> Tensor:
        entry = self.manifest.tensors[name]
        full = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        for chunk in entry.chunks:
            box = tuple(slice(start, start + size) for start, size in zip(chunk.start, chunk.shape, strict=True))
            full[box] = self.tensor(entry, chunk)
        return full


def host_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized CPU tensor, in pages of 2 MiB if the system supports them (see docs/decisions.md)."""
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE_PAGE or sys.platform != "linux":
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has none
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
