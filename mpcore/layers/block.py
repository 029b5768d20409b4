"""The transformer block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from mpcore.layers.dropout import Dropout
from mpcore.layers.module import TensorParallelOptions


class TransformerBlock(nn.Module):
    """Pre-norm residual block: `x + attention(norm(x))`, then `x + mlp(norm(x))`. Pass your own modules for any part.

    Args:
        attention: called as `attention(x, **attention_arguments)`.
        mlp: called as `mlp(x, **mlp_arguments)`.
        attention_norm, mlp_norm: called as `norm(x)`.
        dropout: dropout probability on the output of attention and of the MLP, before the residual is added.
        options: `TensorParallelOptions`: how the activations that dropout sees are sharded.

    Source: Xiong et al. 2020, arXiv:2002.04745, figure 1b.

    Example:
        >>> attention, mlp = mpcore.ParallelAttention(8, num_heads=2), mpcore.ParallelMLP(8, 16)
        >>> block = mpcore.TransformerBlock(attention, mlp, mpcore.RMSNorm(8), mpcore.RMSNorm(8))
        >>> block(torch.zeros(1, 3, 8)).shape
        torch.Size([1, 3, 8])
    """

    def __init__(
        self, attention: nn.Module, mlp: nn.Module, attention_norm: nn.Module, mlp_norm: nn.Module, *,
        dropout: float = 0.0, **options: Unpack[TensorParallelOptions],
    ) -> None:  # fmt: skip
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.attention_dropout: Dropout = Dropout(dropout, **options)
        self.mlp_dropout: Dropout = Dropout(dropout, **options)

    def forward(
        self,
        x: Tensor,
        *,
        samples: Tensor | None = None,
        tokens: Tensor | None = None,
        mlp_arguments: Mapping[str, Any] | None = None,
        **attention_arguments: Any,
    ) -> Tensor:
        """[B, T, D] -> [B, T, D]. Under sequence parallelism, input and output are this rank's shard of the sequence.

        Args:
            samples: int64 [B], the global sample index of each row. Dropout needs it in training.
            tokens: int64 [T], the position of each token in the full sequence. Dropout needs it under context
                parallelism.
            mlp_arguments: keyword arguments for the MLP, for example `loss_scale` for a mixture of experts.
            attention_arguments: keyword arguments for the attention, for example `rotary` or `cu_seqlens`.
        """
        y = self.attention(self.attention_norm(x), **attention_arguments)
        x = self.attention_dropout(y, samples, tokens, residual=x)
        y = self.mlp(self.mlp_norm(x), **(mlp_arguments or {}))
        return self.mlp_dropout(y, samples, tokens, residual=x)
