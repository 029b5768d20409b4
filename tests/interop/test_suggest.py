"""How a plan is found: which layer feeds which, and what is left."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpcore as mp
from mpcore.interop.parallelize.plan import LocalSizes
from mpcore.interop.parallelize.suggest import share_of, suggest_plan


class MLP(nn.Module):
    def __init__(self, d=4, f=8):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(d, f), nn.GELU(), nn.Linear(f, d)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Attention(nn.Module):
    """Heads with a norm each, and a norm of all features in front."""

    def __init__(self, d=8, heads=4):
        super().__init__()
        self.num_heads, self.head_dim = heads, d // heads
        self.norm, self.q, self.k, self.v = nn.LayerNorm(d), nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.q_norm, self.o = nn.LayerNorm(d // heads), nn.Linear(d, d)

    def forward(self, x):
        q, k, v = (
            f(self.norm(x)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = torch.nn.functional.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).flatten(2))


def test_heads_that_nothing_divides_are_gathered():
    found = suggest_plan(Attention(9, 3), 2)
    assert found.plan == dict.fromkeys("kqv", "colwise_gather_output") | {"o": "rowwise_split_input"}
    assert found.replicated == {"o": "tp 2 does not divide num_heads 3"}
    assert suggest_plan(Attention(9, 3), mp.Axis(3, name="tp")).plan == dict.fromkeys("kqv", "colwise") | {
        "": LocalSizes(("num_heads",)), "o": "rowwise", "q_norm": "replicated_with_grad_allreduce"
    }  # fmt: skip
    assert suggest_plan(MLP(4, 9)).plan == suggest_plan(MLP(4, 9), 2).plan == {"up": "colwise", "down": "rowwise"}


class Written(Attention):
    """Heads whose number stands in the forward, or a norm over all features of the queries."""

    def __init__(self, norm=False, **sizes):
        super().__init__(8, 4)
        del self.num_heads, self.head_dim
        vars(self).update(sizes)
        self.q_norm = nn.LayerNorm(8) if norm else nn.Identity()

    def forward(self, x):
        q, k, v = self.q_norm(self.q(x)), self.k(x), self.v(x)
        y = torch.nn.functional.scaled_dot_product_attention(
            *(z.unflatten(-1, (4, 2)).transpose(1, 2) for z in (q, k, v))
        )
        return x + self.o(y.transpose(1, 2).flatten(2))


class Tempered(Attention):
    """Heads with one temperature, whose gradient nothing sums."""

    def __init__(self):
        super().__init__(8, 4)
        self.temp, self.q_norm = nn.Parameter(torch.ones(())), nn.Identity()

    def forward(self, x):
        q, k, v = self.q(x) * self.temp, self.k(x), self.v(x)
        y = torch.nn.functional.scaled_dot_product_attention(
            *(z.unflatten(-1, (self.num_heads, 2)).transpose(1, 2) for z in (q, k, v))
        )
        return x + self.o(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("model", "words"), [
    (Written(), ["fails on 2 ranks", "heads, read their number from Written.num_heads"]),
    (Written(head_dim=2), ["fails on 2 ranks"]),
    (Written(num_heads=4), ["on 2 ranks", "num_heads is divided already: if its forward computes another size"]),
    (Tempered(), ["the gradient of temp on 2 ranks", "call mp.add_partial(module, 'temp', tp) before parallelize"]),
    (Written(norm=True), ["norms over all features come before it (q_norm)"]),
    (Attention(8, 4), []),
])  # fmt: skip
def test_the_suggestion_says_why_each_rank_computes_all_heads(model, words):
    found = suggest_plan(model)
    assert found.plan["q"] == ("colwise_gather_output" if words else "colwise")
    assert list(found.replicated) == ["o"][: len(words)]
    for word in words:
        assert word in str(found)
    assert ("read their number" in str(found)) == any("read their number" in word for word in words)
    assert "has the sizes" not in str(found), "dividing them was tried, and head_dim is never divided"
    assert ("computed in full on each rank" in str(found)) == bool(words)


def test_what_no_plan_shards_is_left_with_the_reason():
    """Of one feature: two ranks cannot share it."""
    found = suggest_plan(MLP(1, 1), 2)
    assert (found.plan, found.share, found.proven) == ({}, 0.0, False)
    assert found.left.keys() == {"down", "up"}


def test_experts_of_uneven_counts_are_left_with_the_counts():
    class Uneven(MLP):  # as in LongCat-Flash, whose identity experts have rows in one parameter
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = nn.Parameter(torch.ones(6, 8, 4)), nn.Parameter(torch.ones(4, 4, 8))

    assert "wide 6, narrow 4" in suggest_plan(nn.Sequential(Uneven()), 1, ep=2).left["0"]


def test_the_part_of_the_bytes_that_a_plan_shards():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False).double())
    sizes = 4 * 32, 8 * 16
    assert share_of(model, {"0": "colwise"}, 2) == sizes[0] / sum(sizes)
    assert share_of(model, {"0": "colwise", "2": "rowwise"}, 2) == 1
    assert share_of(model, {}, 2) == share_of(model, None, 2) == 0
    assert share_of(nn.ReLU(), {}, 2) == 0
