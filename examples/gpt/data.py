"""Token corpora on disk, and training samples as a pure function of (seed, global sample index).

A corpus is a pair of files in Megatron-LM's format. `PREFIX.bin` holds the tokens of all documents, end to
end. `PREFIX.idx` holds, in little-endian:

    9 bytes   b"MMIDIDX\\x00\\x00"
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

import hashlib
import itertools
import operator
import os
import platform
import secrets
import shutil
import struct
import sysconfig
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch

from examples.gpt.tokenizer import ByteTokenizer, Tokenizer

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_CHUNK = 1 << 20  # entries read at a time, so that checking a huge corpus takes little memory


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The token dtype that Megatron picks for a vocabulary.

    Args:
        vocab_size: number of token ids.

    Returns:
        uint16 below 65,500 ids, else int32.

    Raises:
        ValueError: the ids do not fit int32.
    """
    if not 1 <= vocab_size <= 1 << 31:
        raise ValueError(f"vocab_size {vocab_size} is not in [1, {1 << 31}]")
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedDataset:
    """A corpus in Megatron's format, memory-mapped: `len(d)` documents, `d[i]` the tokens of document i.

    The whole index is checked on opening and only 16 bytes a document stay in memory. Sequences must lie
    end to end and fill the .bin exactly, as every Megatron writer lays them; that is what finds a .bin and
    an .idx which do not belong together.

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
        return np.asarray(self._tokens[self._offsets[index] : self._offsets[index + 1]])

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))

    def __reduce__(self) -> tuple:
        # A memory map pickles as a copy of the whole corpus; a worker opens the files instead.
        return IndexedDataset, (self.prefix,)

    def check_tokens(self, vocab_size: int, part: int = 0, parts: int = 1) -> None:
        """Reads every token and refuses a corpus made with a larger vocabulary.

        Args:
            vocab_size: number of token ids that the model has.
            part, parts: read only this one of so many equal parts, so that the ranks of a run share the work.

        Raises:
            ValueError: a token is negative or not below vocab_size.
        """
        smallest = largest = (0, 0)  # (token, position)
        first, end = (self.num_tokens * i // parts for i in (part, part + 1))
        for start in range(first, end, _CHUNK):
            chunk = self._tokens[start : min(start + _CHUNK, end)]
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
        # Nothing is allocated before the counts agree with the size of the file.
        expected = _HEADER.size + 12 * sequences + 8 * boundaries
        if size not in (expected, expected + sequences):
            raise ValueError(
                f"{path}: {sequences} sequences and {boundaries} document boundaries take {expected} bytes "
                f"(or {expected + sequences} with modes), but the file has {size}"
            )
        if boundaries < 1:
            raise ValueError(f"{path}: 0 document boundaries, but even 0 documents have 1")
        lengths_at = _HEADER.size
        pointers_at = lengths_at + 4 * sequences
        boundaries_at = pointers_at + 8 * sequences

        firsts = _read_array(file, "<i8", boundaries_at, boundaries)
        if firsts[0] != 0 or firsts[-1] != sequences or np.any(firsts[1:] < firsts[:-1]):
            raise ValueError(
                f"{path}: document boundaries must rise from 0 to the number of sequences {sequences}, "
                f"but run from {firsts[0]} to {firsts[-1]} and fall {np.sum(firsts[1:] < firsts[:-1])} times"
            )
        offsets = np.empty(boundaries, np.int64)
        total = 0
        for start in range(0, sequences, _CHUNK):
            count = min(_CHUNK, sequences - start)
            lengths = _read_array(file, "<i4", lengths_at + 4 * start, count)
            pointers = _read_array(file, "<i8", pointers_at + 8 * start, count)
            if lengths.min() < 0:
                worst = int(lengths.argmin())
                raise ValueError(f"{path}: sequence {start + worst} has length {lengths[worst]}, below 0")
            ends = total + np.cumsum(lengths, dtype=np.int64)
            begins = ends - lengths
            wrong = np.flatnonzero(pointers != begins * dtype.itemsize)
            if len(wrong):
                k = int(wrong[0])
                raise ValueError(
                    f"{path}: sequence {start + k} begins at byte {pointers[k]}, but the lengths before it "
                    f"end at byte {begins[k] * dtype.itemsize} of {bin_path} ({bin_size} bytes)"
                )
            low, high = np.searchsorted(firsts, [start, start + count])
            offsets[low:high] = begins[firsts[low:high] - start]
            total = int(ends[-1])
            if total * dtype.itemsize > bin_size:
                break  # before the sum of absurd lengths can overflow
        if total * dtype.itemsize != bin_size:
            fault = "truncated" if total * dtype.itemsize > bin_size else "too long"
            raise ValueError(
                f"{bin_path}: {path} describes {total * dtype.itemsize} bytes of {dtype}, but the file has "
                f"{bin_size}: {fault}, or not the partner of this index"
            )
        offsets[np.searchsorted(firsts, sequences) :] = total
    return dtype, offsets


def _read_array(file: BinaryIO, dtype: str, offset: int, count: int) -> np.ndarray:
    file.seek(offset)
    return np.frombuffer(file.read(count * np.dtype(dtype).itemsize), dtype)


class IndexedDatasetWriter:
    """Writes a corpus in Megatron's format, one sequence a document; use it in a `with` block.

    The files are written under temporary names in the same folder. They take their own names when the block
    ends without an exception, and vanish when it does not.

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

    def __enter__(self) -> "IndexedDatasetWriter":
        self._file = open(f"{self._temporary}.bin", "xb")
        return self

    def add_document(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Appends one document as it is; the caller closes it with the end-of-document id.

        Args:
            tokens: integers [n], n >= 0, in the range of dtype.

        Raises:
            ValueError: not a flat array of integers, or an id that dtype cannot hold.
        """
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


def encode_document(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Token ids of a document, closed by the end-of-document id.

    Args:
        tokenizer: the tokenizer.
        text: the document.

    Returns:
        integers [tokens + 1].

    Raises:
        ValueError: the text holds a lone surrogate (UnicodeEncodeError).
    """
    end = np.array([tokenizer.end_of_document], smallest_dtype(tokenizer.vocab_size))
    ids = np.asarray(tokenizer.encode(text))
    return np.concatenate([ids, end]) if ids.size else end


class Documents(Protocol):
    """What `TokenSamples` asks of a dataset; `IndexedDataset` is one."""

    @property
    def lengths(self) -> np.ndarray: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray: ...


class Samples:
    """Samples by their global index; `TokenSamples` are those of one corpus, `Blend` of several.

    Attributes:
        seq_len: tokens that the model reads of each.
    """

    seq_len: int

    def __len__(self) -> int:
        """Samples in an epoch."""
        raise NotImplementedError

    def sample(self, index: int) -> np.ndarray:
        """int64 [seq_len + 1], of any index from 0 on."""
        raise NotImplementedError

    def batch(self, indices: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and next-token targets of some samples.

        Args:
            indices: B global sample indices.

        Returns:
            (tokens, targets), each int64 [B, seq_len]; targets[:, t] is the token after tokens[:, t].

        Raises:
            ValueError: a negative index.
        """
        windows = [self.sample(index) for index in indices]
        stacked = torch.from_numpy(np.array(windows, np.int64).reshape(len(windows), self.seq_len + 1))
        return stacked[:, :-1].contiguous(), stacked[:, 1:].contiguous()


class TokenSamples(Samples):
    """Training samples: the chosen documents end to end, cut in windows of seq_len + 1 tokens.

    Windows begin seq_len tokens apart, so the last token of one is the first of the next and every token
    but the first is a target once. Tokens at the end that fill no window are left out. Sample `index` is a
    pure function of (seed, index): a resumed run, or one with another number of ranks, needs that one
    integer and nothing else. Each epoch visits every window once, in an order of its own.

    Args:
        dataset: the documents, each ending with the end-of-document id.
        seq_len: tokens that the model reads, at least 1.
        seed: any integer.
        documents: ids of the documents to use, in this order; None takes all.
        shuffle: False visits the windows from first to last in every epoch.

    Raises:
        ValueError: an unknown document, or fewer tokens than one window takes.
    """

    def __init__(
        self,
        dataset: Documents,
        seq_len: int,
        *,
        seed: int,
        documents: Sequence[int] | np.ndarray | None = None,
        shuffle: bool = True,
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len {seq_len} is below 1")
        chosen = np.arange(len(dataset)) if documents is None else np.asarray(documents, dtype=np.int64)
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < len(dataset):
            raise ValueError(f"documents {chosen.min()} to {chosen.max()} are asked for, but there are {len(dataset)}")
        self.dataset, self.seq_len, self.seed, self.shuffle = dataset, seq_len, seed, shuffle
        self._documents = chosen
        self._starts = np.zeros(len(chosen) + 1, np.int64)  # token at which each document begins, then the total
        np.cumsum(dataset.lengths[chosen], out=self._starts[1:])
        self.num_tokens = int(self._starts[-1])
        if self.num_tokens < seq_len + 1:
            hold = "document holds" if len(chosen) == 1 else "documents hold"
            raise ValueError(
                f"{len(chosen)} {hold} {self.num_tokens} tokens, but one sample of seq_len {seq_len} "
                f"takes {seq_len + 1}; use a smaller seq_len or more text"
            )

    def __len__(self) -> int:
        """Windows in an epoch."""
        return (self.num_tokens - 1) // self.seq_len

    def sample(self, index: int) -> np.ndarray:
        """One window of tokens.

        Args:
            index: global sample index, 0 or above; len(self) and beyond are further epochs.

        Returns:
            int64 [seq_len + 1].

        Raises:
            ValueError: a negative index.
        """
        index = operator.index(index)
        if index < 0:
            raise ValueError(f"sample index {index} is below 0")
        epoch, window = divmod(index, len(self))
        if self.shuffle:
            window = permute(window, len(self), seed=self.seed, epoch=epoch)
        return self._read(window * self.seq_len, self.seq_len + 1)

    def _read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of the concatenated documents, int64."""
        tokens = np.empty(count, np.int64)
        filled = 0
        # "right" passes over empty documents, which begin where the next one does.
        k = int(np.searchsorted(self._starts, start, side="right")) - 1
        while filled < count:
            skip = start + filled - int(self._starts[k])
            piece = self.dataset[int(self._documents[k])][skip : skip + count - filled]
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
            k += 1
        return tokens


def permute(index: int, size: int, *, seed: int, epoch: int) -> int:
    """Where a permutation of range(size) sends an index; the permutation is never stored.

    An 8-round Feistel network permutes the smallest range 4^b that holds size; its values outside range(size)
    are sent through it again until one falls inside (cycle walking), fewer than 4 passes on average.

    Args:
        index: in [0, size).
        size: length of the range, at least 1.
        seed: any integer.
        epoch: any integer; each (seed, epoch) is another permutation.

    Returns:
        An integer in [0, size), another one for each index.

    Raises:
        ValueError: index is not in [0, size).

    Source:
        Black and Rogaway 2002, "Ciphers with arbitrary finite domains", methods 2 and 3.
    """
    if not 0 <= index < size:
        raise ValueError(f"index {index} is not in [0, {size})")
    half = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    keys = struct.unpack("<8Q", hashlib.blake2b(f"{seed}/{epoch}".encode(), person=b"mpcore.permute").digest())
    while True:
        left, right = index >> half, index & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        index = left << half | right
        if index < size:
            return index


def _mix(x: Any) -> Any:
    """A hash of 64 bits to 64 bits, of one or of an array: the finaliser of splitmix64 (Steele, Lea and Flood 2014,
    variant 13)."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ x >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return x ^ x >> 31


def split_documents(num_documents: int, held_out: float = 0.05, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Splits documents in training and validation by a hash of each id, so that growth moves none across.

    Args:
        num_documents: number of documents, at least 1.
        held_out: expected fraction for validation, in [0, 1); 0 holds none out. Otherwise each side gets at
            least one document where there are two; a single one is for training.
        seed: any integer.

    Returns:
        (train ids, validation ids), int64, each ascending.

    Raises:
        ValueError: num_documents or held_out is out of range.
    """
    if num_documents < 1:
        raise ValueError(f"num_documents {num_documents} is below 1")
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out {held_out} is not in [0, 1)")
    key = hashlib.blake2b(str(seed).encode(), digest_size=8, person=b"mpcore.split").digest()
    x = np.arange(1, num_documents + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = _mix(x ^ np.frombuffer(key, "<u8")[0])
    validation = x >> np.uint64(11) < held_out * 2.0**53
    if held_out > 0 and not validation.any():
        validation[x.argmin()] = True
    if validation.all():
        validation[x.argmax()] = False
    return np.flatnonzero(~validation), np.flatnonzero(validation)


class _Excerpt:
    """The tokens [start, end) of a dataset's first document, as a dataset of one."""

    def __init__(self, dataset: Documents, start: int, end: int) -> None:
        self.dataset, self.start, self.end = dataset, start, end
        self.lengths = np.array([end - start])

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.dataset[index][self.start : self.end]


def split_samples(
    dataset: Documents, seq_len: int, *, seed: int, evaluate: bool = True
) -> tuple[TokenSamples, TokenSamples | None]:
    """Training and held-out samples, with no token in both: of documents as `split_documents` deals them out.

    The seed draws the order alone: what is held out stays so in a run of another seed that begins with these weights.
    Of a single document the end is held out: a twentieth of it, and one sample at least.

    Args:
        dataset: the documents.
        seq_len, seed: as of `TokenSamples`.
        evaluate: False: a held-out part that is too short for a sample may be None.

    Raises:
        ValueError: a part that is too short for a sample, by its name.
    """
    parts: list[tuple[Documents, np.ndarray | None]]
    parts = [(dataset, ids) for ids in split_documents(len(dataset))]
    if len(dataset) == 1:
        tokens = int(dataset.lengths[0])
        end = max(tokens - max(tokens // 20, seq_len + 1), 0)
        end = tokens if end <= seq_len and not evaluate else end
        parts = [(_Excerpt(dataset, 0, end), None), (_Excerpt(dataset, end, tokens), None)]
    found: list[TokenSamples] = []
    for name, (documents, ids) in zip(("training", "held-out"), parts, strict=True):
        try:
            found.append(TokenSamples(documents, seq_len, seed=seed, documents=ids))
        except ValueError as problem:
            if found and not evaluate:
                return found[0], None
            helps = evaluate and (found or len(dataset) == 1)
            way = ", or --eval-every 0, which needs no held-out part" if helps else ""
            raise ValueError(f"the {name} part: {problem}{way}") from None
    return found[0], found[1]


def default_corpus(cache_dir: str | os.PathLike[str] | None = None, tokenizer: Tokenizer | None = None) -> str:
    """A corpus that every machine has: the source of Python's standard library, one document a file.

    It is built on first use and cached. Many processes may call this at once: each builds in a folder of its
    own and the first to rename it wins.

    Args:
        cache_dir: where to keep it; None takes $XDG_CACHE_HOME/mpcore or ~/.cache/mpcore, or a folder for
            temporary files where that cannot be written.
        tokenizer: None takes the bytes.

    Returns:
        The prefix, for `IndexedDataset`.

    Raises:
        ValueError: this Python has no source files, or no folder can be written.
    """
    tokenizer = tokenizer or ByteTokenizer()
    root = sysconfig.get_paths()["stdlib"]
    files = list(_stdlib_files(root))
    if not files:
        raise ValueError(f"{root}: 0 source files of the standard library found; prepare another corpus")
    listing = "\n".join(f"{path} {os.path.getsize(os.path.join(root, path))}" for path in files)
    digest = hashlib.blake2b(f"{tokenizer.fingerprint}\n{listing}".encode(), digest_size=8).hexdigest()
    name = f"stdlib-{platform.python_version()}-{digest}"

    faults = []
    for folder in [os.fspath(cache_dir)] if cache_dir is not None else _cache_folders():
        try:
            os.makedirs(folder, exist_ok=True)
            # A damaged copy stays in place, for a process may be reading it; the next free name is taken.
            for attempt in itertools.count():
                home = os.path.join(folder, f"{name}-{attempt}" if attempt else name)
                prefix = os.path.join(home, "corpus")
                if not os.path.exists(home):
                    _build_corpus(home, root, files, tokenizer)
                    return prefix
                if _is_corpus(prefix, tokenizer):
                    return prefix
        except OSError as error:
            faults.append(f"{folder}: {error.strerror}")
    raise ValueError(f"the corpus cannot be kept ({'; '.join(faults)}); pass a cache_dir that can be written")


def _stdlib_files(root: str) -> Iterator[str]:
    """Relative paths of the standard library's modules, sorted, without tests and installed packages."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped]
        relative = os.path.relpath(folder, root)
        found += [os.path.normpath(os.path.join(relative, name)) for name in names if name.endswith(".py")]
    return (path for path in sorted(found) if os.path.isfile(os.path.join(root, path)))


def _cache_folders() -> list[str]:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    user = os.getuid() if hasattr(os, "getuid") else 0
    return [os.path.join(base, "mpcore"), os.path.join(tempfile.gettempdir(), f"mpcore-{user}")]


def _build_corpus(home: str, root: str, files: list[str], tokenizer: Tokenizer) -> None:
    """Builds the corpus in a folder of its own and renames it to home, unless another process came first."""
    building = f"{home}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    os.mkdir(building)
    try:
        writer = IndexedDatasetWriter(os.path.join(building, "corpus"), smallest_dtype(tokenizer.vocab_size))
        with writer:
            for path in files:
                with open(os.path.join(root, path), "rb") as file:
                    content = file.read()
                try:
                    text = content.decode("utf-8")
                except UnicodeDecodeError:
                    continue
                if text:
                    writer.add_document(encode_document(tokenizer, text))
        IndexedDataset(writer.prefix).check_tokens(tokenizer.vocab_size)
        try:
            os.rename(building, home)
        except OSError:
            if not os.path.exists(home):
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _is_corpus(prefix: str, tokenizer: Tokenizer) -> bool:
    try:
        IndexedDataset(prefix).check_tokens(tokenizer.vocab_size)
    except ValueError:
        return False
    return True
