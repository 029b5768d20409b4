"""Models for `verify` that are not the example's GPT, and broken copies of one, one for each of ten pitfalls."""

from __future__ import annotations

import threading
import time
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.gpt.config import GPTConfig, MoEConfig
from examples.gpt.model import GPT
from mpcore import (
    ColumnParallelLinear,
    LayerNorm,
    Mesh,
    ParallelAttention,
    ParallelMLP,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    TransformerBlock,
    VocabParallelEmbedding,
    parallelize,
    shard_sequence,
    unshard_sequence,
    vocab_parallel_cross_entropy,
)
from mpcore.collectives import all_gather, copy, gather, reduce, split
from mpcore.sharding.declarations import add_partial

VOCAB, WIDTH, HEADS = 22, 16, 4


def batch() -> dict[str, Tensor]:
    """Tokens and targets, of which each sample has another number that count."""
    g = torch.Generator().manual_seed(7)
    x, target = torch.randint(VOCAB, (2, 4, 8), generator=g)
    return {"x": x, "target": target.masked_fill(torch.arange(8) >= torch.tensor([[8], [3], [5], [1]]), -100)}


def loss(output: Tensor, target: Tensor, mesh: Mesh) -> Tensor:
    """Over vocabulary shards, summed."""
    return vocab_parallel_cross_entropy(output, target, tp=mesh.tp, vocab_size=VOCAB, reduction="sum")


# --- three models -----------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Sees both ways, its sequence cut as for "allgather"; a label for each token."""

    def __init__(self, mesh: Mesh, sequence_parallel: bool = False) -> None:
        super().__init__()
        sp = {"tp": mesh.tp, "sequence_parallel": sequence_parallel}
        self.embedding, self.cp = VocabParallelEmbedding(VOCAB, WIDTH, **sp), mesh.cp
        whole = {"causal": False, "context": "allgather", "cp": mesh.cp}

        def block() -> nn.Module:
            attention = ParallelAttention(WIDTH, HEADS, 2, qk_norm=True, rope=RotaryEmbedding(4), **whole, **sp)
            mlp = ParallelMLP(WIDTH, 24, "gelu", **sp)
            return TransformerBlock(attention, mlp, LayerNorm(WIDTH, **sp), LayerNorm(WIDTH, **sp), **sp)

        half = [range(0, 1), range(1, 2)][mesh.pp.rank] if mesh.pp.size == 2 else range(2)
        self.first, self.last = 0 in half, 1 in half
        blocks = [block() for _ in range(2)]  # both are drawn on every stage, so that the second begins alike
        self.blocks = nn.ModuleDict({str(i): blocks[i] for i in half})
        self.norm = LayerNorm(WIDTH, **sp)
        self.head = ColumnParallelLinear(WIDTH, VOCAB, **sp)
        for name in [] if self.first else ["embedding"]:
            delattr(self, name)
        for name in [] if self.last else ["norm", "head"]:
            delattr(self, name)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T] -> [B, T, V/tp]."""
        x = self.embedding(x) if self.first else x
        for block in self.blocks.values():
            x = block(x)
        if not self.last:
            return x
        if self.cp.size > 1:  # the way of what needs the whole sequence
            x = shard_sequence(unshard_sequence(x, self.cp, "allgather", 1), self.cp, "allgather", 1)
        return self.head(self.norm(x))


class Mixer(nn.Module):
    """Mixes tokens, then channels; the hidden features of both are cut. Its output is whole on every rank."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        tp = mesh.tp
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.tokens = nn.Sequential(ColumnParallelLinear(8, 12, tp=tp), nn.GELU(), RowParallelLinear(12, 8, tp=tp))
        self.channels = ParallelMLP(WIDTH, 20, "gelu", tp=tp)
        self.head = ColumnParallelLinear(WIDTH, VOCAB, tp=tp, gather_output=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T] -> [B, T, V]."""
        x = self.embedding(x)
        x = x + self.tokens(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x + self.channels(x))


class Logits(nn.Module):
    """A Hugging Face model that returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """[B, T] -> [B, T, V/tp]."""
        return self.model(input_ids=x, use_cache=False).logits


def llama(mesh: Mesh) -> nn.Module:
    """A Hugging Face Llama, cut by `parallelize`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    config = LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    config._attn_implementation = "eager"
    return Logits(parallelize(LlamaForCausalLM(config), tp=mesh.tp))


# --- every axis, in two decoders --------------------------------------------------------------------------------------

DENSE = GPTConfig(VOCAB, 8, 2, WIDTH, 8, 2, 24, bias=True, qk_norm=True, dropout=0.2, tie_embeddings=True)
MIXED = GPTConfig(VOCAB, 8, 2, WIDTH, HEADS, 2, 24, activation="gelu", norm="layer", positions="learned", window=2,
                  moe=MoEConfig(experts=4, top_k=2, every=2, shared_experts=1, z_loss=0.3))  # fmt: skip


def decoder(config: GPTConfig, context: str, mesh: Mesh, sequence_parallel: bool = False) -> GPT:
    """The example's GPT, with its sequence cut one way or another; drawn by name."""
    return GPT(config, mesh, context=context, sequence_parallel=sequence_parallel, device="meta")


def samples_batch() -> dict[str, Tensor]:
    """As `batch`, with the numbers that dropout needs, and the factor that balance losses need."""
    return batch() | {"samples": torch.tensor([5, 2**33, 7, 1]), "loss_factor": torch.full((4,), 0.5)}


class ByHand(nn.Module):
    """A user's own use of the collectives, on parameters that every rank has; one of them is rarely used, one never."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.tp = mesh.tp
        self.embedding, self.rare = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.never = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH, bias=False), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T] -> [B, T, D]."""
        rare = (x == 0).any(1)[:, None, None]
        x = self.embedding(x)
        x = x + rare * self.rare(x) if rare.any() else x
        shared = copy(x, self.tp) + copy(x.tanh(), self.tp)  # one gradient for both
        hidden = F.linear(shared, split(self.up.weight, self.tp, 0), split(self.up.bias, self.tp, 0)).tanh()
        terms = F.linear(hidden, split(self.down.weight, self.tp, 1))
        total = reduce((terms * 2).transpose(1, 2), self.tp).transpose(1, 2) + reduce(terms, self.tp)
        total = total + reduce(terms * 3, self.tp)  # nothing was written to them
        alike = gather(split(x, self.tp, -1).exp(), self.tp, -1)
        return x + total + alike + reduce(shared / self.tp.size, self.tp)


# --- ten pitfalls, planted --------------------------------------------------------------------------------------------


class BiasOnEveryRank(RowParallelLinear):
    """18: the bias is inside the sum."""

    def forward(self, x: Tensor) -> Tensor:
        """As of `RowParallelLinear`."""
        return reduce(F.linear(x, self.weight, self.bias), self.tp)


class NoReduce(RowParallelLinear):
    """The sum over tp is forgotten."""

    def forward(self, x: Tensor) -> Tensor:
        """As of `RowParallelLinear`."""
        return F.linear(x, self.weight) + self.bias


class GatherSums(nn.Module):
    """13: a replicated consumer after all_gather, whose backward sums what every rank has whole."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.tp = mesh.tp
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        return all_gather(split(x * self.weight, self.tp, 1), self.tp, 1)


class WholeMeetsPart(nn.Module):
    """Under sequence parallel, a modulation that every rank has whole meets this rank's tokens without `copy`."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, WIDTH, tp=mesh.tp, gather_output=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T/tp, D] -> [B, T/tp, D]."""
        return x * self.up(torch.ones(WIDTH, dtype=x.dtype))


class GateUpAsOne(nn.Module):
    """16: gate and up cut as one block of features."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, 48, tp=mesh.tp)
        self.down = RowParallelLinear(24, WIDTH, tp=mesh.tp)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Undeclared(nn.Module):
    """An MLP of shards that no module declares."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.tp, hidden = mesh.tp, 24 // mesh.tp.size
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        return reduce(self.down(self.up(copy(x, self.tp)).tanh()), self.tp)


class ForgottenPartial(ParallelAttention):
    """12: norms of sharded heads, which nobody declared pending."""

    def __init__(self, *sizes: int, **options) -> None:
        super().__init__(*sizes, **options)
        self.q_norm, self.k_norm = RMSNorm(self.head_dim), RMSNorm(self.head_dim)


class Swapped(nn.Module):
    """The row-parallel layer comes first."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.up, self.down = RowParallelLinear(WIDTH, 24, tp=mesh.tp), ColumnParallelLinear(24, WIDTH, tp=mesh.tp)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class AllHeads(nn.Module):
    """An attention whose heads are counted in the unsharded model, so that a rank's are narrower."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.qkv = QKVParallelLinear(WIDTH, HEADS, HEADS, WIDTH // HEADS, tp=mesh.tp)
        self.output = RowParallelLinear(WIDTH, WIDTH, tp=mesh.tp)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.output(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Moved(nn.Module):
    """A plain module computes with the weight of a parallel layer."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 24, bias=False)
        self.up.weight = ColumnParallelLinear(WIDTH, 24, False, tp=mesh.tp).weight
        self.down = RowParallelLinear(24, WIDTH, tp=mesh.tp)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Broken(nn.Module):
    """A small decoder with one fault."""

    def __init__(self, fault: str, mesh: Mesh, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.fault, self.mesh = fault, mesh
        self.first, self.last = mesh.pp.rank == 0, mesh.pp.rank == mesh.pp.size - 1
        self.second = mesh.pp.rank == min(1, mesh.pp.size - 1)  # of up to three stages the one with the MLP
        sp = {"tp": mesh.tp, "sequence_parallel": sequence_parallel}
        forgotten = {} if fault == "norm" else sp  # 11: the norm isn't told that it sees this rank's part alone
        embedding = VocabParallelEmbedding(VOCAB, WIDTH, **sp)
        norm = RMSNorm(WIDTH, **forgotten)
        attention = ForgottenPartial if fault == "qk-norm" else ParallelAttention
        self.attention = AllHeads(mesh) if fault == "heads" else attention(WIDTH, HEADS, **sp)
        self.attention.output.__class__ = {"bias": BiasOnEveryRank, "reduce": NoReduce}.get(fault, RowParallelLinear)
        nn.init.uniform_(self.attention.output.bias)  # the same on every rank: one seed
        mlps = {"gate-up": GateUpAsOne, "by hand": Undeclared, "swapped": Swapped, "moved": Moved}
        self.mlp = mlps[fault](mesh) if fault in mlps else ParallelMLP(WIDTH, 24, "swiglu", **sp)
        scales = {"gather": GatherSums, "modulation": WholeMeetsPart}
        self.scale = scales[fault](mesh) if fault in scales else nn.Identity()
        self.dropout = nn.Dropout(0.3) if fault == "dropout" else nn.Identity()
        if fault == "init":  # 21: each rank draws its own shard
            with torch.no_grad():
                self.attention.qkv.weight.copy_(torch.randn(self.attention.qkv.weight.shape) / WIDTH**0.5)
        tied, renamed = fault == "tied", fault == "renamed"
        if self.first or (self.last and tied):
            self.embedding = embedding
        if not self.first:
            del self.attention, self.scale
        if not self.second:
            del self.mlp
        if self.last:
            self.norm = norm
            self.head = ColumnParallelLinear(WIDTH, VOCAB, False, gather_output=fault == "gathered", **sp)
            if tied or renamed:
                self.head.weight = embedding.weight
        if renamed:  # pending on both stages, but under two names
            for module in (embedding if self.first else self.head,):
                add_partial(module, "weight", mesh.ends)
        if fault == "declared twice":
            add_partial(self.attention.output, "bias", mesh.tp)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T] -> [B, T, V/tp]."""
        if self.first:
            x = self.embedding(x)
            if self.fault == "one rank" and self.mesh.tp.rank == 1:
                x = 2 * x
            if self.fault == "between" and self.mesh.tp.size > 1:
                x = x.sin()
            x = x + self.dropout(self.attention(self.scale(x)))
        if self.second:
            x = x + self.mlp(x.detach() if self.fault == "detach" and self.mesh.tp.size > 1 else x)
        return self.head(self.norm(x)) if self.last else x


def broken(fault: str):
    """The builder of a `Broken`, importable by others."""
    return partial(Broken, fault)


def mean_loss(output: Tensor, target: Tensor, mesh: Mesh) -> Tensor:
    """24: a mean on each rank."""
    return vocab_parallel_cross_entropy(output, target, tp=mesh.tp, vocab_size=VOCAB)


def divided_loss(output: Tensor, target: Tensor, mesh: Mesh) -> Tensor:
    """A sum that is divided by dp."""
    return loss(output, target, mesh) / mesh.dp.size


def torch_loss(output: Tensor, target: Tensor, mesh: Mesh) -> Tensor:
    """10: torch's loss of sharded logits."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def gathered_loss(output: Tensor, target: Tensor, mesh: Mesh) -> Tensor:
    """10: gathered logits in a loss for shards, which multiplies what it sees."""
    size = output.shape[-1] * mesh.tp.size
    return vocab_parallel_cross_entropy(output, target, tp=mesh.tp, vocab_size=size, reduction="sum")


def wrong_heads(mesh: Mesh) -> nn.Module:
    """16: query heads read other KV heads, as a cut through the fused projection's blocks would have it."""
    model = Broken("", mesh)
    if mesh.tp.size > 1:
        core = model.attention.core
        model.attention.core = lambda q, k, *others, **named: core(q, k.flip(2), *others, **named)
    return model


# --- what the mutation report breaks the library under ---------------------------------------------------------------


def tokens() -> dict[str, Tensor]:
    """Without targets; the first word is in the first row alone."""
    x = batch()["x"].clamp(min=1)
    x[0, 3] = 0
    return {"x": x}


class Mean(nn.Module):
    """Returns a number."""

    def forward(self, x: Tensor) -> Tensor:
        """[...] -> []."""
        return x.mean()


class Strange(nn.Module):
    """Has complex and infinite buffers, a layer used twice, and several outputs; its fault shows under tp alone."""

    turns: Tensor
    mask: Tensor
    steps: Tensor

    def __init__(self, fault: str, mesh: Mesh) -> None:
        super().__init__()
        self.fault, self.tp, self.calls = fault if mesh.tp.size > 1 else "", mesh.tp, 0
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.mlp, self.mean = ParallelMLP(WIDTH, 20, "gelu", tp=mesh.tp), Mean()
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        angles = torch.outer(torch.arange(8.0), torch.arange(1.0, WIDTH // 2 + 1) / 10)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        if self.fault == "other buffer" and mesh.tp.size > 1:
            self.register_buffer("other", torch.zeros(()))
        if self.fault == "complex":
            self.turns = self.turns.conj().clone()

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """[B, T] -> [B, T], [B, T, V] and []."""
        fault, self.calls = self.fault, self.calls + 1
        x = self.embedding(x)
        x = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * self.turns).flatten(-2)
        x = x + self.mlp(x)
        x = x + self.mlp(x.mean(1, keepdim=True) * (2 if fault == "again" else 1))
        if fault == "bias":
            x = x + reduce(self.bias if self.tp.rank == 0 else torch.zeros_like(self.bias), self.tp)
        else:
            x = x + self.bias
        logits = self.head(x * (1.01 if fault == "late" else 1)) * self.mask.exp()[0, 0]
        if (fault == "eval" and not self.training) or (fault == "second" and self.calls > 1):
            logits = 2 * logits
        self.steps += fault == "buffer" and self.tp.rank
        indices, mean = logits.argmax(-1), self.mean(x.square())
        return indices + (fault == "indices"), {"logits": logits, "mean": mean * (2 if fault == "mean" else 1)}


class TokensFirst(Mixer):
    """Returns [T, B, V]."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, T] -> [T, B, V]."""
        return super().forward(x).transpose(0, 1)


def strange(fault: str):
    """The builder of a `Strange`, importable by others."""
    return partial(Strange, fault)


def loss_of_strange(output: tuple, target: Tensor, mesh: Mesh) -> Tensor:
    """The loss of its logits."""
    return output[1]["logits"].square().sum() / 2


def narrow_loss(output: Tensor, target: Tensor, mesh: Mesh) -> Tensor:
    """In float32 whatever the model is in."""
    return loss(output.float(), target, mesh)


def narrow_and_tilted_loss(output: Tensor, target: Tensor, mesh: Mesh) -> Tensor:
    """Wrong by less than a rounding of float32 where it is sharded."""
    return narrow_loss(output * (1 + 1e-8 * (mesh.tp.size - 1)), target, mesh)


def narrow_if_sharded_loss(output: Tensor, target: Tensor, mesh: Mesh) -> Tensor:
    """In float32 on several ranks alone."""
    return (narrow_loss if mesh.tp.size > 1 else loss)(output, target, mesh)


class Named(Mixer):
    """Returns a dict, as Hugging Face's models do."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"logits": super().forward(x)}


class Chosen(Mixer):
    """Returns the likeliest words alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(-1)


class Forgotten(nn.Module):
    """The second layer of an MLP isn't swapped."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        layers = {"up": ColumnParallelLinear(6, 8, tp=mesh.tp), "down": nn.Linear(8, 6)}
        self.inner = nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner["down"](self.inner["up"](x).relu())


class Plain(nn.Module):
    """A factor, for inputs of any shape."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Uneven(Plain):
    """Its ranks don't make the same calls: one waits for what the other never sends."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.tp = mesh.tp

    def forward(self, x: Tensor) -> Tensor:
        threading.Thread(target=time.sleep, args=(60.0,), daemon=True).start()  # its stack comes first
        if self.tp.size > 1 and self.tp.rank == 0:
            torch.distributed.recv(x.clone(), src=1)
        return super().forward(x)


def loss_of_named(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """The loss of its logits; it needs no mesh."""
    return output["logits"].square().sum() / 2


def nothing(mesh: Mesh) -> None:
    """A builder that forgets to return."""
