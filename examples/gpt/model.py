"""A GPT on any mesh, and its pipeline stages. On every layout it computes what it computes in one process.

It has every option of the example. `examples/own_model.py` is a transformer without options: read it first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.gpt.config import GPTConfig, LatentConfig, Layout, MoEConfig
from mpcore import (
    Axis,
    ColumnParallelLinear,
    Dropout,
    LayerNorm,
    Mesh,
    MultiLatentAttention,
    ParallelAttention,
    ParallelMLP,
    ParallelMoE,
    PositionEmbedding,
    RMSNorm,
    RotaryEmbedding,
    TransformerBlock,
    VocabParallelEmbedding,
    sequence_index,
    vocab_parallel_cross_entropy,
)
from mpcore.collectives import shard_range
from mpcore.layers import GroupedLinear, document_ends, document_positions
from mpcore.layers.attention.documents import visible_keys
from mpcore.layers.module import normal
from mpcore.sharding import add_partial, owners


def build_norm(c: GPTConfig, layout: Layout) -> nn.Module:
    """Build a norm of the residual stream."""
    kind = RMSNorm if c.norm == "rms" else LayerNorm
    sharded, device, dtype = layout.sequence_parallel, layout.device, layout.dtype
    return kind(c.d_model, c.eps, tp=layout.mesh.tp, sequence_parallel=sharded, device=device, dtype=dtype)


def build_attention(c: GPTConfig, layout: Layout, rope: RotaryEmbedding | None) -> nn.Module:
    """Build the attention of a block: multi-head or grouped-query, or latent attention."""
    if c.latent is not None:
        return latent_attention(c, c.latent, layout, rope)
    qkv_bias, output_bias, _ = c.biases
    kind = partial(DroppedAttention, c.attention_dropout, c.seq_len) if c.attention_dropout else ParallelAttention
    return kind(
        c.d_model, c.heads, c.kv_heads, c.head_dim, bias=qkv_bias, output_bias=output_bias, rope=rope,
        qk_norm=c.qk_norm, norm_eps=c.eps, window=c.window, tp=layout.mesh.tp, cp=layout.mesh.cp,
        context=layout.context, sequence_parallel=layout.sequence_parallel, init=normal(c.init_std),
        output_init=normal(c.output_std), device=layout.device, dtype=layout.dtype,
    )  # fmt: skip


class DroppedAttention(ParallelAttention):
    """Causal attention that drops attention weights in training, with one mask on every layout. Needs O(T^2) memory.

    Args:
        p: probability of dropping a weight.
        seq_len: T of the samples in training.
        sizes, options: as of `ParallelAttention`.

    Raises:
        ValueError: if cp has more than one rank.
    """

    def __init__(self, p: float, seq_len: int, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        if self.cp.size > 1:
            raise ValueError(f"attention_dropout {p} can't go with cp {self.cp.size}: take cp 1 and a larger tp")
        self.dropout = Dropout(p, sharded_features=self.num_heads * seq_len, unit=seq_len, tp=self.tp)

    def forward(self, x: Tensor, *, rows: Tensor | None = None, **others: Any) -> Tensor:
        """[B, T, D] -> [B, T, D]. `rows`: [B] global sample index of each row; others: as of `ParallelAttention`."""
        if not self.training:
            return super().forward(x, **others)
        q, k, v = self.heads(x, others["rotary"] if self.rope is not None else None)
        B, T, H, K = q.shape
        repeats = self.kv_repeats or [H // max(k.shape[2], 1)] * k.shape[2]
        of = [i for i, count in enumerate(repeats) for _ in range(count)]  # the KV head of each query head
        scores = torch.einsum("bqhk,bshk->bqhs", q, k[:, :, of]) * K**-0.5
        see = visible_keys(B, T, x.device, others["cu_seqlens"], True, self.window).unsqueeze(2)
        weights = F.softmax(scores.masked_fill(~see, -torch.inf), -1, dtype=torch.promote_types(q.dtype, torch.float32))
        kept = self.dropout(weights.to(v.dtype).flatten(2), rows).unflatten(2, (H, T))
        return self.output(self.merge_heads(torch.einsum("bqhs,bshk->bqhk", kept, v[:, :, of]), x))


def build_mlp(c: GPTConfig, i: int, layout: Layout) -> nn.Module:
    """Build the MLP of block i: dense, or a mixture of experts."""
    if c.moe is not None and c.has_experts(i):
        return mixture_of_experts(c, c.moe, layout)
    return ParallelMLP(
        c.d_model, c.hidden, c.activation, bias=c.biases[2], tp=layout.mesh.tp,
        sequence_parallel=layout.sequence_parallel, init=normal(c.init_std), output_init=normal(c.output_std),
        device=layout.device, dtype=layout.dtype,
    )  # fmt: skip


def build_block(c: GPTConfig, i: int, layout: Layout, rope: RotaryEmbedding | None) -> TransformerBlock:
    """Build block i: x + attention(norm(x)), then x + mlp(norm(x))."""
    attention, mlp = build_attention(c, layout, rope), build_mlp(c, i, layout)
    norms = build_norm(c, layout), build_norm(c, layout)
    tp, sharded = layout.mesh.tp, layout.sequence_parallel
    return TransformerBlock(attention, mlp, *norms, dropout=c.dropout, tp=tp, sequence_parallel=sharded)


class GPT(nn.Module):
    """A decoder-only transformer, or one pipeline stage of it. Parameter names are the same on every layout.

    Args:
        config: the model.
        mesh: the axes; `Mesh()` is one process.
        context, sequence_parallel, device, dtype: as in `Layout`; build on "meta" and call `mpcore.layers.materialize`.
        blocks: the blocks of this stage; None: this rank's share of all.
        residual_dtype: of the residual stream; None: that of the embedding's output.

    Raises:
        ValueError: if there are fewer layers than pipeline ranks.
    """

    def __init__(
        self,
        config: GPTConfig,
        mesh: Mesh = Mesh(),
        *,
        context: str = "zigzag",
        sequence_parallel: bool = False,
        blocks: range | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        residual_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        c, layout = config, Layout(mesh, context, sequence_parallel, device, dtype)
        if blocks is None:
            if c.layers < mesh.pp.size:
                raise ValueError(f"{c.layers} layers are fewer than the pp size {mesh.pp.size}")
            blocks = range(*shard_range(c.layers, mesh.pp))
        self.config, self.tp, self.cp, self.context = c, mesh.tp, mesh.cp, context
        self.sequence_parallel = sequence_parallel and mesh.tp.size > 1
        self.residual_dtype = residual_dtype
        self.first, self.last = blocks.start == 0, blocks.stop == c.layers
        tp, init = mesh.tp, normal(c.init_std)

        if self.first or (self.last and c.tie_embeddings):  # if tied, the last stage has a copy of the same name
            self.embedding = VocabParallelEmbedding(
                c.vocab_size, c.d_model, tp=tp, sequence_parallel=sequence_parallel, init=init, device=device,
                dtype=dtype,
            )  # fmt: skip
            if c.tie_embeddings:
                add_partial(self.embedding, "weight", mesh.ends)
        if self.first and c.positions == "learned":
            self.position = PositionEmbedding(
                c.seq_len, c.d_model, tp=tp, sequence_parallel=sequence_parallel, init=init, device=device, dtype=dtype
            )
        if self.first:
            self.dropout = Dropout(c.dropout, tp=tp, sequence_parallel=sequence_parallel)
        self.rope = None
        if c.positions == "rope":
            width, pairs = (c.head_width, False) if c.latent is None else (c.latent.qk_rope_head_dim, True)
            more = {"fraction": c.rope_fraction, "scaling": c.rope_scaling, "interleaved": pairs}
            self.rope = RotaryEmbedding(width, c.rope_base, **more)

        self.blocks = nn.ModuleDict({str(i): build_block(c, i, layout, self.rope) for i in blocks})
        if self.last:
            self.norm = build_norm(c, layout)
            self.head = ColumnParallelLinear(
                c.d_model, c.vocab_size, bias=False, tp=tp, sequence_parallel=sequence_parallel, init=init,
                device=device, dtype=dtype,
            )  # fmt: skip
            if c.tie_embeddings:
                self.head.weight = self.embedding.weight

    def forward(
        self, x: Tensor, samples: Tensor | None = None, loss_factor: Tensor | None = None, mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """[B, T/cp] token ids -> [B, T/cp, V/tp] logits; between stages [B, T/cp, D], with sequence parallel 1/tp of T.

        Args:
            samples: [B] global sample index of each row, for dropout in training.
            loss_factor: [B], `Run.loss_factor` in each row, for the balance losses of experts in training.
            mask: [B, T] bool, False for padding, which goes to no expert; None: no padding.
            documents: [B, T] document of each token (`mpcore.document_ids`), to attend within; None: a row is one.
        """
        # x has T / shards tokens: cp shards every sequence, and sequence parallel the hidden states between stages
        shards = self.cp.size * (self.tp.size if self.sequence_parallel and not self.first else 1)
        length = x.shape[1] * shards
        positions = self.positions(length, x.device)
        if self.first:
            if length > self.config.seq_len:
                raise ValueError(f"sequence length {length} is longer than the model's {self.config.seq_len}")
            x = self.embedding(x).to(self.residual_dtype)
            if self.config.positions == "learned":
                x = self.position(x, self.positions(length, x.device, documents))
            x = self.dropout(x, samples, positions)
        for block, arguments in self.calls(length, positions, x.dtype, x.device, samples, loss_factor, mask, documents):
            x = block(x, **arguments)
        return self.head(self.norm(x)) if self.last else x

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[B, T/cp, V/tp] logits, [B, T/cp] next tokens (-100: none) -> cross-entropy in nats, summed over tokens."""
        V = self.config.vocab_size
        return vocab_parallel_cross_entropy(logits, targets, tp=self.tp, vocab_size=V, reduction="sum")

    def calls(
        self, length: int, positions: Tensor | None, dtype: torch.dtype, device: torch.device,
        samples: Tensor | None = None, loss_factor: Tensor | None = None, mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Iterator[tuple[nn.Module, dict[str, Any]]]:  # fmt: skip
        """Yield each block of this stage with its keyword arguments, for tokens at `positions` of the sequence."""
        ends = None if documents is None else document_ends(documents)
        arguments: dict[str, Any] = {"samples": samples, "tokens": positions, "cu_seqlens": ends}
        if self.config.attention_dropout:
            arguments["rows"] = samples
        if self.rope is not None:
            where = positions if documents is None else self.positions(length, device, documents)
            where = torch.arange(length, device=device) if where is None else where
            arguments["rotary"] = self.rope(where, torch.promote_types(dtype, torch.float32))
        routing = {"samples": samples, "loss_scale": loss_factor, "mask": mask, "positions": positions}
        for i, block in self.blocks.items():
            yield block, arguments | {"mlp_arguments": routing if self.config.has_experts(int(i)) else None}

    def positions(self, length: int, device: torch.device, documents: Tensor | None = None) -> Tensor | None:
        """Return the positions of this rank's tokens in sequences of this length; None: the rank has all of them.

        They are [T/cp], or with `documents` [B, T/cp] in each document.
        """
        index = None if self.cp.size == 1 else sequence_index(length, self.cp, self.context, device)
        if documents is None:
            return index
        restarted = document_positions(document_ends(documents), len(documents), length, device)
        return restarted if index is None else restarted[:, index]


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


def build_stages(config: GPTConfig, mesh: Mesh, blocks: Sequence[range], ranks: Sequence[int], **options) -> list[GPT]:
    """Build this rank's pipeline stages, lowest first, of the `blocks` and the pipeline rank of each stage.

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


@lru_cache(maxsize=16)
def parameter_shares(config: GPTConfig) -> tuple[int, int, int, float]:
    """Count the logical parameters of the blocks without their experts, of the experts, and of all else; and the share
    of the experts that a token uses."""
    model, shares = GPT(config, device="meta"), {1.0}
    counts = dict.fromkeys(("blocks", "experts", "ends"), 0)
    for name, module, _, p in owners(model):
        if isinstance(module, GroupedLinear):
            shares.add(module.used_share)
        kind = "experts" if isinstance(module, GroupedLinear) else "blocks" if name.startswith("blocks.") else "ends"
        counts[kind] += p.numel() if p.requires_grad else 0
    return counts["blocks"], counts["experts"], counts["ends"], min(shares)


def count_parameters(config: GPTConfig) -> int:
    """Count the logical parameters of the whole model."""
    return sum(parameter_shares(config)[:3])


def count_active_parameters(config: GPTConfig) -> int:
    """Count the logical parameters that one token uses: of the experts, only the `top_k` that the router chooses."""
    blocks, experts, ends, used = parameter_shares(config)
    return round(blocks + experts * used + ends)


def flops_of_token(config: GPTConfig) -> int:
    """Count the FLOPs of one token's forward and backward: 6 for each parameter of a matrix product, and attention's.

    Embedding tables take part in no product, except a tied table, which is the head too. Attention counts all tokens of
    the window or the sequence. By convention this includes tokens that the causal mask hides.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    c = config
    looked_up = (0 if c.tie_embeddings else c.vocab_size) + (c.seq_len if c.positions == "learned" else 0)
    if c.latent is None:
        widths = 2 * c.head_width  # of a head's scores and values
    else:
        widths = c.latent.qk_nope_head_dim + c.latent.qk_rope_head_dim + c.latent.v_head_dim
    seen = min(c.window or c.seq_len, c.seq_len)
    return 6 * (count_active_parameters(c) - looked_up * c.d_model + c.layers * c.heads * widths * seen)
