"""List how each parameter of a parallelized model is sharded."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from torch import nn

from mpcore.sharding.declarations import declarations
from mpcore.sharding.declare import Sharding


@dataclass(frozen=True)
class SummaryRow:
    """All parameters that have the same name pattern and are sharded in the same way."""

    pattern: str  # their name, with `*` for each number in it
    fate: str
    count: int
    before: int  # bytes of all of them, unsharded
    after: int  # on this rank


@dataclass(frozen=True)
class Summary:
    """The result of `parallelize_summary`. `str` of it is a table."""

    rows: tuple[SummaryRow, ...]
    share: float  # the part of all bytes that is sharded, in [0, 1]

    def __str__(self) -> str:
        wide = max((len(row.pattern) for row in self.rows), default=0)
        lines = [
            f"{row.pattern:<{wide}}  x{row.count:<4} {row.before:>11,} -> {row.after:>14,} bytes  {row.fate}"
            for row in self.rows
        ]
        before, after = sum(row.before for row in self.rows), sum(row.after for row in self.rows)
        return "\n".join([*lines, f"{self.share:.0%} is sharded: {before:,} -> {after:,} bytes on this rank"])


def parallelize_summary(model: nn.Module) -> Summary:
    """List how each parameter of a parallelized model is sharded, and its bytes here. `print` the result for a table.

    Args:
        model: the model that `parallelize` returned.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> model = mpcore.parallelize(model, {"0": "colwise", "2": "rowwise"}, mpcore.Axis(2, rank=0, name="tp"))
        >>> print(mpcore.interop.parallelize.parallelize_summary(model))
        *.weight  x1            128 ->             64 bytes  dimension 0 sharded over tp 2
        *.bias    x1             32 ->             16 bytes  dimension 0 sharded over tp 2
        *.weight  x1            128 ->             64 bytes  dimension 1 sharded over tp 2
        *.bias    x1             16 ->             16 bytes  whole, as the plan leaves it
        95% is sharded: 304 -> 160 bytes on this rank
    """
    found: dict[tuple[str, str], SummaryRow] = {}
    sharded = total = 0
    for name, p, sharding in declarations(model):
        key = re.sub(r"\b\d+\b", "*", name), _fate(sharding)
        old = found.get(key) or SummaryRow(*key, 0, 0, 0)
        before, after = math.prod(sharding.shape) * p.element_size(), p.numel() * p.element_size()
        total, sharded = total + before, sharded + (before if sharding.shards else 0)
        found[key] = SummaryRow(*key, old.count + 1, old.before + before, old.after + after)
    return Summary(tuple(found.values()), sharded / max(total, 1))


def _fate(sharding: Sharding) -> str:
    cuts = " and ".join(f"dimension {s.dim} sharded over {s.axis.name} {s.axis.size}" for s in sharding.shards)
    axes = ", ".join(axis.name for axis in sharding.partial)
    whole = "whole, as the plan leaves it"
    return cuts or (f"whole, its gradient summed over {axes}" if axes else whole)
