"""Randomness: Philox against its published vectors, streams that never fall together, masks that no cut changes."""

import itertools

import pytest
import torch

from mpcore.random import dropout, generator, philox, random_words, stream_key

WORD = 2**32


def plain_philox(key, counter):
    """Philox4x32-10 in Python's integers, as figure 2 of the paper draws it."""
    k = [key % WORD, key // WORD % WORD]
    c = list(counter)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], WORD)
        high1, low1 = divmod(0xCD9E8D57 * c[2], WORD)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % WORD, (k[1] + 0xBB67AE85) % WORD]
    return c


def plain_word(key, sample, token, feature):
    return plain_philox(key, [feature // 4, token, sample % WORD, sample // WORD])[feature % 4]


def test_philox_is_the_integer_implementation_everywhere():
    draw = torch.Generator().manual_seed(0)
    counters = torch.randint(0, WORD, (4, 200), generator=draw)
    counters[:, :16] = torch.tensor(list(itertools.product((0, WORD - 1), repeat=4))).t()
    for key in (0, 1, WORD - 1, WORD, 2**63 - 1, 0x0123456789ABCDEF, stream_key(1, "a")):
        got = torch.stack(philox(key, *counters)).t().tolist()
        assert got == [plain_philox(key, counter) for counter in counters.t().tolist()]


def test_a_word_depends_on_its_global_place_alone():
    key = stream_key(3, "block.dropout")
    samples, tokens = [0, 5, WORD + 5, 2**40], [0, 7, 123_456]
    for first, last in [(0, 10), (3, 10), (4, 8), (5, 6), (7, 7)]:
        got = random_words(key, torch.tensor(samples), torch.tensor(tokens), range(first, last))
        assert got.shape == (len(samples), len(tokens), last - first)
        assert got.tolist() == [
            [[plain_word(key, s, t, d) for d in range(first, last)] for t in tokens] for s in samples
        ]


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_where_the_word_is_at_least_p(p):
    key, samples, tokens = 77, torch.tensor([4, 9]), torch.tensor([2, 3, 8])
    y = dropout(torch.ones(2, 3, 6, dtype=torch.float64), p, key=key, samples=samples, tokens=tokens, first_feature=5)
    for i, j, d in itertools.product(range(2), range(3), range(6)):
        word = plain_word(key, int(samples[i]), int(tokens[j]), 5 + d)
        assert y[i, j, d].item() == (1 / (1 - p) if word >= int(p * WORD) else 0.0)


def test_dropout_of_nothing_is_nothing():
    x = torch.ones(2, 3, 4)
    assert dropout(x, 0.0, key=1, samples=torch.arange(2)) is x
    assert dropout(x[:0], 0.5, key=1, samples=torch.arange(0)).shape == (0, 3, 4)


def test_pitfall_20_no_two_places_of_a_grid_share_a_stream():
    """8 x 8 x 8 places and 4 seeds: distinct keys, distinct first draws, and none a shift of another."""
    places = [
        (seed, f"stages.{a}.experts.{b}.shards.{d}.weight")
        for seed, a, b, d in itertools.product((0, 1, 2, 1234), range(8), range(8), range(8))
    ]
    keys = {stream_key(*place) for place in places}
    assert len(keys) == len(places) == 2048
    assert all(0 <= key < 2**63 for key in keys)
    assert len({key % WORD for key in keys}) == len({key // WORD for key in keys}) == len(places)
    draws = {tuple(torch.randint(0, 2**60, (2,), generator=generator(*place)).tolist()) for place in places}
    assert len(draws) == len(places)
    masks = {tuple(int(w) for w in philox(key, *[torch.tensor([0])] * 4)) for key in keys}
    assert len(masks) == len(places)


def test_pitfall_20_seed_and_name_are_told_apart():
    near = [(1, "1/a"), (11, "a"), (1, "/1a"), (1, "a"), (1, ""), (-1, "a"), (1, "a/1"), (0, "1/a")]
    assert len({stream_key(*pair) for pair in near}) == len(near)
    assert stream_key(1, "a") == stream_key(1, "a") == 5469735371966330324


def test_generators_are_apart_from_torchs_own():
    state = torch.random.get_rng_state()
    torch.randn(3, generator=generator(1, "a"))
    assert torch.equal(state, torch.random.get_rng_state())
