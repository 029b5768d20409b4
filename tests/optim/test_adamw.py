"""Optimizers, groups, scales and rates: their edges, their defaults, and their formulas by hand. In one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.mesh.axis import Axis
from mpcore.optim import adamw, muon, schedules
from mpcore.sharding.declare import Sharding, cut


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


@pytest.mark.parametrize("scale", [None, 0.5, torch.tensor(0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_is_its_formula(dtype, scale):
    model = net(dtype)
    made = mp.AdamW(model, lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.3)
    want = {p: p.detach().clone() for p in model.parameters()}
    m = {p: torch.zeros_like(p) for p in want}
    v = {p: torch.zeros_like(p) for p in want}
    for step in (1, 2, 3):
        give(model, step)
        made.step(scale=scale)
        for i, p in enumerate(want):
            g = torch.full_like(p, step * (i + 1)) * (1.0 if scale is None else 0.5)
            m[p], v[p] = 0.8 * m[p] + 0.2 * g, 0.9 * v[p] + 0.1 * g * g
            want[p] = want[p] * (1 - 0.1 * (0.3 if p.dim() > 1 else 0.0))
            want[p] -= 0.1 * (m[p] / (1 - 0.8**step)) / ((v[p] / (1 - 0.9**step)).sqrt() + 1e-3)
            torch.testing.assert_close(p.detach(), want[p], rtol=1e-5, atol=1e-6)
            state = made.state[p]
            assert state["step"] == step
            torch.testing.assert_close(state["exp_avg"], m[p], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(state["exp_avg_sq"], v[p], rtol=1e-5, atol=1e-6)


def test_a_step_without_a_gradient_changes_nothing_and_counts_nothing():
    model = net()
    made = mp.AdamW(model)
    before = [p.detach().clone() for p in model.parameters()]
    made.step()
    assert not made.state
    assert all(map(torch.equal, model.parameters(), before))
    model.weight.grad = torch.ones(2, 3)
    made.step()
    assert list(made.state) == [model.weight]


def test_states_have_their_dtypes_and_masters_the_values_before():
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    for dtype, state_dtype, moments in ((half, None, single), (single, half, half), (double, None, double)):
        model = net(dtype)
        before = model.weight.detach().clone()
        made = mp.AdamW(model, lr=0.0, weight_decay=0.0, state_dtype=state_dtype)
        give(model)
        made.step()
        state = made.state[model.weight]
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (moments, moments)
        assert ("master" in state) is (dtype == torch.bfloat16)
        assert dtype != torch.bfloat16 or torch.equal(state["master"], before.float())
    without = mp.AdamW(net(torch.bfloat16), masters=False)
    give(without.model)
    without.step()
    assert "master" not in without.state[without.model.weight]
    with pytest.raises(ValueError, match="weight is float16 and vanishes without a master: masters=True"):
        mp.AdamW(net(torch.float16), masters=False)


def test_the_unfused_step_is_the_same_to_rounding():
    one, other = net(), net()
    fused, plain = mp.AdamW(one), mp.AdamW(other)
    plain.set_fused(False)
    for made in (fused, plain):
        give(made.model)
        made.step()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_groups_that_do_not_fit_are_not_added():
    model = net()
    model.bias.requires_grad_(False)
    made = mp.AdamW(model)
    with pytest.raises(ValueError, match=r"a parameter of shape \(4,\) in the groups is none of the model's"):
        made.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
    assert len(made.param_groups) == 2
    made.add_param_group({"params": [model.bias], "lr": 5.0})
    assert made.param_groups[2]["lr"] == 5.0


def test_zero_grad_drops_the_gradients_of_its_own_groups():
    model = net()
    give(model)
    mp.AdamW(model, groups=[{"params": [model.bias]}]).zero_grad()
    assert model.bias.grad is None
    mp.AdamW(model).zero_grad()
    assert model.weight.grad is None


def test_a_state_of_another_shape_is_refused_and_dtypes_stay():
    model, twin = net(torch.bfloat16), net(torch.bfloat16)
    one, other = mp.AdamW(model), mp.AdamW(twin)
    give(model)
    one.step()
    state = one.state_dict()
    other.load_state_dict(state)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        for slot, value in one.state[p].items():
            assert torch.equal(other.state[q][slot], value)
            assert other.state[q][slot].dtype == value.dtype
            assert other.state[q][slot] is not value
    state["state"][0]["exp_avg"] = torch.ones(7)
    with pytest.raises(ValueError, match=r"the exp_avg of weight has shape \(7,\), the parameter \(2, 3\) here"):
        other.load_state_dict(state)


def test_logical_indices_are_places_in_the_whole_tensor():
    def places(sharding: Sharding) -> list[int]:
        rows, columns = adamw.logical_indices(torch.ones(sharding.local_shape), sharding)
        return (rows[:, None] + columns).flatten().tolist()

    whole = torch.arange(24).view(2, 3, 4)
    for shards in (
        (), (cut(3, Axis(2, 1), 1),), (cut(2, Axis(2, 1), 0), cut(4, Axis(2, 0), 2)), (cut(4, Axis(3, 1), 2),),
    ):  # fmt: skip
        sharding = Sharding((2, 3, 4), shards)
        assert places(sharding) == sharding.take(whole).flatten().tolist()
    assert places(Sharding(())) == [0]
    assert places(Sharding((5,), (cut(5, Axis(2, 1), 0),))) == [3, 4]


def test_matrices_decay_and_what_is_left_out_or_frozen_is_in_no_group():
    model: Any = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Conv1d(2, 2, 1)})
    model.scale = nn.Parameter(torch.ones(()))
    model["b"].bias.requires_grad_(False)
    first, second = mp.decay_groups(model, 0.3)
    assert [id(p) for p in first["params"]] == [id(model[n].weight) for n in "abc"]
    assert [id(p) for p in second["params"]] == [id(p) for p in (model.scale, model["a"].bias, model["c"].bias)]
    assert (first["weight_decay"], second["weight_decay"]) == (0.3, 0.0)
    first, second = mp.decay_groups(model, 0.3, [model["a"], model["c"].weight])
    assert [id(p) for p in first["params"]] == [id(model["b"].weight)]
    assert [id(p) for p in second["params"]] == [id(model.scale), id(model["c"].bias)]
    with pytest.raises(TypeError, match="exclude holds 'a', neither a parameter nor a module"):
        mp.decay_groups(model, 0.3, ["a"])
    with pytest.raises(TypeError, match=r"it takes the model, .* not list"):
        mp.AdamW(list(model.parameters()))


def test_the_usual_options_of_muon_and_who_steps_what():
    model: Any = nn.ModuleDict({"up": nn.Linear(2, 2), "table": nn.Embedding(3, 2), "conv": nn.Conv2d(1, 1, 1)})
    made: Any = mp.Muon(model)
    hidden, matrices, vectors = made.param_groups
    assert hidden["params"] == [model["up"].weight]
    assert [id(p) for p in matrices["params"]] == [id(model["table"].weight), id(model["conv"].weight)]
    assert [id(p) for p in vectors["params"]] == [id(model["up"].bias), id(model["conv"].bias)]
    assert [group["muon"] for group in made.param_groups] == [True, False, False]
    assert [group["weight_decay"] for group in made.param_groups] == [0.1, 0.1, 0.0]
    usual = {"momentum": 0.95, "nesterov": True, "ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5,
             "adjust_lr_fn": "match_rms_adamw", "lr": 1e-3}  # fmt: skip
    assert {name: hidden[name] for name in usual} == usual
    assert (hidden["betas"], hidden["eps"], made.ns_dtype) == ((0.9, 0.999), 1e-8, None)
    excluded: Any = mp.Muon(model, exclude=[model["up"]])
    assert excluded.param_groups[0]["params"] == []
    with pytest.raises(ValueError, match="adjust_lr_fn 'keller' is neither 'match_rms_adamw' nor 'original'"):
        mp.Muon(model, adjust_lr_fn="keller")
    with pytest.raises(ValueError, match="the parameter group doesn't say who steps it: give it 'muon': True"):
        made.add_param_group({"params": []})
    model.more = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="more has 1 dimensions, Muon takes matrices: 'muon': False"):
        made.add_param_group({"params": [model.more], "muon": True})


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


def test_a_direction_of_nothing_is_nothing_and_batches_are_apart():
    assert not muon.orthogonalize(torch.zeros(2, 3), (1.0, 2.0, 3.0), 2).any()
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    each = torch.stack([muon.orthogonalize(one, (3.0, -2.0, 1.0), 2) for one in x])
    torch.testing.assert_close(muon.orthogonalize(x, (3.0, -2.0, 1.0), 2), each)


def test_a_scale_grows_after_so_many_good_steps_and_shrinks_after_a_bad_one():
    scaler = mp.optim.LossScaler(scale=8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    scales = []
    for good in (True, True, True, True, True, False, True, True, True, False, False):
        assert scaler.update(torch.tensor(good)) is good
        scales.append((scaler.scale, scaler.good_steps))
    assert scales == [(8, 1), (8, 2), (32, 3), (32, 4), (32, 5), (8, 0), (8, 1), (8, 2), (32, 3), (8, 0), (2, 0)]
    assert scaler.state_dict() == {"scale": 2.0, "good_steps": 0}
    scaler.load_state_dict({"scale": 16, "good_steps": 2.0})
    assert (scaler.scale, scaler.good_steps) == (16.0, 2)
    scaler.load_state_dict({})
    assert (scaler.scale, scaler.good_steps) == (16.0, 2)
    usual = mp.optim.LossScaler()
    assert (usual.scale, usual.growth_factor, usual.backoff_factor, usual.growth_interval) == (65536.0, 2.0, 0.5, 2000)


@pytest.mark.parametrize("wrong", [{"scale": 0.0}, {"scale": -1.0}, {"growth_factor": 0.99}, {"backoff_factor": 0.0},
                                   {"backoff_factor": 1.0}, {"growth_interval": 0}])  # fmt: skip
def test_scales_that_cant_be_are_refused(wrong):
    with pytest.raises(ValueError, match="must be positive, growth_factor"):
        mp.optim.LossScaler(**wrong)
    mp.optim.LossScaler(scale=1e-9, growth_factor=1.0, backoff_factor=0.99, growth_interval=1)


def test_gradients_are_divided_by_the_scale():
    model = net()
    give(model, 4.0)
    model.bias.grad = None
    mp.optim.LossScaler(scale=8.0).unscale(model)
    assert torch.equal(model.weight.grad, torch.full((2, 3), 0.5))


@pytest.mark.parametrize("schedule", [schedules.cosine, schedules.linear, schedules.wsd])
def test_rates_warm_up_fall_and_stay_at_the_floor(schedule):
    how = {"steps": 20, "warmup": 4, "lr": 2.0, "floor": 0.25}
    rates = [schedule(step, **how) for step in range(30)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0
    assert rates[20:] == pytest.approx([0.5] * 10)
    if schedule is schedules.cosine:
        want = [2.0 * (0.25 + 0.375 * (1 + math.cos(math.pi * (step - 4) / 16))) for step in range(4, 20)]
    elif schedule is schedules.linear:
        want = [2.0 * (1 - 0.75 * (step - 4) / 16) for step in range(4, 20)]
    else:
        want = [2.0] * 12 + [2.0 * (1 - 0.75 * i / 4) for i in range(4)]
    assert rates[4:20] == pytest.approx(want)
    assert schedule(0, steps=5) == 1.0
    assert schedule(9, steps=5) == pytest.approx(0.1)
    assert schedule(3, steps=3, warmup=3, lr=2.0) == 2.0, "a run that is all warm-up"


def test_the_last_descent_has_so_many_steps():
    rates = [schedules.wsd(step, steps=10, decay=3, floor=0.0) for step in range(11)]
    assert rates == pytest.approx([1.0] * 7 + [1.0, 2 / 3, 1 / 3, 0.0])
    assert schedules.wsd(9, steps=10, decay=0) == 1.0
    late = [schedules.wsd(step, steps=10, decay=9, warmup=5, floor=0.0) for step in range(11)]
    assert late == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
