"""The loss scale: all ranks decide alike, it follows its rule, and float16 doesn't go without."""

from __future__ import annotations

import math

import pytest
import torch

from mpcore import AdamW, ColumnParallelLinear
from mpcore.gradients import grad_norm, main_gradients
from mpcore.optim import LossScaler
from tests.pool import mesh, on_ranks


@pytest.mark.parametrize("sizes", [{"tp": 2, "dp": 2}, {"pp": 2, "dp": 2}, {"tp": 2, "pp": 2}], ids=str)
@on_ranks(4)
def test_pitfall_31_one_poisoned_shard_skips_the_step_on_all_ranks(sizes):
    """Each rank in turn finds an inf that the others don't see: all skip, and hold the same scale."""
    on = mesh(**sizes)
    for main in (False, True):
        scaler = LossScaler(on, growth_interval=3)
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
            assert not scaler.update(mine)
            assert scaler.scale == 2.0 ** (15 - poisoned)
        assert scaler.state_dict() == {"scale": 2.0**12, "good_steps": 0}


@pytest.mark.parametrize("poisoned", [1, None])  # ranks 0 and 1 own the gradient; the data ranks hold copies
@on_ranks(4)
def test_pitfall_31_the_norm_tells_every_rank(poisoned):
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
    skipped = poisoned is not None
    assert all(map(torch.equal, before, model.parameters())) == skipped
    assert scaler.state_dict() == {"scale": 2.0 ** (16 - skipped), "good_steps": int(not skipped)}
