"""Cutting a list of blocks into stages: against every possible cut, and on modules that aren't ours."""

import itertools
import random

import pytest
import torch
from torch import nn

from mpcore.layers.moe import Experts
from mpcore.pipeline.partition import parameter_costs, partition, split_sizes


def every_cut(n, stages):
    for ends in itertools.combinations(range(1, n), stages - 1):
        yield [range(a, b) for a, b in itertools.pairwise((0, *ends, n))]


def stage_costs(cut, costs, first, last):
    sums = [sum(costs[i] for i in stage) for stage in cut]
    sums[0] += first
    sums[-1] += last
    return sums


@pytest.mark.parametrize("n", range(1, 9))
def test_the_cut_is_the_best_of_all_cuts(n):
    """Integers, so that sums are exact: first the slowest stage, then the sum of squares."""
    for seed in range(25):
        draw = random.Random(1000 * n + seed)
        costs = [draw.choice((0, 1, 1, 2, 3, 10, 50)) for _ in range(n)]
        first, last = draw.choice(((0, 0), (5, 0), (0, 7), (3, 20)))
        for stages in range(1, n + 1):
            cut = partition(costs, stages, first=first, last=last)
            assert [i for stage in cut for i in stage] == list(range(n))
            assert len(cut) == stages
            assert min(map(len, cut)) >= 1
            every = [stage_costs(other, costs, first, last) for other in every_cut(n, stages)]
            got = stage_costs(cut, costs, first, last)
            assert max(got) == min(map(max, every)), (costs, stages, cut)
            best = min(sum(c * c for c in other) for other in every if max(other) == max(got))
            assert sum(c * c for c in got) == best, (costs, stages, cut)
            assert partition([c / 512 for c in costs], stages, first=first / 512, last=last / 512) == cut
            huge = partition([c * 2.0**600 for c in costs], stages, first=first * 2.0**600, last=last * 2.0**600)
            assert max(stage_costs(huge, costs, first, last)) == max(got), "though squares are infinite"


def test_equal_blocks_make_even_stages_and_extras_shorten_the_outer_ones():
    assert list(map(len, partition([1.0] * 10, 4))) == [3, 3, 2, 2]
    assert list(map(len, partition([0.0] * 3, 3))) == [1, 1, 1]
    assert list(map(len, partition([1.0] * 10, 4, first=1, last=1))) == [2, 3, 3, 2]
    assert list(map(len, partition([1.0] * 8, 4, last=3))) == [3, 2, 2, 1]
    assert list(map(len, partition([0.1] * 12, 3))) == [4, 4, 4], "sums of floats don't upset it"


@pytest.mark.parametrize(("costs", "stages", "extra", "message"), [
    ([1.0] * 3, 4, 0.0, "3 blocks are fewer than the 4 stages"), ([], 1, 0.0, "0 blocks are fewer than the 1 stages"),
    ([1.0], 0, 0.0, "0 stages: at least 1"), ([1.0, -2.0], 1, 0.0, r"the cost -2\.0 of block 1 is not a finite number"),
    ([1.0, float("nan")], 1, 0.0, "the cost nan of block 1"), ([1.0, 1.0], 1, float("inf"), "the cost inf of last"),
])  # fmt: skip
def test_bad_input_is_refused_with_the_numbers(costs, stages, extra, message):
    with pytest.raises(ValueError, match=message):
        partition(costs, stages, last=extra)


def test_explicit_sizes():
    assert split_sizes([1, 3, 2], 6) == [range(0, 1), range(1, 4), range(4, 6)]
    for sizes in ([1, 3], [7], [6, 0], [7, -1], []):
        with pytest.raises(ValueError, match=rf"stages of \[.*\] blocks hold {sum(sizes)}, not the model's 6"):
            split_sizes(sizes, 6)


class Strange(nn.Module):
    """A module of nobody's: a table, a norm, and a product with a transposed weight."""

    def __init__(self, d: int, rank: int) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(11, d), nn.LayerNorm(d)
        self.down, self.up = nn.Parameter(torch.ones(d, rank)), nn.Parameter(torch.ones(rank, d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) @ self.down @ self.up


def test_costs_of_any_modules():
    modules = [nn.Linear(6, 6), Strange(6, 2), nn.Sequential(nn.Linear(6, 12, bias=False), nn.Linear(12, 6)), nn.ReLU()]
    assert parameter_costs(modules) == [36, 24, 144, 0], "biases, norms and tables multiply with nothing"
    modules[0].num_embeddings = 4
    assert parameter_costs(modules[:1]) == [36], "a table is known by its type, not by an attribute"
    experts = Experts(4, dim=6, hidden_dim=3, used_share=0.5)
    assert parameter_costs([experts]) == [0.5 * 4 * (2 * 3 * 6 + 6 * 3)], "a token goes through half of the experts"
    assert partition(parameter_costs(modules), 2) == [range(0, 2), range(2, 4)]
