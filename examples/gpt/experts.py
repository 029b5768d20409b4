"""Summarize the loads of the experts for the record of a step."""

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
    """Return, for each layer with experts, its facts and how many tokens each expert got. A collective over pp.

    Args:
        routers: the statistics of this rank's routers, by name.
        config, mesh: those of the run.
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
