"""Dropout whose mask is the same on every layout."""

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
    """Zero elements with probability p, and multiply the other elements by 1 / (1 - p).

    The mask depends only on (seed, this module's name, sample, token, feature). All ranks that hold the same element
    use the same mask. The mask does not depend on tp, cp, dp, pp or the micro-batch size, and recomputation draws the
    same mask. Call `mpcore.materialize` or `mpcore.seed_dropout` to set the seed.

    Args:
        p: probability of zeroing an element, in [0, 1).
        options: `TensorParallelOptions`: how the input is sharded. In a model with sequence parallelism pass
            `tp=mesh.tp`, and `sequence_parallel=True` if the input is this rank's shard of the sequence.

    Raises:
        ValueError: if p is outside [0, 1).

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
        """[B, T, D] -> [B, T, D] ([T, B, D] with `sequence_dim=0`). In eval mode, or with p = 0, nothing is zeroed.

        Args:
            samples: int64 [B], the global sample index of each row. None is allowed only in eval mode or with p = 0.
            tokens: int64 [T], the position of each token in the full sequence. None: 0 .. T-1. Under context
                parallelism pass this cp rank's positions (`sequence_index`). Under sequence parallelism pass those of
                all tp ranks' tokens.
            residual: a tensor of the shape of `x`, added to the result in the same kernel.

        Returns:
            A tensor of the shape of `x`, in the dtype of `x`; with a residual, in the wider of both dtypes.

        Raises:
            ValueError: in training, if the module is not seeded or `samples` is missing.
        """
        if not self.training or self.p == 0:
            return x if residual is None else residual + x
        if self.key is None:
            raise input_error("dropout has no seed: call mpcore.seed_dropout(model, seed) or mpcore.materialize")
        if samples is None:
            raise input_error(
                f"dropout {self.p} needs samples, the global index of the sample in each row of x {tuple(x.shape)}: "
                "the mask depends on it, and not on which rank computes the row. Call dropout(x, samples) in a forward "
                "that has samples: nn.Sequential passes x alone"
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
        """Return the probability."""
        return f"p={self.p}"


def seed_dropout(model: nn.Module, seed: int) -> None:
    """Give each module that draws random numbers, such as `Dropout` and `Router`, its own key.

    The key depends only on the seed and the module's full name in the model, so it is the same on every layout.

    Args:
        model: the model, or this rank's pipeline stage.
        seed: the run's seed.

    Raises:
        ValueError: if a layer of the model is sequence parallel, and a `Dropout` was not given `tp`. It can't know
            whether its input is a shard of the sequence, on which its mask depends.

    Example:
        >>> model = nn.Sequential(mpcore.Dropout(0.1), mpcore.Dropout(0.1))
        >>> mpcore.seed_dropout(model, seed=0)
        >>> model[0].key == model[1].key
        False
    """
    modules = tuple(named_modules(model))
    layers = {name: module for name, module in modules if isinstance(module, ParallelLayer)}
    shards = next((name for name, layer in layers.items() if layer.sequence_parallel), None)
    for name, module in modules:
        if isinstance(module, Dropout) and module.p and module.tp.size == 1 and shards is not None:
            raise ValueError(
                f"{name} is a Dropout without tp, and {shards} is sequence parallel: pass it tp=mesh.tp and "
                f"sequence_parallel=True if its input is this rank's shard of the sequence, or tp=mesh.tp alone if its "
                f"input has all tokens. Otherwise its masks would depend on the layout"
            )
        if isinstance(module, RandomModule):
            module.seed_stream(seed, name)
