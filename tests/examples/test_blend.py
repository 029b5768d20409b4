"""Samples of several corpora in given shares, and the corpora of a run."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from examples.gpt.indexed_dataset import IndexedDataset
from examples.gpt.samples import PERIOD, Blend, Corpora, TokenSamples, counts_of_period, parse_sources, read_without
from tests.examples.corpora import write
from tests.examples.test_pretrain import trainer


@pytest.fixture
def parts(tmp_path) -> list[TokenSamples]:
    """Of 3 windows, 10 and 40; a token names its corpus by its hundreds."""
    documents = [[100 + i % 100 for i in range(7)], list(range(200, 221)), list(range(300, 381))]
    prefixes = [write(tmp_path / str(i), [tokens]) for i, tokens in enumerate(documents)]
    return [TokenSamples(IndexedDataset(prefix), 2, seed=5) for prefix in prefixes]


def test_a_blend_is_a_function_of_seed_and_index(parts):
    blend, again = (Blend(parts, [2, 1, 1], seed=1) for _ in range(2))
    other = Blend(parts, [2, 1, 1], seed=2)
    indices = [0, 7, PERIOD - 1, PERIOD, 12 * PERIOD + 3, 10**9]
    for index in reversed(indices):
        part, own = blend.place(index)
        np.testing.assert_array_equal(again.sample(index), parts[part].sample(own))
        assert set(again.sample(index) // 100) == {part + 1}
    orders = [[b.place(p * PERIOD + i)[0] for i in range(200)] for b in (blend, other) for p in range(2)]
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    tokens, targets = blend.batch(indices)
    assert tokens[3].tolist() == blend.sample(PERIOD)[:-1].tolist()
    assert targets[3].tolist() == blend.sample(PERIOD)[1:].tolist()
    for begin in (0, PERIOD - 60):  # each corpus in turn, sample by sample: one of 3 windows is not read twice before
        places = [blend.place(i) for i in range(begin, begin + 120)]
        owns = [[own for part, own in places if part == k] for k in range(3)]
        assert all(own == [*range(own[0], own[0] + len(own))] and own[0] * 2 >= begin / 4 for own in owns)
    runs = [len(list(same)) for _, same in itertools.groupby(blend.place(i)[0] for i in range(4000))]
    assert max(runs) < 30  # well mixed: half of the samples are the first's
    with pytest.raises(ValueError, match="-1"):
        blend.sample(-1)


def test_without_weights_each_sample_comes_once_a_period_and_a_part_goes_on_in_the_next(parts):
    blend = Blend(parts, None, seed=1)
    for p in range(3):
        places = [blend.place(p * blend.period + i) for i in range(blend.period)]
        assert sorted(places) == [(k, p * len(part) + i) for k, part in enumerate(parts) for i in range(len(part))]


@pytest.mark.parametrize(("words", "found"), [
    (["web"], (["web"], None)), (["web", "code"], (["web", "code"], None)), (["7"], (["7"], None)),
    (["0.7", "web", "3", "code"], (["web", "code"], [0.7, 3.0])), (["1", "web"], (["web"], [1.0])),
    (["0.7", "web", "code"], "give prefixes alone, or a weight before each"),
    (["0.7", "web", "x", "code"], "give prefixes alone, or a weight before each"),
    (["0.7", "web", "0.3"], "give prefixes alone, or a weight before each"),
    (["0.7", "0.3", "web", "code"], "give prefixes alone, or a weight before each"),
    (["web", "code", "web"], "names web and web, one corpus"),
    (["0.7", "web", "0.2", "code", "0.1", "./web"], "names web and ./web, one corpus"),
], ids=str)  # fmt: skip
def test_sources_are_prefixes_with_weights_or_without(words, found):
    if isinstance(found, tuple):
        assert parse_sources(words) == found
    else:
        with pytest.raises(ValueError, match=found):
            parse_sources(words)


def test_a_corpus_under_another_name_is_refused(tmp_path):
    """Each would bring the same samples in the same order (Megatron-Energon #266)."""
    web = write(tmp_path / "web", [[1]])
    other = tmp_path / "other"
    for end in (".bin", ".idx"):
        other.with_suffix(end).symlink_to(web + end)
    with pytest.raises(ValueError, match=f"names {web} and {other}, one corpus"):
        parse_sources([web, str(other)])


def test_weights_that_are_none_are_refused(parts):
    for weights in ([1, 0, 1], [1, -1, 1], [1, float("nan"), 1], [1, float("inf"), 1]):
        with pytest.raises(ValueError, match="not all positive"):
            Blend(parts, weights, seed=0)
    with pytest.raises(ValueError, match="2 weights for 3 corpora"):
        Blend(parts, [1, 1], seed=0)
    with pytest.raises(ValueError, match=r"2 parts have samples of \[2, 3\] tokens"):
        Blend([parts[0], TokenSamples(parts[1].dataset, 3, seed=0)], None, seed=0)


def test_what_is_held_out_of_each_corpus_is_blended_alike(tmp_path):
    prefixes = [write(tmp_path / str(i), [[100 * i + j % 90 for j in range(40)]] * 60) for i in (1, 2)]
    data = Corpora(prefixes, [3, 1])
    train, held_out = data.split(8, seed=0, evaluate=True)
    assert held_out is not None
    assert Counter(int(held_out.sample(i)[0]) // 100 for i in range(PERIOD)) == {1: 7500, 2: 2500}
    assert held_out.counts == train.counts
    _, other = data.split(8, seed=7, evaluate=True)
    assert other is not None
    assert all((other.sample(i) == held_out.sample(i)).all() for i in range(50)), "a seed chooses what is measured"
    assert len(train) + len(held_out) <= sum(d.num_tokens for d in data.datasets) // 8
    third, rest = Corpora(prefixes, None, held_out=0.3).split(8, seed=0, evaluate=True)
    assert rest is not None
    assert len(rest) / (len(third) + len(rest)) == pytest.approx(0.3, abs=0.1)
    assert Corpora(prefixes[:1], None, held_out=0.3).about == {"documents": 60, "tokens": 2400, "held_out": 0.3}
    assert Corpora(prefixes, None, held_out=0).split(8, seed=0, evaluate=False)[1] is None


def lines(*flags: str, out: str, **sizes: int) -> list[float]:
    t = trainer("--eval-every", "2", "--set", "eval_samples=8", *flags, "--out", out, **sizes)
    return [t.step()["loss"] for i in range(2)] + [t.evaluate()]


def check_layout(flags: list[str], expected: list[float], out: str) -> None:
    assert lines(*flags, out=out, dp=2, tp=2) == pytest.approx(expected, rel=1e-5)


def test_every_layout_trains_on_the_same_blend_and_goes_on_with_no_other(ranks, tmp_path):
    web, code = (write(tmp_path / name, [[(7 * i + j) % 60 for j in range(50)] for i in range(40)]) for name in "ab")
    flags = ["--data", "0.7", web, "0.3", code, "--set", "min_lr=0.001", "--set", "betas=0.8,0.9"]
    alone = lines(*flags, out=str(tmp_path / "alone"))
    assert alone != lines("--data", web, code, out=str(tmp_path / "other"))
    ranks(4, check_layout, flags, alone, str(tmp_path / "mesh"))
    out = str(tmp_path / "run")
    trainer(*flags, "--eval-every", "0", "--steps", "1", "--save-every", "1", "--out", out).train()
    again = ["--steps", "2", "--eval-every", "0", "--resume", "auto", "--out", out]
    resumed = trainer(*flags, *again)
    assert resumed.run.optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    resumed.train()
    with pytest.raises(ValueError, match=r"is of another run: .*blend"):
        trainer("--data", "0.6", web, "0.4", code, *again)


@pytest.mark.parametrize(("weights", "counts"), [
    ([1], [10_000]), ([1, 1], [5000, 5000]),
    ([1, 1, 1], [3334, 3333, 3333]),  # the first of equal remainders
    ([2, 2, 2], [3334, 3333, 3333]),
    ([1, 2, 4], [1429, 2857, 5714]),  # 1428.57, 2857.14, 5714.29
    ([1, 9999], [1, 9999]), ([1] * 7, [1429] * 4 + [1428] * 3),
    ([1, 2, 4] * 9, [159, 318, 635] + [159, 317, 635] * 8),  # 158.73, 317.46, 634.92: one is left
    ([0.7, 0.3], [7000, 3000]),
])  # fmt: skip
def test_shares_are_rounded_by_the_largest_remainders(weights, counts):
    assert counts_of_period(weights) == counts


def test_a_share_below_one_sample_of_a_period_is_refused():
    assert counts_of_period([1.1, 9998.9])[0] == 1
    with pytest.raises(ValueError, match=r"^weight 0.4 of 10000 in all is below 1 in 10,000: give it more, or leave"):
        counts_of_period([0.4, 9999.6])


def test_documents_are_left_out_by_prefix_and_number(tmp_path):
    file = tmp_path / "drop"
    file.write_text("web 3 # bad\n\n# none\ncode 4\n  web 5\n")
    assert read_without(str(file), ["web", "code"]) == {"web": [3, 5], "code": [4]}
    assert read_without(None, ["web"]) == {}
    file.write_text("7\nweb 8\n")
    assert read_without(str(file), ["web"]) == {"web": [7, 8]}
    for content, line in (("7", 1), ("web 1\nother 2", 2), ("web x", 1), ("web 1 2", 1), ("web -1", 1)):
        file.write_text(content)
        message = f", line {line}: .* is not PREFIX NUMBER, with a PREFIX of --data: web, code$"
        with pytest.raises(ValueError, match=message):
            read_without(str(file), ["web", "code"])


def test_the_facts_of_corpora_are_their_documents_tokens_and_shares(tmp_path):
    one, two = write(tmp_path / "a", [[1, 2], [3, 4, 5]]), write(tmp_path / "b", [[6] * 7])
    assert Corpora([one], None).about == {"documents": 2, "tokens": 5}
    assert Corpora([one], [1.0]).about == {"documents": 2, "tokens": 5}
    assert Corpora([one, two], None).about == {"documents": 3, "tokens": 12, "blend": [[5, "once"], [7, "once"]]}
    assert Corpora([one, two], [1, 3]).about["blend"] == [[5, 2500], [7, 7500]]
    without = Corpora([one, two], None, {one: [1, 1]})
    assert without.about == {"documents": 2, "tokens": 9, "blend": [[2, "once"], [7, "once"]], "without": {one: [1]}}
    assert len(Corpora([one], None).files) == 2
    with pytest.raises(ValueError, match=r"a.idx has no document: there is nothing to train on"):
        Corpora([one], None, {one: [0, 1]})
    with pytest.raises(ValueError, match="largest token id 6"):
        Corpora([one, two], None).check_tokens(6, 0, 1)
    Corpora([one, two], None).check_tokens(7, 0, 1)


def test_parts_of_several_corpora_name_the_one_that_is_too_short(tmp_path):
    long = write(tmp_path / "long", [[i] * 20 for i in range(60)])
    short = write(tmp_path / "short", [[1, 2, 3]])
    with pytest.raises(ValueError, match=r"^\S+short: the training part: 1 document holds"):
        Corpora([long, short], None).split(4, seed=0, evaluate=False)
    with pytest.raises(ValueError, match=r"^the training part: 1 document holds"):
        Corpora([short], None).split(4, seed=0, evaluate=False)
    few = write(tmp_path / "few", [[i] * 2 for i in range(40)])
    train, held_out = Corpora([long, few], None).split(8, seed=0, evaluate=False)
    assert isinstance(train, Blend)
    assert held_out is None, "what is held out of one is too short"
    with pytest.raises(ValueError, match=r"^\S+short: 1 document holds 3 tokens"):
        Corpora([short], None).whole(4)
    every = Corpora([long], None).whole(4)
    assert (len(every), every.seq_len) == (1199 // 4, 4)
    assert every.sample(0).tolist() == TokenSamples(Corpora([long], None).datasets[0], 4, seed=0).sample(0).tolist()
