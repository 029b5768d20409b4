"""Linear layers with a low-rank adapter: `y = x W^T + scaling x A^T B^T`. Only A and B are trained.

| layer | A [rank, in_features] | B [out_features, rank] |
|---|---|---|
| column-parallel | replicated; with sequence parallel its gradient is partial | sharded like the rows of W |
| row-parallel | sharded like the columns of W | replicated; its gradient is partial |
| unsharded | replicated | replicated |

In a row-parallel layer the adapter adds no communication. In a column-parallel layer it adds an all-reduce of
[.., rank] over tp in backward; with sequence parallel instead an all-gather of [.., rank] in forward and a
reduce-scatter of it in backward. `mpcore.reduce_gradients` all-reduces the partial gradients, once per step.

Source: Hu et al. 2021, LoRA, arXiv:2106.09685, section 4.1; names of parameters as in PEFT.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpcore.interop.parallelize.checks import linear_sizes
from mpcore.interop.parallelize.layers import TransposedLinear
from mpcore.layers.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from mpcore.layers.linear_ops import all_gather_linear, autocast_dtype, copy_linear
from mpcore.layers.module import Init, ParallelModule
from mpcore.mesh.axis import Axis
from mpcore.sharding.declare import Shard

_ALONE = Axis()


class Factor(ParallelModule):
    """One factor of an adapter: this rank's shard of the matrix, with its declaration, on the meta device at first."""

    weight: Tensor

    def __init__(
        self, shape: tuple[int, int], init: Init, shard: Shard | None, partial: tuple[Axis, ...], dtype: torch.dtype
    ) -> None:
        super().__init__(device="meta", dtype=dtype)
        self.declare("weight", shape, init, shard=shard, partial=partial)

    def extra_repr(self) -> str:
        """Return the logical shape as text."""
        return " x ".join(map(str, self.shardings["weight"].shape))


class LoRALayer(nn.Module):
    """Mixin for a linear layer: it adds the adapter's output to the layer's output.

    Attributes:
        kind: the layer's class without the adapter.
        lora_A, lora_B: the factors.
        rank: the number of features between the factors.
        alpha, scaling: the adapter's output is multiplied by scaling = alpha / rank.
        dropout: the probability with which an element of the adapter's input is zero in training.
    """

    kind: type[nn.Module]
    lora_A: Factor  # noqa: N815 (the names in PEFT)
    lora_B: Factor  # noqa: N815
    rank: int
    alpha: float
    scaling: float
    dropout: float

    def low_rank(self, x: Tensor, split: bool = False) -> Tensor:
        """Return the input times A^T, scaled: [.., in_features] -> [.., rank].

        If A is sharded, the result is partial: this rank's term of the sum over tp.
        """
        if self.training and self.dropout:
            x = x * self.dropout_mask(x)
        if autocast_dtype(x) is None:
            x = x.to(self.lora_A.weight.dtype)
        return copy_linear(x, self.lora_A.weight, None, _ALONE, split) * self.scaling

    def low_rank_output(self, x: Tensor, split: bool = False) -> Tensor:
        """Return the adapter's output: [.., in_features] -> [.., out_features].

        If A is sharded, it is partial over tp.
        """
        return copy_linear(self.low_rank(x, split), self.lora_B.weight, None, _ALONE, split)

    def dropout_mask(self, x: Tensor) -> Tensor:
        """Return the dropout mask of this rank's input: each element is 0 or 1 / (1 - dropout).

        With the same random seed, it is this rank's part of the mask of the unsharded layer.
        """
        return F.dropout(torch.ones_like(x), self.dropout)


class LoRAWhole(LoRALayer):
    """The adapter of a layer that isn't sharded: `nn.Linear`, or Conv1D of transformers."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output plus the adapter's."""
        y = super().forward(input)
        return y + self.low_rank_output(input).to(y.dtype)


class LoRAColumn(LoRALayer, ColumnParallelLinear):
    """The adapter of a `ColumnParallelLinear`."""

    def project(self, x: Tensor) -> Tensor:
        """Return this rank's output features."""
        y, split = super().project(x), self.mode.split_backward
        low, held = self.low_rank(x, split), (self.lora_B.weight, None, self.tp)
        if self.sequence_parallel:
            return y + all_gather_linear(low, *held, self.sequence_dim, False, split).to(y.dtype)
        return y + copy_linear(low, *held, split).to(y.dtype)

    def dropout_mask(self, x: Tensor) -> Tensor:
        """Return the mask of this rank's input. With sequence parallel it is a shard of the full sequence's mask."""
        if not self.sequence_parallel:
            return super().dropout_mask(x)
        dim, length = self.sequence_dim, x.shape[self.sequence_dim]
        shape = [size * self.tp.size if i == dim else size for i, size in enumerate(x.shape)]
        return super().dropout_mask(x.new_empty(shape)).narrow(dim, self.tp.rank * length, length)


class LoRARow(LoRALayer, RowParallelLinear):
    """The adapter of a `RowParallelLinear`.

    One reduction over tp sums the layer's and the adapter's products together.
    """

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return this rank's term of the output."""
        y = super().project(x, bias)
        return y + self.low_rank_output(x, self.mode.split_backward).to(y.dtype)

    def dropout_mask(self, x: Tensor) -> Tensor:
        """Return this rank's features of the mask of the full input."""
        whole = super().dropout_mask(x.new_empty(*x.shape[:-1], self.in_features))
        ((start, end),) = self.lora_A.shardings["weight"].shards[0].mine if self.tp.size > 1 else ((0, x.shape[-1]),)
        return whole[..., start:end]


@cache
def with_adapter(kind: type[nn.Module]) -> type[LoRALayer]:
    """Return the class of a linear layer of class `kind` with an adapter."""
    column, row = (issubclass(kind, parallel) for parallel in (ColumnParallelLinear, RowParallelLinear))
    before = LoRAColumn if column else LoRARow if row else LoRAWhole
    made: Any = type(f"LoRA{kind.__name__}", (before, kind), {"kind": kind})
    return made


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a linear layer stores its weight as [in_features, out_features], as Conv1D does."""
    return isinstance(layer, TransposedLinear) or not isinstance(layer, ParallelLinear | nn.Linear)


def sizes_of(layer: nn.Module) -> tuple[int, int]:
    """Return the logical numbers of input and output features of a linear layer."""
    return (layer.in_features, layer.out_features) if isinstance(layer, ParallelLinear) else linear_sizes(layer)


def factors(layer: LoRALayer) -> tuple[tuple[str, Factor], tuple[str, Factor]]:
    """Return the two factors with their names."""
    return ("lora_A", layer.lora_A), ("lora_B", layer.lora_B)
