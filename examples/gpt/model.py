"""The reference GPT: embedding, blocks, head. At tp=1, pp=1 it is the model that all layouts equal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

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
)
from mpcore.collectives import shard_range
from mpcore.layers.module import normal
from mpcore.sharding.declarations import add_partial, owners


@dataclass(frozen=True)
class MoEConfig:
    """The mixture of experts in the place of a dense MLP; names as of `mpcore.ParallelMoE` and `mpcore.Router`."""

    experts: int = 8
    top_k: int = 2
    shared_experts: int = 0
    d_ff: int | None = None  # of each expert; None: as the dense MLP's
    every: int = 1  # block i has experts where (i + 1) % every == 0, and a dense MLP elsewhere
    dense: int = 0  # the first blocks, which have a dense MLP whatever `every` says
    score: str = "softmax"
    normalize: bool = True
    routed_scale: float = 1.0
    groups: int = 1
    top_groups: int | None = None
    aux_loss: str | None = "sequence"
    aux_coefficient: float = 0.01
    z_loss: float = 0.0
    bias_rate: float = 0.0
    bias: bool | None = None  # True with a rate of 0: one that was learned, and stays
    jitter: float = 0.0
    capacity_factor: float | None = None
    dispatch: str | None = None

    def routing(self) -> dict:
        """What `mpcore.ParallelMoE` takes of it by the same name."""
        own = ("experts", "d_ff", "every", "dense")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in own}


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention in the place of `kv_heads` and `head_dim`; names as of `MultiLatentAttention`."""

    kv_lora_rank: int = 32
    q_lora_rank: int | None = 48  # None: queries come from x itself
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32


@dataclass(frozen=True)
class GPTConfig:
    """What the model is, whatever it runs on."""

    vocab_size: int = 257  # bytes, and the end of a document
    seq_len: int = 256
    layers: int = 4
    d_model: int = 128
    heads: int = 4
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: d_model / heads
    d_ff: int | None = None  # None: 4 d_model, or 8/3 of it where there is a gate, up to a multiple of 64
    activation: str = "swiglu"
    norm: str = "rms"  # or "layer"
    norm_eps: float | None = None  # None: 1e-6 for "rms", 1e-5 for "layer"
    qk_norm: bool = False  # RMSNorm of each query and key head
    positions: str = "rope"  # or "learned"
    rope_base: float = 10000.0
    rope_scaling: dict[str, Any] | None = dataclasses.field(default=None, hash=False)  # as of `RotaryEmbedding`
    window: int | None = None  # tokens that each one sees, itself counted; None: all before it
    bias: bool = False
    qkv_bias: bool | None = None  # these three: None: as `bias`
    output_bias: bool | None = None  # of the attention's output projection
    mlp_bias: bool | None = None
    dropout: float = 0.0
    tie_embeddings: bool = False
    init_std: float = 0.02  # as GPT-2
    moe: MoEConfig | None = None  # None: every MLP is dense
    latent: LatentConfig | None = None  # None: attention is of `kv_heads`

    def __post_init__(self) -> None:
        if isinstance(self.moe, dict):  # of a checkpoint's config
            object.__setattr__(self, "moe", MoEConfig(**self.moe))
        if isinstance(self.latent, dict):
            object.__setattr__(self, "latent", LatentConfig(**self.latent))
        for field in ("vocab_size", "seq_len", "layers", "d_model", "heads"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} {getattr(self, field)} is smaller than 1")
        if self.latent is not None:
            qkv, output, _ = self.biases
            given = {"kv_heads": self.kv_heads, "head_dim": self.head_dim, "qk_norm": self.qk_norm or None}
            given = {name: value for name, value in given.items() if value is not None}
            if given or qkv != output:
                raise ValueError(
                    f"latent attention has no {given or 'biases of one projection alone'}: every head has keys of its "
                    f"own, as wide as {self.latent}, and biases go to all projections down and the output or to none"
                )
        elif self.head_dim is None and self.d_model % self.heads:
            raise ValueError(f"d_model {self.d_model} is not a multiple of heads {self.heads}")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.norm not in ("rms", "layer") or self.positions not in ("rope", "learned"):
            raise ValueError(
                f"norm {self.norm!r} must be 'rms' or 'layer', positions {self.positions!r} 'rope' or 'learned'"
            )
        if self.moe is not None:
            if self.biases[2]:
                raise ValueError(f"{self.moe.experts} experts in the place of an MLP with biases: experts have none")
            if not 1 <= self.moe.every <= self.layers:
                raise ValueError(f"moe every {self.moe.every} is not between 1 and the {self.layers} layers")
            if not 0 <= self.moe.dense < self.layers:
                raise ValueError(f"moe dense {self.moe.dense} leaves no experts in the {self.layers} layers")

    @property
    def eps(self) -> float:
        """Of all norms."""
        if self.norm_eps is not None:
            return self.norm_eps
        return 1e-6 if self.norm == "rms" else 1e-5

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        """Whether the QKV projection, the attention's output projection and the MLP have them."""
        qkv, output, mlp = (
            self.bias if own is None else own for own in (self.qkv_bias, self.output_bias, self.mlp_bias)
        )
        return qkv, output, mlp

    @property
    def head_width(self) -> int:
        """Width of a head that has no latents."""
        return self.head_dim or self.d_model // self.heads

    @property
    def hidden(self) -> int:
        """Width of the MLP."""
        if self.d_ff is not None:
            return self.d_ff
        gated = self.activation in ("swiglu", "geglu")
        return -(-8 * self.d_model // (3 * 64)) * 64 if gated else 4 * self.d_model

    def has_experts(self, block: int) -> bool:
        """Whether a block's MLP is a mixture."""
        return self.moe is not None and block >= self.moe.dense and (block + 1) % self.moe.every == 0


_gpt2 = partial(
    GPTConfig,
    vocab_size=50257,
    seq_len=1024,
    activation="gelu",
    norm="layer",
    positions="learned",
    bias=True,
    tie_embeddings=True,
)
_llama3 = partial(GPTConfig, vocab_size=128256, seq_len=8192, kv_heads=8, rope_base=500000.0)
PRESETS = {
    "tiny": GPTConfig(),
    "tiny-moe": GPTConfig(moe=MoEConfig(experts=8, top_k=2, d_ff=192)),
    "tiny-mla": GPTConfig(latent=LatentConfig()),
    "mixtral-8x7b": GPTConfig(
        vocab_size=32000,
        seq_len=32768,
        layers=32,
        d_model=4096,
        heads=32,
        kv_heads=8,
        d_ff=14336,
        rope_base=1e6,
        moe=MoEConfig(experts=8, top_k=2, aux_coefficient=0.02),
    ),
    "gpt2": _gpt2(layers=12, d_model=768, heads=12),
    "gpt2-medium": _gpt2(layers=24, d_model=1024, heads=16),
    "gpt2-large": _gpt2(layers=36, d_model=1280, heads=20),
    "gpt2-xl": _gpt2(layers=48, d_model=1600, heads=25),
    "llama3-1b": _llama3(layers=16, d_model=2048, heads=32, d_ff=8192, tie_embeddings=True),
    "llama3-8b": _llama3(layers=32, d_model=4096, heads=32, d_ff=14336),
    "llama3-70b": _llama3(layers=80, d_model=8192, heads=64, d_ff=28672),
}


class GPT(nn.Module):
    """A decoder-only transformer, or this rank's stage of one. Parameter names are the same on every layout.

    Args:
        config: the model.
        mesh: where it lies; `Mesh()` is one process.
        context: how attention meets the tokens of other ranks of `mesh.cp`, which hold `shard_sequence`'s part each.
        sequence_parallel: between tensor-parallel regions each rank holds its part of the sequence.
        blocks: the blocks of this stage; None: this rank's share of all.
        device, dtype: of the parameters; build on "meta" and call `mpcore.materialize`.
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
    ) -> None:
        super().__init__()
        c, tp, pp = config, mesh.tp, mesh.pp
        if blocks is None:
            if c.layers < pp.size:
                raise ValueError(f"{c.layers} layers are fewer than the pp size {pp.size}")
            blocks = range(*shard_range(c.layers, pp))
        self.cp, self.context = mesh.cp, context
        self.config, self.tp, self.sequence_parallel = c, tp, sequence_parallel and tp.size > 1
        self.first, self.last = blocks.start == 0, blocks.stop == c.layers
        like = {"device": device, "dtype": dtype}
        sp = {"tp": tp, "sequence_parallel": sequence_parallel}
        init, output_init = normal(c.init_std), normal(c.init_std / math.sqrt(2 * c.layers))
        norm = RMSNorm if c.norm == "rms" else LayerNorm

        if self.first or (self.last and c.tie_embeddings):  # tied: the last stage has a copy of the same name
            self.embedding = VocabParallelEmbedding(c.vocab_size, c.d_model, init=init, **sp, **like)
            if c.tie_embeddings:
                add_partial(self.embedding, "weight", mesh.ends)
        if self.first:
            if c.positions == "learned":
                self.position = PositionEmbedding(c.seq_len, c.d_model, init=init, **sp, **like)
            self.dropout = Dropout(c.dropout, **sp)
        turning = {"base": c.rope_base, "scaling": c.rope_scaling, "interleaved": c.latent is not None}
        turns = c.latent.qk_rope_head_dim if c.latent is not None else c.head_width
        self.rope = RotaryEmbedding(turns, **turning) if c.positions == "rope" else None
        qkv_bias, output_bias, mlp_bias = c.biases

        def mlp(i: int, **options) -> nn.Module:
            if c.moe is None or not c.has_experts(i):
                return ParallelMLP(c.d_model, c.hidden, c.activation, bias=mlp_bias, **options)
            axes = {"ep": mesh.ep, "etp": mesh.etp, "cp": mesh.cp, "data": mesh.data}
            sizes = (c.d_model, c.moe.d_ff or c.hidden, c.moe.experts)
            routing = c.moe.routing()
            return ParallelMoE(*sizes, activation=c.activation, **routing, **axes, **options)

        def block(i: int) -> TransformerBlock:
            options = {"init": init, "output_init": output_init, **sp, **like}
            looks = {"rope": self.rope, "norm_eps": c.eps, "window": c.window, "bias": qkv_bias}
            looks |= {"context": context, "cp": mesh.cp}
            if c.latent is not None:
                sizes = dataclasses.asdict(c.latent)
                attention = MultiLatentAttention(c.d_model, c.heads, **sizes, **looks, **options)
            else:
                looks |= {"qk_norm": c.qk_norm, "output_bias": output_bias}
                attention = ParallelAttention(c.d_model, c.heads, c.kv_heads, c.head_dim, **looks, **options)
            norms = [norm(c.d_model, c.eps, **sp, **like) for _ in range(2)]
            return TransformerBlock(attention, mlp(i, **options), *norms, dropout=c.dropout, **sp)

        self.blocks = nn.ModuleDict({str(i): block(i) for i in blocks})
        if self.last:
            self.norm = norm(c.d_model, c.eps, **sp, **like)
            self.head = ColumnParallelLinear(c.d_model, c.vocab_size, bias=False, init=init, **sp, **like)
            if c.tie_embeddings:
                self.head.weight = self.embedding.weight

    def forward(
        self,
        x: Tensor,
        samples: Tensor | None = None,
        loss_scale: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """[B, T/cp] ids -> logits [B, T/cp, V/tp]; between stages [B, T/cp, D], or a tp-th with sequence parallel.

        Args:
            samples: [B] global sample index of each row; dropout in training needs it.
            loss_scale: [B], equal numbers: what the loss's sum over tokens is multiplied by. Balance losses of experts
                need it in training.
            mask: [B, T] bool, False for padding, which goes to no expert; None: there is none.
        """
        length = x.shape[1] * self.cp.size * (self.tp.size if self.sequence_parallel and not self.first else 1)
        tokens = self.tokens(length, x.device)
        if self.first:
            if length > self.config.seq_len:
                raise ValueError(f"sequence length {length} is longer than the model's {self.config.seq_len}")
            x = self.embedding(x)
            x = self.position(x, tokens) if self.config.positions == "learned" else x
            x = self.dropout(x, samples, tokens)
        for block, arguments in self.calls(length, tokens, x.dtype, x.device, samples, loss_scale, mask):
            x = block(x, **arguments)
        return self.head(self.norm(x)) if self.last else x

    def calls(
        self,
        length: int,
        tokens: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        samples: Tensor | None = None,
        loss_scale: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
        """Each block of this stage, and what it is called with beside x: `tokens` of sequences of this length."""
        arguments: dict[str, Any] = {"samples": samples, "tokens": tokens}
        if self.rope is not None:
            where = torch.arange(length, device=device) if tokens is None else tokens
            arguments["rotary"] = self.rope(where, torch.promote_types(dtype, torch.float32))
        routing = {"samples": samples, "loss_scale": loss_scale, "mask": mask, "positions": tokens}
        for i, block in self.blocks.items():
            yield block, arguments | {"mlp_arguments": routing if self.config.has_experts(int(i)) else None}

    def tokens(self, length: int, device: torch.device) -> Tensor | None:
        """The places of this rank's tokens in sequences that cp cuts."""
        return None if self.cp.size == 1 else sequence_index(length, self.cp, self.context, device)


def build_stages(config: GPTConfig, mesh: Mesh, blocks: Sequence[range], ranks: Sequence[int], **options) -> list[GPT]:
    """This rank's stages of a GPT, lowest first, where a pipeline rank may hold several.

    Args:
        config, mesh, options: as of `GPT`.
        blocks: the blocks of each stage.
        ranks: the pipeline rank of each stage.

    Returns:
        The stages; `mpcore.pipeline.partition.join_stages` makes the module to materialize of them.

    Raises:
        ValueError: if embeddings are tied between ranks other than the first and the last.
    """
    one_rank = ranks[0] == ranks[-1]
    if config.tie_embeddings and not one_rank and (ranks[0], ranks[-1]) != (0, mesh.pp.size - 1):
        raise ValueError(
            f"tied embeddings on the pipeline ranks {ranks[0]} and {ranks[-1]}: only 0 and {mesh.pp.size - 1} sum them"
        )
    if one_rank:  # then first and last stage share one table, and nothing is summed between ranks
        mesh = dataclasses.replace(mesh, ends=Axis(role="ends"))
    mine = [held for held, rank in zip(blocks, ranks, strict=True) if rank == mesh.pp.rank]
    stages = [GPT(config, mesh, blocks=held, **options) for held in mine]
    if config.tie_embeddings and stages and stages[0].first and stages[-1].last:
        stages[-1].embedding = stages[0].embedding
        stages[-1].head.weight = stages[0].embedding.weight
    return stages


def compile_blocks(blocks: Sequence[nn.Module], backend: str) -> None:
    """Have torch.compile make the forward of each block; hooks, such as those of ZeRO-3 and offloading, stay around it.

    Call it last, after recomputation and sharding. Blocks that are alike share one graph, or two where each has keys of
    its own for dropout.

    Args:
        blocks: in place.
        backend: one of `torch.compiler.list_backends`.
    """
    from torch._dynamo import config  # imported when it is needed, for it takes a second

    config.recompile_limit = max(config.recompile_limit, 2 * len(blocks))
    config.allow_unspec_int_on_nn_module = True  # the keys of dropout, else constants of a graph for each block
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend)


def count_parameters(config: GPTConfig) -> int:
    """Logical parameters of the whole model."""
    return sum(p.numel() for p in GPT(config, device="meta").parameters() if p.requires_grad)


def count_active_parameters(config: GPTConfig) -> int:
    """Logical parameters that one token goes through."""
    if config.moe is None:
        return count_parameters(config)
    held = owners(GPT(config, device="meta"))
    return round(sum(p.numel() * getattr(module, "used_share", 1) for _, module, _, p in held if p.requires_grad))


def flops_of_token(config: GPTConfig) -> int:
    """Of forward and backward of one token: 6 for each parameter that multiplies, and attention's products.

    Tables are looked up, and multiply nothing but as a tied head. Attention counts a window's tokens, or all: half of
    them are hidden by the causal mask, which by convention is no saving.

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
