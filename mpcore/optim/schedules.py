"""Learning rates as pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable


def cosine(step: int, *, steps: int, warmup: int = 0, lr: float = 1.0, floor: float = 0.1) -> float:
    """Linear warm-up, then a cosine from `lr` down to `floor * lr`, which stays.

    With `lr=1` it is the factor that `torch.optim.lr_scheduler.LambdaLR` takes.

    Args:
        step: optimizer steps done; a pure function of it.
        steps: where the descent ends.
        warmup: steps until `lr` is reached: step `warmup - 1` has it.
        lr: the peak.
        floor: the last rate, as a fraction of the peak.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5.
    """
    if step < warmup:
        return lr * (step + 1) / warmup
    done = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return lr * (floor + (1 - floor) / 2 * (1 + math.cos(math.pi * done)))


def linear(step: int, *, steps: int, warmup: int = 0, lr: float = 1.0, floor: float = 0.1) -> float:
    """Linear warm-up, then a straight line from `lr` down to `floor * lr`, which stays; arguments as of `cosine`."""
    if step < warmup:
        return lr * (step + 1) / warmup
    done = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return lr * (1 - (1 - floor) * done)


def wsd(
    step: int, *, steps: int, warmup: int = 0, lr: float = 1.0, floor: float = 0.1, decay: int | None = None
) -> float:
    """Warm-up, stable, decay: linear warm-up, `lr` until the last `decay` steps, then a line down to `floor * lr`.

    Args:
        step, steps, warmup, lr, floor: as of `cosine`.
        decay: how many steps the descent takes; None: a fifth of all.

    Source: Hu et al. 2024, arXiv:2404.06395, section 4; the line: Hägele et al. 2024, arXiv:2405.18392.
    """
    begin = max(steps - (steps // 5 if decay is None else decay), warmup)
    if step < begin:
        return lr * (step + 1) / warmup if step < warmup else lr
    return linear(step, steps=steps, warmup=begin, lr=lr, floor=floor)


SCHEDULES: dict[str, Callable[..., float]] = {"cosine": cosine, "linear": linear, "wsd": wsd}
