"""A mixture of experts that work in a latent space, narrower than the model: latent MoE.

    y = W_up (sum over the K chosen experts e of weight_e(x) expert_e(W_down x)) + shared(x)

The router and the shared experts read x itself. W_down [L, D] is applied before the dispatch and W_up [D, L] after the
outputs are back and summed, so the messages of ep and the experts' weights are L / D as large.

Source: Elango et al. 2026 (arXiv:2601.18089); used in Nemotron 3 (arXiv:2512.20856).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from mpcore.layers.linear import ColumnParallelLinear, replicated_linear
from mpcore.layers.module import LayerOptions, select_options
from mpcore.layers.moe.dispatch import AllGather, AllToAll, Returned, Sent
from mpcore.layers.moe.experts import Experts
from mpcore.layers.moe.layer import ParallelMoE


class LatentMoE(ParallelMoE):
    """Mixture of experts of width L. Both projections are replicated: each rank projects its own tokens.

    Args:
        dim, hidden_dim, num_experts, top_k: D, F, E and K; see `ParallelMoE`.
        latent_dim: L, the width of the experts' inputs and outputs. F is the hidden width of each expert.
        expert_class: see `ParallelMoE`.
        options: the other arguments of `ParallelMoE`. `init` fills W_down, and `output_init` W_up.

    Raises:
        ValueError: if `latent_dim` is smaller than 1, and as `ParallelMoE` does.

    Example:
        >>> moe = mpcore.experimental.LatentMoE(8, 16, num_experts=4, top_k=2, latent_dim=4)
        >>> moe(torch.zeros(1, 3, 8)).shape, moe.experts.down.weight.shape
        (torch.Size([1, 3, 8]), torch.Size([4, 4, 16]))
    """

    def __init__(
        self, dim: int, hidden_dim: int, num_experts: int, top_k: int, *, latent_dim: int,
        expert_class: type[Experts] = Experts, **options: Any,
    ) -> None:  # fmt: skip
        if latent_dim < 1:
            raise ValueError(f"latent_dim {latent_dim} is smaller than 1")
        narrow: Any = partial(_narrow, expert_class, latent_dim)
        super().__init__(dim, hidden_dim, num_experts, top_k, expert_class=narrow, **options)
        # Every rank of tp has other tokens, with and without sequence parallelism.
        layer: Any = {**select_options(options, LayerOptions), "sequence_parallel": True}
        self.latent_down: ColumnParallelLinear = replicated_linear(dim, latent_dim, False, **layer)
        layer["init"] = options.get("output_init") or layer.get("init")
        self.latent_up: ColumnParallelLinear = replicated_linear(latent_dim, dim, False, **layer)
        self.dispatcher = (_LatentAllToAll if isinstance(self.dispatcher, AllToAll) else _Latent)(self, top_k)


def _narrow(expert_class: type[Experts], latent_dim: int, num_experts: int, _: int, *sizes: Any, **on: Any) -> Experts:
    return expert_class(num_experts, latent_dim, *sizes, **on)


class _Latent(AllGather):
    """Send and bring back the latents of a layer's tokens."""

    def __init__(self, layer: LatentMoE, top_k: int) -> None:
        super().__init__(layer.ep, layer.etp, layer.router.num_experts, top_k)
        self.layer = layer  # not its projections: adapters replace them

    def send(self, x: Tensor, experts: Tensor, weights: Tensor, room: int | None) -> Sent:
        return super().send(self.layer.latent_down(x), experts, weights, room)

    def receive(self, returned: Returned) -> Tensor:
        return self.layer.latent_up(super().receive(returned))


class _LatentAllToAll(_Latent, AllToAll):
    pass
