"""Refuse uneven shards of the sequence, in the first step, in layers that would take them for even ones."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from mpcore.layers.module import ParallelLayer, input_error
from mpcore.mesh.axis import Axis


class LengthCheck:
    """Check that layers with cp know the length of a sequence whose shards are uneven, until `end`.

    Args:
        model: the model, or this rank's stages.
        sizes: the number of tokens on each rank of cp, not all equal.
    """

    def __init__(self, model: nn.Module, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        own = [m for m in model.modules() if isinstance(m, ParallelLayer) and isinstance(getattr(m, "cp", None), Axis)]
        layers = [layer for layer in own if "length" in inspect.signature(layer.forward).parameters]
        self.hooks = [layer.register_forward_pre_hook(self._check, with_kwargs=True) for layer in layers]

    def _check(self, layer: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        known = any(given.get(name) is not None for name in ("length", "cu_seqlens", "mask", "bias", "memory", "cache"))
        x, cp, tp = (*args, given.get("x"))[0], layer.cp, layer.tp
        if known or len(args) > 1 or not isinstance(x, Tensor) or len(self.sizes) != cp.size:
            return
        tokens = x.shape[layer.sequence_dim] * (tp.size if layer.sequence_parallel else 1)
        if tokens == self.sizes[cp.rank]:
            raise input_error(
                f"the ranks of cp have {self.sizes} tokens, and without a length each takes its own number times "
                f"{cp.size} for the sequence: pass length={sum(self.sizes)} to the layer"
            )

    def end(self) -> None:
        """Check no more."""
        for hook in self.hooks:
            hook.remove()
