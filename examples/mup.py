"""muP: train a small transformer at any width with the learning rate that was tuned at the base width.

`mpcore coordinate-check examples.mup:train --widths 32,64,128,256 --layouts tp2,pp2,dp2 --out mup.svg` shows that the
activations keep their size; with `examples.mup:standard` they grow.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.experimental import apply_mup

V, T, LAYERS, BASE, HEAD = 61, 16, 2, 32, 16  # vocabulary, tokens, blocks, base width, size of a head
LR = 1e-2


class Stage(nn.Module):
    """The blocks of a transformer that one pipeline rank holds; with pp 1 the whole model."""

    def __init__(self, width: int, mesh: mp.Mesh, tp: mp.Axis) -> None:
        super().__init__()
        small: Any = partial(nn.init.normal_, std=BASE**-0.5)  # the same at each width: muP scales it
        mine = mp.pipeline.partition([1.0] * LAYERS, mesh.pp.size)[mesh.pp.rank]
        like: dict[str, Any] = {"tp": tp, "init": small}
        self.first, self.last = mine.start == 0, mine.stop == LAYERS
        if self.first:
            self.embedding = mp.VocabParallelEmbedding(V, width, **like)
        self.blocks = nn.ModuleDict({str(i): self.block(width, like) for i in mine})
        if self.last:
            self.norm = mp.RMSNorm(width, tp=tp)
            self.head = mp.ColumnParallelLinear(width, V, bias=False, **like)

    @staticmethod
    def block(width: int, like: dict[str, Any]) -> mp.TransformerBlock:
        """Return a block whose heads keep their size at each width."""
        attention = mp.ParallelAttention(width, num_heads=width // HEAD, output_init=like["init"], **like)
        mlp = mp.ParallelMLP(width, 4 * width, output_init=like["init"], **like)
        return mp.TransformerBlock(
            attention, mlp, mp.RMSNorm(width, tp=attention.tp), mp.RMSNorm(width, tp=attention.tp)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, T] tokens on the first stage, else [B, T, width] -> [B, T, width], or logits [B, T, V/tp]."""
        x = self.embedding(x) if self.first else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def train(width: int, mesh: mp.Mesh, mup: bool = True, zero: int = 1) -> tuple[mp.Run, dict[str, Tensor]]:
    """Return a prepared run at a width, and this rank's samples of the one batch that it learns."""
    with torch.device("meta"):
        model = Stage(width, mesh, mesh.tp)
        base = Stage(BASE, mesh, mp.Axis())  # unsharded: two heads would not do for tp 3

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return mp.vocab_parallel_cross_entropy(logits, target, tp=mesh.tp, vocab_size=V, reduction="sum")

    rates = apply_mup(model, base, mesh) if mup else None

    def optimizer(model: nn.Module) -> mp.AdamW:
        return mp.AdamW(model, LR, groups=rates.groups(model, LR) if rates else None)

    run = mp.prepare(
        model, mesh, blocks=model.blocks.values(), loss=loss, optimizer=optimizer, micro_batches=2, data=mp.Zero(zero)
    )
    text = torch.randint(V, (8, T + 1), generator=torch.Generator().manual_seed(0)).to(mesh.device)
    share = run.share(8)
    return run, {"x": text[share.start : share.stop, :-1], "target": text[share.start : share.stop, 1:]}


standard = partial(train, mup=False)
