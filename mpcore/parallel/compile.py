"""Compile the blocks of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mpcore._torch.compile import allow_graphs


def compile_blocks(blocks: Sequence[nn.Module], backend: str) -> None:
    """Compile the forward of each block with torch.compile; hooks, such as those of ZeRO-3, stay around it.

    Call it after recompute and sharding. Blocks that are alike share one graph, or two if each has a dropout key.

    Args:
        blocks: in place.
        backend: one of `torch.compiler.list_backends`.
    """
    allow_graphs(len(blocks))
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend)
