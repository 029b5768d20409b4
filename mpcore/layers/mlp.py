"""The feed-forward layer, its hidden units cut over the tensor-parallel axis.

Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), figure 3a; gated units: Shazeer 2020 (arXiv:2002.05202);
squared ReLU: So et al. 2021 (arXiv:2109.08668).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpcore.kernels.geglu import geglu
from mpcore.kernels.gelu import gelu
from mpcore.kernels.relu_squared import relu_squared
from mpcore.kernels.swiglu import swiglu
from mpcore.layers.linear import ColumnParallelLinear, GateUpParallelLinear, RowParallelLinear
from mpcore.layers.module import Init
from mpcore.mesh.axis import Axis

ACTIVATIONS = {"swiglu": swiglu, "geglu": geglu, "gelu": gelu, "relu_squared": relu_squared}
GATED = ("swiglu", "geglu")


class ParallelMLP(torch.nn.Module):
    """`down(activation(up(x)))`; each rank computes its share of the hidden units.

    Args:
        dim: D, the model width.
        hidden_dim: F, the hidden width (of the gate and of the up projection each, where there is a gate).
        activation: "swiglu", "geglu", "gelu" (tanh form) or "relu_squared".
        bias: biases of the projections.
        tp: the axis.
        sequence_parallel, sequence_dim: input and output are this rank's shard of the sequence.
        init, output_init: fill the logical weights of up and down; None: as `torch.nn.Linear`.
        device, dtype: of the parameters.

    Raises:
        ValueError: for an unknown activation.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        activation: str = "swiglu",
        *,
        bias: bool = True,
        tp: Axis = Axis(name="tp"),
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        init: Init | None = None,
        output_init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r} is unknown: it is one of {sorted(ACTIVATIONS)}")
        self.activation = activation
        up = GateUpParallelLinear if activation in GATED else ColumnParallelLinear
        like = {"device": device, "dtype": dtype}
        sp = {"sequence_parallel": sequence_parallel, "sequence_dim": sequence_dim}
        self.up = up(dim, hidden_dim, bias, tp=tp, init=init, **sp, **like)
        self.down = RowParallelLinear(hidden_dim, dim, bias, tp=tp, init=output_init or init, **sp, **like)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D], the hidden [..., F/tp] between."""
        return self.down(ACTIVATIONS[self.activation](self.up(x)))
