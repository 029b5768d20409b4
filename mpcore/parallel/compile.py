"""Compile the blocks of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def compile_blocks(blocks: Sequence[nn.Module], backend: str) -> None:
    """Have torch.compile make the forward of each block; hooks, such as those of ZeRO-3 and offload, stay around it.

    Call it after recompute and sharding. Blocks that are alike share one graph, or two where each has keys of its own
    for dropout.

    Args:
        blocks: in place.
        backend: one of `torch.compiler.list_backends`.
    """
    from torch._dynamo import config  # imported when it is needed, for it takes a second

    config.recompile_limit = max(config.recompile_limit, 2 * len(blocks))
    config.allow_unspec_int_on_nn_module = True  # the keys of dropout, else constants of a graph for each block
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend)
