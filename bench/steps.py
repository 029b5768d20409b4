"""A training step of a `Run`, for benches that need any one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import mpcore as mp

Step = Callable[[], object]


def squares(y: Tensor, target: Tensor) -> Tensor:
    """A loss that sums."""
    return (y - target).square().sum()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW of torch."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def prepared(mesh: mp.Mesh, model: Any, blocks: Any, x: Tensor, **options: Any) -> Step:
    """Forward, backward, clip and AdamW by a `Run` of `prepare` with some options."""
    run = mp.prepare(model, mesh, blocks=blocks, loss=squares, optimizer=adamw, initialize=False, **options)

    def step() -> None:
        run.forward_backward(x, x)
        run.clip_gradients(1.0)
        run.optimizer_step()

    return step
