"""Training samples as a pure function of (seed, global sample index)."""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from mpcore import Mesh


class Documents(Protocol):
    """What `TokenSamples` needs of a dataset; `IndexedDataset` is one."""

    @property
    def lengths(self) -> np.ndarray: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray: ...

    def origin(self, index: int) -> tuple[str, int, int]: ...


class Piece(NamedTuple):
    """Tokens of a document in a sample.

    Attributes:
        corpus: prefix of its files.
        document: its number in them.
        first: the first of its tokens in the sample, counted from 0.
        count: how many tokens.
    """

    corpus: str
    document: int
    first: int
    count: int


class Samples:
    """Samples by their global index: of one corpus `TokenSamples`, of several `Blend`.

    Attributes:
        seq_len: number of tokens of a sample that the model reads.
    """

    seq_len: int

    def __len__(self) -> int:
        """Samples in an epoch."""
        raise NotImplementedError

    def sample(self, index: int) -> np.ndarray:
        """Read the tokens of a sample, int64 [seq_len + 1], for any index from 0."""
        raise NotImplementedError

    def pieces(self, index: int) -> list[Piece]:
        """Return which text a sample is made of, in order."""
        raise NotImplementedError

    def batch(self, indices: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the inputs and next-token targets of some samples.

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
    """Samples of one corpus: its documents end to end, cut into windows of seq_len + 1 tokens.

    Windows begin seq_len tokens apart: the last token of one is the first of the next, and every token but the first
    is a target once. Tokens at the end that fill no window are left out. Sample `index` is a pure function of
    (seed, index), so a resumed run, or a run on another number of ranks, needs only that integer. Each epoch visits
    every window once, in its own order.

    Args:
        dataset: the documents, each ending with the end-of-document id.
        seq_len: tokens that the model reads, at least 1.
        seed: any integer.
        documents: ids of the documents to use, in this order; None: all.
        shuffle: False: every epoch visits the windows from first to last.

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
        """Read one window of tokens.

        Args:
            index: global sample index, 0 or above; len(self) and beyond are further epochs.

        Returns:
            int64 [seq_len + 1].

        Raises:
            ValueError: a negative index.
        """
        return np.concatenate(
            [self.dataset[k][first : first + count] for k, first, count in self._spans(index)]
        ).astype(np.int64)

    def pieces(self, index: int) -> list[Piece]:
        """As of `Samples`."""
        origins = [(*self.dataset.origin(k), first, count) for k, first, count in self._spans(index)]
        return [Piece(corpus, number, begin + first, count) for corpus, number, begin, first, count in origins]

    def _spans(self, index: int) -> Iterator[tuple[int, int, int]]:
        """The documents of a sample: of each its number, its first token and the number of tokens."""
        index = operator.index(index)
        if index < 0:
            raise ValueError(f"sample index {index} is below 0")
        epoch, window = divmod(index, len(self))
        if self.shuffle:
            window = permute(window, len(self), seed=self.seed, epoch=epoch)
        start, end = window * self.seq_len, (window + 1) * self.seq_len + 1
        # "right" passes over empty documents, which begin where the next one does.
        k = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < end:
            stop = min(end, int(self._starts[k + 1]))
            if start < stop:
                yield int(self._documents[k]), start - int(self._starts[k]), stop - start
            start, k = stop, k + 1


def to_device(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Copy a batch to this rank's device. The host doesn't wait for the copy."""
    return x.pin_memory().to(mesh.device, non_blocking=True) if mesh.device_type == "cuda" else x


def permute(index: int, size: int, *, seed: int, epoch: int) -> int:
    """Compute where a pseudo-random permutation of range(size) sends an index, without storing the permutation.

    An 8-round Feistel network permutes the smallest range 4^b that holds size. A value outside range(size) goes
    through it again until it falls inside (cycle walking): fewer than 4 passes on average.

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
    """Split documents into training and validation by a hash of each id. When a corpus grows, no document changes side.

    Args:
        num_documents: number of documents, at least 1.
        held_out: expected fraction for validation, in [0, 1); 0: none. Otherwise each side gets at least one document
            if there are two; a single one is for training.
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

    def origin(self, index: int) -> tuple[str, int, int]:
        corpus, number, first = self.dataset.origin(index)
        return corpus, number, first + self.start


def split_samples(
    dataset: Documents, seq_len: int, *, seed: int, evaluate: bool = True
) -> tuple[TokenSamples, TokenSamples | None]:
    """Make training and held-out samples, with no token in both; `split_documents` chooses the documents of each.

    The seed draws only the order of the training samples. Runs with other seeds hold out the same documents, and their
    held-out samples have one order. If there is one document, its end is held out: a twentieth of it, and at least one
    sample.

    Args:
        dataset: the documents.
        seq_len, seed: as of `TokenSamples`.
        evaluate: False: a held-out part that is too short for a sample may be None.

    Raises:
        ValueError: a part is too short for a sample; the message names it.
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
            # The first held-out samples are measured: the seed must not choose which these are.
            found.append(TokenSamples(documents, seq_len, seed=0 if found else seed, documents=ids))
        except ValueError as problem:
            if found and not evaluate:
                return found[0], None
            helps = evaluate and (found or len(dataset) == 1)
            way = ", or --eval-every 0, which needs no held-out part" if helps else ""
            raise ValueError(f"the {name} part: {problem}{way}") from None
    return found[0], found[1]
