"""A model whose tensors have second readers, for bugs that a plain transformer does not show: `mpcore preflight`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpcore import ColumnParallelLinear, Mesh, RowParallelLinear, VocabParallelEmbedding, vocab_parallel_cross_entropy
from mpcore.collectives import all_gather, copy, gather, reduce

VOCAB, WIDTH = 22, 16


def batch() -> dict[str, Tensor]:
    """Tokens and targets, some of them ignored."""
    x, target = torch.randint(VOCAB, (2, 4, 8), generator=torch.Generator().manual_seed(7))
    return {"x": x, "target": target.masked_fill(torch.arange(8) >= torch.tensor([[8], [3], [5], [1]]), -100)}


def loss(output: Tensor, target: Tensor, mesh: Mesh) -> Tensor:
    """Smoothed cross-entropy, and a penalty that reads the same logits afterwards."""
    smoothed = vocab_parallel_cross_entropy(
        output, target, tp=mesh.tp, vocab_size=VOCAB, reduction="sum", label_smoothing=0.1
    )
    real = (target != -100).unsqueeze(-1)
    return smoothed + 1e-2 * reduce((output.square() * real).sum(), mesh.tp)


class Branching(nn.Module):
    """Two branches that share a gradient, a term read after its sum, strided inputs, and a frozen layer."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.tp = mesh.tp
        self.embedding = VocabParallelEmbedding(VOCAB, WIDTH, tp=mesh.tp)
        self.left = nn.Linear(WIDTH, WIDTH)
        self.up = ColumnParallelLinear(WIDTH, 2 * WIDTH, tp=mesh.tp)
        self.down = RowParallelLinear(2 * WIDTH, WIDTH, tp=mesh.tp)
        self.frozen = ColumnParallelLinear(WIDTH, WIDTH, tp=mesh.tp).requires_grad_(False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.head = ColumnParallelLinear(WIDTH, VOCAB, tp=mesh.tp)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T] -> [B, T, V/tp]."""
        x = self.embedding(x)
        rows = self.up.weight  # this rank's
        both = copy(self.left(x), self.tp) + copy(x, self.tp)  # one gradient, two branches
        hidden = F.gelu(F.linear(both, rows))
        term = F.linear(hidden, self.down.weight)  # one term of a sum over tp
        total = reduce(term, self.tp) + reduce(2 * term, self.tp)  # the term is read again
        strided = reduce(term.transpose(0, 1), self.tp).transpose(0, 1)
        x = x + total + strided + self.down(self.up(x))
        frozen = self.frozen(x)
        whole = gather(frozen.movedim(-1, 0), self.tp, 0, WIDTH).movedim(0, -1)  # every rank reads it alike
        parts = all_gather(frozen.movedim(-1, 0), self.tp, 0, WIDTH).movedim(0, -1)  # each rank reads it in its own way
        mine = F.linear(parts * copy(self.scale, self.tp), rows)
        return self.head(x + whole + reduce(F.linear(mine, self.down.weight), self.tp))
