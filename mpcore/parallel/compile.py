"""Compile the blocks of a model. Hooks, such as those of ZeRO-3, stay outside the graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mpcore._torch.compile import allow_graphs


def compile_blocks(blocks: Sequence[nn.Module], backend: str) -> None:
    """Compile the forward of each block with torch.compile, after recomputation and sharding. Blocks share graphs."""
    allow_graphs(len(blocks))
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend)
