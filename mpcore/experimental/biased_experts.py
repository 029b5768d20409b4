"""Experts with biases, and their clamped SwiGLU, as in GPT-OSS.

Source: GPT-OSS (arXiv:2508.10925), section 2, and its released code: biases in all projections of the experts, and
`gate sigmoid(1.702 gate) (up + 1)` with gate clamped to at most 7 and up to [-7, 7].
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpcore.layers.module import Init, constant, uniform
from mpcore.layers.moe.experts import Experts, GroupedLinear
from mpcore.mesh.axis import Axis
from mpcore.sharding.declare import Shard, cut


class BiasedGroupedLinear(GroupedLinear):
    """One linear layer per expert, with a bias: `y = x W[e]^T + b[e]`.

    Args:
        num_experts, in_features, out_features, ep, shard, others: see `GroupedLinear`. If `shard` cuts the input
            features, the ranks of its axis compute terms of a sum, and only its rank 0 adds the bias.

    Note:
        - The bias [E, F] has two dimensions, so `decay_groups` decays it and `Muon` takes it for a matrix: give it
          groups of its own where that is not wanted.

    Example:
        >>> axis = mpcore.Axis()
        >>> shard = mpcore.sharding.cut(6, axis, 1)
        >>> experts = mpcore.experimental.BiasedGroupedLinear(2, 4, 6, ep=axis, shard=shard)
        >>> experts(torch.zeros(5, 4), torch.tensor([3, 2])).equal(experts.bias[[0, 0, 0, 1, 1]])
        True
    """

    bias: Tensor

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        ep: Axis,
        shard: Shard,
        blocks: tuple[int, ...] = (),
        init: Init | None = None,
        **others: Any,
    ) -> None:
        sizes = (num_experts, in_features, out_features)
        super().__init__(*sizes, ep=ep, shard=shard, blocks=blocks, init=init, **others)
        default, of_experts = uniform(1 / math.sqrt(in_features)), cut(num_experts, ep, 0)
        sums = shard.dim == 2  # over the input features
        self.adds: bool = not sums or shard.axis.rank == 0
        self.declare(
            "bias", (num_experts, out_features), constant(0.0) if init else default,
            shard=(of_experts,) if sums else (of_experts, shard), partial=(shard.axis,) if sums else (),
            blocks=blocks, block_dim=1,
        )  # fmt: skip

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """[R, D] -> [R, F]; see `GroupedLinear.forward`. Rows after the last expert's are zero."""
        y = super().forward(x, counts)
        expert = torch.searchsorted(counts.cumsum(0), torch.arange(len(y), device=y.device), right=True)
        bias = self.bias if self.adds else self.bias * 0  # every rank has a gradient
        return y + F.pad(bias, (0, 0, 0, 1))[expert].to(y.dtype)


class BiasedExperts(Experts):
    """The feed-forward layers of all experts, with biases. Pass the class to `ParallelMoE(expert_class=..)`.

    Example:
        >>> from mpcore.experimental import BiasedExperts, clamped_swiglu
        >>> moe = mpcore.ParallelMoE(8, 16, 4, 2, clamped_swiglu, expert_class=BiasedExperts)
        >>> moe(torch.zeros(1, 3, 8)).shape
        torch.Size([1, 3, 8])
    """

    linear = BiasedGroupedLinear


def clamped_swiglu(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """Compute `gate sigmoid(alpha gate) (up + 1)` with clamped gate and up: [..., 2F] -> [..., F].

    Args:
        x: [gate | up].
        alpha: factor inside the sigmoid.
        limit: gate is clamped to at most `limit`, up to [-limit, limit].

    Example:
        >>> mpcore.experimental.clamped_swiglu(torch.tensor([0.0, 100.0, 1.0, 100.0]))  # [gate, gate, up, up]
        tensor([ 0.0000, 55.9996])
    """
    gate, up = x.chunk(2, -1)
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)
