"""The pipeline stages of a GPT."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from examples.gpt.config import GPTConfig
from examples.gpt.model import GPT
from mpcore import Axis, Mesh


def build_stages(config: GPTConfig, mesh: Mesh, blocks: Sequence[range], ranks: Sequence[int], **options) -> list[GPT]:
    """Build this rank's pipeline stages of a GPT, lowest first. A rank may hold several.

    Args:
        config, mesh, options: as in `GPT`.
        blocks: the blocks of each stage.
        ranks: the pipeline rank of each stage.

    Returns:
        The stages, for `mpcore.prepare`.

    Raises:
        ValueError: if embeddings are tied between ranks other than the first and the last.
    """
    one_rank = ranks[0] == ranks[-1]
    if config.tie_embeddings and not one_rank and (ranks[0], ranks[-1]) != (0, mesh.pp.size - 1):
        raise ValueError(
            f"tied embeddings on the pipeline ranks {ranks[0]} and {ranks[-1]}: only 0 and {mesh.pp.size - 1} sum them"
        )
    if one_rank:  # the first and the last stage share one table, so no gradient is summed between ranks
        mesh = dataclasses.replace(mesh, ends=Axis(role="ends"))
    mine = [held for held, rank in zip(blocks, ranks, strict=True) if rank == mesh.pp.rank]
    stages = [GPT(config, mesh, blocks=held, **options) for held in mine]
    if config.tie_embeddings and stages and stages[0].first and stages[-1].last:
        stages[-1].embedding = stages[0].embedding
        stages[-1].head.weight = stages[0].embedding.weight
    return stages
