"""The transformer block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mpcore.layers.dropout import Dropout
from mpcore.layers.module import TensorParallelOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class TransformerBlock(nn.Module):
    """Pre-norm residual block: `x + attention(norm(x))`, then `x + mlp(norm(x))`. Any of its pieces can be yours.

    Args:
        attention: called as `attention(x, **attention_arguments)`.
        mlp: called as `mlp(x, **mlp_arguments)`.
        attention_norm, mlp_norm: called as `norm(x)`.
        dropout: probability on each branch, before it is added.
        options: `TensorParallelOptions` of the dropout.

    Source: Xiong et al. 2020, arXiv:2002.04745, figure 1b.

    Example:
        >>> attention, mlp = mpcore.ParallelAttention(8, num_heads=2), mpcore.ParallelMLP(8, 16)
        >>> block = mpcore.TransformerBlock(attention, mlp, mpcore.RMSNorm(8), mpcore.RMSNorm(8))
        >>> block(torch.zeros(1, 3, 8)).shape
        torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        attention_norm: nn.Module,
        mlp_norm: nn.Module,
        *,
        dropout: float = 0.0,
        **options: Unpack[TensorParallelOptions],
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.attention_dropout, self.mlp_dropout = Dropout(dropout, **options), Dropout(dropout, **options)

    def forward(
        self,
        x: Tensor,
        *,
        samples: Tensor | None = None,
        tokens: Tensor | None = None,
        mlp_arguments: Mapping[str, Any] | None = None,
        **attention_arguments,
    ) -> Tensor:
        """[B, T, D] -> [B, T, D], or this rank's shard of the sequence to the same.

        Args:
            samples: [B] global sample index of each row, for dropout in training.
            tokens: [T] place of each token in the whole sequence, for dropout where context parallel cuts it.
            mlp_arguments: passed to the MLP, such as `loss_scale` to a mixture of experts.
            attention_arguments: passed on, such as `rotary` or `cu_seqlens`.
        """
        y = self.attention(self.attention_norm(x), **attention_arguments)
        x = self.attention_dropout(y, samples, tokens, residual=x)
        y = self.mlp(self.mlp_norm(x), **(mlp_arguments or {}))
        return self.mlp_dropout(y, samples, tokens, residual=x)
