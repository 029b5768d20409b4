"""Samples, corpora, blends, and checkpoints."""

from __future__ import annotations

import numpy as np

from examples.gpt.indexed_dataset import smallest_dtype
from examples.gpt.samples import Blend, TokenSamples, parse_sources
from tests.peers import rows


class Corpus:
    """Documents in memory: a token is its place in the corpus."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = np.array(lengths)
        self.starts = np.cumsum(self.lengths) - self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.starts[index] + np.arange(self.lengths[index])

    def origin(self, index: int) -> tuple[str, int]:
        return "corpus", index


def parts(*counts: int) -> list[TokenSamples]:
    """Corpora that hold so many samples of 10 tokens."""
    return [TokenSamples(Corpus(10 * count + 1), 10, seed=i) for i, count in enumerate(counts)]


def test_after_the_last_sample_every_sample_comes_again():
    samples = TokenSamples(Corpus(31), 10, seed=0)
    assert len(samples) == 3
    epochs = [[int(samples.sample(3 * epoch + i)[0]) for i in range(3)] for epoch in range(10)]
    assert all(sorted(epoch) == [0, 10, 20] for epoch in epochs)


SIZES = [10 * (i + 1) for i in range(10)]


@rows({"as long as all corpora": 0, "each sample once": 1})
def test_a_blend_without_weights_holds_every_sample_once(what):
    blend = Blend(parts(*SIZES), None, seed=1234)
    assert len(blend) == sum(SIZES)
    if what:
        places = [blend.place(i) for i in range(len(blend))]
        assert len({*places}) == len(blend)
        assert [sum(part == i for part, _ in places) for i in range(10)] == SIZES


def test_a_blends_shares_are_its_weights():
    blend = Blend(parts(*SIZES), range(1, 11), seed=1234)
    found = np.bincount([blend.place(i)[0] for i in range(10_000)], minlength=10)
    assert np.abs(found - 10_000 * np.arange(1, 11) / 55).max() < 1


@rows(
    {
        "a weight before each prefix": (["1", "a", "2", "b"], (["a", "b"], [1.0, 2.0])),
        "one prefix without a weight": (["a"], (["a"], None)),
        "prefixes without weights": (["a", "b"], (["a", "b"], None)),
    }
)
def test_sources_are_read_as_megatrons(words, read):
    assert parse_sources(words) == read


@rows({"20,000 tokens": (20000, np.uint16), "131,072 tokens": (131072, np.int32)})
def test_a_corpus_has_megatrons_dtype(vocab, dtype):
    assert smallest_dtype(vocab) == dtype


def test_batches_go_on_into_the_next_epoch():
    """A convention: DeepSpeed's loader drops the last incomplete batch, or makes it smaller."""
    assert TokenSamples(Corpus(51), 10, seed=0).batch(range(4, 8))[0].shape == (4, 10)
