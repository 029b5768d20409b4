"""Cut the parts of an unsharded tensor that a rank may hold, and compare tensors to rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mpcore.collectives import shard_sizes
from mpcore.tools.verify.layout import Layout
from mpcore.tools.verify.run import RankRecord

TOLERANCE = 1e-10  # relative, for float64: thousands of roundings


def parts(
    layout: Layout, seen: RankRecord, want: Tensor, shape: torch.Size, runs: Iterable[tuple[int, int]]
) -> Iterator[Tensor]:
    """Yield the parts of an unsharded tensor that a rank may hold.

    They are its rows and tokens, and of them the declared features, or a shard of one dimension.
    """
    rows = want.chunk(layout.dp)[seen.dp] if want.dim() and layout.dp > 1 else want
    runs = tuple(runs)
    parts = []
    if seen.tokens is not None:
        for dim in (d for d, size in enumerate(rows.shape) if size == seen.length):
            parts += shards(layout, seen, rows.index_select(dim, seen.tokens), shape, runs)
    yield from parts or shards(layout, seen, rows, shape, runs)


def shards(
    layout: Layout, seen: RankRecord, rows: Tensor, shape: torch.Size, runs: tuple[Any, ...]
) -> Iterator[Tensor]:
    if runs and sum(end - start for start, end in runs) == shape[-1] and runs[-1][1] <= rows.shape[-1]:
        declared = torch.cat([rows.narrow(-1, start, end - start) for start, end in runs], -1)
        if declared.shape == shape:
            yield declared
            return
    if rows.shape == shape:
        yield rows
        return
    unequal = [d for d in range(rows.dim()) if rows.dim() == len(shape) and rows.shape[d] != shape[d]]
    if len(unequal) == 1:
        dim = unequal[0]
        sizes = shard_sizes(rows.shape[dim], layout.tp)
        if sizes[seen.tp] == shape[dim]:
            yield rows.narrow(dim, sum(sizes[: seen.tp]), shape[dim])


def one_each(held: Sequence[RankRecord], tensors: Sequence[Tensor | None], axis: str) -> list[Tensor]:
    """Return the tensors of the ranks that have the same coordinates as the first rank, except on `axis`."""
    others = [a for a in ("tp", "cp", "pp", "dp") if a != axis]
    return [
        t
        for seen, t in zip(held, tensors, strict=True)
        if t is not None and all(getattr(seen, a) == getattr(held[0], a) for a in others)
    ]


def same_shape(tensors: Sequence[Tensor]) -> bool:
    return all(t.shape == tensors[0].shape for t in tensors)


def same(tensors: Sequence[Tensor]) -> bool:
    return same_shape(tensors) and all(torch.equal(t, tensors[0]) for t in tensors)


def near(got: Tensor, want: Tensor) -> bool:
    scale = want.double().abs().max().item() if want.numel() else 0.0
    eps = torch.finfo(got.dtype).eps if got.dtype != torch.float64 else TOLERANCE
    return bool(scale) and (got.double() - want.double()).abs().max().item() <= 64 * eps * scale


def farthest(got: Tensor, want: Tensor) -> float:
    """Return the largest absolute difference. Equal infinities differ by 0."""
    return ((got.double() - want.double()).abs().masked_fill_(got == want, 0)).max().item()


def ratio(got: Tensor, want: Tensor) -> float:
    """Return r if got = r want, otherwise NaN."""
    got, want = got.double(), want.double()
    square = want.square().sum().item()
    if not square or got.shape != want.shape:
        return math.nan
    ratio = (got * want).sum().item() / square
    return ratio if ratio and near(got / ratio, want) else math.nan


def close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * abs(b)


def same_columns(got: Tensor, want: Tensor) -> bool:
    columns = [t.double().reshape(-1, t.shape[-1]).square().sum(0).sort().values for t in (got, want)]
    return near(*columns)


def infinite(x: Tensor) -> Tensor:
    """Replace NaN by infinity, so that NaN in both of two compared tensors is no difference."""
    return x.nan_to_num(math.inf, math.inf, -math.inf)


def is_affine_in_rows(got: Tensor, want: Tensor) -> bool:
    """Return whether each row of `got` is a multiple of the row of `want`, plus one number."""
    x, y = (t.double() - t.double().mean(-1, keepdim=True) for t in (want, got))
    square = x.square().sum(-1, keepdim=True)
    is_wide = got.shape[-1] >= 4 and bool(square.all())
    return is_wide and near((x * y).sum(-1, keepdim=True) / square * x, y)
