"""Compile the blocks of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mpcore._torch.compile import allow_graphs


def compile_blocks(blocks: Sequence[nn.Module], backend: str) -> None:
    """Have torch.compile make the forward of each block; hooks, such as those of ZeRO-3 and offload, stay around it.

    Call it after recompute and sharding. Blocks that are alike share one graph, or two where each has keys of its own
    for dropout.

    Args:
        blocks: in place.
        backend: one of `torch.compiler.list_backends`.
    """
    allow_graphs(len(blocks))
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend)
