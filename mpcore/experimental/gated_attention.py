"""Attention whose heads are multiplied by a gate before the output projection.

    y = W_o (sigmoid(W_g x) * attention(x))

Source: Qiu et al. 2025, "Gated Attention for Large Language Models" (arXiv:2505.06708), section 2.2, gate G1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpcore.layers.attention.multi_head import ParallelAttention
from mpcore.layers.linear import ColumnParallelLinear
from mpcore.layers.module import LayerOptions, select_options


class GatedAttention(ParallelAttention):
    """Attention with a sigmoid gate, sharded over tp as the heads are.

    Args:
        dim, num_heads, num_kv_heads, head_dim: see `ParallelAttention`.
        gate: "channel": a gate for each feature of each head, as in Qwen3-Next; "head": one for each head.
        options: the other arguments of `ParallelAttention`.

    Raises:
        ValueError: if `gate` is neither, and as `ParallelAttention` does.

    Example:
        >>> attention = mpcore.experimental.GatedAttention(16, num_heads=4, gate="head")
        >>> attention(torch.zeros(1, 3, 16)).shape
        torch.Size([1, 3, 16])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        gate: str = "channel",
        **options: Any,
    ) -> None:
        if gate not in ("channel", "head"):
            raise ValueError(f"gate {gate!r} is neither 'channel' nor 'head'")
        super().__init__(dim, num_heads, num_kv_heads, head_dim, **options)
        width = self.head_dim if gate == "channel" else 1
        layer = select_options(options, LayerOptions)
        self.gate: ColumnParallelLinear = ColumnParallelLinear(dim, num_heads * width, False, unit=width, **layer)

    def merge_heads(self, y: Tensor, x: Tensor) -> Tensor:
        """Return sigmoid(W_g x) times the heads."""
        return super().merge_heads(y * self._to_heads(torch.sigmoid(self.gate(x)), self.gate.unit), x)
