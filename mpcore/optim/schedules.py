"""Learning rates as pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable


def cosine(step: int, *, steps: int, warmup: int = 0, lr: float = 1.0, floor: float = 0.1) -> float:
    """Return the learning rate: linear warm-up, then a cosine from `lr` down to `floor * lr`, then constant.

    With `lr=1` it returns the factor that `torch.optim.lr_scheduler.LambdaLR` needs.

    Args:
        step: the number of optimizer steps done.
        steps: the step at which the rate reaches `floor * lr`.
        warmup: the number of warm-up steps; step `warmup - 1` has the rate `lr`.
        lr: the peak learning rate.
        floor: the final rate as a fraction of the peak.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5.
    """
    if step < warmup:
        return lr * (step + 1) / warmup
    done = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return lr * (floor + (1 - floor) / 2 * (1 + math.cos(math.pi * done)))


def linear(step: int, *, steps: int, warmup: int = 0, lr: float = 1.0, floor: float = 0.1) -> float:
    """Return the learning rate: linear warm-up, then a line from `lr` down to `floor * lr`, then constant.

    Args:
        step, steps, warmup, lr, floor: see `cosine`.
    """
    if step < warmup:
        return lr * (step + 1) / warmup
    return lr * (1 - (1 - floor) * min((step - warmup) / max(steps - warmup, 1), 1.0))


def wsd(
    step: int, *, steps: int, warmup: int = 0, lr: float = 1.0, floor: float = 0.1, decay: int | None = None
) -> float:
    """Return the learning rate: linear warm-up, constant `lr`, then a line down to `floor * lr` over the last steps.

    Args:
        step, steps, warmup, lr, floor: see `cosine`.
        decay: the number of steps of the final descent; None: a fifth of all steps.

    Source: Hu et al. 2024, arXiv:2404.06395, section 4; the line: Hägele et al. 2024, arXiv:2405.18392.
    """
    begin = max(steps - (steps // 5 if decay is None else decay), warmup)
    if step < begin:
        return lr * (step + 1) / warmup if step < warmup else lr
    return linear(step, steps=steps, warmup=begin, lr=lr, floor=floor)


SCHEDULES: dict[str, Callable[..., float]] = {"cosine": cosine, "linear": linear, "wsd": wsd}
