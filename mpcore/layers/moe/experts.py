"""The experts of one layer as grouped linear layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mpcore.kernels.grouped_linear import grouped_linear
from mpcore.layers.linear import check_size
from mpcore.layers.linear_ops import autocast_dtype, cast
from mpcore.layers.mlp import ACTIVATIONS, GATED
from mpcore.layers.module import Init, ParallelModule, uniform
from mpcore.mesh.axis import Axis
from mpcore.sharding.declare import Shard, cut, cut_blocks


class GroupedLinear(ParallelModule):
    """A linear layer without bias of each expert: `y = x W[e]^T`.

    Args:
        num_experts, in_features, out_features: logical sizes.
        ep: the axis that experts are dealt out over.
        shard: how each expert is cut.
        used_share: share of the experts that a token goes through, for those who count the work of a layer.
        init: fills the logical weight [E, F, D]; None: as `torch.nn.Linear`.
        device, dtype: of the parameter.
    """

    weight: Tensor

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        ep: Axis,
        shard: Shard,
        used_share: float = 1.0,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.sizes = num_experts, in_features, out_features
        self.used_share = used_share
        shards = (cut(num_experts, ep, 0), shard)
        init = init or uniform(1 / math.sqrt(in_features))
        self.declare("weight", (num_experts, out_features, in_features), init, shard=shards, device=device, dtype=dtype)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """[R, D] rows, expert by expert, `counts` [E/ep] of them each -> [R, F]; in the dtype of autocast if on."""
        dtype = autocast_dtype(x)
        if dtype is None and not x.is_meta and x.dtype != self.weight.dtype:
            raise ValueError(f"x is of {x.dtype}, the experts of {self.weight.dtype}: cast one, or use torch.autocast")
        return grouped_linear(cast(x, dtype), self.weight, counts)

    def extra_repr(self) -> str:
        """Global sizes."""
        return "{} experts, {}, {}".format(*self.sizes)


class Experts(nn.Module):
    """The feed-forward layers of all experts: `down(activation(gate_up(x)))`, without biases.

    Args:
        num_experts, dim, hidden_dim: E, D and F.
        activation: as of `ParallelMLP`; `gate_up` is [E, 2F, D], gate above up, or [E, F, D] where there is no gate.
        ep, etp: the axes; the output is a pending sum over etp.
        used_share: of `GroupedLinear`.
        init, output_init: fill the logical weights.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden_dim: int,
        activation: str = "swiglu",
        *,
        ep: Axis = Axis(role="ep"),
        etp: Axis = Axis(name="etp"),
        used_share: float = 1.0,
        init: Init | None = None,
        output_init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r} is unknown: it is one of {sorted(ACTIVATIONS)}")
        if num_experts % ep.size:
            raise ValueError(f"{num_experts} experts are not a multiple of the ep size {ep.size}")
        check_size("hidden_dim", hidden_dim, etp)
        self.activation = activation
        blocks = (hidden_dim,) * (1 + (activation in GATED))
        like = {"ep": ep, "used_share": used_share, "device": device, "dtype": dtype}
        rows, columns = cut_blocks(blocks, etp, 1, (1,) * len(blocks)), cut(hidden_dim, etp, 2)
        self.gate_up = GroupedLinear(num_experts, dim, sum(blocks), shard=rows, init=init, **like)
        self.down = GroupedLinear(num_experts, hidden_dim, dim, shard=columns, init=output_init or init, **like)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """[R, D] rows, expert by expert -> [R, D], the hidden [R, F/etp] between."""
        return self.down(ACTIVATIONS[self.activation](self.gate_up(x, counts)), counts)
