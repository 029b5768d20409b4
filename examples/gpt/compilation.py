"""torch.compile, block by block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def compile_blocks(blocks: Sequence[nn.Module], backend: str) -> None:
    """Compile the forward of each block, in place; hooks, such as those of ZeRO-3 and offloading, stay around it.

    Call it last, after recomputation and sharding. Blocks that are alike share one graph, or two where each has its
    own keys for dropout.

    Args:
        blocks: the blocks.
        backend: one of `torch.compiler.list_backends`.
    """
    from torch._dynamo import config  # imported here, because it takes a second

    config.recompile_limit = max(config.recompile_limit, 2 * len(blocks))
    config.allow_unspec_int_on_nn_module = True  # keys of dropout are else constants: a graph for each block
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend)
