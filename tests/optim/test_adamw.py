"""Optimizers, groups, scales and rates: their edges, and a step of Muon by its formula. In one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.optim import schedules


def net(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return nn.Linear(3, 2, dtype=dtype)


def give(model: nn.Module, value: float = 1.0) -> None:
    for i, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, value * (i + 1))


@pytest.mark.parametrize("wrong", [
    {"lr": -1e-9}, {"betas": (1.0, 0.9)}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}, {"betas": (0.9, -0.1)},
    {"eps": -1.0}, {"weight_decay": -1.0},
])  # fmt: skip
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="is out of range"):
        mp.AdamW(net(), **wrong)
    for fine in ({"lr": 0.0}, {"betas": (0.0, 0.0)}, {"eps": 0.0}, {"weight_decay": 0.0}, {"lr": torch.tensor(0.1)}):
        mp.AdamW(net(), **fine)
    with pytest.raises(ValueError, match=r"state_dtype torch\.float16 is neither float32 nor bfloat16"):
        mp.AdamW(net(), state_dtype=torch.float16)


def test_the_unfused_step_is_the_same_to_rounding():
    one, other = net(), net()
    fused, plain = mp.AdamW(one), mp.AdamW(other)
    plain.set_fused(False)
    for made in (fused, plain):
        give(made.model)
        made.step()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_what_is_left_out_is_in_no_group():
    model: Any = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Conv1d(2, 2, 1)})
    first, second = mp.decay_groups(model, 0.3, [model["a"], model["c"].weight])
    assert [id(p) for p in first["params"]] == [id(model["b"].weight)]
    assert [id(p) for p in second["params"]] == [id(model["b"].bias), id(model["c"].bias)]
    assert mp.Muon(model, exclude=[model["a"]]).param_groups[0]["params"] == [model["b"].weight]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("adjust", "shape"), [("match_rms_adamw", (2, 5)), ("match_rms_adamw", (6, 3)),
                                               ("original", (6, 3)), ("original", (3, 6))])  # fmt: skip
def test_a_step_of_muon_is_its_formula(nesterov, adjust, shape):
    torch.manual_seed(0)
    model: Any = nn.Linear(shape[1], shape[0], bias=False).double()
    made = mp.Muon(model, lr=0.1, weight_decay=0.3, momentum=0.8, nesterov=nesterov, adjust_lr_fn=adjust, ns_steps=3)
    want, buffer = model.weight.detach().clone(), torch.zeros(shape, dtype=torch.float64)
    for _ in range(2):
        g = torch.randn(shape, dtype=torch.float64)
        model.weight.grad = g.clone()
        made.step(scale=0.5)
        g = 0.5 * g
        buffer = 0.8 * buffer + 0.2 * g
        direction = newton_schulz(0.2 * g + 0.8 * buffer if nesterov else buffer, 3)
        m, n = shape
        factor = 0.2 * math.sqrt(max(m, n)) if adjust == "match_rms_adamw" else math.sqrt(max(1, m / n))
        want = want * (1 - 0.1 * 0.3) - 0.1 * factor * direction
        torch.testing.assert_close(model.weight.detach(), want, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(made.state[model.weight]["momentum_buffer"], buffer)
    assert made.state[model.weight]["step"] == 2


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """By the singular values: each step maps s to a s + b s^3 + c s^5."""
    u, s, v = torch.linalg.svd(x / x.norm(), full_matrices=False)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize("wrong", [{"scale": 0.0}, {"scale": -1.0}, {"growth_factor": 0.99}, {"backoff_factor": 0.0},
                                   {"backoff_factor": 1.0}, {"growth_interval": 0}])  # fmt: skip
def test_scales_that_cant_be_are_refused(wrong):
    with pytest.raises(ValueError, match="must be positive, growth_factor"):
        mp.optim.LossScaler(**wrong)
    scaler = mp.optim.LossScaler(scale=1e-9, growth_factor=1.0, backoff_factor=0.99, growth_interval=1)
    scaler.load_state_dict({})  # of a checkpoint without a scale
    assert scaler.state_dict() == {"scale": 1e-9, "good_steps": 0}


@pytest.mark.parametrize("schedule", [schedules.cosine, schedules.linear, schedules.wsd])
def test_the_usual_floor_is_a_tenth_and_warm_up_may_be_the_whole_run(schedule):
    assert [schedule(step, steps=5) for step in (0, 9)] == pytest.approx([1.0, 0.1])
    assert schedule(3, steps=3, warmup=3, lr=2.0) == 2.0


def test_the_last_descent_has_so_many_steps():
    rates = [schedules.wsd(step, steps=10, decay=3, floor=0.0) for step in range(11)]
    assert rates == pytest.approx([1.0] * 7 + [1.0, 2 / 3, 1 / 3, 0.0])
    assert schedules.wsd(9, steps=10, decay=0) == 1.0
    late = [schedules.wsd(step, steps=10, decay=9, warmup=5, floor=0.0) for step in range(11)]
    assert late == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
