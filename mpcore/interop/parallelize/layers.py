"""Parallel forms of layers that mpcore itself doesn't have: GPT-2's Conv1D, experts, subclasses of embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpcore import collectives
from mpcore._torch.pytree import leaves, map_tensors
from mpcore.layers.embedding import check_ids
from mpcore.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpcore.layers.linear_ops import Product, WrappedProduct
from mpcore.layers.module import ParallelModule
from mpcore.layers.moe.dispatch import AllToAll
from mpcore.mesh.axis import Axis


@dataclass(frozen=True)
class TransposedProduct(WrappedProduct):
    """The product with a weight that is stored as [in_features, out_features]."""

    def column(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None = None, regather: bool = False
    ) -> Tensor:
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


@contextmanager
def in_place_of_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Make a module's own code read these tensors in place of its parameters of the same names."""
    before = {leaf: vars(module)[leaf] for leaf in tensors if leaf in vars(module)}
    vars(module).update(tensors)
    try:
        yield
    finally:
        for leaf in tensors:
            del vars(module)[leaf]
        vars(module).update(before)


class ExpertsShard(nn.Module):
    """Mixin for a module that holds all experts: its own forward computes with this rank's experts and features."""

    tp: Axis
    ep: Axis
    etp: Axis
    num_all: int
    replicated: tuple[str, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.ep.size > 1:
            return self._dispatched(args, kwargs)
        given = args, kwargs
        args, kwargs = map_tensors(lambda x: collectives.copy(x, self.tp) if x.is_floating_point() else x, given)
        return collectives.reduce(self._own(*args, **kwargs), self.tp)

    def _own(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call the module's own forward. The result is partial over etp."""
        parts = {leaf: getattr(self, leaf) / self.etp.size for leaf in self.replicated}
        with in_place_of_parameters(self, parts):  # the sum over etp adds each once
            return super().forward(*args, **kwargs)

    def _dispatched(self, args: Any, kwargs: Any) -> Tensor:
        """Send this rank's part of the tokens to their experts over ep x etp, and gather the outputs over tp."""
        given = x, experts, weights = self._routed(args, kwargs)
        short = -len(x) % self.tp.size
        padded = (F.pad(t, (0, 0, 0, short), value=v) for t, v in ((x, 0), (experts, self.num_all), (weights, 0)))
        mine = [collectives.split(t, self.tp, 0) for t in padded]

        def run(rows: Tensor, counts: Tensor) -> Tensor:
            """Compute the rows of this rank's experts, each by one expert with weight 1."""
            some = rows if len(rows) else F.pad(rows, (0, 0, 0, len(counts)))  # unused experts get gradients of zeros
            expert = torch.searchsorted(counts.cumsum(0), torch.arange(len(some), device=rows.device), right=True)
            real = (expert < len(counts)).to(weights.dtype)[:, None]
            swap = zip(given, (some, expert.clamp(max=len(counts) - 1)[:, None].to(experts.dtype), real), strict=True)
            new = {id(old): instead for old, instead in swap}
            own_args, own_kwargs = map_tensors(lambda t: new.get(id(t), t), (args, kwargs))
            return self._own(*own_args, **own_kwargs)[: len(rows)]

        wide = torch.promote_types(weights.dtype, torch.float32)  # the messages hold numbers of experts, too
        dispatch = AllToAll(self.ep, self.etp, self.num_all, experts.shape[1])
        return collectives.gather(dispatch(mine[0], mine[1], mine[2].to(wide), None, run), self.tp, 0)[: len(x)]

    def _routed(self, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens, the chosen experts and their weights among the arguments of a forward."""
        given = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
        experts = [x for x in given if not x.is_floating_point()]
        floats = [x for x in given if x.is_floating_point()]
        shapes = [tuple(x.shape) for x in floats]
        if not experts and len(shapes) == 1 and len(shapes[0]) == 2 and shapes[0][0] % self.num_all == 0:
            rows = torch.arange(len(floats[0]), device=floats[0].device)[:, None]  # of one expert after the other
            return floats[0], rows // (len(rows) // self.num_all or 1), torch.ones_like(rows, dtype=floats[0].dtype)
        if len(experts) != 1 or len(floats) != 2 or shapes[1] != experts[0].shape or len(shapes[0]) != 2:
            said = ", ".join(f"{tuple(x.shape)} of {x.dtype}" for x in given)
            raise ValueError(
                f"{type(self).__name__} gets tensors {said}. To shard its experts over ep {self.ep.size}, its forward "
                f"must take tokens [N, D], the chosen experts [N, K] as integers, and their weights [N, K]; or tokens "
                f"[{self.num_all} N, D] alone, N for each expert: leave it out of the plan, or build the mesh with ep 1"
            )
        return floats[0], experts[0], floats[1]


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
