"""The loss scale: all ranks decide alike, it follows its rule, and float16 doesn't go without."""

from __future__ import annotations

import math

import pytest
import torch

from mpcore import AdamW, ColumnParallelLinear
from mpcore.gradients import grad_norm, main_gradients
from mpcore.optim import LossScaler
from tests.pool import mesh


def check_poison(sizes, main):
    """Each rank in turn finds an inf that the others don't see: all skip, and hold the same scale."""
    on = mesh(**sizes)
    scaler, decisions = LossScaler(on, growth_interval=3), []
    for poisoned in range(on.world.size):
        model = ColumnParallelLinear(3, 4, tp=on.tp)
        if main:
            main_gradients(model)
        (model(torch.ones(2, 3)).sum() * scaler.scale).backward()
        if on.world.rank == poisoned:
            (model.weight.main_grad if main else model.weight.grad)[0, 1] = math.inf
        scaler.unscale(model)
        mine = all(p.isfinite().all() for p in (model.weight.main_grad if main else model.weight.grad))
        assert mine == (on.world.rank != poisoned)
        decisions.append((scaler.update(mine), scaler.scale))
    return decisions, scaler.state_dict()


@pytest.mark.parametrize("sizes", [{"tp": 2, "dp": 2}, {"pp": 2, "dp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_pitfall_31_one_poisoned_shard_skips_the_step_on_all_ranks(ranks, sizes):
    for main in (False, True):
        for decisions, state in ranks(4, check_poison, sizes, main):
            assert decisions == [(False, 2.0**i) for i in (15, 14, 13, 12)]
            assert state == {"scale": 2.0**12, "good_steps": 0}


def check_norm(poisoned):
    """As a training step does it: the norm, which is over all ranks, decides."""
    on = mesh(tp=2, dp=2)
    torch.manual_seed(on.tp.rank)
    model = ColumnParallelLinear(3, 4, tp=on.tp)
    optimizer, scaler = AdamW(model, 0.1), LossScaler(on)
    before = [p.detach().clone() for p in model.parameters()]
    (model(torch.ones(2, 3)).sum() * scaler.scale).backward()
    if on.world.rank == poisoned:
        model.bias.grad[0] = math.nan
    scaler.unscale(model)
    if scaler.update(grad_norm(model, on).isfinite()):
        optimizer.step()
    return scaler.state_dict(), all(map(torch.equal, before, model.parameters()))


def test_pitfall_31_the_norm_tells_every_rank(ranks):
    for poisoned in (1, None):  # rank 0 and 1 own the gradient; the data ranks hold copies
        for state, same in ranks(4, check_norm, poisoned):
            assert same == (poisoned is not None)
            assert (state["scale"], state["good_steps"]) == ((2.0**15, 0) if same else (2.0**16, 1))
