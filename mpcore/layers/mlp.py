"""The feed-forward layer, with its hidden units sharded over the tensor-parallel axis.

Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), figure 3a; gated units: Shazeer 2020 (arXiv:2002.05202);
squared ReLU: So et al. 2021 (arXiv:2109.08668).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from mpcore._torch.values import real_tensors
from mpcore.kernels.activation import geglu, relu_squared, swiglu
from mpcore.layers.fused_linear import GateUpParallelLinear
from mpcore.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpcore.layers.module import Init, LayerOptions, check_names, select_options

Activation = str | Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": swiglu,
    "geglu": partial(geglu, approximate="none"),
    "geglu_tanh": geglu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": relu_squared,
    "silu": F.silu,
}
GATED = ("swiglu", "geglu", "geglu_tanh")


class ParallelMLP(torch.nn.Module):
    """`down(activation(up(x)))`, with the hidden units sharded over tp.

    Args:
        dim: D, the model width.
        hidden_dim: F, the hidden width. A gated MLP has a gate projection and an up projection of width F each.
        activation: "swiglu", "gelu", "gelu_tanh", "geglu", "geglu_tanh", "relu", "relu_squared" or "silu". "gelu" and
            "geglu" use the exact erf formula, as in torch. Or pass an element-wise callable [..., F] -> [..., F]
            without learnable weights. A callable [..., 2F] -> [..., F] is gated: it gets [gate | up] concatenated. For
            example, `torch.nn.functional.glu` applies the sigmoid to the second half, up.
        bias: whether the projections have biases.
        output_init: fills the weight of the down projection; None: use `init`.
        options: tp, sequence_parallel, sequence_dim, init, device, dtype: see `mpcore.layers.module.LayerOptions`. With
            `sequence_parallel`, input and output are this rank's shard of the sequence.

    Raises:
        ValueError: if the activation is unknown, or is a callable that has parameters or mixes features.

    Example:
        >>> mlp = mpcore.ParallelMLP(8, 32, "gelu")
        >>> mlp(torch.zeros(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(
        self, dim: int, hidden_dim: int, activation: Activation = "swiglu", *, bias: bool = True,
        output_init: Init | None = None, **options: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__()
        check_names(options, LayerOptions)
        self.activation: Callable[[Tensor], Tensor]
        self.activation, gated = find_activation(activation)
        self.parts = 2 if gated else 1
        up = GateUpParallelLinear if gated else ColumnParallelLinear
        self.up: ColumnParallelLinear | GateUpParallelLinear = up(dim, hidden_dim, bias, **options)
        of_down = select_options(options, LayerOptions, init=output_init)
        self.down: RowParallelLinear = RowParallelLinear(hidden_dim, dim, bias, **of_down)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]. The hidden activations are [..., F/tp]."""
        return self.down(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., F/tp], the input of `down`."""
        return self.activation(self.up(x))


def find_activation(given: Activation) -> tuple[Callable[[Tensor], Tensor], bool]:
    """Look up an activation by its name, or check a callable. Return the function and whether it is gated: 2F to F."""
    if isinstance(given, str):
        if given not in ACTIVATIONS:
            raise ValueError(f"activation {given!r} is unknown: it is one of {sorted(ACTIVATIONS)}, or a callable")
        return ACTIVATIONS[given], given in GATED
    if isinstance(given, torch.nn.Module) and next(given.parameters(), None) is not None:
        raise ValueError(
            f"activation {given} has parameters, and each rank of tp would train its own: write the MLP with "
            f"ColumnParallelLinear and RowParallelLinear, and call mpcore.add_partial(activation, 'weight', tp)"
        )
    return given, _tried(given)


def _tried(activation: Callable[[Tensor], Tensor]) -> bool:
    """Check on 2 tokens of 64 features that a callable is element-wise; return whether it is gated."""
    with real_tensors(), torch.no_grad():
        z = torch.linspace(-2, 3, 128, device="cpu").view(2, 64)
        try:
            whole = activation(z.clone())
            gated, some = whole.shape == (2, 32), activation(z[1:, 1::2].clone())
            same = whole.shape in ((2, 32), (2, 64)) and torch.allclose(some, whole[1:, 1::2])
        except Exception as error:
            raise ValueError(f"activation {activation} fails on a tensor (2, 64) on the CPU: {error}") from error
    if not same:
        raise ValueError(
            f"activation {activation} gives other values on a part of the features than on all of them, so it can't be "
            f"sharded over tp: give a function of each feature by itself"
        )
    return gated
