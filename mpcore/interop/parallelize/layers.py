"""Parallel layers for what only other libraries have: fused linears, GPT-2's Conv1D, a shard of an embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from mpcore import collectives
from mpcore.layers.embedding import check_ids
from mpcore.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpcore.mesh.axis import Axis
from mpcore.sharding.declare import Shard, Sharding


class FusedColumnParallelLinear(ColumnParallelLinear):
    """Several projections of one input in one product; each rank's output is [its part of block 0 | of block 1 | ...].

    Args:
        blocks: lengths of the blocks, whose sum is `out_features`.
        others: as of `ColumnParallelLinear`.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, blocks: tuple[int, ...], **others: Any
    ) -> None:
        self.blocks = blocks
        super().__init__(in_features, out_features, bias, **others)

    def output_blocks(self) -> tuple[int, ...]:
        """As given."""
        return self.blocks


class ColumnParallelConv1D(FusedColumnParallelLinear):
    """`FusedColumnParallelLinear` with its weight stored as [in_features, out_features]."""

    def __init__(self, *sizes: Any, **others: Any) -> None:
        super().__init__(*sizes, **others)
        self.shardings["weight"] = _transposed(self.shardings["weight"])

    def matrix(self) -> Tensor:
        """The weight turned."""
        return self.weight.t()


class RowParallelConv1D(RowParallelLinear):
    """`RowParallelLinear` with its weight stored as [in_features, out_features]."""

    def __init__(self, *sizes: Any, **others: Any) -> None:
        super().__init__(*sizes, **others)
        self.shardings["weight"] = _transposed(self.shardings["weight"])

    def matrix(self) -> Tensor:
        """The weight turned."""
        return self.weight.t()


def _transposed(sharding: Sharding) -> Sharding:
    shards = tuple(Shard(s.axis, 1 - s.dim, s.runs) for s in sharding.shards)
    return replace(sharding, shape=sharding.shape[::-1], shards=shards, block_dim=1 - sharding.block_dim)


class VocabShard(nn.Embedding):
    """Stands before a subclass of `nn.Embedding`, whose own forward then looks up this rank's rows."""

    tp: Axis
    start: int
    end: int

    def forward(self, input: Tensor) -> Tensor:
        check_ids(input, self.num_embeddings)
        elsewhere = (input < self.start) | (input >= self.end)
        rows = super().forward((input - self.start).masked_fill(elsewhere, 0))
        return collectives.reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.tp)
