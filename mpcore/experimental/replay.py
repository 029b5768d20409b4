"""Record the experts of each token, so that another forward computes with the same: routing replay.

In reinforcement learning the sampler and the trainer round differently, and their routers choose other experts for some
tokens. The trainer then takes the sampler's choice, `moe(x, experts=..)`, and computes the weights itself.

Source: Ma et al. 2025 (arXiv:2510.11370), section 4.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpcore import collectives
from mpcore.experimental.overlap_experts import HalvesBlock
from mpcore.layers.module import recomputing
from mpcore.layers.moe.layer import ParallelMoE
from mpcore.sharding.declarations import named_modules


@contextlib.contextmanager
def record_routing(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Record the experts that the routers choose within the block. It is a collective over tp in each forward.

    Returns:
        For each `ParallelMoE`, by its name, one int64 [B, T, K] for each forward: the argument `experts` of this rank's
        forward. Padding has expert 0.

    Raises:
        ValueError: if a router has a capacity: a dropped choice is not recorded.

    Example:
        >>> moe = mpcore.ParallelMoE(4, 8, num_experts=4, top_k=2)
        >>> with mpcore.experimental.record_routing(moe) as experts:
        ...     y = moe(torch.ones(1, 3, 4))
        >>> torch.equal(moe(torch.ones(1, 3, 4), experts=experts[""][0]), y)
        True
    """
    found, hooks = dict[str, list[Tensor]](), []
    blocks: dict[Any, nn.Module] = {block.mlp: block for block in model.modules() if isinstance(block, HalvesBlock)}
    for name, moe in named_modules(model):
        if isinstance(moe, ParallelMoE):
            if moe.router.options.capacity_factor is not None:
                raise ValueError(
                    f"{name or 'the model'} has a capacity_factor of {moe.router.options.capacity_factor}: choices "
                    f"that it drops can't be recorded; build it with capacity_factor=None"
                )
            hooks.append(moe.router.register_forward_hook(_recorder(moe, found.setdefault(name, []))))
            if moe in blocks:
                hooks.append(blocks[moe].register_forward_hook(partial(_join_halves, found[name])))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _join_halves(found: list[Tensor], _: nn.Module, __: Any, y: Tensor) -> None:
    """Make one entry of the two that a block's forward added, a half of its rows each."""
    if not recomputing() and len(found[-1]) < len(y):
        found[-2:] = [torch.cat(found[-2:])]


def _recorder(moe: ParallelMoE, found: list[Tensor]) -> Any:
    @torch.no_grad()
    def record(_: nn.Module, args: tuple[Any, ...], routing: Any) -> None:
        if recomputing():
            return
        places, experts = args[1], routing.experts
        experts = experts.where(experts < moe.router.num_experts, 0)
        rows, whole = places.sequences, places.length // moe.cp.size
        if moe.sequence_parallel:
            experts = collectives.all_gather(experts.view(rows, -1, experts.shape[-1]), moe.tp, 1)
        else:
            experts = collectives.all_gather(experts, moe.tp, 0)[: rows * whole].view(rows, whole, -1)
        found.append(experts)

    return record
