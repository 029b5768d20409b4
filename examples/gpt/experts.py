"""What a step's record says of the experts' loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from examples.gpt.model import GPTConfig
from mpcore import Mesh
from mpcore.collectives import all_reduce
from mpcore.layers import RouterStatistics

FACTS = ("entropy", "dropped", "max_violation", "aux_loss", "z_loss")


def summarize_experts(routers: Mapping[str, RouterStatistics], config: GPTConfig, mesh: Mesh) -> dict[str, Any]:
    """For each layer with experts, lowest first, its facts and how many tokens each expert got: summed over stages.

    Args:
        routers: of this rank's stages, by name.
        config, mesh: of the run. All ranks of a pipeline call this.
    """
    assert config.moe is not None
    rows = torch.zeros(config.layers, len(FACTS) + config.moe.experts, dtype=torch.float64, device=mesh.device)
    for name, of in routers.items():
        block = int(name.split("blocks.")[1].split(".")[0])
        rows[block] = torch.cat([torch.stack(of[1:]), of.tokens_per_expert])
    mixed = [i for i in range(config.layers) if config.has_experts(i)]
    *facts, tokens = all_reduce(rows, mesh.pp)[mixed].split([1] * len(FACTS) + [config.moe.experts], 1)
    found: dict[str, Any] = {name: fact.flatten().tolist() for name, fact in zip(FACTS, facts, strict=True)}
    return found | {"tokens_per_expert": tokens.long().tolist()}
