"""The files of a checkpoint: tensors in safetensors, all else in one JSON manifest. Nothing here runs what it reads.

A checkpoint is a directory:

    manifest.json                what is inside, and where each piece of each tensor lies
    model-00000.safetensors      parameters and buffers; the number is the rank that wrote them
    optimizer-00000.safetensors  optimizer state

A tensor has its logical name and shape, whatever layout wrote it. It is stored in chunks, boxes of the logical tensor
that tile it exactly once. Each chunk has its `checksum`, so that damage is found and named; headers and the manifest
have their CRC-32.

Source: the safetensors format, https://huggingface.co/docs/safetensors/index#format. Written and read here, because
the library copies all tensors into memory before it writes, doesn't sync the file, and hashes nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

K = TypeVar("K")
R = TypeVar("R")
FORMAT, VERSION = "mpcore checkpoint", 2
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 2**30  # bytes: some 5 million chunks
THREADS = 4  # that read or write at a time
HEADER_LIMIT = 100_000_000  # bytes, as the safetensors library has it
WORDS, ROWS = 1021, 63  # that `checksum` adds up; a prime, and fewer rows than a sector has words

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Chunk:
    """A box of a logical tensor, in a file.

    Attributes:
        file, key: where it is stored.
        start, shape: where it lies in the logical tensor.
        checksum: of its bytes.
    """

    file: str
    key: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    checksum: int


@dataclass(frozen=True)
class Entry:
    """A logical tensor: its shape, its dtype as safetensors calls it, and the chunks that tile it."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]

    def size(self, chunk: Chunk) -> int:
        """Bytes of a chunk."""
        return math.prod(chunk.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class FileRecord:
    """A file of tensors: its whole size in bytes, and the CRC-32 of its header."""

    bytes: int
    header_crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds besides the numbers.

    Attributes:
        step: optimizer steps done.
        sample: global index of the next sample.
        seed: of the run; None: not given.
        config, extra: what the caller gave, as JSON has it.
        mesh: sizes of the mesh that wrote it; of no consequence to who reads it.
        optimizer: parameter groups, each `{"options": {...}, "params": [names]}`; None: no optimizer inside.
        files: by name.
        tensors: by `model/NAME` or `optimizer/SLOT/NAME`.
    """

    step: int
    sample: int = 0
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)
    optimizer: list[dict[str, Any]] | None = None
    files: dict[str, FileRecord] = field(default_factory=dict)
    tensors: dict[str, Entry] = field(default_factory=dict)


# --- the manifest -------------------------------------------------------------------------------------------------


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and sync it to the disk. The last file of a checkpoint: with it the checkpoint is whole."""
    body = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    text = json.dumps(body | {"crc32": sign(body)}, allow_nan=False, indent=1)
    with _named(folder / MANIFEST), open(folder / MANIFEST, "wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def _why_none(folder: Path) -> str:
    if not folder.exists():
        return "there is no such folder"
    inside = [manifest.parent for where in ("", "checkpoints/") for manifest in folder.glob(f"{where}*/{MANIFEST}")]
    inside = sorted((path for path in inside if not path.name.startswith(".")), key=lambda path: path.name)
    return f"it has no {MANIFEST}" + (f"; the newest in it is {inside[-1]}" if inside else "")


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest and check it against itself.

    Raises:
        ValueError: naming the file, if it is missing, too large, damaged, of another format or of another version, or
            if the chunks of a tensor don't tile it.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} is no complete checkpoint: {_why_none(folder)}")
    size = path.stat().st_size
    if size > MANIFEST_LIMIT:
        raise ValueError(f"{path} has {size} bytes, more than the {MANIFEST_LIMIT} that a manifest may have")
    try:
        body = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
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
    try:
        return _parse(body)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def sign(body: Mapping[str, Any]) -> int:
    """The CRC-32 of a manifest that lacks it, whatever the order of its fields."""
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _parse(body: dict[str, Any]) -> Manifest:
    del body["format"], body["version"]
    files = {name: FileRecord(**record) for name, record in body.pop("files").items()}
    for name, record in files.items():
        _sizes((record.bytes, record.header_crc32))
        if Path(name).name != name or name in ("", ".", ".."):  # never a way out of the checkpoint
            raise ValueError(f"{name!r} is not a plain file name")
    tensors = {}
    for name, raw in body.pop("tensors").items():
        chunks = [
            Chunk(c["file"], c["key"], _sizes(c["start"]), _sizes(c["shape"]), c["checksum"]) for c in raw["chunks"]
        ]
        entry = Entry(_sizes(raw["shape"]), raw["dtype"], tuple(chunks))
        if entry.dtype not in DTYPES:
            raise ValueError(f"{name} has the unknown dtype {entry.dtype!r}")
        if not tiles([tuple(zip(c.start, c.shape, strict=True)) for c in chunks], entry.shape):
            raise ValueError(f"the {len(chunks)} chunks of {name} do not tile its shape {entry.shape}")
        for chunk in chunks:
            _sizes((chunk.checksum,))
            if chunk.file not in files:
                raise ValueError(f"{name} lies in {chunk.file!r}, which is not among the files")
            if not isinstance(chunk.key, str):
                raise ValueError(f"{name} lies under {chunk.key!r}, which is no name")
        tensors[name] = entry
    return Manifest(**body, files=files, tensors=tensors)


def _sizes(values: Sequence[Any]) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values!r} are not sizes")
    return tuple(values)


def tiles(boxes: Sequence[tuple[tuple[int, int], ...]], shape: Sequence[int]) -> bool:
    """Whether boxes, each a (start, size) for every dimension, cover a shape exactly once.

    Dimension 0 must fall into runs that all boxes respect, and each run likewise into runs of dimension 1, and so on:
    so any cut over tp and over data falls.
    """
    if 0 in shape:
        return not boxes
    if not shape:
        return len(boxes) == 1
    runs: dict[tuple[int, int], list] = {}
    for (start, size), *inner in boxes:
        runs.setdefault((start, size), []).append(inner)
    end = 0
    for (start, size), inner in sorted(runs.items()):
        if start != end or size < 1 or not tiles(inner, shape[1:]):
            return False
        end = start + size
    return end == shape[0]


# --- files of tensors ---------------------------------------------------------------------------------------------


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor] | None = None
) -> tuple[FileRecord, dict[str, int]]:
    """Write tensors to a new safetensors file, one after the other, and sync it to the disk.

    Args:
        path: the file; must not exist.
        tensors: by key, on any device; moved to the CPU one at a time.
        read: gives the tensor of a key when its turn comes; then `tensors` may be on the meta device.

    Returns:
        The file's record and each tensor's checksum.

    Raises:
        OSError: if the file can't be written.
        ValueError: if safetensors has no such dtype.
    """
    # The widest dtypes first, as the library has it, so that each tensor is aligned to its own elements.
    keys = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in keys:
        tensor, start = tensors[key], end
        end += tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [start, end],
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text

    with _named(path), open(path, "xb", buffering=0) as file:
        _write_at(file, head, 0)
        if hasattr(os, "posix_fallocate"):  # a third less work for the kernel; a full disk is told at once
            os.posix_fallocate(file.fileno(), 0, len(head) + end)

        def one(key: str) -> int:
            data = raw(tensors[key] if read is None else read(key))
            _write_at(file, data, len(head) + header[key]["data_offsets"][0])
            return checksum(data)

        sums = in_threads(one, keys, THREADS if read is None else 1)
        os.fsync(file.fileno())
    return FileRecord(len(head) + end, zlib.crc32(head)), dict(zip(keys, sums, strict=True))


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Have an error of the system, such as a full disk, say which file it is about."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _write_at(file: FileIO, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view.nbytes:  # one call writes 2 GiB at the most
        done = os.pwrite(file.fileno(), view, offset)
        view, offset = view[done:], offset + done


def in_threads(work: Callable[[K], R], items: Iterable[K], threads: int = 0) -> list[R]:
    """Do the work of all items, several at a time: files, copies and zlib leave the interpreter to the others.

    Not by `concurrent.futures`: that takes no work any more while the interpreter waits for a save in the background.

    Args:
        work: called with each item.
        items: what is to be done, begun in this order.
        threads: how many at a time; 0: `THREADS`.

    Returns:
        What the work returned, in the order of the items.

    Raises:
        What the work of the first item that failed raised; nothing more is begun then.
    """
    todo = list(items)
    results: dict[int, R] = {}
    errors: dict[int, Exception] = {}
    numbers = iter(range(len(todo)))
    lock = threading.Lock()

    def run() -> None:
        while not errors:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                results[number] = work(todo[number])
            except Exception as error:  # raised again below
                errors[number] = error

    workers = [threading.Thread(target=run) for _ in range(min(threads or THREADS, len(todo)) - 1)]
    for worker in workers:
        worker.start()
    run()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(len(todo))]


def raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes in row-major order: its own memory where it lies so on the CPU, else a copy."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def checksum(data: memoryview) -> int:
    """A CRC-32 at the speed of memory: not of the bytes, but of sums of 64-bit words that lie `WORDS` apart.

    A row is `WORDS` words; `ROWS` rows at a time are added up, column by column, modulo 2^64. The CRC-32 runs over the
    sums, then over the bytes that fill no row. So every change within one row's length, 8 KB, be it a bit, a word or a
    page that is zero, changes what the CRC-32 sees; and so do two blocks that change places, 512 bytes or a larger
    power of two apart: no such distance within `ROWS` rows is a multiple of the prime. What can hide is damage in
    several places that happens to cancel: the same bit of the same column, cleared here and set there.

    Args:
        data: bytes, aligned or not.
    """
    rows = np.frombuffer(data, np.uint64, len(data) // (8 * WORDS) * WORDS).reshape(-1, WORDS)
    crc = 0
    for first in range(0, len(rows), ROWS):
        crc = zlib.crc32(np.add.reduce(rows[first : first + ROWS], axis=0), crc)
    return zlib.crc32(data[rows.nbytes :], crc)


class TensorFile:
    """A safetensors file, mapped: only the pages that are used are read.

    Args:
        path: the file.
        record: what the manifest says of it; None: a file of others, of which nothing is known.

    Attributes:
        header: by key the dtype's name, the shape, and where in the data the tensor lies.

    Raises:
        ValueError: naming the file, if it is missing, has another size, its header is another one than was written, or
            none that fits the file.
    """

    def __init__(self, path: Path, record: FileRecord | None = None) -> None:
        self.path = path
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8 or (record is not None and size != record.bytes):
                written = "" if record is None else f", written were {record.bytes}"
                raise ValueError(f"{path} has {size} bytes{written}")
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(HEADER_LIMIT, size - 8):
                raise ValueError(
                    f"{path} is damaged: a header of {length} bytes, in a file of {size} and at most {HEADER_LIMIT}"
                )
            text = file.read(length)
            found = zlib.crc32(text, zlib.crc32(struct.pack("<Q", length)))
            if record is not None and found != record.header_crc32:
                raise ValueError(
                    f"{path} is damaged: the CRC-32 of its header is {found:08x}, written was {record.header_crc32:08x}"
                )
            # A private mapping: torch wants a writable buffer, and nobody's write would reach the file.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._data = 8 + length
        try:
            self.header = {k: v for k, v in json.loads(text).items() if k != "__metadata__"}
        except (ValueError, RecursionError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        room = size - self._data
        for key, said in self.header.items():
            if not _fits(said, room):
                raise ValueError(f"{path} is damaged: its header says {key} is {str(said)[:200]}, of {room} bytes")

    def _span(self, entry: Entry, chunk: Chunk) -> tuple[int, int]:
        found = self.header.get(chunk.key)
        if found is None:
            raise ValueError(f"{self.path} has no tensor {chunk.key!r}")
        want = {"dtype": entry.dtype, "shape": list(chunk.shape)}
        if any(found.get(name) != value for name, value in want.items()):
            raise ValueError(f"{self.path}: {chunk.key} is {found}, expected {want}")
        start, end = found["data_offsets"]
        return self._data + start, self._data + end

    def tensor(self, entry: Entry, chunk: Chunk) -> Tensor:
        """A chunk as it lies in the file: not read until used."""
        self._span(entry, chunk)
        return self.whole(chunk.key)

    def whole(self, key: str) -> Tensor:
        """The tensor of a key as it lies in the file: not read until used."""
        found = self.header[key]
        dtype, shape = DTYPES[found["dtype"]], found["shape"]
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        start = self._data + found["data_offsets"][0]
        return torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape), offset=start).view(shape)

    def forget(self, key: str) -> None:
        """Let go of the memory that reading a tensor took; it can be read again."""
        start, end = (self._data + offset for offset in self.header[key]["data_offsets"])
        start -= start % mmap.PAGESIZE
        if end > start and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def problem(self, entry: Entry, chunk: Chunk) -> str | None:
        """Read a chunk and say what is wrong with its bytes; None: nothing."""
        start, end = self._span(entry, chunk)
        if hasattr(mmap, "MADV_WILLNEED"):
            first = start - start % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, first, end - first)
        found = checksum(memoryview(self._map)[start:end])
        if found == chunk.checksum:
            return None
        return f"{self.path}: {chunk.key} is damaged: its checksum is {found:08x}, written was {chunk.checksum:08x}"


def _fits(found: Any, room: int) -> bool:
    """Whether what a header says of a tensor makes sense in a file with so many bytes of data."""
    try:
        start, end = _sizes(found["data_offsets"])
        size = math.prod(_sizes(found["shape"])) * DTYPES[found["dtype"]].itemsize
    except (KeyError, TypeError, ValueError):
        return False
    return end - start == size and end <= room


class Files:
    """The files of one checkpoint, each opened when first needed."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._open: dict[str, TensorFile] = {}

    def __getitem__(self, name: str) -> TensorFile:
        if name not in self._open:
            self._open[name] = TensorFile(self.folder / name, self.manifest.files[name])
        return self._open[name]

    def problems(self, chunks: Sequence[tuple[str, Entry, Chunk]]) -> list[str]:
        """What is wrong with these chunks, each named by tensor, key and file; a file's own fault once."""

        def one(item: tuple[str, Entry, Chunk]) -> str | None:
            name, entry, chunk = item
            try:
                problem = self[chunk.file].problem(entry, chunk)
            except (ValueError, OSError) as error:
                return str(error)
            return None if problem is None else f"{name}: {problem}"

        return list(dict.fromkeys(told for told in in_threads(one, chunks) if told is not None))

    def assemble(self, name: str) -> Tensor:
        """A logical tensor, whole."""
        entry = self.manifest.tensors[name]
        full = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        for chunk in entry.chunks:
            box = tuple(slice(start, start + size) for start, size in zip(chunk.start, chunk.shape, strict=True))
            full[box] = self[chunk.file].tensor(entry, chunk)
        return full


def dtype_name(dtype: torch.dtype) -> str:
    """What safetensors calls a dtype.

    Raises:
        ValueError: if it has no name for it.
    """
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"safetensors has no dtype for {dtype}")
    return DTYPE_NAMES[dtype]


def sync_folder(path: Path) -> None:
    """Bring a directory's list of names to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
