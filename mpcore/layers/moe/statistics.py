"""Read the routers' statistics once per step, and update the biases that balance the experts' loads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from mpcore.collectives import all_reduce
from mpcore.layers.moe.router import _REST, Router, _as_fractions
from mpcore.mesh.axis import Mesh
from mpcore.sharding.declarations import ModelTree, named_modules


class RouterStatistics(NamedTuple):
    """The statistics of one router in a step, over all tokens of all ranks.

    Attributes:
        tokens_per_expert: [E], the number of choices of each expert, including dropped ones.
        entropy: entropy of the probabilities, in nats, averaged over tokens.
        dropped: fraction of the choices that were dropped for lack of capacity.
        max_violation: the largest load divided by the mean load, minus 1.
        aux_loss, z_loss: the losses averaged over tokens, without their coefficients.

    Example:
        >>> moe = mpcore.ParallelMoE(4, 8, num_experts=2, top_k=2, bias_rate=0.01)
        >>> y = moe(torch.randn(2, 3, 4))
        >>> mpcore.layers.update_routers(moe, mpcore.Mesh())["router"].max_violation  # each expert has every token
        tensor(0., dtype=torch.float64)
    """

    tokens_per_expert: Tensor
    entropy: Tensor
    dropped: Tensor
    max_violation: Tensor
    aux_loss: Tensor
    z_loss: Tensor


@torch.no_grad()
def update_routers(model: nn.Module | ModelTree, mesh: Mesh) -> dict[str, RouterStatistics]:
    """Update the biases that balance the experts' loads, and reset the counts. Call it after the optimizer step.

    It is a collective over tp and data. Only this function changes the biases and the fractions of the "global" loss;
    forward never does.

    Args:
        model: the model, or this rank's pipeline stage.
        mesh: the model's mesh.

    Returns:
        A dictionary from each router's name to its `RouterStatistics` since the last call, on the device.

    Raises:
        ValueError: before any communication, if a trained router that needs its counts has counted nothing. The message
            names it.

    Example:
        >>> moe = mpcore.ParallelMoE(4, 8, num_experts=2, top_k=1, bias_rate=0.01)
        >>> y = moe(torch.randn(2, 3, 4))
        >>> mpcore.layers.update_routers(moe, mpcore.Mesh())["router"].tokens_per_expert.sum()
        tensor(6., dtype=torch.float64)
    """
    routers = {name: module for name, module in named_modules(model) if isinstance(module, Router)}
    if not routers:
        return {}
    for name, r in routers.items():
        by_counts = r.bias_rate > 0 or r.fractions is not None
        if by_counts and r.tally is None and r.training and r.weight.requires_grad:
            raise ValueError(
                f"{name or 'the router'} counted no token since the last update_routers: it ran without gradients, as "
                f"within torch.utils.checkpoint(use_reentrant=True), or not at all: use "
                f"mpcore.parallel.recompute or use_reentrant=False"
            )
    zero = torch.zeros((), dtype=torch.float64, device=mesh.device)
    tallies = [zero.expand(r.num_experts + _REST) if r.tally is None else r.tally for r in routers.values()]
    total = all_reduce(all_reduce(torch.cat(tallies), mesh.tp), mesh.data)
    found = {}
    for (name, router), tally in zip(routers.items(), total.split([len(t) for t in tallies]), strict=True):
        counts, (tokens, dropped, *sums) = tally[:-_REST], tally[-_REST:]
        if router.expert_bias is not None:
            router.expert_bias.add_(router.bias_rate * (counts.mean() - counts).sign())
        if router.fractions is not None:
            router.fractions.copy_(_as_fractions(counts))
        entropy, aux, z = (s / tokens.clamp(min=1) for s in sums)
        violation = counts.max() / counts.mean().clamp(min=1e-30) - 1
        found[name] = RouterStatistics(counts, entropy, dropped / counts.sum().clamp(min=1), violation, aux, z)
        router.tally = None
    return found
