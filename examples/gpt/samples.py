"""Training samples as a pure function of (seed, global sample index): of one corpus, or of several in given shares."""

from __future__ import annotations

import functools
import hashlib
import operator
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from examples.gpt.indexed_dataset import IndexedDataset
from mpcore import Mesh
from mpcore.tools.fault_tolerance.versions import file_versions


class Documents(Protocol):
    """What `TokenSamples` needs of a dataset; `IndexedDataset` is one."""

    @property
    def lengths(self) -> np.ndarray: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> np.ndarray: ...
    def origin(self, index: int) -> tuple[str, int]: ...


class Piece(NamedTuple):
    """Tokens of a document in a sample.

    Attributes:
        corpus, document: the prefix of its files, and its number in them.
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
        """Read tokens and next-token targets of B samples, each int64 [B, seq_len]. ValueError for a negative index."""
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
        tokens: the first of the documents' tokens to use, and the one behind the last; None: all.

    Raises:
        ValueError: an unknown document, or fewer tokens than one window takes.
    """

    def __init__(
        self, dataset: Documents, seq_len: int, *, seed: int, documents: Sequence[int] | np.ndarray | None = None,
        tokens: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        if seq_len < 1:
            raise ValueError(f"seq_len {seq_len} is below 1")
        chosen = np.arange(len(dataset)) if documents is None else np.asarray(documents, dtype=np.int64)
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < len(dataset):
            raise ValueError(f"documents {chosen.min()} to {chosen.max()} are asked for, but there are {len(dataset)}")
        self.dataset, self.seq_len, self.seed = dataset, seq_len, seed
        self._documents = chosen
        self._starts = np.zeros(len(chosen) + 1, np.int64)  # token at which each document begins, then the total
        np.cumsum(dataset.lengths[chosen], out=self._starts[1:])
        self._first, end = tokens or (0, int(self._starts[-1]))
        self.num_tokens = end - self._first
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
        """Read a window of tokens, int64 [seq_len + 1]; from index len(self) on come further epochs."""
        found = [self.dataset[k][first : first + count] for k, first, count in self._spans(index)]
        return np.concatenate(found).astype(np.int64)

    def pieces(self, index: int) -> list[Piece]:
        """As of `Samples`."""
        return [Piece(*self.dataset.origin(k), first, count) for k, first, count in self._spans(index)]

    def _spans(self, index: int) -> Iterator[tuple[int, int, int]]:
        """The documents of a sample: of each its number, its first token and the number of tokens."""
        index = operator.index(index)
        if index < 0:
            raise ValueError(f"sample index {index} is below 0")
        epoch, window = divmod(index, len(self))
        window = permute(window, len(self), seed=self.seed, epoch=epoch)
        start = self._first + window * self.seq_len
        end = start + self.seq_len + 1
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

    Each (seed, epoch), of any integers, is another permutation. ValueError for an index outside [0, size).

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", methods 2 and 3.
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
        num_documents: at least 1.
        held_out: expected fraction for validation, in [0, 1); 0: none. Otherwise each side gets at least one document
            if there are two; a single one is for training.
        seed: any integer.

    Returns:
        The numbers for training and for validation, int64, each ascending.
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


def split_samples(
    dataset: Documents, seq_len: int, *, seed: int, evaluate: bool = True, held_out: float = 0.05
) -> tuple[TokenSamples, TokenSamples | None]:
    """Make training and held-out samples, with no token in both; `split_documents` chooses the documents of each.

    The seed draws only the order of the training samples. Runs with other seeds hold out the same documents, and their
    held-out samples have one order. If there is one document, its end is held out: this share of it, and at least one
    sample.

    Args:
        evaluate: False: a held-out part that is too short for a sample may be None.
        held_out: share of the documents; 0: none.

    Raises:
        ValueError: a part is too short for a sample; the message names it.
    """
    parts: list[dict[str, Any]] = [{"documents": ids} for ids in split_documents(len(dataset), held_out)]
    if len(dataset) == 1:
        tokens = int(dataset.lengths[0])
        end = max(tokens - max(int(tokens * held_out), seq_len + 1), 0) if held_out else tokens
        end = tokens if end <= seq_len and not evaluate else end
        parts = [{"tokens": (0, end)}, {"tokens": (end, tokens)}]
    found: list[TokenSamples] = []
    for name, part in zip(("training", "held-out"), parts, strict=True):
        try:
            # The first held-out samples are measured: the seed must not choose which these are.
            found.append(TokenSamples(dataset, seq_len, seed=0 if found else seed, **part))
        except ValueError as problem:
            if found and not evaluate:
                return found[0], None
            helps = evaluate and (found or len(dataset) == 1)
            way = ", or --eval-every 0, which needs no held-out part" if helps else ""
            raise ValueError(f"the {name} part: {problem}{way}") from None
    return found[0], found[1]


PERIOD = 10_000  # samples in which given shares are exact; what is below one of them can't be a share


class Blend(Samples):
    """Samples of several corpora.

    Args:
        parts: the samples of each corpus.
        weights: a positive number for each corpus; only their ratios count. None: every sample of each corpus comes
            once before any comes again, so that all corpora end together. With weights, a corpus with fewer samples
            than its share of a period is read one epoch after another.
        seed: any integer.

    Raises:
        ValueError: no part, parts of unequal `seq_len`, or weights that don't fit.
    """

    def __init__(self, parts: Sequence[TokenSamples], weights: Sequence[float] | None, *, seed: int) -> None:
        lengths = sorted({part.seq_len for part in parts})
        if len(lengths) != 1:
            raise ValueError(f"{len(parts)} parts have samples of {lengths} tokens: all must have the same")
        if weights is not None and len(weights) != len(parts):
            raise ValueError(f"{len(weights)} weights for {len(parts)} corpora")
        self.parts, self.seed, self.seq_len = list(parts), seed, lengths[0]
        self.counts = [len(part) for part in parts] if weights is None else counts_of_period(weights)
        self.period = sum(self.counts)
        self._ends = np.cumsum(self.counts)

    def __len__(self) -> int:
        """Samples of all parts."""
        return sum(map(len, self.parts))

    def place(self, index: int) -> tuple[int, int]:
        """Return the corpus of sample `index`, and the index of the sample in that corpus."""
        if index < 0:
            raise ValueError(f"sample index {index} is below 0")
        period, at = divmod(index, self.period)
        slot = permute(at, self.period, seed=self.seed, epoch=-1 - period)  # corpora have the epochs from 0 on
        part = int(np.searchsorted(self._ends, slot, side="right"))
        count = self.counts[part]
        own = slot - int(self._ends[part]) + count
        if count > len(self.parts[part]):  # in the order of the slots some would come again before others have come
            own = int((_parts_of(tuple(self._ends), self.seed, period)[:at] == part).sum())
        return part, period * count + own

    def sample(self, index: int) -> np.ndarray:
        """int64 [seq_len + 1]."""
        part, own = self.place(index)
        return self.parts[part].sample(own)

    def pieces(self, index: int) -> list[Piece]:
        """As of `Samples`."""
        part, own = self.place(index)
        return self.parts[part].pieces(own)


@functools.lru_cache(maxsize=4)
def _parts_of(ends: tuple[int, ...], seed: int, period: int) -> np.ndarray:
    """Return the corpus of each sample of a period."""
    slots = [permute(at, int(ends[-1]), seed=seed, epoch=-1 - period) for at in range(ends[-1])]
    return np.searchsorted(ends, slots, side="right")


def counts_of_period(weights: Sequence[float]) -> list[int]:
    """Return how many samples of each corpus a period holds: shares are rounded by the method of largest remainders.

    Raises:
        ValueError: a weight that is not a positive number, or whose share is not one sample of a period.
    """
    if not all(0 < weight < np.inf for weight in weights):
        raise ValueError(f"weights {list(weights)} are not all positive numbers")
    exact = np.asarray(weights, np.float64) / np.sum(weights) * PERIOD
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: PERIOD - int(counts.sum())]] += 1
    if counts.min() < 1:
        raise ValueError(
            f"weight {weights[int(counts.argmin())]} of {sum(weights):g} in all is below 1 in {PERIOD:,}: "
            f"give it more, or leave that corpus out"
        )
    return counts.tolist()


def parse_sources(words: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Read the prefixes and weights of `--data`: prefixes alone, or a weight before each. Each corpus comes once."""
    numbers = [_number(word) for word in words]
    weights: list[float] | None = [x for x in numbers[::2] if x is not None]
    prefixes = list(words[1::2])
    if not weights or len(words) == 1:
        prefixes, weights = list(words), None
    elif len(words) % 2 or len(weights) < len(prefixes) or any(x is not None for x in numbers[1::2]):
        raise ValueError(
            f"--data {' '.join(words)}: give prefixes alone, or a weight before each, as in --data 0.7 web 0.3 code; "
            f"a prefix that is a number wants a folder before it, as in ./7"
        )
    found: dict[str, int] = {}
    for i, prefix in enumerate(prefixes):
        first = found.setdefault(os.path.realpath(f"{prefix}.bin"), i)
        if first < i:
            raise ValueError(f"--data names {prefixes[first]} and {prefix}, one corpus: give it once, with a weight")
    return prefixes, weights


def read_without(path: str | None, prefixes: Sequence[str]) -> dict[str, list[int]]:
    """Read the file of without_documents: a line a document, `PREFIX NUMBER`, or `NUMBER` where one corpus is read.

    What follows `#` is left out.

    Returns:
        The numbers by prefix.

    Raises:
        ValueError: a line of another form, or a corpus that isn't read; it names the line.
        OSError: if the file can't be read.
    """
    found: dict[str, list[int]] = {}
    for at, line in enumerate(Path(path).read_text().splitlines() if path else (), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) == 1 and len(prefixes) == 1:
            words.insert(0, prefixes[0])
        if len(words) != 2 or words[0] not in prefixes or not words[1].isdecimal():
            known = ", ".join(prefixes)
            raise ValueError(
                f"{path}, line {at}: {line.strip()!r} is not PREFIX NUMBER, with a PREFIX of --data: {known}"
            )
        found.setdefault(words[0], []).append(int(words[1]))
    return found


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


class Corpora:
    """The open corpora of a run.

    Args:
        prefixes, weights: as `parse_sources` returns them.
        without: by prefix, numbers of documents that are left out.
        held_out: as of `split_samples`.

    Attributes:
        about: facts of the data that must be the same when a run resumes.
        files: the versions of all files, for `check_same`.

    Raises:
        ValueError: a file that is missing or damaged, or a corpus without a document.
    """

    def __init__(
        self, prefixes: Sequence[str], weights: Sequence[float] | None,
        without: Mapping[str, Sequence[int]] | None = None, held_out: float = 0.05,
    ) -> None:  # fmt: skip
        self.weights, self.held_out, without = weights, held_out, without or {}
        self.datasets = [IndexedDataset(prefix, without.get(prefix, ())) for prefix in prefixes]
        for data in self.datasets:
            if not len(data):
                raise ValueError(f"{data.prefix}.idx has no document: there is nothing to train on")
        self.about: dict[str, Any] = {
            "documents": sum(map(len, self.datasets)),
            "tokens": sum(data.num_tokens for data in self.datasets),
        }
        if len(self.datasets) > 1:
            shares = ["once"] * len(self.datasets) if weights is None else counts_of_period(weights)
            self.about["blend"] = [[data.num_tokens, n] for data, n in zip(self.datasets, shares, strict=True)]
        if held_out != 0.05:
            self.about["held_out"] = held_out
        if without:
            self.about["without"] = {prefix: sorted(set(numbers)) for prefix, numbers in without.items()}
        self.files = file_versions(*(f"{prefix}{end}" for prefix in prefixes for end in (".idx", ".bin")))

    def check_tokens(self, vocab_size: int, part: int, parts: int) -> None:
        """As of `IndexedDataset`, of each."""
        for data in self.datasets:
            data.check_tokens(vocab_size, part, parts)

    def split(self, seq_len: int, *, seed: int, evaluate: bool) -> tuple[Samples, Samples | None]:
        """Training and held-out samples, as of `split_samples`, in the same shares; None if a corpus has none."""
        both = []
        for data in self.datasets:
            try:
                both.append(split_samples(data, seq_len, seed=seed, evaluate=evaluate, held_out=self.held_out))
            except ValueError as problem:
                raise problem if len(self.datasets) == 1 else ValueError(f"{data.prefix}: {problem}") from None
        if len(both) == 1:
            return both[0]
        train = Blend([train for train, _ in both], self.weights, seed=seed)
        held_out = [part for _, part in both if part is not None]
        if len(held_out) < len(both):
            return train, None
        return train, Blend(held_out, None if self.weights is None else train.counts, seed=0)

    def whole(self, seq_len: int) -> Samples:
        """All samples of the only corpus, in an order that no run changes.

        Raises:
            ValueError: too few tokens for a sample.
        """
        (data,) = self.datasets
        try:
            return TokenSamples(data, seq_len, seed=0)
        except ValueError as problem:
            raise ValueError(f"{data.prefix}: {problem}") from None


def open_eval_sets(words: Sequence[str], trained: Sequence[str]) -> dict[str, Corpora]:
    """Open the corpora of eval_data, NAME=PREFIX each, by name. `trained`: prefixes of what is trained on.

    Raises:
        ValueError: a word of another form, a name given twice, a corpus that is trained on, or one that can't be read.
    """
    found: dict[str, Corpora] = {}
    for word in words:
        name, equals, prefix = word.partition("=")
        if not (name and equals and prefix):
            raise ValueError(f"eval_data {word}: give NAME=PREFIX, as in --set eval_data=code=corpora/code")
        if name in found:
            raise ValueError(f"eval_data names {name} twice: give each set a name of its own")
        if os.path.realpath(f"{prefix}.bin") in {os.path.realpath(f"{other}.bin") for other in trained}:
            raise ValueError(f"eval_data {word} is trained on: --data names it too, and a part of it is held out")
        found[name] = Corpora([prefix], None)
    return found
