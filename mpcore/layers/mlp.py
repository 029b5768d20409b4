"""The feed-forward layer, its hidden units cut over the tensor-parallel axis.

Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), figure 3a; gated units: Shazeer 2020 (arXiv:2002.05202);
squared ReLU: So et al. 2021 (arXiv:2109.08668).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpcore.kernels.geglu import geglu
from mpcore.kernels.gelu import gelu
from mpcore.kernels.relu_squared import relu_squared
from mpcore.kernels.swiglu import swiglu
from mpcore.layers.linear import ColumnParallelLinear, GateUpParallelLinear, RowParallelLinear
from mpcore.layers.module import Init, LayerOptions, check_names, pick

if TYPE_CHECKING:
    from typing_extensions import Unpack

ACTIVATIONS = {"swiglu": swiglu, "geglu": geglu, "gelu": gelu, "relu_squared": relu_squared}
GATED = ("swiglu", "geglu")


class ParallelMLP(torch.nn.Module):
    """`down(activation(up(x)))`; each rank computes its share of the hidden units.

    Args:
        dim: D, the model width.
        hidden_dim: F, the hidden width (of the gate and of the up projection each, where there is a gate).
        activation: "swiglu", "geglu", "gelu" (tanh form) or "relu_squared".
        bias: biases of the projections.
        output_init: fills the weight of down; None: as `init`.
        options: tp, sequence_parallel, sequence_dim, init, device, dtype: see `mpcore.layers.module.LayerOptions`. With
            sequence parallel input and output are this rank's shard of the sequence.

    Raises:
        ValueError: for an unknown activation.

    Example:
        >>> mlp = mpcore.ParallelMLP(8, 32, "gelu")
        >>> mlp(torch.zeros(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        activation: str = "swiglu",
        *,
        bias: bool = True,
        output_init: Init | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        check_names(options, LayerOptions)
        check_activation(activation)
        self.activation = activation
        up = GateUpParallelLinear if activation in GATED else ColumnParallelLinear
        self.up = up(dim, hidden_dim, bias, **options)
        self.down = RowParallelLinear(hidden_dim, dim, bias, **pick(options, LayerOptions, init=output_init))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D], the hidden [..., F/tp] between."""
        return self.down(ACTIVATIONS[self.activation](self.up(x)))


def check_activation(name: str) -> None:
    """Refuse an activation that isn't there."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is unknown: it is one of {sorted(ACTIVATIONS)}")
