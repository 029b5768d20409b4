"""A GPT on any mesh, and its pipeline stages. On every layout it computes what it computes in one process.

It has every option of the example. `examples/own_model.py` is a transformer without options: read it first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.gpt.config import LINEAR, BlockKind, GPTConfig, Layout, LinearConfig, MoEConfig
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
from mpcore.collectives import gather, shard_range
from mpcore.experimental import (
    BiasedExperts,
    GatedAttention,
    GatedDeltaNet,
    KimiDeltaAttention,
    LatentMoE,
    Mamba2,
    MultiTokenPrediction,
    clamped_swiglu,
)
from mpcore.layers import GroupedLinear, document_ends, document_positions
from mpcore.layers.attention.documents import visible_keys
from mpcore.layers.module import normal
from mpcore.sharding import add_partial, owners


def build_norm(c: GPTConfig, layout: Layout) -> nn.Module:
    """Build a norm of the residual stream."""
    kind = RMSNorm if c.norm == "rms" else LayerNorm
    sharded, device, dtype = layout.sequence_parallel, layout.device, layout.dtype
    return kind(c.d_model, c.eps, tp=layout.mesh.tp, sequence_parallel=sharded, device=device, dtype=dtype)


def build_attention(c: GPTConfig, kind: BlockKind, layout: Layout, rope: RotaryEmbedding | None) -> nn.Module:
    """Build the mixer of a block: multi-head, grouped-query, latent or linear attention."""
    options: dict[str, Any] = {
        "norm_eps": c.eps, "context": layout.context, "cp": layout.mesh.cp, "output_init": normal(c.output_std),
        **layer_options(c, layout),
    }  # fmt: skip
    if kind.mixer in LINEAR:
        return linear_attention(c, c.linear or LinearConfig(), kind.mixer, options)
    options |= {"rope": rope, "window": kind.window}
    qkv_bias, output_bias, _ = c.biases
    if c.latent is not None:
        return MultiLatentAttention(c.d_model, c.heads, **dataclasses.asdict(c.latent), bias=qkv_bias, **options)
    layer: Any = partial(GatedAttention, gate=c.gate) if c.gate else ParallelAttention
    layer = partial(DroppedAttention, c.attention_dropout, c.seq_len) if c.attention_dropout else layer
    heads = (c.d_model, c.heads, c.kv_heads, c.head_dim)
    return layer(*heads, bias=qkv_bias, output_bias=output_bias, qk_norm=c.qk_norm, sinks=c.sinks, **options)


def layer_options(c: GPTConfig, layout: Layout) -> dict[str, Any]:
    """Return the `LayerOptions` of all layers with matrices."""
    sharded, like = layout.sequence_parallel, {"device": layout.device, "dtype": layout.dtype}
    return {"tp": layout.mesh.tp, "sequence_parallel": sharded, "init": normal(c.init_std), **like}


def linear_attention(c: GPTConfig, linear: LinearConfig, mixer: str, options: dict[str, Any]) -> nn.Module:
    """Build a layer with a recurrence."""
    heads, width, options = linear.heads, linear.head_dim, {"convolution": linear.convolution, **options}
    if mixer == "delta":
        sizes = (linear.key_heads or heads, heads, linear.key_dim or width, width)
        return GatedDeltaNet(c.d_model, *sizes, **options)
    if mixer == "kimi":
        return KimiDeltaAttention(c.d_model, heads, width, **options)
    return Mamba2(c.d_model, heads, width, linear.state_dim, linear.groups, **options)


class PostNorm(nn.Module):
    """A module, and a norm of what it returns."""

    def __init__(self, inner: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm = inner, norm

    def forward(self, x: Tensor, **arguments: Any) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        return self.norm(self.inner(x, **arguments))


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


def build_mlp(c: GPTConfig, kind: BlockKind, layout: Layout) -> nn.Module:
    """Build the MLP of a block: dense, or a mixture of experts."""
    if c.moe is not None and kind.experts:
        return mixture_of_experts(c, c.moe, layout)
    options = {"output_init": normal(c.output_std), **layer_options(c, layout)}
    return ParallelMLP(c.d_model, c.hidden, c.activation, bias=c.biases[2], **options)


def build_block(c: GPTConfig, kind: BlockKind, layout: Layout, rope: RotaryEmbedding | None) -> TransformerBlock:
    """Build a block: x + attention(norm(x)), then x + mlp(norm(x))."""
    attention, mlp = build_attention(c, kind, layout, rope), build_mlp(c, kind, layout)
    if c.post_norm:
        attention, mlp = PostNorm(attention, build_norm(c, layout)), PostNorm(mlp, build_norm(c, layout))
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
        self, config: GPTConfig, mesh: Mesh = Mesh(), *, context: str = "zigzag", sequence_parallel: bool = False,
        blocks: range | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        residual_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
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
        tp, options = mesh.tp, layer_options(c, layout)

        if self.first or (self.last and c.shares_embedding):  # the last stage has a copy of the same name
            self.embedding = VocabParallelEmbedding(c.vocab_size, c.d_model, **options)
            if c.shares_embedding:
                add_partial(self.embedding, "weight", mesh.ends)
        if self.first and c.positions == "learned":
            self.position = PositionEmbedding(c.seq_len, c.d_model, **options)
        if self.first:
            self.dropout = Dropout(c.dropout, tp=tp, sequence_parallel=sequence_parallel)
        width, pairs = (c.head_width, False) if c.latent is None else (c.latent.qk_rope_head_dim, True)
        more = {"fraction": c.rope_fraction, "scaling": c.rope_scaling, "interleaved": pairs}
        self.kinds = {str(i): c.kind(i) for i in blocks}
        bases = {kind.rope_base for kind in self.kinds.values()}
        self.ropes: dict[float | None, RotaryEmbedding] = {
            base: RotaryEmbedding(width, base, **more) for base in bases if base is not None
        }

        def block(kind: BlockKind) -> nn.Module:
            return build_block(c, kind, layout, self.ropes.get(kind.rope_base))

        self.blocks = nn.ModuleDict({i: block(kind) for i, kind in self.kinds.items()})
        if self.last:
            self.norm = build_norm(c, layout)
            self.head = ColumnParallelLinear(c.d_model, c.vocab_size, bias=False, **options)
            if c.tie_embeddings:
                self.head.weight = self.embedding.weight
        if self.last and c.mtp:
            further = [block(self.kinds[str(c.layers - 1)]) for _ in range(c.mtp)]
            self.mtp = MultiTokenPrediction(c.d_model, further, norm_eps=c.eps, **options)
        self.further_losses: list[Tensor] = []

    def forward(
        self, x: Tensor, samples: Tensor | None = None, loss_factor: Tensor | None = None, mask: Tensor | None = None,
        documents: Tensor | None = None, later: Tensor | None = None, drafting: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """[B, T/cp] token ids -> [B, T/cp, V/tp] logits; between stages [B, T/cp, D], with sequence parallel 1/tp of T.

        With `later` the logits are [B, (1 + n) T/cp, V/tp], the next token's first.

        Args:
            samples: [B] global sample index of each row, for dropout in training.
            loss_factor: [B], `Run.loss_factor` in each row, for the balance losses of experts in training.
            mask: [B, T] bool, False for padding, which goes to no expert; None: no padding.
            documents: [B, T] document of each token (`mpcore.document_ids`), to attend within; None: a row is one.
            later: [B, n, T/cp] the inputs of `MultiTokenPrediction`.
            drafting: [3 + T], return what `draft` returns in place of logits.
        """
        # x has T / shards tokens: cp shards every sequence, and sequence parallel the hidden states between stages
        shards = self.cp.size * (self.tp.size if self.sequence_parallel and not self.first else 1)
        length = x.shape[1] * shards
        positions = self.positions(length, x.device)
        if self.first:
            if length > self.config.seq_len:
                raise ValueError(f"sequence length {length} is longer than the model's {self.config.seq_len}")
            x = self.embed(x)
            if self.config.positions == "learned":
                x = self.position(x, self.positions(length, x.device, documents))
            x = self.dropout(x, samples, positions)
        of = self.arguments(length, positions, x.dtype, x.device, samples, loss_factor, mask, documents)
        for i, block in self.blocks.items():
            x = block(x, **of(self.kinds[i]))
        if not self.last:
            return x
        if drafting is not None:
            return self.draft(x, drafting, of(self.kinds[str(self.config.layers - 1)]))
        states = [self.norm(x)]
        if later is not None:
            kind = self.kinds[str(self.config.layers - 1)]
            states += self.mtp(x, later.unbind(1), self.embed, **of(kind))
        return torch.cat([self.head(state) for state in states], 1) if later is not None else self.head(states[0])

    def draft(self, x: Tensor, drafting: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Check guessed tokens, and guess as many as `MultiTokenPrediction` has blocks. Needs cp 1 and one sample.

        Args:
            x: [1, T, D], the output of the last block.
            drafting: int64 [3 + T]: the numbers of known tokens, of guesses behind them, and of tokens in the
                vocabulary; then the tokens, the guesses and padding.
            arguments: of a block of the chain.

        Returns:
            int64 [2 + guesses + n]: how many guesses are right; these, the likeliest token after them, and 0 for each
            guess that is wrong; then n guesses that follow.
        """
        (known, count, vocab, *ids), T = drafting.tolist(), len(drafting) - 3

        def likeliest(state: Tensor, start: int, end: int) -> list[int]:
            logits = gather(self.head(state)[0, start:end], self.tp, 1, self.config.vocab_size)
            return logits[:, :vocab].argmax(-1).tolist()

        best = likeliest(self.norm(x), known - 1, known + count)
        right = next((i for i in range(count) if ids[known + i] != best[i]), count)
        tokens, last = [*ids[: known + right], best[right]], known + right - 1
        for depth in range(self.config.mtp):
            shifted = torch.tensor([*tokens[depth + 1 :], *ids][:T], device=x.device)
            x = self.mtp.advance(depth, x, shifted[None], self.embed, **arguments)
            tokens += likeliest(self.mtp.norms[depth](x), last, last + 1)
        new = last + 2
        return torch.tensor([right, *tokens[known:new], *[0] * (count - right), *tokens[new:]], device=x.device)

    def embed(self, ids: Tensor) -> Tensor:
        """[B, T/cp] token ids -> [B, T/cp, D], the begin of the residual stream."""
        x = self.embedding(ids).to(self.residual_dtype)
        return x if self.config.embedding_scale == 1 else x * self.config.embedding_scale

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[B, T/cp, V/tp] logits, [B, T/cp] next tokens (-100: none) -> cross-entropy in nats, summed over tokens.

        With logits [B, (1 + n) T/cp, V/tp] and targets [B, 1 + n, T/cp], the losses of the n further tokens are
        multiplied by `mtp_weight` / n.
        """
        if targets.dim() == 3:
            pairs = zip(logits.chunk(targets.shape[1], 1), targets.unbind(1), strict=True)
            first, *others = (self.loss(*pair) for pair in pairs)
            further = torch.stack(others).mean()
            self.further_losses.append(further.detach())
            return first + further * self.config.mtp_weight
        V = self.config.vocab_size
        return vocab_parallel_cross_entropy(logits, targets, tp=self.tp, vocab_size=V, reduction="sum")

    def calls(self, *about: Any, **more: Any) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
        """Yield each block of this stage with its keyword arguments; see `arguments`."""
        of = self.arguments(*about, **more)
        for i, block in self.blocks.items():
            yield block, of(self.kinds[i])

    def arguments(
        self, length: int, positions: Tensor | None, dtype: torch.dtype, device: torch.device,
        samples: Tensor | None = None, loss_factor: Tensor | None = None, mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Callable[[BlockKind], dict[str, Any]]:  # fmt: skip
        """Return the keyword arguments of a block by its kind, for tokens at `positions` of the sequence."""
        ends = None if documents is None else document_ends(documents)
        common: dict[str, Any] = {"samples": samples, "tokens": positions, "cu_seqlens": ends}
        where = positions if documents is None else self.positions(length, device, documents)
        where = torch.arange(length, device=device) if where is None else where
        tables = {base: rope(where, torch.promote_types(dtype, torch.float32)) for base, rope in self.ropes.items()}
        routing = {"samples": samples, "loss_scale": loss_factor, "mask": mask, "positions": positions}

        def of(kind: BlockKind) -> dict[str, Any]:
            rotary = {} if kind.rope_base is None else {"rotary": tables[kind.rope_base]}
            rows = {"rows": samples} if self.config.attention_dropout and kind.mixer == "attention" else {}
            return {**common, **rotary, **rows, "mlp_arguments": routing if kind.experts else None}

        return of

    def positions(self, length: int, device: torch.device, documents: Tensor | None = None) -> Tensor | None:
        """Return the positions of this rank's tokens in sequences of this length; None: the rank has all of them.

        They are [T/cp], or with `documents` [B, T/cp] in each document.
        """
        index = None if self.cp.size == 1 else sequence_index(length, self.cp, self.context, device)
        if documents is None:
            return index
        restarted = document_positions(document_ends(documents), len(documents), length, device)
        return restarted if index is None else restarted[:, index]


def mixture_of_experts(c: GPTConfig, moe: MoEConfig, layout: Layout) -> ParallelMoE:
    """Build a mixture of experts, sharded over the axes ep and etp of the mesh."""
    own = ("experts", "d_ff", "every", "dense", "latent_dim", "biased")
    options: dict[str, Any] = {name: value for name, value in dataclasses.asdict(moe).items() if name not in own}
    options |= {name: getattr(layout.mesh, name) for name in ("ep", "etp", "cp", "data")}
    options |= {"output_init": normal(c.output_std), "activation": c.activation, **layer_options(c, layout)}
    if moe.biased:
        options |= {"activation": clamped_swiglu, "expert_class": BiasedExperts}
    layer = ParallelMoE if moe.latent_dim is None else partial(LatentMoE, latent_dim=moe.latent_dim)
    return layer(c.d_model, moe.d_ff or c.hidden, moe.experts, **options)


def build_stages(config: GPTConfig, mesh: Mesh, blocks: Sequence[range], ranks: Sequence[int], **options) -> list[GPT]:
    """Build this rank's pipeline stages, lowest first, of the `blocks` and the pipeline rank of each stage.

    Raises:
        ValueError: if embeddings are tied between ranks other than the first and the last.
    """
    one_rank = ranks[0] == ranks[-1]
    if config.shares_embedding and not one_rank and (ranks[0], ranks[-1]) != (0, mesh.pp.size - 1):
        raise ValueError(
            f"shared embedding on the pipeline ranks {ranks[0]} and {ranks[-1]}: only 0 and {mesh.pp.size - 1} sum them"
        )
    if one_rank:  # the first and the last stage share one table, so no gradient is summed between ranks
        mesh = dataclasses.replace(mesh, ends=Axis(role="ends"))
    mine = [held for held, rank in zip(blocks, ranks, strict=True) if rank == mesh.pp.rank]
    stages = [GPT(config, mesh, blocks=held, **options) for held in mine]
    if config.shares_embedding and stages and stages[0].first and stages[-1].last:
        stages[-1].embedding = stages[0].embedding
        if config.tie_embeddings:
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
    the window or the sequence. By convention this includes tokens that the causal mask hides. A linear block counts the
    products with its state.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    c = config
    looked_up = (0 if c.tie_embeddings else c.vocab_size) + (c.seq_len if c.positions == "learned" else 0)
    of = c.latent  # below: the widths of a head's scores and values
    widths = 2 * c.head_width if of is None else of.qk_nope_head_dim + of.qk_rope_head_dim + of.v_head_dim
    linear = c.linear or LinearConfig()
    keys = {"delta": linear.key_dim or linear.head_dim, "kimi": linear.head_dim, "mamba": linear.state_dim}
    mixers = 0
    for kind in [*map(c.kind, range(c.layers)), *[c.kind(c.layers - 1)] * c.mtp]:
        if kind.mixer in LINEAR:  # the state [K, V] of a head is read and changed, in "delta" and "kimi" read twice
            mixers += linear.heads * linear.head_dim * keys[kind.mixer] * (2 if kind.mixer == "mamba" else 3)
        else:
            mixers += c.heads * widths * min(kind.window or c.seq_len, c.seq_len)
    matrices = count_active_parameters(c) - looked_up * c.d_model + c.mtp * c.vocab_size * c.d_model
    return 6 * (matrices + mixers)
