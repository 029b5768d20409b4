"""Dropout whose mask is the same on every layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from mpcore.kernels.dropout_add import dropout_add
from mpcore.layers.module import ParallelLayer, RandomModule, TensorParallelOptions, input_error
from mpcore.random import stream_key
from mpcore.sharding.declarations import named_modules
from mpcore.sharding.declare import cut


class Dropout(ParallelLayer, RandomModule):
    """Zero elements with probability p, and multiply the other elements by 1 / (1 - p).

    The mask depends only on (seed, this module's name, sample, token, feature). All ranks that hold the same element
    use the same mask. The mask does not depend on tp, cp, dp, pp or the micro-batch size, and recomputation draws the
    same mask. Call `mpcore.layers.materialize` or `mpcore.layers.seed_dropout` to set the seed.

    Args:
        p: probability of zeroing an element, in [0, 1).
        sharded_features: the number of features on all tp ranks, if `x` holds this rank's shard of the features, as
            between a column-parallel and a row-parallel layer. None: `x` holds all D features.
        unit: the number of consecutive features that stay on one rank, as in the column-parallel layer before.
        options: `TensorParallelOptions`: how the input is sharded. In a model with sequence parallelism pass
            `tp=mesh.tp`, and `sequence_parallel=True` if the input is this rank's shard of the sequence.

    Raises:
        ValueError: if p is outside [0, 1), or both the features and the sequence of `x` would be sharded.

    Example:
        >>> model = nn.Sequential(mpcore.Dropout(0.5))
        >>> mpcore.layers.seed_dropout(model, seed=0)
        >>> x = torch.ones(2, 4, 8)
        >>> first, second = (model[0](x, samples=torch.tensor([5, 6])) for _ in range(2))
        >>> torch.equal(first, second)
        True
    """

    def __init__(
        self, p: float, *, sharded_features: int | None = None, unit: int = 1, **options: Unpack[TensorParallelOptions]
    ) -> None:
        super().__init__(**options)
        if not 0 <= p < 1:
            raise ValueError(f"dropout probability {p} is not in [0, 1)")
        self.p = p
        self.shard: range | None = None
        if sharded_features is not None:
            if self.sequence_parallel:
                raise ValueError(
                    f"sharded_features={sharded_features} with sequence_parallel=True: between a column-parallel and a "
                    f"row-parallel layer x has all tokens, so leave sequence_parallel out"
                )
            runs = cut(sharded_features, self.tp, 0, unit).runs[self.tp.rank]
            self.shard = range(*runs[0]) if runs else range(0)

    def forward(
        self, x: Tensor, samples: Tensor | None = None, tokens: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """[B, T, D] -> [B, T, D] ([T, B, D] with `sequence_dim=0`). In eval mode, or with p = 0, nothing is zeroed.

        D is the number of features of this rank's shard with `sharded_features`.

        Args:
            samples: int64 [B], the global sample index of each row. None is allowed only in eval mode or with p = 0.
            tokens: int64 [T], the position of each token in the full sequence. None: 0 .. T-1. For cp and sequence
                parallelism see `positions` of `PositionEmbedding`.
            residual: a tensor of the shape of `x`, added to the result in the same kernel.

        Returns:
            A tensor of the shape of `x`, in the dtype of `x`; with a residual, in the wider of both dtypes.

        Raises:
            ValueError: in training, if the module is not seeded, `samples` is missing, or D is not the size of this
                rank's shard.
        """
        if residual is not None and residual.shape != x.shape:
            raise input_error(f"residual has shape {tuple(residual.shape)}, but x has {tuple(x.shape)}: expand it to x")
        if not self.training or self.p == 0:
            return x if residual is None else residual + x
        if self.key is None:
            raise input_error("dropout has no seed: call mpcore.layers.seed_dropout(model, seed), or materialize")
        if samples is None:
            raise input_error(
                f"dropout {self.p} needs samples, the global index of the sample in each row of x {tuple(x.shape)}: "
                "the mask depends on it, and not on which rank computes the row. Call dropout(x, samples) in a forward "
                "that has samples: nn.Sequential passes x alone"
            )
        if self.shard is not None and x.shape[-1] != len(self.shard):
            raise input_error(
                f"x has {x.shape[-1]} features, and this rank's shard {len(self.shard)}: pass sharded_features and "
                f"unit of the column-parallel layer before"
            )
        length = x.shape[self.sequence_dim]
        first, whole = (self.tp.rank * length, self.tp.size * length) if self.sequence_parallel else (0, length)
        if tokens is not None:
            if tokens.shape != (whole,):
                raise input_error(f"tokens {tuple(tokens.shape)} for {whole}: give this rank's, sequence_index(..)")
            tokens = tokens[first : first + length]
        elif self.sequence_parallel:
            tokens = torch.arange(first, first + length, device=x.device)
        first_feature = 0 if self.shard is None else self.shard.start
        return dropout_add(
            x, residual, self.p, key=self.key, samples=samples, tokens=tokens,
            sequence_dim=self.sequence_dim, first_feature=first_feature,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"p={self.p}"


def seed_dropout(model: nn.Module, seed: int) -> None:
    """Give each module that draws random numbers, such as `Dropout` and `Router`, a key of the seed and its full name.

    Args:
        model: the model, or this rank's pipeline stage.
        seed: the run's seed.

    Raises:
        ValueError: if a layer of the model is sequence parallel, and a `Dropout` was not given `tp`. It can't know
            whether its input is a shard of the sequence, on which its mask depends.

    Example:
        >>> model = nn.Sequential(mpcore.Dropout(0.1), mpcore.Dropout(0.1))
        >>> mpcore.layers.seed_dropout(model, seed=0)
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
            module.key = stream_key(seed, name)
