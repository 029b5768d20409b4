"""The experts of one layer as grouped linear layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from mpcore.kernels.grouped_linear import grouped_linear
from mpcore.layers.linear import check_size
from mpcore.layers.linear_ops import autocast_dtype, cast
from mpcore.layers.mlp import Activation, find_activation
from mpcore.layers.module import Init, ParallelModule, TensorOptions, input_error, uniform
from mpcore.mesh.axis import Axis
from mpcore.sharding.declare import Shard, cut, cut_blocks


class GroupedLinear(ParallelModule):
    """One linear layer per expert, without bias: `y = x W[e]^T`.

    Args:
        num_experts, in_features, out_features: sizes of the unsharded layer.
        ep: the axis over which experts are sharded.
        shard: how each expert's weight is sharded, from `mpcore.sharding.declare.cut`.
        blocks: lengths of the matrices that are concatenated in each expert's output features, for example gate and up.
            Muon orthogonalizes each of them separately. (): the output features are one matrix.
        used_share: the fraction of the experts that each token uses, for FLOP counts.
        init: fills the logical weight [num_experts, out_features, in_features]; None: the initial values of
            `torch.nn.Linear`.
        like: `TensorOptions`.

    Attributes:
        product: `grouped_linear`, or another function of x, weight and counts.

    Example:
        >>> from mpcore.sharding.declare import cut
        >>> experts = mpcore.layers.GroupedLinear(2, 4, 6, ep=mpcore.Axis(), shard=cut(6, mpcore.Axis(), 1))
        >>> experts(torch.zeros(5, 4), counts=torch.tensor([3, 2])).shape  # 3 rows of expert 0, then 2 of expert 1
        torch.Size([5, 6])
    """

    weight: Tensor
    product: Callable[[Tensor, Tensor, Tensor], Tensor] = staticmethod(grouped_linear)

    def __init__(
        self, num_experts: int, in_features: int, out_features: int, *, ep: Axis, shard: Shard,
        blocks: tuple[int, ...] = (), used_share: float = 1.0, init: Init | None = None, **like: Unpack[TensorOptions],
    ) -> None:  # fmt: skip
        super().__init__(**like)
        self.sizes: tuple[int, int, int] = (num_experts, in_features, out_features)
        self.used_share = used_share
        init, shards = init or uniform(1 / math.sqrt(in_features)), (cut(num_experts, ep, 0), shard)
        shape = (num_experts, out_features, in_features)
        self.declare("weight", shape, init, shard=shards, blocks=blocks, block_dim=1)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Multiply each row by the weight of its expert: [R, D] -> [R, F].

        Args:
            x: [R, D], the rows of the first local expert, then the rows of the second, and so on.
            counts: integers [E/ep] on x's device, the number of rows of each local expert. Their sum is at most R.

        Returns:
            [R, F], in x's dtype, or in autocast's dtype if autocast is on. Rows after the last expert's are zero.

        Raises:
            ValueError: if the shapes don't match, `counts` are floating-point or on another device, or x and the weight
                differ in dtype and autocast is off.
        """
        dtype = autocast_dtype(x)
        if dtype is None and not x.is_meta and x.dtype != self.weight.dtype:
            raise input_error(f"x is of {x.dtype}, the experts of {self.weight.dtype}: cast one, or use torch.autocast")
        return self.product(cast(x, dtype), self.weight, counts)

    def extra_repr(self) -> str:
        """Return the sizes of the unsharded layer."""
        return "{} experts, {}, {}".format(*self.sizes)


class Experts(nn.Module):
    """The feed-forward layers of all experts: `down(activation(gate_up(x)))`, without biases.

    Args:
        num_experts, dim, hidden_dim: E, D and F.
        activation: see `ParallelMLP`. `gate_up` is [E, 2F, D] with gate above up, or [E, F, D] without a gate.
        ep, etp: the axes of the experts. The output is partial over etp (must be summed).
        used_share: see `GroupedLinear`.
        init, output_init: fill the logical weights of `gate_up` and `down`.
        like: `TensorOptions`.

    Example:
        >>> experts = mpcore.layers.moe.Experts(2, dim=4, hidden_dim=6)
        >>> experts(torch.zeros(5, 4), counts=torch.tensor([3, 2])).shape
        torch.Size([5, 4])
    """

    linear = GroupedLinear

    def __init__(
        self, num_experts: int, dim: int, hidden_dim: int, activation: Activation = "swiglu", *,
        ep: Axis = Axis(role="ep"), etp: Axis = Axis(name="etp"), used_share: float = 1.0, init: Init | None = None,
        output_init: Init | None = None, **like: Unpack[TensorOptions],
    ) -> None:  # fmt: skip
        super().__init__()
        if num_experts % ep.size:
            raise ValueError(f"{num_experts} experts are not a multiple of the ep size {ep.size}")
        check_size("hidden_dim", hidden_dim, etp)
        self.activation: Callable[[Tensor], Tensor]
        self.activation, gated = find_activation(activation)
        blocks = (hidden_dim,) * (1 + gated)
        rows, columns = cut_blocks(blocks, etp, 1, (1,) * len(blocks)), cut(hidden_dim, etp, 2)
        shared: dict[str, Any] = {"ep": ep, "used_share": used_share, **like}
        up = self.linear(num_experts, dim, sum(blocks), shard=rows, blocks=blocks, init=init, **shared)
        self.gate_up: GroupedLinear = up
        self.down: GroupedLinear = self.linear(
            num_experts, hidden_dim, dim, shard=columns, init=output_init or init, **shared
        )

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map rows [R, D], sorted by expert, to [R, D]. The hidden activations are [R, F/etp]."""
        return self.down(self.activation(self.gate_up(x, counts)), counts)
