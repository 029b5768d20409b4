"""A transformer of your own on any mesh: which lines are swapped, and which a training step then has more.

`python -m examples.own_model` runs it in one process, and `torchrun --nproc-per-node 4 -m examples.own_model --tp 2
--zero 3` on tp 2 x dp 2. The losses are the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import trange

from mpcore import (
    Axis,
    ColumnParallelLinear,
    LayerNorm,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    build_mesh,
    clip_gradients,
    grad_norm,
    materialize,
    reduce_gradients,
    vocab_parallel_cross_entropy,
)
from mpcore.collectives import all_reduce
from mpcore.parallel.data import shard_data_parallel
from mpcore.parallel.sync import sync_gradients

V, D, H, LAYERS, T = 256, 64, 4, 2, 64  # bytes, width, heads, blocks, tokens of a sample
SAMPLES, MICRO_BATCHES = 8, 2  # of a step


class Block(nn.Module):
    """Attention and MLP side by side under one norm: x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, tp: Axis) -> None:
        super().__init__()
        self.norm = LayerNorm(D)  # was nn.LayerNorm(D)
        self.qkv = QKVParallelLinear(D, H, H, D // H, tp=tp)  # was nn.Linear(D, 3 * D)
        self.up = ColumnParallelLinear(D, 4 * D, tp=tp)  # was nn.Linear(D, 4 * D)
        self.mix = RowParallelLinear(D, D, tp=tp, unit=D // H)  # was nn.Linear(D, D); cut between heads, for any tp
        self.down = RowParallelLinear(4 * D, D, tp=tp)  # was nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]; in between H/tp heads and 4D/tp features."""
        h = self.norm(x)
        q, k, v = (rearrange(part, "b t (h k) -> b h t k", k=D // H) for part in self.qkv(h).chunk(3, dim=-1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mix(rearrange(seen, "b h t k -> b t (h k)")) + self.down(F.gelu(self.up(h)))


class Transformer(nn.Module):
    """Bytes in, this rank's columns of the logits out."""

    def __init__(self, tp: Axis) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(V, D, tp=tp)  # was nn.Embedding(V, D)
        self.position = nn.Embedding(T, D)  # what is not swapped is whole on every rank
        self.blocks = nn.ModuleList(Block(tp) for _ in range(LAYERS))
        self.norm = LayerNorm(D)
        self.head = ColumnParallelLinear(D, V, bias=False, tp=tp)  # was nn.Linear(D, V, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, V/tp]."""
        x = self.embedding(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def samples(step: int) -> Tensor:
    """This file's bytes: [SAMPLES, T + 1] of one step, the same for whoever asks."""
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    first = torch.randint(len(text) - T, (SAMPLES, 1), generator=torch.Generator().manual_seed(step))
    return text[first + torch.arange(T + 1)]


def train(tp: int = 1, zero: int = 0, steps: int = 30) -> list[float]:
    """Train, and return the loss before each step: for every mesh the same."""
    mesh = build_mesh(tp=tp)  # dp is what tp leaves of the world
    model = Transformer(mesh.tp)
    materialize(model, seed=0, device=mesh.device)  # the same first parameters on every mesh
    shard_data_parallel(model, mesh, model.blocks, zero=zero)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in (bar := trange(steps, disable=mesh.world.rank != 0)):
        mine = samples(step).chunk(mesh.dp.size)[mesh.dp.rank].to(mesh.device)
        total = torch.zeros((), device=mesh.device)
        micro_batches = mine.chunk(MICRO_BATCHES)
        for i, batch in enumerate(micro_batches):
            sync_gradients(model, last=i == len(micro_batches) - 1)
            logits = model(batch[:, :-1])
            loss = vocab_parallel_cross_entropy(logits, batch[:, 1:], tp=mesh.tp, vocab_size=V, reduction="sum")
            loss = loss / (SAMPLES * T)  # the one division, by all tokens of the step
            loss.backward()
            total += loss.detach()
        reduce_gradients(model)  # the sums that are still pending
        clip_gradients(model, 1.0, grad_norm(model, mesh))  # the norm is the whole model's
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(all_reduce(total, mesh.data)))
        bar.set_postfix(loss=f"{losses[-1]:.4f}")
    if mesh.world.rank == 0:
        print(f"loss {losses[0]:.5f} -> {losses[-1]:.5f}")
    return losses


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--zero", type=int, default=0, choices=range(4), help="stage of ZeRO over the data ranks")
    parser.add_argument("--steps", type=int, default=30)
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
