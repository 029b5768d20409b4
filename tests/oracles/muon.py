"""Muon as published: Keller Jordan's reference (github.com/KellerJordan/Muon, muon.py), with the step length of
Liu et al. 2025 (arXiv:2502.16982), equation 4. It imports torch alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EPS = 1e-7


def zeropower(g: Tensor, steps: int = 5, added: bool = True) -> Tensor:
    """The quintic iteration of the reference, on the dtype of `g`.

    Args:
        g: [m, n].
        steps: iterations.
        added: divide by norm + 1e-7, as the reference; False: by max(norm, 1e-7), as torch.optim.Muon. The two differ
            by 1e-7 / norm in the scale of the argument.
    """
    wide = g if g.shape[0] <= g.shape[1] else g.T
    norm = wide.norm()
    x = wide / (norm + EPS if added else max(norm, torch.tensor(EPS, dtype=g.dtype)))
    for _ in range(steps):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x if g.shape[0] <= g.shape[1] else x.T


class Muon:
    """The step of matrices: decay, momentum with Nesterov's look ahead, orthogonalization, 0.2 sqrt(max(m, n))."""

    def __init__(self, parts: Sequence[tuple[Tensor, Sequence[int]]], weight_decay: float) -> None:
        """Take each parameter with the heights of the matrices stacked in it; of [E, m, n], of those in each expert."""
        self.parts, self.weight_decay = list(parts), weight_decay
        self.momenta = [torch.zeros_like(p) for p, _ in self.parts]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for (p, heights), momentum in zip(self.parts, self.momenta, strict=True):
            assert p.grad is not None
            momentum.lerp_(p.grad, 0.05)
            ahead = p.grad.lerp(momentum, 0.95)
            p.mul_(1 - lr * self.weight_decay)
            for mine, matrix in zip(self.matrices(p, heights), self.matrices(ahead, heights), strict=True):
                mine.sub_(lr * 0.2 * max(matrix.shape) ** 0.5 * zeropower(matrix, added=False))

    @staticmethod
    def matrices(x: Tensor, heights: Sequence[int]) -> list[Tensor]:
        experts = x if x.dim() == 3 else (x,)
        return [matrix for expert in experts for matrix in expert.split(list(heights))]
