"""torch's loss scales and clipping, and torchtitan's schedules (tests/unit_tests/test_lr_scheduler.py at 0353a25)."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import mpcore as mp
from mpcore.optim.schedules import linear, wsd

SCHEDULES = {
    "test_linear_warmup_decay": (linear, {"steps": 10, "warmup": 2},
                                 [0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
    "test_warmup_stable_decay": (wsd, {"steps": 10, "warmup": 2, "decay": 5},
                                 [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
    "test_warmup_stable_only": (wsd, {"steps": 10, "warmup": 2, "decay": 0}, [0.5, *[1.0] * 9]),
    "test_warmup_plus_decay_exceeds_training": (wsd, {"steps": 10, "warmup": 5, "decay": 8},
                                                [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rates_are_torchtitans(name):
    schedule, options, factors = SCHEDULES[name]
    assert [schedule(i, **options, floor=0.0) for i in range(10)] == pytest.approx(factors, abs=1e-12)


def test_after_all_steps_the_rate_is_the_lowest():
    """test_min_lr."""
    assert linear(10, steps=10, warmup=2, lr=0.1, floor=0.2) == pytest.approx(0.02)


@pytest.mark.parametrize("seed", range(4))
def test_the_loss_scale_is_that_of_torchs_grad_scaler(seed):
    """torch/amp/grad_scaler.py: over a hundred steps, some of which overflow."""
    dice = random.Random(seed)
    how = {"growth_factor": dice.choice([2.0, 4.0]), "backoff_factor": 0.5, "growth_interval": dice.choice([1, 3, 7])}
    theirs, ours = torch.amp.GradScaler("cpu", init_scale=1024.0, **how), mp.LossScaler(mp.Mesh(), 1024.0, **how)
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.0)
    for _ in range(100):
        good = dice.random() < 0.8
        theirs.scale(torch.ones(()))  # it begins here
        p.grad = torch.tensor([1.0, 1.0 if good else torch.inf])
        theirs.step(optimizer)
        theirs.update()
        assert ours.update(good) is good
        assert ours.scale == theirs.get_scale()


@pytest.mark.parametrize("bound", [0.1, 100.0])
def test_clipping_is_torchs_but_for_its_millionth(bound):
    """torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6, here by the norm: a relative 1e-6 / norm."""
    draws = torch.Generator().manual_seed(0)
    ours, theirs = (nn.Linear(5, 3) for _ in range(2))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        p.grad = torch.randn(p.shape, generator=draws)
        q.grad = p.grad.clone()
    mp.clip_gradients(ours, bound, mp.grad_norm(ours, mp.Mesh()))
    norm = float(nn.utils.clip_grad_norm_(theirs.parameters(), bound))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6 / norm + 1e-6, atol=0)
