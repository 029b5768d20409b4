"""Dropout whose mask no layout changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpcore.kernels.dropout_add import dropout_add
from mpcore.layers.module import ParallelLayer, RandomModule, TensorParallelOptions, input_error
from mpcore.sharding.declarations import named_modules

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Dropout(ParallelLayer, RandomModule):
    """Zeros elements by a mask that depends on (seed, this module's name, sample, token, feature) alone.

    So the mask is the same on every rank that holds the same element, at any tp, cp, dp, pp and micro-batch size, and
    again when the forward is recomputed. `mpcore.materialize` or `mpcore.seed_dropout` gives the seed and the name.

    Args:
        p: probability of zero, in [0, 1).
        options: `TensorParallelOptions`.

    Example:
        >>> model = nn.Sequential(mpcore.Dropout(0.5))
        >>> mpcore.seed_dropout(model, seed=0)
        >>> x = torch.ones(2, 4, 8)
        >>> first, second = (model[0](x, samples=torch.tensor([5, 6])) for _ in range(2))
        >>> torch.equal(first, second)
        True
    """

    def __init__(self, p: float, **options: Unpack[TensorParallelOptions]) -> None:
        super().__init__(**options)
        if not 0 <= p < 1:
            raise ValueError(f"dropout probability {p} is not in [0, 1)")
        self.p = p

    def forward(
        self, x: Tensor, samples: Tensor | None = None, tokens: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """[B, T, D] (or [T, B, D] with `sequence_dim` 0) -> the same; `x` itself in eval mode or with p = 0.

        Args:
            samples: [B] int64, the global index of the sample in each row.
            tokens: [T] int64, the place of each token in the whole sequence, where context parallel shards it
                (`sequence_index`); with sequence parallel before that shard. None: 0 .. T-1.
            residual: of the shape of `x`, added to the result in the same pass.

        Raises:
            ValueError: in training, if the module isn't seeded or `samples` is missing.
        """
        if not self.training or self.p == 0:
            return x if residual is None else residual + x
        if self.key is None:
            raise input_error("dropout has no seed: call mpcore.seed_dropout(model, seed) or mpcore.materialize")
        if samples is None:
            raise input_error(
                f"dropout {self.p} needs samples, the global index of the sample in each row of x {tuple(x.shape)}: "
                "the mask depends on it, and not on which rank computes the row"
            )
        length = x.shape[self.sequence_dim]
        first = self.tp.rank * length if self.sequence_parallel else 0
        if tokens is not None:
            tokens = tokens[first : first + length]
        elif self.sequence_parallel:
            tokens = torch.arange(first, first + length, device=x.device)
        where = {"samples": samples, "tokens": tokens, "sequence_dim": self.sequence_dim}
        return dropout_add(x, residual, self.p, key=self.key, **where)

    def extra_repr(self) -> str:
        """The probability."""
        return f"p={self.p}"


def seed_dropout(model: nn.Module, seed: int) -> None:
    """Give each module that draws random numbers, such as `Dropout` and `Router`, a key of its own.

    The key depends on the seed and on the module's full name in the model, so it is the same on every layout.

    Example:
        >>> model = nn.Sequential(mpcore.Dropout(0.1), mpcore.Dropout(0.1))
        >>> mpcore.seed_dropout(model, seed=0)
        >>> model[0].key == model[1].key
        False
    """
    for name, module in named_modules(model):
        if isinstance(module, RandomModule):
            module.seed_stream(seed, name)
