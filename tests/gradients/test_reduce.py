"""Main gradients, norms and guards. Without real ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.gradients import accumulate, guard, norm
from mpcore.tools.invariant.run import exact_norm

TP = mp.Axis(2, 0, role="tp")


def test_main_gradients_are_for_trained_parameters_that_are_chosen():
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    model[0].bias.requires_grad_(False)
    mp.gradients.main_gradients(model, [model[0].bias, model[0].weight, model[1].weight])
    main = [accumulate.main_grad(p) for p in model.parameters()]
    assert [x if x is None else x.dtype for x in main] == [torch.float32, None, torch.float64, None]
    held = main[0]
    mp.gradients.main_gradients(model)
    assert accumulate.main_grad(model[0].weight) is held, "a second call changes nothing"
    with pytest.raises(ValueError, match="DistributedDataParallel sums no main gradients"):
        mp.gradients.main_gradients(nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel))


def test_an_exact_norm_holds_sixty_bits_of_each_square():
    model: Any = nn.Linear(3, 1, bias=False).double()
    for values in ([1.0, 2.0**-20, 2.0**-29], [3.0, -4.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]):
        model.weight.grad = torch.tensor([values], dtype=torch.float64)
        largest = max(map(abs, values)) or 1.0
        digits = sum(int((x / largest) ** 2 * 2**60) for x in values)
        want = math.sqrt(digits * 2.0**-60) * largest if any(values) else 0.0
        assert float(exact_norm(model, mp.Mesh())) == want
    model.weight.grad = torch.tensor([[math.nan, 1.0, 1.0]], dtype=torch.float64)
    assert not math.isfinite(float(exact_norm(model, mp.Mesh())))


def test_a_norm_is_that_of_all_elements_and_scales_them_in_every_dtype():
    model: Any = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).double())
    for i, each in enumerate(list(model.parameters())[:3]):
        each.grad = torch.arange(each.numel(), dtype=each.dtype).view_as(each).sub(2.5) * (i + 1)
    flat = torch.cat([each.grad.double().flatten() for each in model.parameters() if each.grad is not None])
    for p in (0.5, 1.0, 2.0, 3.0, math.inf):
        want = torch.linalg.vector_norm(flat, p).item()
        assert float(norm.grad_norm(model, mp.Mesh(), p)) == pytest.approx(want, rel=1e-12)
    for most, length, factor in ((1.0, 4.0, 0.25), (4.0, 4.0, 1.0), (5.0, 4.0, 1.0), (1.0, math.inf, 1.0),
                                 (1.0, math.nan, 1.0), (1.0, 0.0, 1.0), (-1.0, 4.0, 1.0), (0.0, 4.0, 1.0)):  # fmt: skip
        for each in (length, torch.tensor(length, dtype=torch.float64)):
            for p in list(model.parameters())[:3]:
                p.grad = torch.ones_like(p)
            mp.gradients.clip_gradients(model, most, each)
            assert model[1].bias.grad is None
            for p in list(model.parameters())[:3]:
                assert torch.equal(p.grad, torch.full_like(p, factor))


def test_a_sum_that_is_missing_names_every_axis():
    p = nn.Parameter(torch.ones(2))
    axes = (mp.Axis(2, 0, name="tp"), mp.Axis(4, 0, name="ends"))
    guard.check_reduced("w", p, axes)
    p.grad = torch.ones(2)
    with pytest.raises(ValueError, match=r"the gradient of w is this rank's term of a sum over tp \(2 ranks\) and"):
        guard.check_reduced("w", p, axes)
    guard.check_reduced("w", p, ())
    p.requires_grad_(False)
    guard.check_reduced("w", p, axes)
    assert isinstance(p.grad, Tensor)
