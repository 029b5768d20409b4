"""Layers that replace attention and the dense MLP of a block: latent attention, and a mixture of experts."""

from __future__ import annotations

import dataclasses

from examples.gpt.config import GPTConfig, LatentConfig, Layout, MoEConfig
from mpcore import MultiLatentAttention, ParallelMoE, RotaryEmbedding
from mpcore.layers.module import normal


def latent_attention(
    c: GPTConfig, latent: LatentConfig, layout: Layout, rope: RotaryEmbedding | None
) -> MultiLatentAttention:
    """Build DeepSeek's multi-head latent attention."""
    return MultiLatentAttention(
        c.d_model, c.heads, **dataclasses.asdict(latent), bias=c.biases[0], rope=rope, norm_eps=c.eps,
        window=c.window, tp=layout.mesh.tp, context=layout.context, cp=layout.mesh.cp,
        sequence_parallel=layout.sequence_parallel, init=normal(c.init_std), output_init=normal(c.output_std),
        device=layout.device, dtype=layout.dtype,
    )  # fmt: skip


def mixture_of_experts(c: GPTConfig, moe: MoEConfig, layout: Layout) -> ParallelMoE:
    """Build a mixture of experts, sharded over the axes ep and etp of the mesh."""
    own = ("experts", "d_ff", "every", "dense")
    routing = {name: value for name, value in dataclasses.asdict(moe).items() if name not in own}
    mesh = layout.mesh
    return ParallelMoE(
        c.d_model, moe.d_ff or c.hidden, moe.experts, activation=c.activation, **routing,
        tp=mesh.tp, ep=mesh.ep, etp=mesh.etp, cp=mesh.cp, data=mesh.data, sequence_parallel=layout.sequence_parallel,
        init=normal(c.init_std), output_init=normal(c.output_std), device=layout.device, dtype=layout.dtype,
    )  # fmt: skip
