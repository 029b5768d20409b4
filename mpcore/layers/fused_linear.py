"""Column-parallel layers that fuse several projections of one input in one product."""

from __future__ import annotations

from itertools import accumulate

from typing_extensions import Unpack

from mpcore.layers.linear import ColumnParallelLinear, check_size
from mpcore.layers.module import LayerOptions
from mpcore.mesh.axis import Axis
from mpcore.sharding.declare import Run, Shard, cut


class FusedOptions(LayerOptions, total=False):
    """`LayerOptions`, and `regather` of `ColumnParallelLinear`."""

    regather: bool


class GateUpParallelLinear(ColumnParallelLinear):
    """The gate and up projections of a gated MLP, fused in one product. Each rank returns [its gate | its up].

    The logical weight is [2F, D], the gate rows above the up rows, for every tp size.

    Args:
        in_features: D.
        hidden_features: F, the width of the gate projection and of the up projection. Shards may be uneven.
        bias: whether the projections have biases.
        options: `FusedOptions`.

    Example:
        >>> layer = mpcore.GateUpParallelLinear(4, 6, tp=mpcore.Axis(size=2, rank=0), device="meta")
        >>> layer.shardings["weight"].shards[0].mine  # rows of the logical weight: half of the gate, half of up
        ((0, 3), (6, 9))
    """

    def __init__(
        self, in_features: int, hidden_features: int, bias: bool = True, **options: Unpack[FusedOptions]
    ) -> None:
        check_size("hidden_features", hidden_features, options.get("tp", Axis()))
        super().__init__(in_features, 2 * hidden_features, bias, blocks=(hidden_features,) * 2, **options)
        self.hidden_features = hidden_features


class QKVParallelLinear(ColumnParallelLinear):
    """The query, key and value projections, fused in one product. Each rank returns [its q heads | k heads | v heads].

    The logical weight is [(H + 2 H_kv) K, D], Q above K above V, for every tp size. Query heads are sharded over tp. KV
    heads are sharded too if tp divides their number. Otherwise each rank holds the KV heads that its query heads read,
    and several ranks may hold the same KV head. The layer declares these replicas in its `shardings`, and
    `mpcore.gradients.reduce_gradients` sums their gradients.

    Args:
        in_features: D.
        num_heads, num_kv_heads: H and H_kv of the unsharded layer.
        head_dim: K.
        bias: whether the projections have biases.
        options: `FusedOptions`.

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

    has_queries = True

    def __init__(
        self, in_features: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool = True,
        **options: Unpack[FusedOptions],
    ) -> None:  # fmt: skip
        tp = options.get("tp", Axis())
        check_size("num_heads", num_heads, tp)
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
        group = num_heads // num_kv_heads
        q = [run for (run,) in cut(num_heads, tp, 0).runs]  # each rank's query heads
        kv = [(start // group, (end - 1) // group + 1) for start, end in q]  # the KV heads that they read
        fused = ((num_heads, q), (num_kv_heads, kv), (num_kv_heads, kv))[0 if self.has_queries else 1 :]
        blocks = tuple(heads * head_dim for heads, _ in fused)
        starts = [0, *accumulate(blocks)][:-1]

        def rows(*heads: Run) -> tuple[Run, ...]:
            runs = zip(starts, heads, strict=True)
            return tuple((start + a * head_dim, start + b * head_dim) for start, (a, b) in runs)

        shard = Shard(tp, 0, tuple(map(rows, *(runs for _, runs in fused))))
        super().__init__(in_features, sum(blocks), bias, unit=head_dim, blocks=blocks, shard=shard, **options)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        (q_start, q_end), (kv_start, kv_end) = q[tp.rank], kv[tp.rank]
        self.local_heads: int = q_end - q_start
        self.local_kv_heads: int = kv_end - kv_start
        self.kv_head_of: list[int] = [head // group - kv_start for head in range(q_start, q_end)]


class KVParallelLinear(QKVParallelLinear):
    """The key and value projections, fused in one product, for cross-attention, whose queries come from another input.

    The logical weight is [2 H_kv K, D], K above V. Arguments and attributes are those of `QKVParallelLinear`.

    Example:
        >>> layer = mpcore.layers.KVParallelLinear(16, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> layer(torch.zeros(1, 3, 16)).shape
        torch.Size([1, 3, 16])
    """

    has_queries = False
