"""Which text a step read, and the corpora of a run: by records, losses and documents that are known."""

from __future__ import annotations

import pytest

from examples.gpt.samples import Blend, Corpora, TokenSamples, counts_of_period, read_without
from tests.examples.test_blend import write


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
    one, two = write(tmp_path / "a", [1, 2], [3, 4, 5]), write(tmp_path / "b", [6] * 7)
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
    long = write(tmp_path / "long", *([i] * 20 for i in range(60)))
    short = write(tmp_path / "short", [1, 2, 3])
    train, held_out = Corpora([long, long], [1, 3]).split(4, seed=5, evaluate=True)
    assert isinstance(train, Blend)
    assert isinstance(held_out, Blend)
    assert (train.seed, held_out.seed, train.counts, held_out.counts) == (5, 0, [2500, 7500], [2500, 7500])
    with pytest.raises(ValueError, match=r"^\S+short: the training part: 1 document holds"):
        Corpora([long, short], None).split(4, seed=0, evaluate=False)
    with pytest.raises(ValueError, match=r"^the training part: 1 document holds"):
        Corpora([short], None).split(4, seed=0, evaluate=False)
    few = write(tmp_path / "few", *([i] * 2 for i in range(40)))
    train, held_out = Corpora([long, few], None).split(8, seed=0, evaluate=False)
    assert isinstance(train, Blend)
    assert held_out is None, "what is held out of one is too short"
    with pytest.raises(ValueError, match=r"^\S+short: 1 document holds 3 tokens"):
        Corpora([short], None).whole(4)
    every = Corpora([long], None).whole(4)
    assert (len(every), every.seq_len) == (1199 // 4, 4)
    assert every.sample(0).tolist() == TokenSamples(Corpora([long], None).datasets[0], 4, seed=0).sample(0).tolist()
