"""Compile the blocks of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mpcore._torch.compile import allow_graphs


def compile_blocks(blocks: Sequence[nn.Module], backend: str) -> None:
    """Compile the forward of each block with torch.compile. Hooks, such as those of ZeRO-3, stay outside the graph.

    Call it after recomputation and sharding. Blocks of equal structure share one graph, or two graphs if they have
    dropout keys.
    """
    allow_graphs(len(blocks))
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend)
