"""Linear layers whose weight is cut over the tensor-parallel axis.

Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), section 3; sequence parallel: Korthikanti et al. 2022
(arXiv:2205.05198), section 4.2.2.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from mpcore import collectives
from mpcore.kernels.quantize_fp8 import BLOCK
from mpcore.layers.invariant import ColumnProduct, RowProduct, check_pieces, on_tokens
from mpcore.layers.linear_ops import all_gather_linear, copy_linear
from mpcore.layers.module import LayerOptions, ParallelModule, constant, input_error, uniform
from mpcore.mesh.axis import Axis, check_axis
from mpcore.sharding.declare import Run, Shard, cut, cut_blocks

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ALONE = Axis()


class LinearMode(NamedTuple):
    """How a parallel linear layer computes its products.

    Attributes:
        split_backward: the gradients of the input and of the weight are asked for apart, as zero-bubble pipelines do.
            Then the product is torch's own, which autograd can split; it keeps its whole input.
        fp8: compute all three products in FP8.
    """

    split_backward: bool = False
    fp8: bool = False


class ParallelLinear(ParallelModule):
    """What `ColumnParallelLinear` and `RowParallelLinear` share: parameters, and how products are computed.

    Attributes:
        mode: set it by `set_mode`.
    """

    mode = LinearMode()
    weight: Tensor
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, **options: Unpack[LayerOptions]) -> None:
        super().__init__(**options)
        self.in_features, self.out_features = in_features, out_features

    def declare_linear(self, bias: bool, of_weight: dict[str, Any], of_bias: dict[str, Any]) -> None:
        """Declare the parameters; without an `init` they begin as those of `torch.nn.Linear`."""
        default = uniform(1 / math.sqrt(self.in_features) if self.in_features else 0.0)
        self.declare("weight", (self.out_features, self.in_features), self._init or default, **of_weight)
        if bias:
            self.declare("bias", (self.out_features,), constant(0.0) if self._init else default, **of_bias)
        else:
            self.register_parameter("bias", None)

    def matrix(self) -> Tensor:
        """This rank's [out_features, in_features], by whose transpose the input is multiplied."""
        return self.weight

    def set_mode(self, *, split_backward: bool | None = None, fp8: bool | None = None) -> None:
        """Choose how products are computed from now on.

        Args:
            split_backward, fp8: as of `LinearMode`; None: as it is.

        Raises:
            ValueError: for another value, or as `check_fp8`.
        """
        wanted = {"split_backward": split_backward, "fp8": fp8}
        for name, value in wanted.items():
            if not isinstance(value, bool | None):
                raise ValueError(f"{name} is {value!r}: give True, False, or None to leave it as it is")
        if fp8:
            self.check_fp8()
        self.mode = self.mode._replace(**{name: value for name, value in wanted.items() if value is not None})

    def check_fp8(self, name: str = "the weight") -> None:
        """Refuse a weight that tp cuts within a block of FP8: another tp size would compute other products."""
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
        """Global sizes, as users wrote them."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, tp={self.tp.size}"


class ColumnParallelLinear(ParallelLinear):
    """`y = x W^T + b` with the rows of W (the output features) sharded over tp.

    Each rank takes the same x, and returns its shard of y's last dimension (I and S(-1) in `mpcore.collectives`).

    Args:
        in_features, out_features, bias: as of `torch.nn.Linear`: sizes of the whole layer. Shards may be uneven.
        gather_output: return the whole output on every rank.
        regather: with sequence parallel, gather the input again in backward instead of storing all of it.
        unit: groups of `unit` neighbouring output features are never split, such as `head_dim`.
        options: `tp`, the axis: give `mesh.tp`, without it each rank holds the whole layer; `sequence_parallel`: the
            input is this rank's shard of the sequence, gathered here; `sequence_dim`; `init`, `device`, `dtype`.

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
        self.gather_output, self.regather = gather_output, regather
        shard = self.output_shard(unit)
        if gather_output and (unit > 1 or len(shard.mine) > 1):
            raise ValueError(
                f"gather_output can't put {len(shard.mine)} blocks of unit {unit} in order: split them first"
            )
        rest = 0 if self.output_blocks() or unit > 1 else 1
        check_pieces("out_features", self.output_blocks() or (out_features,), self.tp, unit, rest)
        self.local_blocks = tuple(end - start for start, end in shard.mine)
        rows = {"shard": shard, "blocks": self.output_blocks()}
        self.declare_linear(bias, rows, rows)

    def output_shard(self, unit: int) -> Shard:
        """How the output features are sharded: each projection by itself."""
        check_size("out_features", self.out_features, self.tp, unit)
        blocks = self.output_blocks() or (self.out_features,)
        return cut_blocks(blocks, self.tp, 0, (unit,) * len(blocks))

    def output_blocks(self) -> tuple[int, ...]:
        """The output features of each projection, where there are several in one."""
        return ()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features/tp], or [..., out_features] with `gather_output`."""
        check_last(x, self.in_features, "in_features")
        y = self.project(x)
        return collectives.gather(y, self.tp, -1, self.out_features) if self.gather_output else y

    def project(self, x: Tensor) -> Tensor:
        """Compute this rank's output features."""
        held, how = (self.matrix(), self.bias, self.tp), self.mode
        if self.tp.virtual:
            dim = self.sequence_dim if self.sequence_parallel else None
            return ColumnProduct.apply(x, *held, dim, self.local_blocks)
        if self.sequence_parallel:
            return all_gather_linear(x, *held, self.sequence_dim, self.regather, *how)
        return copy_linear(x, *held, *how)


class RowParallelLinear(ParallelLinear):
    """`y = x W^T + b` with the columns of W (the input features) sharded over tp.

    Each rank takes its shard of x's last dimension, as a column-parallel layer returns it. The products
    are summed over the ranks, and each rank gets the whole y: x is S(-1) and y is I, the same on all ranks, in the
    terms of `mpcore.collectives`. The bias is added once, after the sum.

    Args:
        in_features, out_features, bias: as of `torch.nn.Linear`: sizes of the whole layer. Shards may be uneven.
        input_is_parallel: `x` is this rank's shard; otherwise it is whole, and split here.
        unit: groups of `unit` neighbouring input features are never split, such as `head_dim`.
        options: `tp`, the axis: give `mesh.tp`, without it each rank holds the whole layer; `sequence_parallel`: the
            output is this rank's shard of the sequence; `sequence_dim`; `init`, `device`, `dtype`.

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
        check_pieces("in_features", (in_features,), self.tp, unit)
        self.input_is_parallel = input_is_parallel
        shard = cut(in_features, self.tp, 1, unit)
        self.local_in_features = shard.size(self.tp.rank)
        self.local_in_features_name = f"this rank's share of in_features {in_features}"
        partial = (self.tp,) if self.sequence_parallel and not self.tp.virtual else ()
        self.declare_linear(bias, {"shard": shard}, {"partial": partial})

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features/tp] -> [..., out_features], or the sequence's shard of it."""
        if self.sequence_parallel:
            check_sequence(x, self.sequence_dim, self.tp)
        if not self.input_is_parallel:
            check_last(x, self.in_features, "in_features")
            x = collectives.split(x, self.tp, -1)
        check_last(x, self.local_in_features, self.local_in_features_name)
        if self.tp.virtual:
            how = (self.tp, self.sequence_dim, self.sequence_parallel)
            y = RowProduct.apply(x, self.matrix(), self.tp, self.sequence_dim if self.sequence_parallel else None)
            return y if self.bias is None else on_tokens(Tensor.add, *how, y, self.bias)
        if self.tp.size == 1:  # with the bias inside the product: bitwise what torch.nn.Linear gives
            return self.project(x, self.bias)
        y = self.project(x, None)
        if self.sequence_parallel:
            y = collectives.reduce_scatter(y, self.tp, self.sequence_dim)
        else:
            y = collectives.reduce(y, self.tp)
        bias = self.bias
        return y if bias is None else y + bias.to(y.dtype)

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute this rank's term of the output."""
        return copy_linear(x, self.matrix(), bias, _ALONE, *self.mode)


class GateUpParallelLinear(ColumnParallelLinear):
    """The gate and the up projection of a gated MLP in one product; each rank's output is [its gate | its up].

    The logical weight is [2F, D], gate above up, whatever the tp size.

    Args:
        in_features: D.
        hidden_features: F, the width of the gate and of the up projection. Shards may be uneven.
        others: as of `ColumnParallelLinear`.

    Example:
        >>> layer = mpcore.GateUpParallelLinear(4, 6, tp=mpcore.Axis(size=2, rank=0), device="meta")
        >>> layer.shardings["weight"].shards[0].mine  # of the logical rows: half of the gate, half of up
        ((0, 3), (6, 9))
    """

    def __init__(self, in_features: int, hidden_features: int, bias: bool = True, **others) -> None:
        self.hidden_features = hidden_features
        check_size("hidden_features", hidden_features, others.get("tp", Axis()))
        super().__init__(in_features, 2 * hidden_features, bias, **others)

    def output_blocks(self) -> tuple[int, ...]:
        """Gate and up."""
        return (self.hidden_features,) * 2


class QKVParallelLinear(ColumnParallelLinear):
    """The query, key and value projections in one product; each rank's output is [its q heads | k heads | v heads].

    The logical weight is [(H + 2 H_kv) K, D], Q above K above V, whatever the tp size. Query heads are sharded over
    tp. Where tp divides the number of KV heads they are sharded too. Otherwise each rank holds the KV heads that its
    query heads read, so that several ranks may hold the same one. The layer declares this in its `shardings`, and
    `mpcore.reduce_gradients` sums the gradients of the copies.

    Args:
        in_features: D.
        num_heads, num_kv_heads: H and H_kv, logical.
        head_dim: K.
        others: as of `ColumnParallelLinear`.

    Attributes:
        local_heads, local_kv_heads: of this rank.
        kv_head_of: for each local query head the local KV head it reads.

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
        """Q, K and V are cut each for itself, whole heads at a time."""
        blocks = self.output_blocks()
        starts = [0, *accumulate(blocks)][:-1]

        def runs(q: Run, kv: Run) -> tuple[Run, ...]:
            heads = zip(starts, (q, kv, kv)[-len(blocks) :], strict=True)
            return tuple((start + a * self.head_dim, start + b * self.head_dim) for start, (a, b) in heads)

        return Shard(self.tp, 0, tuple(runs(q, kv) for (q,), (kv,) in zip(self.q_heads, self.kv_heads, strict=True)))

    def output_blocks(self) -> tuple[int, ...]:
        """Q, K and V."""
        return tuple(heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads))


class KVParallelLinear(QKVParallelLinear):
    """The key and value projections of `QKVParallelLinear` in one product, for queries that come from elsewhere.

    The logical weight is [2 H_kv K, D], K above V. Arguments and attributes are those of `QKVParallelLinear`.

    Example:
        >>> layer = mpcore.layers.KVParallelLinear(16, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> layer(torch.zeros(1, 3, 16)).shape
        torch.Size([1, 3, 16])
    """

    def output_blocks(self) -> tuple[int, ...]:
        """K and V."""
        return (self.num_kv_heads * self.head_dim,) * 2


def check_size(name: str, size: int, tp: Axis, unit: int = 1) -> None:
    """Refuse a dimension that isn't made of whole units or leaves a rank with nothing."""
    check_axis(tp)
    if size % unit:
        raise ValueError(f"{name} {size} is not a multiple of the unit {unit}")
    units = f"{size}" if unit == 1 else f"{size} / {unit} = {size // unit}"
    if size // unit < tp.size:
        raise ValueError(f"{name} {units} is smaller than the {tp.name} size {tp.size}: some ranks would hold nothing")


def check_last(x: Tensor, size: int, what: str) -> None:
    """Refuse an input whose last dimension isn't `size`."""
    if x.shape[-1] != size:
        raise input_error(f"the last dimension of x {tuple(x.shape)} is {x.shape[-1]}, but {what} is {size}")


def check_sequence(x: Tensor, dim: int, tp: Axis) -> None:
    """Refuse a sequence that the axis can't cut into equal shards."""
    if x.shape[dim] % tp.size:
        raise input_error(
            f"sequence length {x.shape[dim]} is not a multiple of the {tp.name} size {tp.size}, as sequence_parallel "
            f"needs: pad it to {-(-x.shape[dim] // tp.size) * tp.size} with ignored targets (and a mask, if not causal)"
        )
