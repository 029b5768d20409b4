"""Short recipes for the law of defaults (tests/test_defaults.py): what a call gives, to be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import mpcore as mp

B, T, D = 2, 5, 8


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


IDS = torch.tensor([[0, 3, 1, 4, 2], [2, 2, 0, 1, 3]])
WIDE = torch.float64
X, G = draw(B, T, D), draw(D, seed=1)


def made(kind: Callable[..., nn.Module], *args: Any, x: Tensor = X, call: dict | None = None, **options: Any) -> Any:
    """A layer's weights, its output and their gradients, in training."""
    torch.manual_seed(5)
    layer = kind(*args, **options)
    if options.get("dtype") is None:
        layer = layer.to(WIDE)
    mp.layers.seed_dropout(layer, 7)
    x = x.clone().requires_grad_(x.is_floating_point())
    y = layer(x, **(call or {}))
    y = y[0] if isinstance(y, tuple) else y
    y.square().sum().backward()
    return [*layer.parameters(), y, *(p.grad for p in layer.parameters() if p.grad is not None)]


def stepped(kind: Callable[..., torch.optim.Optimizer], dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Weights after three steps of an optimizer on two fused matrices and their biases; the last gradient is small."""
    torch.manual_seed(5)
    model = nn.Sequential(mp.GateUpParallelLinear(6, 2)).to(dtype)
    optimizer = kind(model, **options)
    for step, size in enumerate((1.0, 0.5, 1e-7)):
        for i, p in enumerate(model.parameters()):
            p.grad = (size * draw(*p.shape, seed=2 * step + i)).to(dtype)
        optimizer.step()
    return list(model.parameters())


def scales(**options: Any) -> list[float]:
    scaler, found = mp.optim.LossScaler(**options), []
    scaler.good_steps = 1998
    for good in (True, True, False):
        scaler.update(good)
        found.append(scaler.scale)
    return found


def prepared(**options: Any) -> Any:
    model = nn.Sequential(mp.ColumnParallelLinear(D, D, device="meta"), mp.Dropout(0.5))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.drop = model

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.linear(x), torch.arange(len(x)))

    run = mp.prepare(
        Model(),
        mp.Mesh(),
        blocks=[],
        loss=lambda y, t: (y - t).square().sum(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        **options,
    )
    run.forward_backward(X.float(), torch.zeros_like(X).float())
    return [run.optimizer_step().loss, run.pipeline.micro_batches, *run.model.parameters()]


def with_gradient(call: Callable[..., Any], *args: Tensor, **options: Any) -> Any:
    """What a function returns, and the gradients of its floating arguments."""
    given = [a.clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    out = call(*given, **options)
    outs = [y for y in (out if isinstance(out, tuple) else (out,)) if isinstance(y, Tensor)]
    total = sum(
        (y.double().sin() * torch.arange(1, y.numel() + 1).view(y.shape)).sum() for y in outs if y.is_floating_point()
    )
    if isinstance(total, Tensor) and total.requires_grad:
        total.backward()
    return [*outs, *(a.grad for a in given if isinstance(a, Tensor) and a.grad is not None)]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else a == b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.allclose(a, b, rtol=1e-12, atol=1e-15) if a.dtype == WIDE else torch.equal(a, b)
