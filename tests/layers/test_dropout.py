"""Dropout: the mask of an element is the same wherever, and with whatever beside it, the element is computed."""

from typing import Any

import pytest
import torch
from torch import nn

import mpcore as mp
from mpcore import Axis, Dropout
from mpcore.layers import seed_dropout
from tests.pool import mesh, on_ranks

B, T, D = 4, 12, 10


class Two(nn.Module):
    """Two dropout sites: their masks must differ."""

    def __init__(self, p=0.5, **others):
        super().__init__()
        self.first, self.second = Dropout(p, **others), Dropout(p, **others)


def seeded(seed=3, p=0.5, **others):
    model = Two(p, **others)
    seed_dropout(model, seed)
    return model


def mask(site, samples, shape=(B, T, D)):
    return site(torch.ones(shape), samples) != 0


def same(a, b):
    return (a == b).double().mean().item()


def test_pitfall_19_masks_differ_across_samples_tokens_sites_and_seeds():
    samples = torch.arange(B)
    shape = (B, 64, 64)
    model, other = seeded(3), seeded(4)
    here = mask(model.first, samples, shape)
    halves = [
        (here[0], here[1]), (here[:, 0], here[:, 1]), (here[..., 0], here[..., 1]), (here[..., :32], here[..., 32:]),
        (here, mask(model.second, samples, shape)), (here, mask(other.first, samples, shape)),
        (here, mask(model.first, samples + B, shape)), (here, mask(model.first, samples + 2**32, shape)),
        (here, here.transpose(1, 2)),
    ]  # fmt: skip
    for i, (a, b) in enumerate(halves):  # independent coins agree half the time: five deviations of n coins
        assert abs(same(a, b) - 0.5) < 2.5 / a.numel() ** 0.5, f"pair {i}"
    assert torch.equal(here, mask(seeded(3).first, samples, shape)), "the same seed and site again"


@on_ranks(4)
def test_pitfall_19_equality_and_independence_over_the_mesh():
    """What each rank drops: the same on tp, slices of one mask under sequence parallel, other samples on dp."""
    m = mesh(tp=2, dp=2)
    samples = torch.arange(B // 2) + m.dp.rank * (B // 2)
    whole = mask(seeded().first, torch.arange(B))
    mine = whole[samples]
    assert torch.equal(mask(seeded(tp=m.tp).first, samples, (B // 2, T, D)), mine)
    cut = slice(m.tp.rank * T // 2, (m.tp.rank + 1) * T // 2)
    assert torch.equal(mask(seeded(tp=m.tp, sequence_parallel=True).first, samples, (B // 2, T // 2, D)), mine[:, cut])
    places = torch.arange(1, 2 * T, 2)  # as context parallel deals them out
    longer = mask(seeded().first, samples, (B // 2, 2 * T, D))[:, places]
    placed = seeded(tp=m.tp, sequence_parallel=True).first(torch.ones(B // 2, T // 2, D), samples, places)
    assert torch.equal(placed != 0, longer[:, cut])
    site = seeded(tp=m.tp, sequence_parallel=True, sequence_dim=0).first
    assert torch.equal(mask(site, samples, (T // 2, B // 2, D)), mine[:, cut].transpose(0, 1))
    assert not torch.equal(*whole.chunk(2)), "dp ranks differ"
    assert not torch.equal(*mine.chunk(2, 1)), "tp ranks differ where the activation is sharded"


def test_beside_sequence_parallel_layers_a_dropout_says_which_tokens_it_has():
    two = Axis(size=2, rank=1)

    def model(*dropouts: Dropout, **options: Any) -> nn.Module:
        return nn.Sequential(mp.RowParallelLinear(4, 4, tp=two, device="meta", **options), *dropouts)

    said = r"^1 is a Dropout without tp, and 0 is sequence parallel: pass it tp=mesh.tp and sequence_parallel=True if"
    with pytest.raises(ValueError, match=said):
        seed_dropout(model(Dropout(0.1), sequence_parallel=True), 9)
    for told in (Dropout(0.0), Dropout(0.1, tp=two), Dropout(0.1, tp=two, sequence_parallel=True)):
        seed_dropout(model(told, sequence_parallel=True), 9)
    seed_dropout(model(Dropout(0.1)), 9)


@pytest.mark.parametrize(
    ("tp", "unit", "sizes"), [(1, 1, [10]), (2, 1, [5, 5]), (2, 2, [6, 4]), (3, 1, [4, 3, 3]), (3, 5, [5, 5, 0])]
)
def test_masks_of_sharded_features_are_slices_of_the_whole_mask(tp, unit, sizes):
    samples, x = torch.arange(B), torch.randn(B, T, D, dtype=torch.float64)
    whole, first = seeded().first(x, samples), 0
    for rank, size in enumerate(sizes):
        site = seeded(tp=Axis(size=tp, rank=rank), sharded_features=D, unit=unit).first
        mine = slice(first, first + size)
        assert torch.equal(site(x[..., mine], samples), whole[..., mine])
        assert torch.equal(site.eval()(x, samples), x), "any width where nothing is dropped"
        first += size
