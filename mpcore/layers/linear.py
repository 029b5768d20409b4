"""Linear layers whose weight is sharded over the tensor-parallel axis.

Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), section 3; sequence parallelism: Korthikanti et al. 2022
(arXiv:2205.05198), section 4.2.2.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from mpcore import collectives
from mpcore.kernels.quantize_fp8 import BLOCK
from mpcore.layers.linear_ops import all_gather_linear, copy_linear
from mpcore.layers.module import LayerOptions, ParallelModule, constant, input_error, uniform
from mpcore.mesh.axis import Axis, check_axis
from mpcore.sharding.declare import Run, Shard, cut, cut_blocks

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ALONE = Axis()


class LinearMode(NamedTuple):
    """How a parallel linear layer computes its matrix products.

    Attributes:
        split_backward: allow backward to compute the input's gradient and the weight's gradient in two separate passes,
            as zero-bubble pipelines do. The layer then uses torch's own product, which autograd can split, and keeps
            its whole input for backward.
        fp8: compute the forward product and both backward products in FP8.
    """

    split_backward: bool = False
    fp8: bool = False


class ParallelLinear(ParallelModule):
    """Base class of `ColumnParallelLinear` and `RowParallelLinear`: holds the parameters and the `LinearMode`.

    Attributes:
        mode: the `LinearMode`. Change it with `set_mode`.
    """

    mode = LinearMode()
    weight: Tensor
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, **options: Unpack[LayerOptions]) -> None:
        super().__init__(**options)
        self.in_features, self.out_features = in_features, out_features

    def declare_linear(self, bias: bool, of_weight: dict[str, Any], of_bias: dict[str, Any]) -> None:
        """Declare weight and bias; without an `init` they get the initial values of `torch.nn.Linear`."""
        default = uniform(1 / math.sqrt(self.in_features) if self.in_features else 0.0)
        self.declare("weight", (self.out_features, self.in_features), self._init or default, **of_weight)
        if bias:
            self.declare("bias", (self.out_features,), constant(0.0) if self._init else default, **of_bias)
        else:
            self.register_parameter("bias", None)

    def matrix(self) -> Tensor:
        """Return this rank's matrix [out_features, in_features]; the input is multiplied by its transpose."""
        return self.weight

    def set_mode(self, *, split_backward: bool | None = None, fp8: bool | None = None) -> None:
        """Choose how the next forward and backward passes compute the products.

        Args:
            split_backward: see `LinearMode`. None leaves it unchanged.
            fp8: see `LinearMode`. None leaves it unchanged.

        Raises:
            ValueError: if a value is not True, False or None, or if `fp8=True` and `check_fp8` rejects the weight.
        """
        wanted = {"split_backward": split_backward, "fp8": fp8}
        for name, value in wanted.items():
            if not isinstance(value, bool | None):
                raise ValueError(f"{name} is {value!r}: give True, False, or None to leave it as it is")
        if fp8:
            self.check_fp8()
        self.mode = self.mode._replace(**{name: value for name, value in wanted.items() if value is not None})

    def check_fp8(self, name: str = "the weight") -> None:
        """Raise ValueError if tp cuts the weight inside an FP8 block: results would then depend on the tp size."""
        sharding = self.shardings["weight"]
        for shard in sharding.shards:
            for edge in sorted({edge for runs in shard.runs for run in runs for edge in run}):
                if edge % BLOCK and edge != sharding.shape[shard.dim]:
                    axis, step = shard.axis, BLOCK * shard.axis.size
                    parts = (shard.dim == 0 and sharding.blocks) or (sharding.shape[shard.dim],)
                    found, wanted = (" + ".join(map(str, w)) for w in (parts, [-(-n // step) * step for n in parts]))
                    raise ValueError(
                        f"{name} is cut over {axis.name} {axis.size} at feature {edge}, which is no multiple of "
                        f"{BLOCK}, the block of FP8: take {wanted} features instead of {found}, a smaller {axis.name}, "
                        f"or don't convert this layer"
                    )

    def extra_repr(self) -> str:
        """Return the sizes of the unsharded layer, as the user wrote them."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, tp={self.tp.size}"


class ColumnParallelLinear(ParallelLinear):
    """`y = x W^T + b` with the rows of W (the output features) sharded over tp.

    Each rank accepts the same x and returns its shard of y's last dimension. In the notation of `mpcore.collectives`, x
    is I and y is S(-1).

    Args:
        in_features, out_features: sizes of the unsharded layer. Shards may be uneven.
        bias: whether the layer has a bias.
        gather_output: all-gather the output, so that every rank returns all `out_features`.
        regather: with sequence parallelism, keep only this rank's shard of the input and all-gather it again in
            backward.
        unit: sharding keeps groups of `unit` neighbouring output features together, for example `unit=head_dim`.
        options: `LayerOptions`: `tp`, `sequence_parallel`, `sequence_dim`, `init`, `device`, `dtype`. Pass
            `tp=mesh.tp`; without it each rank holds the unsharded layer. With `sequence_parallel` the input is this
            rank's shard of the sequence, and the layer all-gathers it.

    Raises:
        ValueError: if out_features / unit is smaller than the number of ranks.

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
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(in_features, out_features, **options)
        self.gather_output, self.regather, self.unit = gather_output, regather, unit
        shard = self.output_shard(unit)
        if gather_output and (unit > 1 or len(shard.mine) > 1):
            raise ValueError(
                f"gather_output can't put {len(shard.mine)} blocks of unit {unit} in order: split them first"
            )
        rows = {"shard": shard, "blocks": self.output_blocks()}
        self.declare_linear(bias, rows, rows)

    def output_shard(self, unit: int) -> Shard:
        """Return how the output features are sharded. Each block of `output_blocks` is sharded separately."""
        check_size("out_features", self.out_features, self.tp, unit)
        blocks = self.output_blocks() or (self.out_features,)
        return cut_blocks(blocks, self.tp, 0, (unit,) * len(blocks))

    def output_blocks(self) -> tuple[int, ...]:
        """Return the number of output features of each fused projection; () for a single projection."""
        return ()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features/tp], or [..., out_features] with `gather_output`."""
        check_last(x, self.in_features, "in_features")
        y = self.project(x)
        return collectives.gather(y, self.tp, -1, self.out_features) if self.gather_output else y

    def project(self, x: Tensor) -> Tensor:
        """Compute this rank's output features."""
        held, how = (self.matrix(), self.bias, self.tp), self.mode
        if self.sequence_parallel:
            return all_gather_linear(x, *held, self.sequence_dim, self.regather, *how)
        return copy_linear(x, *held, *how)


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
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        unit: int = 1,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(in_features, out_features, **options)
        check_size("in_features", in_features, self.tp, unit)
        self.input_is_parallel, self.unit = input_is_parallel, unit
        shard = cut(in_features, self.tp, 1, unit)
        self.local_in_features = shard.size(self.tp.rank)
        self.local_in_features_name = f"this rank's share of in_features {in_features}"
        partial = (self.tp,) if self.sequence_parallel else ()
        self.declare_linear(bias, {"shard": shard}, {"partial": partial})

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features/tp] -> [..., out_features]; this rank's shard of the sequence with `sequence_parallel`."""
        if self.sequence_parallel:
            check_sequence(x, self.sequence_dim, self.tp)
        if not self.input_is_parallel:
            check_last(x, self.in_features, "in_features")
            x = collectives.split(x, self.tp, -1)
        check_last(x, self.local_in_features, self.local_in_features_name)
        if self.tp.size == 1:  # adds the bias inside the product: bitwise equal to torch.nn.Linear
            return self.project(x, self.bias)
        y = self.project(x, None)
        if self.sequence_parallel:
            y = collectives.reduce_scatter(y, self.tp, self.sequence_dim)
        else:
            y = collectives.reduce(y, self.tp)
        bias = self.bias
        return y if bias is None else y + bias.to(y.dtype)

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply this rank's input features by its part of the weight: one term of the sum over ranks."""
        return copy_linear(x, self.matrix(), bias, _ALONE, *self.mode)


class GateUpParallelLinear(ColumnParallelLinear):
    """The gate and up projections of a gated MLP, fused in one product. Each rank returns [its gate | its up].

    The logical weight is [2F, D], the gate rows above the up rows, for every tp size.

    Args:
        in_features: D.
        hidden_features: F, the width of the gate projection and of the up projection. Shards may be uneven.
        bias: whether the projections have biases.
        others: the other arguments of `ColumnParallelLinear`.

    Example:
        >>> layer = mpcore.GateUpParallelLinear(4, 6, tp=mpcore.Axis(size=2, rank=0), device="meta")
        >>> layer.shardings["weight"].shards[0].mine  # rows of the logical weight: half of the gate, half of up
        ((0, 3), (6, 9))
    """

    def __init__(self, in_features: int, hidden_features: int, bias: bool = True, **others) -> None:
        self.hidden_features = hidden_features
        check_size("hidden_features", hidden_features, others.get("tp", Axis()))
        super().__init__(in_features, 2 * hidden_features, bias, **others)

    def output_blocks(self) -> tuple[int, ...]:
        """Return the sizes of gate and up."""
        return (self.hidden_features,) * 2


class QKVParallelLinear(ColumnParallelLinear):
    """The query, key and value projections, fused in one product. Each rank returns [its q heads | k heads | v heads].

    The logical weight is [(H + 2 H_kv) K, D], Q above K above V, for every tp size. Query heads are sharded over tp. KV
    heads are sharded too if tp divides their number. Otherwise each rank holds the KV heads that its query heads read,
    and several ranks may hold the same KV head. The layer declares these replicas in its `shardings`, and
    `mpcore.reduce_gradients` sums their gradients.

    Args:
        in_features: D.
        num_heads, num_kv_heads: H and H_kv of the unsharded layer.
        head_dim: K.
        bias: whether the projections have biases.
        others: the other arguments of `ColumnParallelLinear`.

    Attributes:
        local_heads, local_kv_heads: the number of query heads and of KV heads on this rank.
        kv_head_of: for each local query head, the index of the local KV head it reads.

    Raises:
        ValueError: if H_kv does not divide H, or H is smaller than the tp size.

    Example:
        >>> layer = mpcore.QKVParallelLinear(16, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> q, k, v = layer(torch.zeros(1, 3, 16)).split([4 * 4, 2 * 4, 2 * 4], dim=-1)
        >>> k.shape
        torch.Size([1, 3, 8])
    """

    def __init__(
        self, in_features: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool = True, **others
    ) -> None:
        tp = others.get("tp", Axis())
        check_size("num_heads", num_heads, tp)
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        group = num_heads // num_kv_heads
        self.q_heads = cut(num_heads, tp, 0).runs
        self.kv_heads = tuple(((a // group, (b - 1) // group + 1),) for ((a, b),) in self.q_heads)
        (q_start, q_end), (kv_start, kv_end) = self.q_heads[tp.rank][0], self.kv_heads[tp.rank][0]
        self.local_heads, self.local_kv_heads = q_end - q_start, kv_end - kv_start
        self.kv_head_of = [head // group - kv_start for head in range(q_start, q_end)]
        super().__init__(in_features, sum(self.output_blocks()), bias, unit=head_dim, **others)

    def output_shard(self, unit: int) -> Shard:
        """Shard Q, K and V separately, in whole heads."""
        blocks = self.output_blocks()
        starts = [0, *accumulate(blocks)][:-1]

        def runs(q: Run, kv: Run) -> tuple[Run, ...]:
            heads = zip(starts, (q, kv, kv)[-len(blocks) :], strict=True)
            return tuple((start + a * self.head_dim, start + b * self.head_dim) for start, (a, b) in heads)

        return Shard(self.tp, 0, tuple(runs(q, kv) for (q,), (kv,) in zip(self.q_heads, self.kv_heads, strict=True)))

    def output_blocks(self) -> tuple[int, ...]:
        """Return the sizes of Q, K and V."""
        return tuple(heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads))


class KVParallelLinear(QKVParallelLinear):
    """The key and value projections, fused in one product, for cross-attention, whose queries come from another input.

    The logical weight is [2 H_kv K, D], K above V. Arguments and attributes are those of `QKVParallelLinear`.

    Example:
        >>> layer = mpcore.layers.KVParallelLinear(16, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> layer(torch.zeros(1, 3, 16)).shape
        torch.Size([1, 3, 16])
    """

    def output_blocks(self) -> tuple[int, ...]:
        """Return the sizes of K and V."""
        return (self.num_kv_heads * self.head_dim,) * 2


def check_size(name: str, size: int, tp: Axis, unit: int = 1) -> None:
    """Raise ValueError if `unit` does not divide the size, or if a rank of tp would hold no unit."""
    check_axis(tp)
    if size % unit:
        raise ValueError(f"{name} {size} is not a multiple of the unit {unit}")
    units = f"{size}" if unit == 1 else f"{size} / {unit} = {size // unit}"
    if size // unit < tp.size:
        raise ValueError(f"{name} {units} is smaller than the {tp.name} size {tp.size}: some ranks would hold nothing")


def check_last(x: Tensor, size: int, what: str) -> None:
    """Raise ValueError if the last dimension of the input is not `size`."""
    if x.shape[-1] != size:
        raise input_error(f"the last dimension of x {tuple(x.shape)} is {x.shape[-1]}, but {what} is {size}")


def check_sequence(x: Tensor, dim: int, tp: Axis) -> None:
    """Raise ValueError if the tp size does not divide the sequence length."""
    if x.shape[dim] % tp.size:
        raise input_error(
            f"sequence length {x.shape[dim]} is not a multiple of the {tp.name} size {tp.size}, as sequence_parallel "
            f"needs: pad it to {-(-x.shape[dim] // tp.size) * tp.size} with ignored targets (and a mask, if not causal)"
        )
