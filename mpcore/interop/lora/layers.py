"""Linear layers with a low-rank adapter: `y = x W^T + scaling x A^T B^T`. Only A and B are trained.

| layer | A [rank, in_features] | B [out_features, rank] |
|---|---|---|
| column-parallel | replicated; with sequence parallel its gradient is partial | sharded like the rows of W |
| row-parallel | sharded like the columns of W | replicated; its gradient is partial |
| unsharded | replicated | replicated |

A grouped weight W [experts, M, N] has A [experts, rank, N] and B [experts, M, rank], and the module computes with
W + scaling x B A. Both factors are sharded over experts like W. Where W's M or N is sharded over etp, so is the
factor that has this dimension; the gradient of the other factor is partial over etp.

In a row-parallel layer the adapter adds no communication. In a column-parallel layer it adds an all-reduce of
[.., rank] over tp in backward; with sequence parallel instead an all-gather of [.., rank] in forward and a
reduce-scatter of it in backward. `mpcore.gradients.reduce_gradients` all-reduces the partial gradients, once per step.

Source: Hu et al. 2021, LoRA, arXiv:2106.09685, section 4.1; names of parameters as in PEFT.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpcore.interop.parallelize.checks import linear_sizes
from mpcore.interop.parallelize.layers import TransposedLinear, in_place_of_parameters
from mpcore.layers.linear import ParallelLinear
from mpcore.layers.linear_ops import Product, WrappedProduct, autocast_dtype
from mpcore.layers.module import Init, ParallelModule
from mpcore.mesh.axis import Axis
from mpcore.sharding.declare import Shard

_ALONE = Axis()


class Factor(ParallelModule):
    """One factor of an adapter: this rank's shard of the matrix, with its declaration, on the meta device at first."""

    weight: Tensor

    def __init__(
        self, shape: tuple[int, ...], init: Init, shard: Shard | tuple[Shard, ...] | None, partial: tuple[Axis, ...],
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__(device="meta", dtype=dtype)
        self.declare("weight", shape, init, shard=shard, partial=partial)

    def extra_repr(self) -> str:
        return " x ".join(map(str, self.shardings["weight"].shape))


class LoRALayer(nn.Module):
    """Mixin for a linear layer: it holds an adapter, whose output is added to the layer's.

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

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse a product that leaves the adapter out."""
        inner = value
        while name == "product" and not isinstance(inner, LoRAProduct):
            if not isinstance(inner, WrappedProduct):
                raise ValueError(
                    f"the product {type(value).__name__} leaves the adapter out: make it from the layer's, as by "
                    f"layer.product.change(..), or assign it before add_lora"
                )
            inner = inner.base
        super().__setattr__(name, value)

    def low_rank_output(self, x: Tensor, tp: Axis = _ALONE, dim: int | None = None, split: bool = False) -> Tensor:
        """Return the adapter's output: [.., in_features] -> [.., out_features]. If A is sharded, it is partial over tp.

        Args:
            tp, dim: the axis over which B is sharded, and the dimension of x that sequence parallelism shards over it.
            split: as `Product.split_backward`.
        """
        product, a, b = Product(split), self.lora_A.weight, self.lora_B.weight
        if self.training and self.dropout:
            x = x * self.dropout_mask(x, tp, dim)
        if autocast_dtype(x) is None:
            x = x.to(a.dtype)
        return product.column(product.column(x, a, None, _ALONE) * self.scaling, b, None, tp, dim)

    def merged_weight(self, weight: Tensor) -> Tensor:
        """Return the layer's weight with the adapter merged into it."""
        return weight_with(weight, self.lora_A.weight, self.lora_B.weight, self.scaling, is_transposed(self))

    def dropout_mask(self, x: Tensor, tp: Axis, dim: int | None) -> Tensor:
        """Return the dropout mask of this rank's input: each element is 0 or 1 / (1 - dropout).

        With the same random seed, it is this rank's part of the mask of the unsharded layer.
        """
        declared, length = self.lora_A.shardings["weight"], x.shape[dim or 0]
        full, start = tp.size * length, tp.rank * length
        if declared.shards:
            ((start, end),) = declared.shards[0].mine
            dim, full, length = -1, declared.shape[1], end - start
        elif dim is None:
            return F.dropout(torch.ones_like(x), self.dropout)
        shape = list(x.shape)
        shape[dim] = full
        return F.dropout(x.new_ones(shape), self.dropout).narrow(dim, start, length)


class GroupedAdapter(LoRALayer):
    """The adapter of one grouped weight, as a child of the module that holds the weight."""

    leaf: str


class LoRAGrouped(nn.Module):
    """Mixin for a module with grouped weights: its own forward computes with the adapters merged into them."""

    kind: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        adapters = [child for child in self.children() if isinstance(child, GroupedAdapter)]
        weights = {adapter.leaf: adapter.merged_weight(getattr(self, adapter.leaf)) for adapter in adapters}
        with in_place_of_parameters(self, weights):
            return super().forward(*args, **kwargs)


class LoRAWhole(LoRALayer):
    """The adapter of a layer that isn't sharded: `nn.Linear`, or Conv1D of transformers."""

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        return y + self.low_rank_output(input).to(y.dtype)


@dataclass(frozen=True)
class LoRAProduct(WrappedProduct):
    """The product of a parallel linear layer that has an adapter.

    In a row-parallel layer, one reduction over tp sums the layer's and the adapter's products together.
    """

    layer: LoRALayer

    def column(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, dim: int | None = None, regather: bool = False
    ) -> Tensor:
        y = self.base.column(x, weight, bias, tp, dim, regather)
        return y + self.layer.low_rank_output(x, tp, dim, self.split_backward).to(y.dtype)


@cache
def with_grouped(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a module of class `kind` whose grouped weights have adapters."""
    return kind if issubclass(kind, LoRAGrouped) else type(f"LoRA{kind.__name__}", (LoRAGrouped, kind), {"kind": kind})


@cache
def with_adapter(kind: type[nn.Module]) -> type[LoRALayer]:
    before = LoRALayer if issubclass(kind, ParallelLinear) else LoRAWhole
    made: Any = type(f"LoRA{kind.__name__}", (before, kind), {"kind": kind})
    return made


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a linear layer stores its weight as [in_features, out_features], as Conv1D does."""
    return isinstance(layer, TransposedLinear) or not isinstance(layer, ParallelLinear | nn.Linear | GroupedAdapter)


def sizes_of(layer: nn.Module) -> tuple[int, int]:
    """Return the logical numbers of input and output features of a linear layer."""
    return (layer.in_features, layer.out_features) if isinstance(layer, ParallelLinear) else linear_sizes(layer)


def factors(layer: LoRALayer) -> tuple[tuple[str, Factor], tuple[str, Factor]]:
    return ("lora_A", layer.lora_A), ("lora_B", layer.lora_B)


def weight_with(weight: Tensor, a: Tensor, b: Tensor, scaling: float, transposed: bool = False) -> Tensor:
    """Return the weight plus the product of an adapter's factors, times `scaling`, computed in float32 or wider."""
    wide = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
    product = b.to(wide) @ a.to(wide) * scaling
    return (weight.to(wide) + (product.t() if transposed else product)).to(weight.dtype)
