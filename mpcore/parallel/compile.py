"""Compile the blocks of a model. Hooks, such as those of ZeRO-3, stay outside the graphs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from mpcore._torch.compile import allow_graphs


def compile_blocks(blocks: Sequence[nn.Module], backend: str) -> None:
    """Compile the forward of each block with torch.compile, after recomputation and sharding. Blocks share graphs."""
    allow_graphs(len(blocks))
    for block in blocks:
        held = vars(block).get("forward", partial(type(block).forward, block))
        if isinstance(held, partial):  # a deep copy of the block computes with its own parameters
            block.forward = partial(torch.compile(held.func, backend=backend), *held.args, **held.keywords)
        else:
            block.forward = torch.compile(held, backend=backend)
