"""Token corpora on disk, in Megatron-LM's format: a pair of files.

`PREFIX.bin` holds the tokens of all documents, end to end. `PREFIX.idx` holds, in little-endian:

    9 bytes   b"MMIDIDX\x00\x00"
    uint64    version, 1
    uint8     code of the token dtype
    uint64    S, number of sequences
    uint64    D, number of document boundaries: documents + 1
    int32     [S] tokens of each sequence
    int64     [S] byte offset of each sequence in the .bin
    int64     [D] first sequence of each document, then S
    int8      [S] mode of each sequence, in multimodal corpora only; ignored here

Source: NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import mmap
import operator
import os
import secrets
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mpcore.checkpoint.store import Store

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_CHUNK = 1 << 20  # tokens checked at a time, so that a huge corpus takes little memory


def smallest_dtype(vocab_size: int) -> np.dtype:
    """Choose the token dtype for a vocabulary, as Megatron does: uint16 below 65,500 ids, else int32."""
    if not 1 <= vocab_size <= 1 << 31:
        raise ValueError(f"vocab_size {vocab_size} is not in [1, {1 << 31}]")
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedDataset:
    """A corpus in Megatron's format, memory-mapped: `len(d)` documents, `d[i]` the tokens of document i.

    Opening checks the whole index; only 24 bytes a document stay in memory. Sequences must lie end to end and fill
    the .bin exactly, as every Megatron writer lays them. This finds a .bin and an .idx that do not belong together.

    Args:
        prefix: path of the two files without `.bin` and `.idx`.
        without: numbers of documents to leave out, as if they had never been in the corpus.

    Raises:
        ValueError: a file is missing, damaged, or not the other's partner; or no document has a number of `without`.
    """

    prefix: str
    dtype: np.dtype
    numbers: np.ndarray  # int64 [documents], the number of each document in the files
    lengths: np.ndarray  # int64 [documents], tokens of each document
    num_tokens: int

    def __init__(self, prefix: str | os.PathLike[str], without: Sequence[int] = ()) -> None:
        self.prefix, self.without = os.fspath(prefix), sorted(set(without))
        bin_path = f"{self.prefix}.bin"
        with _open(bin_path, self.prefix) as file:
            bin_size = os.fstat(file.fileno()).st_size
            self.dtype, self._offsets = _read_index(f"{self.prefix}.idx", self.prefix, bin_path, bin_size)
            self._tokens = np.empty(0, self.dtype)  # an empty file cannot be mapped
            if bin_size:
                self._tokens = np.memmap(file, self.dtype, mode="r", shape=(int(self._offsets[-1]),))
        count = len(self._offsets) - 1
        if strange := [number for number in self.without if not 0 <= number < count]:
            raise ValueError(f"{self.prefix} has no document {strange[0]}: it has {count}, counted from 0")
        self.numbers = np.delete(np.arange(count), self.without)
        self.lengths = np.diff(self._offsets)[self.numbers]
        self.num_tokens = int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens of one document, a read-only view of the file: [lengths[index]] of dtype."""
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.prefix}: document {index} of {len(self)}")
        number = self.numbers[index]
        needed = int(self._offsets[number + 1]) * self.dtype.itemsize
        mapped: Any = self._tokens.base
        if isinstance(mapped, mmap.mmap) and mapped.size() < needed:  # a read would be a SIGBUS
            raise ValueError(f"{self.prefix}.bin was cut to {mapped.size()} bytes after it was opened")
        return np.asarray(self._tokens[self._offsets[number] : self._offsets[number + 1]])

    def __reduce__(self) -> tuple:
        # A memory map pickles as a copy of the whole corpus; a worker opens the files instead.
        return IndexedDataset, (self.prefix, self.without)

    def origin(self, index: int) -> tuple[str, int]:
        """Return the prefix of the files, and the number of a document in them."""
        return self.prefix, int(self.numbers[index])

    def check_tokens(self, vocab_size: int, part: int = 0, parts: int = 1) -> None:
        """Read every token, and refuse a corpus made with a larger vocabulary. Documents that are left out aren't read.

        Args:
            vocab_size: number of token ids that the model has.
            part, parts: read only part `part` of `parts` equal ones, so that the ranks of a run share the work.

        Raises:
            ValueError: a token is negative or not below vocab_size.
        """
        smallest = largest = (0, 0)  # (token, position)
        first, end = (len(self._tokens) * i // parts for i in (part, part + 1))
        cuts = [first, *(int(self._offsets[k + i]) for k in self.without for i in (0, 1)), end]
        spans = [(max(a, first), min(b, end)) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
        for start, end in ((at, min(at + _CHUNK, b)) for a, b in spans for at in range(a, b, _CHUNK)):
            chunk = self._tokens[start:end]
            if (token := int(chunk.max())) > largest[0]:
                largest = (token, start + int(chunk.argmax()))
            if (token := int(chunk.min())) < smallest[0]:
                smallest = (token, start + int(chunk.argmin()))
        for name, (token, position) in (("largest", largest), ("smallest", smallest)):
            if not 0 <= token < vocab_size:
                document = int(np.searchsorted(self._offsets, position, side="right")) - 1
                within = position - int(self._offsets[document])
                raise ValueError(
                    f"{self.prefix}.bin: the {name} token id {token} is outside the vocabulary of "
                    f"{vocab_size}, at token {within} of document {document} (token {position} of all); "
                    "use the tokenizer that made the corpus, or a larger vocab_size"
                )


def _open(path: str, prefix: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        hint = ""
        if prefix.endswith((".bin", ".idx")):
            hint = f"; pass the path without its ending: {prefix[:-4]}"
        elif os.path.exists(prefix):
            hint = f"; of text, python -m examples.gpt.prepare --input {prefix} --out PREFIX makes a corpus"
        raise ValueError(f"{path}: cannot be read: {error.strerror}{hint}") from error


def _read_index(path: str, prefix: str, bin_path: str, bin_size: int) -> tuple[np.dtype, np.ndarray]:
    """Dtype of the tokens, and int64 [documents + 1] the token at which each document begins, then ends."""
    with _open(path, prefix) as file:
        dtype, sequences, boundaries = _read_header(path, file)
        lengths = _read_array(file, "<i4", _HEADER.size, sequences)
        pointers = _read_array(file, "<i8", _HEADER.size + 4 * sequences, sequences)
        firsts = _read_array(file, "<i8", _HEADER.size + 12 * sequences, boundaries)
    if firsts[0] != 0 or firsts[-1] != sequences or np.any(firsts[1:] < firsts[:-1]):
        raise ValueError(
            f"{path}: document boundaries must rise from 0 to the number of sequences {sequences}, "
            f"but run from {firsts[0]} to {firsts[-1]} and fall {np.sum(firsts[1:] < firsts[:-1])} times"
        )
    if sequences and lengths.min() < 0:
        worst = int(lengths.argmin())
        raise ValueError(f"{path}: sequence {worst} has length {lengths[worst]}, below 0")
    begins = np.zeros(sequences + 1, np.int64)  # of each sequence, then the end
    np.cumsum(lengths, out=begins[1:])
    wrong = np.flatnonzero(pointers != begins[:-1] * dtype.itemsize)
    if len(wrong):
        k = int(wrong[0])
        raise ValueError(
            f"{path}: sequence {k} begins at byte {pointers[k]}, but the lengths before it end at byte "
            f"{begins[k] * dtype.itemsize} of {bin_path} ({bin_size} bytes)"
        )
    if (size := int(begins[-1]) * dtype.itemsize) != bin_size:
        fault = "truncated" if size > bin_size else "too long"
        raise ValueError(
            f"{bin_path}: {path} describes {size} bytes of {dtype}, but the file has {bin_size}: {fault}, or not the "
            f"partner of this index"
        )
    return dtype, begins[firsts]


def _read_header(path: str, file: BinaryIO) -> tuple[np.dtype, int, int]:
    """Dtype of the tokens and the counts of sequences and document boundaries, which fit the size of the file."""
    size = os.fstat(file.fileno()).st_size
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise ValueError(f"{path}: {size} bytes, but the header alone takes {_HEADER.size}: truncated")
    magic, version, code, sequences, boundaries = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise ValueError(f"{path}: begins with {magic!r}, not with {_MAGIC!r}: not a Megatron index")
    if version != 1:
        raise ValueError(f"{path}: version {version}, but only version 1 is known")
    if code not in _DTYPES:
        raise ValueError(f"{path}: dtype code {code} is unknown; the codes are 1 to {len(_DTYPES)}")
    dtype = np.dtype(_DTYPES[code])
    if dtype.kind == "f":
        raise ValueError(f"{path}: dtype code {code} is {dtype}, but tokens must be integers")
    expected = _HEADER.size + 12 * sequences + 8 * boundaries
    if size not in (expected, expected + sequences):
        raise ValueError(
            f"{path}: {sequences} sequences and {boundaries} document boundaries take {expected} bytes "
            f"(or {expected + sequences} with modes), but the file has {size}"
        )
    if boundaries < 1:
        raise ValueError(f"{path}: 0 document boundaries, but even 0 documents have 1")
    return dtype, sequences, boundaries


def _read_array(file: BinaryIO, dtype: str, offset: int, count: int) -> np.ndarray:
    file.seek(offset)
    data = file.read(size := count * np.dtype(dtype).itemsize)
    if len(data) < size:
        raise ValueError(f"{file.name} was cut to {os.fstat(file.fileno()).st_size} bytes while it was read")
    return np.frombuffer(data, dtype)


class IndexedDatasetWriter:
    """Write a corpus in Megatron's format, one sequence a document; use it in a `with` block.

    The files are written under temporary names in the same folder. When the block ends without an exception they get
    their own names; else they are removed.

    Args:
        prefix: path of the two files without `.bin` and `.idx`; files that exist are replaced.
        dtype: integer dtype of the tokens; see `smallest_dtype`.

    Raises:
        ValueError: the format has no code for dtype, or it is not an integer dtype.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: np.dtype | type | str) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype)
        codes = {np.dtype(name): code for code, name in _DTYPES.items()}
        if self.dtype not in codes or self.dtype.kind == "f":
            known = ", ".join(str(known) for known in codes if known.kind != "f")
            raise ValueError(f"tokens of dtype {self.dtype} cannot be written; use one of {known}")
        self._code = codes[self.dtype]
        self._lengths = array("i")
        folder, name = os.path.split(self.prefix)
        self._temporary = os.path.join(folder, f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        self._file: BinaryIO | None = None

    def __enter__(self) -> IndexedDatasetWriter:
        self._file = open(f"{self._temporary}.bin", "xb")
        return self

    def add_document(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append a document, integers [n] in the range of dtype; the caller ends it with the end-of-document id."""
        if self._file is None:
            raise ValueError(f"{self.prefix}: add_document works inside a with block only")
        given = np.asarray(tokens)
        document = f"{self.prefix}: document {len(self._lengths)}"
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise ValueError(f"{document} must be integers [n], but is {given.dtype} {list(given.shape)}")
        if given.size and given.dtype != self.dtype:
            low, high, limits = int(given.min()), int(given.max()), np.iinfo(self.dtype.name)
            if low < limits.min or high > limits.max:
                raise ValueError(
                    f"{document} has token ids {low} to {high}, but {self.dtype} holds {limits.min} to "
                    f"{limits.max}; use the dtype of smallest_dtype(vocab_size)"
                )
        if given.size > np.iinfo(np.int32).max:
            raise ValueError(f"{document} has {given.size} tokens, but the format holds {np.iinfo(np.int32).max}")
        self._file.write(np.ascontiguousarray(given, self.dtype).data)
        self._lengths.append(given.size)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._file is not None
        bin_path, idx_path = f"{self.prefix}.bin", f"{self.prefix}.idx"
        leftovers = [f"{self._temporary}.bin", f"{self._temporary}.idx"]
        try:
            with self._file as file:
                if kind is not None:
                    return
                _sync(file)
            with open(f"{self._temporary}.idx", "xb") as file:
                self._write_index(file)
                _sync(file)
            # A kill between the two renames must not leave an old index beside new data.
            if os.path.exists(idx_path):
                os.unlink(idx_path)
            os.replace(f"{self._temporary}.bin", bin_path)
            leftovers.append(bin_path)
            os.replace(f"{self._temporary}.idx", idx_path)
            leftovers.clear()
        finally:
            self._file = None
            for path in leftovers:
                if os.path.exists(path):
                    os.unlink(path)
        Store[Path]().sync(Path(idx_path).parent)

    def _write_index(self, file: BinaryIO) -> None:
        count = len(self._lengths)
        lengths = np.array(self._lengths, "<i4")
        begins = np.cumsum(lengths, dtype=np.int64) - lengths
        file.write(_HEADER.pack(_MAGIC, 1, self._code, count, count + 1))
        file.write(lengths.data)
        file.write((begins * self.dtype.itemsize).astype("<i8").data)
        file.write(np.arange(count + 1, dtype="<i8").data)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
