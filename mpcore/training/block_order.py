"""Number the order in which a rank runs the blocks: the collectives of blocks meet in this order."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpcore._torch.compile import uncompiled
from mpcore.mesh.axis import Mesh
from mpcore.training.observers import Observer

if TYPE_CHECKING:
    from mpcore.training.run import Run


class BlockOrder(Observer):
    """The blocks that ran in training since the last `take`, as a number of less than 2^20.

    The ranks of tp and cp must run the same blocks, and with experts on ep all ranks of a stage.

    Args:
        blocks: those of `prepare`.
        mesh: the model's mesh.
    """

    def __init__(self, blocks: Sequence[nn.Module], mesh: Mesh) -> None:
        meet = [mesh.tp, mesh.cp, mesh.ep]
        self.names: str = " or ".join(axis.name for axis in meet if axis.size > 1)
        axes = [mesh.tp, mesh.cp, mesh.dp] if mesh.ep.size > 1 else [mesh.tp, mesh.cp]
        ranks = math.prod(axis.size for axis in axes)
        self.factor = -1 if any(axis.rank for axis in axes) else ranks - 1  # these add up to 0
        self.number = 0
        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._note, i))

    @uncompiled
    def _note(self, i: int, block: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self.number = zlib.crc32(b"%d %d" % (self.number, i)) % 2**20

    def dropped(self, run: Run) -> None:
        """Forget the blocks of a step that is abandoned, in which a rank may have raised."""
        self.number = 0

    def take(self) -> int:
        """Return the number times a factor, such that the sum over ranks is 0 if they ran the same blocks."""
        number, self.number = self.number, 0
        return self.factor * number
