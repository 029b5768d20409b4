"""Parallel forms of layers that mpcore itself doesn't have: GPT-2's Conv1D, experts, subclasses of embeddings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from mpcore import collectives
from mpcore._torch.pytree import map_tensors
from mpcore.layers.embedding import check_ids
from mpcore.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpcore.layers.linear_ops import Product, WrappedProduct
from mpcore.layers.module import ParallelModule
from mpcore.mesh.axis import Axis


@dataclass(frozen=True)
class TransposedProduct(WrappedProduct):
    """The product with a weight that is stored as [in_features, out_features]."""

    def column(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None = None, regather: bool = False
    ) -> Tensor:
        """See `Product.column`."""
        return self.base.column(x, weight.t(), bias, tp, dim, regather)


class TransposedLinear(ParallelModule):
    """Mixin for a parallel linear layer whose weight is stored as [in_features, out_features]."""

    product: Product = TransposedProduct(Product())

    def __init__(self, *sizes: Any, **others: Any) -> None:
        super().__init__(*sizes, **others)
        old = self.shardings["weight"]
        shards = tuple(replace(shard, dim=1 - shard.dim) for shard in old.shards)
        self.shardings["weight"] = replace(old, shape=old.shape[::-1], shards=shards, block_dim=1 - old.block_dim)


class ColumnParallelConv1D(TransposedLinear, ColumnParallelLinear):
    """`ColumnParallelLinear` for transformers' Conv1D."""


class RowParallelConv1D(TransposedLinear, RowParallelLinear):
    """`RowParallelLinear` for transformers' Conv1D."""


class ExpertsShard(nn.Module):
    """Mixin for a module that holds all experts: its own forward computes with this rank's hidden features."""

    tp: Axis
    replicated: tuple[str, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        args, kwargs = map_tensors(
            lambda x: collectives.copy(x, self.tp) if x.is_floating_point() else x, (args, kwargs)
        )
        parts = {leaf: self.get_parameter(leaf) / self.tp.size for leaf in self.replicated}
        vars(self).update(parts)  # used instead of the parameters: the sum over tp adds each once
        try:
            return collectives.reduce(super().forward(*args, **kwargs), self.tp)
        finally:
            for leaf in parts:
                del vars(self)[leaf]


class VocabShard(nn.Embedding):
    """Mixin for a subclass of `nn.Embedding`: its own forward looks up the rows of this rank."""

    tp: Axis
    start: int
    end: int

    def forward(self, input: Tensor) -> Tensor:
        check_ids(input, self.num_embeddings)
        elsewhere = (input < self.start) | (input >= self.end)
        rows = super().forward((input - self.start).masked_fill(elsewhere, 0))
        return collectives.reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.tp)
