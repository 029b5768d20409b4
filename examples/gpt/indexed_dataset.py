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
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_CHUNK = 1 << 20  # entries read at a time, so that checking a huge corpus takes little memory


def smallest_dtype(vocab_size: int) -> np.dtype:
    """Choose the token dtype for a vocabulary, as Megatron does: uint16 below 65,500 ids, else int32."""
    if not 1 <= vocab_size <= 1 << 31:
        raise ValueError(f"vocab_size {vocab_size} is not in [1, {1 << 31}]")
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedDataset:
    """A corpus in Megatron's format, memory-mapped: `len(d)` documents, `d[i]` the tokens of document i.

    Opening checks the whole index; only 16 bytes a document stay in memory. Sequences must lie end to end and fill
    the .bin exactly, as every Megatron writer lays them. This finds a .bin and an .idx that do not belong together.

    Args:
        prefix: path of the two files without `.bin` and `.idx`.

    Raises:
        ValueError: a file is missing, damaged, or not the other's partner.
    """

    prefix: str
    dtype: np.dtype
    lengths: np.ndarray  # int64 [documents], tokens of each document
    num_tokens: int

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        bin_path = f"{self.prefix}.bin"
        with _open(bin_path, self.prefix) as file:
            bin_size = os.fstat(file.fileno()).st_size
            self.dtype, self._offsets = _read_index(f"{self.prefix}.idx", self.prefix, bin_path, bin_size)
            self.num_tokens = int(self._offsets[-1])
            self.lengths = np.diff(self._offsets)
            self._tokens = np.empty(0, self.dtype)  # an empty file cannot be mapped
            if self.num_tokens:
                self._tokens = np.memmap(file, self.dtype, mode="r", shape=(self.num_tokens,))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens of one document, a read-only view of the file: [lengths[index]] of dtype."""
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.prefix}: document {index} of {len(self)}")
        index %= len(self)
        needed = int(self._offsets[index + 1]) * self.dtype.itemsize
        mapped: Any = self._tokens.base
        if isinstance(mapped, mmap.mmap) and mapped.size() < needed:  # a read would be a SIGBUS
            raise ValueError(f"{self.prefix}.bin was cut to {mapped.size()} bytes after it was opened")
        return np.asarray(self._tokens[self._offsets[index] : self._offsets[index + 1]])

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))

    def __reduce__(self) -> tuple:
        # A memory map pickles as a copy of the whole corpus; a worker opens the files instead.
        return IndexedDataset, (self.prefix,)

    def origin(self, index: int) -> tuple[str, int, int]:
        """Return the prefix of the files, the number of a document in them, and its first token that counts here."""
        return self.prefix, index, 0

    def check_tokens(
        self, vocab_size: int, part: int = 0, parts: int = 1, *, without: Sequence[int] | np.ndarray = ()
    ) -> None:
        """Read every token, and refuse a corpus made with a larger vocabulary.

        Args:
            vocab_size: number of token ids that the model has.
            part, parts: read only part `part` of `parts` equal ones, so that the ranks of a run share the work.
            without: documents that are not read, ascending.

        Raises:
            ValueError: a token is negative or not below vocab_size.
        """
        smallest = largest = (0, 0)  # (token, position)
        first, end = (self.num_tokens * i // parts for i in (part, part + 1))
        cuts = [first, *(int(self._offsets[k + i]) for k in without for i in (0, 1)), end]
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


class WithoutDocuments:
    """A corpus without some of its documents, as if they had never been in it.

    Args:
        dataset: the corpus.
        dropped: numbers of documents.

    Raises:
        ValueError: a number that no document has.
    """

    def __init__(self, dataset: IndexedDataset, dropped: Sequence[int]) -> None:
        self.dataset, self.prefix, self.dropped = dataset, dataset.prefix, sorted(set(dropped))
        strange = next((number for number in self.dropped if not 0 <= number < len(dataset)), None)
        if strange is not None:
            raise ValueError(f"{self.prefix} has no document {strange}: it has {len(dataset)}, counted from 0")
        self.kept = np.setdiff1d(np.arange(len(dataset)), self.dropped)
        self.lengths = dataset.lengths[self.kept]
        self.num_tokens = int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.dataset[int(self.kept[index])]

    def origin(self, index: int) -> tuple[str, int, int]:
        """As of `IndexedDataset`."""
        return self.dataset.origin(int(self.kept[index]))

    def check_tokens(self, vocab_size: int, part: int = 0, parts: int = 1) -> None:
        """As of `IndexedDataset`. Documents that are left out aren't read."""
        self.dataset.check_tokens(vocab_size, part, parts, without=self.dropped)


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


class _Header(NamedTuple):
    """Dtype of the tokens, and the counts of sequences and document boundaries."""

    dtype: np.dtype
    sequences: int
    boundaries: int


def _read_index(path: str, prefix: str, bin_path: str, bin_size: int) -> tuple[np.dtype, np.ndarray]:
    """Dtype of the tokens, and int64 [documents + 1] the token at which each document begins, then ends."""
    with _open(path, prefix) as file:
        header = _read_header(path, file)
        lengths_at = _HEADER.size
        pointers_at = lengths_at + 4 * header.sequences
        firsts = _read_array(file, "<i8", pointers_at + 8 * header.sequences, header.boundaries)
        if firsts[0] != 0 or firsts[-1] != header.sequences or np.any(firsts[1:] < firsts[:-1]):
            raise ValueError(
                f"{path}: document boundaries must rise from 0 to the number of sequences {header.sequences}, "
                f"but run from {firsts[0]} to {firsts[-1]} and fall {np.sum(firsts[1:] < firsts[:-1])} times"
            )
        itemsize = header.dtype.itemsize
        offsets = np.empty(header.boundaries, np.int64)
        total = 0
        for start in range(0, header.sequences, _CHUNK):
            count = min(_CHUNK, header.sequences - start)
            lengths = _read_array(file, "<i4", lengths_at + 4 * start, count)
            pointers = _read_array(file, "<i8", pointers_at + 8 * start, count)
            if lengths.min() < 0:
                worst = int(lengths.argmin())
                raise ValueError(f"{path}: sequence {start + worst} has length {lengths[worst]}, below 0")
            ends = total + np.cumsum(lengths, dtype=np.int64)
            begins = ends - lengths
            wrong = np.flatnonzero(pointers != begins * itemsize)
            if len(wrong):
                k = int(wrong[0])
                raise ValueError(
                    f"{path}: sequence {start + k} begins at byte {pointers[k]}, but the lengths before it "
                    f"end at byte {begins[k] * itemsize} of {bin_path} ({bin_size} bytes)"
                )
            low, high = np.searchsorted(firsts, [start, start + count])
            offsets[low:high] = begins[firsts[low:high] - start]
            total = int(ends[-1])
            if total * itemsize > bin_size:
                break  # before the sum of absurd lengths can overflow
    if total * itemsize != bin_size:
        fault = "truncated" if total * itemsize > bin_size else "too long"
        raise ValueError(
            f"{bin_path}: {path} describes {total * itemsize} bytes of {header.dtype}, but the file has "
            f"{bin_size}: {fault}, or not the partner of this index"
        )
    offsets[np.searchsorted(firsts, header.sequences) :] = total
    return header.dtype, offsets


def _read_header(path: str, file: BinaryIO) -> _Header:
    """The header, checked against the size of the file before anything is allocated."""
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
    return _Header(dtype, sequences, boundaries)


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
        _sync_folder(os.path.dirname(idx_path) or ".")

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


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
