"""Norms over the last dimension. Their weights are replicated over the tensor-parallel axis."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from mpcore.kernels.layer_norm import layer_norm
from mpcore.kernels.rms_norm import rms_norm
from mpcore.layers.module import LayerOptions, ParallelModule, constant
from mpcore.mesh.axis import Axis


class NormOptions(LayerOptions, total=False):
    """`LayerOptions`, and `partial`: the axes besides tp over which the weight's gradient must be all-reduced."""

    partial: tuple[Axis, ...]


class _Norm(ParallelModule):
    """Base class of the norms. A 16-bit weight makes the output 16-bit, even for a float32 residual stream."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, dim: int, eps: float, bias: bool, *, partial: tuple[Axis, ...] = (), **options: Unpack[LayerOptions]
    ) -> None:
        super().__init__(**options)
        self.dim, self.eps = dim, eps
        partial = (self.tp, *partial) if self.sequence_parallel else partial
        self.declare("weight", (dim,), self._init or constant(1.0), partial=partial)
        if bias:
            self.declare("bias", (dim,), constant(0.0), partial=partial)
        else:
            self.register_parameter("bias", None)

    def narrowed(self, y: Tensor) -> Tensor:
        return y.to(self.weight.dtype) if self.weight.dtype in (torch.bfloat16, torch.float16) else y

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


class RMSNorm(_Norm):
    """`x / rms(x) * weight`, computed in fp32 for half-precision inputs.

    Args:
        dim: D, the size of the last dimension.
        eps: added to the mean square. `torch.nn.RMSNorm` without `eps` adds `torch.finfo(x.dtype).eps`.
        options: `NormOptions`. With `sequence_parallel` each rank sees a part of the tokens, so the layer declares the
            weight's gradient partial over tp.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.

    Example:
        >>> norm = mpcore.RMSNorm(2)
        >>> norm(torch.tensor([[3.0, -3.0]])).detach().round(decimals=3)
        tensor([[ 1., -1.]])
    """

    def __init__(self, dim: int, eps: float = 1e-6, **options: Unpack[NormOptions]) -> None:
        super().__init__(dim, eps, False, **options)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.narrowed(rms_norm(x, self.weight, self.eps))


class LayerNorm(_Norm):
    """`(x - mean(x)) / std(x) * weight + bias`, computed in fp32 for half-precision inputs.

    Args:
        dim: D, the size of the last dimension.
        eps: added to the variance.
        bias: whether the norm has a bias.
        options: `NormOptions`.

    Source: Ba et al. 2016, arXiv:1607.06450, equation 4.

    Example:
        >>> norm = mpcore.LayerNorm(2)
        >>> norm(torch.tensor([[1.0, 3.0]])).detach().round(decimals=3)
        tensor([[-1.,  1.]])
    """

    def __init__(self, dim: int, eps: float = 1e-5, bias: bool = True, **options: Unpack[NormOptions]) -> None:
        super().__init__(dim, eps, bias, **options)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.narrowed(layer_norm(x, self.weight, self.bias, self.eps))
