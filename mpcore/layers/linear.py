"""Linear layers whose weight is sharded over the tensor-parallel axis.

The contract: `forward` checks the input and calls the layer's `product`, an object of `mpcore.layers.linear_ops`. Its
`column` is linear(communicate(x)), its `row` is communicate(linear(x)). Nothing else branches here, and no subclass
overrides a step of forward. To compute in another way (FP8, backward in two passes), hand the layer another product.

Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), section 3; sequence parallelism: Korthikanti et al. 2022
(arXiv:2205.05198), section 4.2.2.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from mpcore import collectives
from mpcore.layers.linear_ops import Product
from mpcore.layers.module import (
    LayerOptions,
    ParallelModule,
    TensorOptions,
    constant,
    input_error,
    select_options,
    uniform,
)
from mpcore.mesh.axis import Axis, check_axis
from mpcore.sharding.declarations import add_partial
from mpcore.sharding.declare import Shard, cut, cut_blocks


class ParallelLinear(ParallelModule):
    """Base class of `ColumnParallelLinear` and `RowParallelLinear`: holds the parameters and the product.

    Attributes:
        product: the `Product` that forward calls. To change how the layer computes, assign another one that is made
            from it: `layer.product.split(True)`, `layer.product.change(function)`.
    """

    product: Product = Product()
    weight: Tensor
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, **options: Unpack[LayerOptions]) -> None:
        super().__init__(**options)
        self.in_features = in_features
        self.out_features = out_features

    def declare_linear(self, bias: bool, of_weight: dict[str, Any], of_bias: dict[str, Any]) -> None:
        """Declare weight and bias; without an `init` they get the initial values of `torch.nn.Linear`."""
        default = uniform(1 / math.sqrt(self.in_features) if self.in_features else 0.0)
        self.declare("weight", (self.out_features, self.in_features), self._init or default, **of_weight)
        if bias:
            self.declare("bias", (self.out_features,), constant(0.0) if self._init else default, **of_bias)
        else:
            self.register_parameter("bias", None)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, tp={self.tp.size}"


class ColumnParallelLinear(ParallelLinear):
    """`y = x W^T + b` with the rows of W (the output features) sharded over tp.

    Each rank accepts the same x and returns its shard of y's last dimension. In the notation of `mpcore.collectives`, x
    is I and y is S(-1).

    Args:
        in_features, out_features: sizes of the unsharded layer. Shards may be uneven.
        bias: whether the layer has a bias.
        gather_output: all-gather the output, so that every rank returns all `out_features`.
        regather: with sequence parallelism, keep this rank's shard of the input, and all-gather it again in backward.
        unit: sharding keeps groups of `unit` neighbouring output features together, for example `unit=head_dim`.
        blocks: the output features of each projection, if several are fused in the weight, such as gate and up. Each is
            sharded separately, and a rank returns [its part of block 0 | its part of block 1 | ...].
        shard: which output features each rank holds; None: equal shares of each block.
        options: `LayerOptions`: `tp`, `sequence_parallel`, `sequence_dim`, `init`, `device`, `dtype`. Pass
            `tp=mesh.tp`; without it each rank holds the unsharded layer. With `sequence_parallel` the input is this
            rank's shard of the sequence, and the layer all-gathers it.

    Raises:
        ValueError: if out_features / unit is smaller than the number of ranks, or `blocks` or `shard` don't fit.

    Example:
        >>> layer = mpcore.ColumnParallelLinear(4, 6, tp=mpcore.Axis(size=2, rank=0), device="meta")
        >>> layer.weight.shape, layer.shardings["weight"].shape
        (torch.Size([3, 4]), (6, 4))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        regather: bool = False,
        unit: int = 1,
        blocks: tuple[int, ...] = (),
        shard: Shard | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(in_features, out_features, **options)
        self.gather_output = gather_output
        self.regather = regather
        self.unit = unit
        if sum(blocks) not in (0, out_features):
            raise ValueError(f"blocks {blocks} have a sum of {sum(blocks)}, not of out_features {out_features}")
        evenly = shard is None
        if shard is None:
            check_size("out_features", out_features, self.tp, unit)
            lengths = blocks or (out_features,)
            shard = cut_blocks(lengths, self.tp, 0, (unit,) * len(lengths))
        elif shard.axis != self.tp or shard.dim != 0:
            raise ValueError(
                f"shard cuts dimension {shard.dim} over {shard.axis.name} {shard.axis.size}: it must cut dimension 0 "
                f"over {self.tp.name} {self.tp.size}"
            )
        if gather_output and (unit > 1 or len(shard.mine) > 1 or not evenly):
            raise ValueError(f"gather_output can't put {len(shard.mine)} blocks of unit {unit} in order: split first")
        rows = {"shard": shard, "blocks": blocks}
        self.declare_linear(bias, rows, rows)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features/tp], or [..., out_features] with `gather_output`."""
        if x.shape[-1] != self.in_features:
            is_share = abs(x.shape[-1] * self.tp.size - self.in_features) < self.tp.size > 1
            hint = ": is it swapped with the RowParallelLinear?" if is_share else ""
            raise wrong_last(x, self.in_features, "in_features", hint)
        dim = self.sequence_dim if self.sequence_parallel else None
        y = self.product.column(x, self.weight, self.bias, self.tp, dim, self.regather)
        return collectives.gather(y, self.tp, -1, self.out_features) if self.gather_output else y


class RowParallelLinear(ParallelLinear):
    """`y = x W^T + b` with the columns of W (the input features) sharded over tp.

    Each rank accepts its shard of x's last dimension, which is what a column-parallel layer returns. The products of
    all ranks are all-reduced, so every rank returns the full y. In the notation of `mpcore.collectives`, x is S(-1) and
    y is I. The bias is added once, after the all-reduce.

    Args:
        in_features, out_features: sizes of the unsharded layer. Shards may be uneven.
        bias: whether the layer has a bias.
        input_is_parallel: True if `x` is this rank's shard. If False, `x` has all `in_features`, and the layer keeps
            this rank's shard of it.
        unit: sharding keeps groups of `unit` neighbouring input features together, for example `unit=head_dim`.
        options: `LayerOptions`: `tp`, `sequence_parallel`, `sequence_dim`, `init`, `device`, `dtype`. Pass
            `tp=mesh.tp`; without it each rank holds the unsharded layer. With `sequence_parallel` the output is
            reduce-scattered, and each rank returns its shard of the sequence.

    Raises:
        ValueError: if in_features / unit is smaller than the number of ranks.

    Example:
        >>> layer = mpcore.RowParallelLinear(6, 4, tp=mpcore.Axis(size=2, rank=0), device="meta")
        >>> layer.weight.shape, layer.shardings["weight"].shape
        (torch.Size([4, 3]), (4, 6))
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, input_is_parallel: bool = True, unit: int = 1,
        **options: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, **options)
        check_size("in_features", in_features, self.tp, unit)
        self.input_is_parallel = input_is_parallel
        self.unit = unit
        shard = cut(in_features, self.tp, 1, unit)
        self.local_in_features: int = shard.size(self.tp.rank)
        partial = (self.tp,) if self.sequence_parallel else ()
        self.declare_linear(bias, {"shard": shard}, {"partial": partial})

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features/tp] -> [..., out_features]; this rank's shard of the sequence with `sequence_parallel`."""
        if self.sequence_parallel:
            check_sequence(x, self.sequence_dim, self.tp)
        if not self.input_is_parallel:
            if x.shape[-1] != self.in_features:
                raise wrong_last(x, self.in_features, "in_features")
            x = collectives.split(x, self.tp, -1)
        if x.shape[-1] != self.local_in_features:
            if self.tp.size == 1 < self.in_features // max(x.shape[-1], 1):
                hint = ": pass this layer tp=mesh.tp, as the layer before it has"
                raise wrong_last(x, self.in_features, "in_features", hint)
            what = f"this rank's share of in_features {self.in_features}"
            hint = ": is it swapped with the ColumnParallelLinear, or has that no tp? Else input_is_parallel=False"
            raise wrong_last(x, self.local_in_features, what, hint if x.shape[-1] == self.in_features else "")
        dim = self.sequence_dim if self.sequence_parallel else None
        return self.product.row(x, self.weight, self.bias, self.tp, dim)


def replicated_linear(
    in_features: int, out_features: int, bias: bool = True, **options: Unpack[LayerOptions]
) -> ColumnParallelLinear:
    """Return a linear layer that each rank of tp holds in full.

    With sequence parallelism each rank computes its own tokens, so its gradient is a partial sum over tp.
    """
    alone = select_options(options, TensorOptions)
    linear = ColumnParallelLinear(in_features, out_features, bias, init=options.get("init"), **alone)
    tp = options.get("tp", Axis())
    for leaf, _ in linear.named_parameters() if tp.size > 1 and options.get("sequence_parallel") else ():
        add_partial(linear, leaf, tp)
    return linear


def check_size(name: str, size: int, tp: Axis, unit: int = 1) -> None:
    """Raise ValueError if `unit` does not divide the size, or if a rank of tp would hold no unit."""
    check_axis(tp)
    if size % unit:
        raise ValueError(f"{name} {size} is not a multiple of the unit {unit}")
    units = f"{size}" if unit == 1 else f"{size} / {unit} = {size // unit}"
    if size // unit < tp.size:
        raise ValueError(f"{name} {units} is smaller than the {tp.name} size {tp.size}: some ranks would hold nothing")


def wrong_last(x: Tensor, size: int, what: str, hint: str = "") -> ValueError:
    return input_error(f"the last dimension of x {tuple(x.shape)} is {x.shape[-1]}, but {what} is {size}{hint}")


def check_sequence(x: Tensor, dim: int, tp: Axis) -> None:
    if x.shape[dim] % tp.size:
        raise input_error(
            f"sequence length {x.shape[dim]} is not a multiple of the {tp.name} size {tp.size}, as sequence_parallel "
            f"needs: pad it to {-(-x.shape[dim] // tp.size) * tp.size} with ignored targets (and a mask, if not causal)"
        )
