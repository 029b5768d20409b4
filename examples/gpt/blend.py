"""Mix several corpora, each with its share, in one stream of samples: a pure function of (seed, index).

`--data 0.7 web 0.3 code` takes seven of ten samples from `web`. Samples 0 to 9,999, 10,000 to 19,999 and so on hold the
share of each corpus exactly, each time in a new order. When a corpus ends, its next epoch begins. Without weights a
period is as long as all corpora together, and holds each sample once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.gpt.indexed_dataset import IndexedDataset, WithoutDocuments
from examples.gpt.samples import Piece, Samples, TokenSamples, permute, split_samples
from mpcore.tools.fault_tolerance.versions import file_versions

PERIOD = 10_000  # samples in which given shares are exact; what is below one of them can't be a share


class Blend(Samples):
    """Samples of several corpora.

    Args:
        parts: the samples of each corpus.
        weights: a positive number for each corpus; only their ratios count. None: every sample of each corpus comes
            once before any comes again, so that all corpora end together.
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
        period, slot = divmod(index, self.period)
        slot = permute(slot, self.period, seed=self.seed, epoch=-1 - period)  # corpora have the epochs from 0 on
        part = int(np.searchsorted(self._ends, slot, side="right"))
        count = self.counts[part]
        return part, period * count + slot - int(self._ends[part]) + count

    def sample(self, index: int) -> np.ndarray:
        """int64 [seq_len + 1]."""
        part, own = self.place(index)
        return self.parts[part].sample(own)

    def pieces(self, index: int) -> list[Piece]:
        """As of `Samples`."""
        part, own = self.place(index)
        return self.parts[part].pieces(own)


def counts_of_period(weights: Sequence[float]) -> list[int]:
    """Return how many samples of each corpus a period holds: shares are rounded by the method of largest remainders.

    Raises:
        ValueError: a weight that is not a positive number, or whose share is not one sample of a period.
    """
    if not all(0 < weight < np.inf for weight in weights):
        raise ValueError(f"weights {list(weights)} are not all positive numbers")
    exact = np.asarray(weights, np.float64) / np.sum(weights) * PERIOD
    counts = np.floor(exact).astype(np.int64)
    most = np.argsort(counts - exact, kind="stable")
    counts[most[: PERIOD - int(counts.sum())]] += 1
    if counts.min() < 1:
        raise ValueError(
            f"weight {weights[int(counts.argmin())]} of {sum(weights):g} in all is below 1 in {PERIOD:,}: "
            f"give it more, or leave that corpus out"
        )
    return counts.tolist()


def parse_sources(words: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Read the prefixes and weights of `--data`: prefixes alone, or a weight before each.

    Raises:
        ValueError: only some prefixes have weights, or two prefixes name the same corpus.
    """
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
    """Read the file of `--without-documents`: a line a document, `PREFIX NUMBER`, or `NUMBER` where one corpus is read.

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

    Attributes:
        about: facts of the data that must be the same when a run resumes.
        files: the versions of all files, for `check_same`.

    Raises:
        ValueError: a file that is missing or damaged, or a corpus without a document.
    """

    def __init__(
        self,
        prefixes: Sequence[str],
        weights: Sequence[float] | None,
        without: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.datasets: list[IndexedDataset | WithoutDocuments] = [IndexedDataset(prefix) for prefix in prefixes]
        self.weights, without = weights, without or {}
        self.datasets = [
            WithoutDocuments(data, without[data.prefix]) if isinstance(data, IndexedDataset) and data.prefix in without
            else data for data in self.datasets
        ]  # fmt: skip
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
                both.append(split_samples(data, seq_len, seed=seed, evaluate=evaluate))
            except ValueError as problem:
                raise problem if len(self.datasets) == 1 else ValueError(f"{data.prefix}: {problem}") from None
        if len(both) == 1:
            return both[0]
        train = Blend([train for train, _ in both], self.weights, seed=seed)
        held_out = [part for _, part in both if part is not None]
        if len(held_out) < len(both):
            return train, None
        return train, Blend(held_out, train.counts, seed=0)

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
    """Open the corpora of `--eval-data NAME=PREFIX ...`, by name.

    Args:
        words: the words of the flag.
        trained: prefixes of the corpora that are trained on.

    Raises:
        ValueError: a word of another form, a name given twice, a corpus that is trained on, or one that can't be read.
    """
    found: dict[str, Corpora] = {}
    for word in words:
        name, equals, prefix = word.partition("=")
        if not (name and equals and prefix):
            raise ValueError(f"--eval-data {word}: give NAME=PREFIX, as in --eval-data code=corpora/code")
        if name in found:
            raise ValueError(f"--eval-data names {name} twice: give each set a name of its own")
        if os.path.realpath(f"{prefix}.bin") in {os.path.realpath(f"{other}.bin") for other in trained}:
            raise ValueError(
                f"--eval-data {word} is trained on: --data names it too; a part of --data is held out anyway"
            )
        found[name] = Corpora([prefix], None)
    return found
