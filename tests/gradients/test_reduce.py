"""The parts of sums, norms and guards: what has begun, and each refusal. Without ranks."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.gradients import accumulate, guard, norm, overlap, reduce
from mpcore.gradients.overlap import OverlappedAllReduce
from mpcore.tools.invariant.run import exact_norm

TP = mp.Axis(2, 0, role="tp")


def test_buckets_hold_at_most_so_much_or_one_larger_item():
    for sizes, want in (([], []), ([1, 2, 2], [[1, 2, 2]]), ([1, 2, 3], [[1, 2], [3]]), ([5, 5], [[5], [5]]),
                        ([9, 1, 4, 1], [[9], [1, 4], [1]]), ([0, 5, 0, 1], [[0, 5, 0], [1]])):  # fmt: skip
        assert list(reduce.buckets(iter(sizes), int, 5)) == want


@pytest.fixture
def sent(monkeypatch) -> list:
    """The sums that are started; `wait` only writes down what it waits for."""
    found: list = []
    monkeypatch.setattr(overlap, "start_sum_in_place", lambda x, axis: found.append((x, axis)) or x)
    monkeypatch.setattr(overlap, "wait", lambda x: found.append(("waited", x)))
    monkeypatch.setattr(overlap, "_pending", overlap._Pending())
    return found


@pytest.mark.parametrize(("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32),
                                             (torch.float64, torch.float64)])  # fmt: skip
def test_a_sum_begins_in_float32_or_wider_where_the_gradient_lies(sent, dtype, wide):
    p = nn.Parameter(torch.ones(2, 3, dtype=dtype))
    begun = overlap.begin_sum(p, TP)
    assert (begun.axis, begun.here) == (TP, False)
    assert torch.equal(begun.total, torch.zeros(2, 3, dtype=wide))
    p.grad = torch.ones(2, 3, dtype=dtype).cumsum(1)
    begun = overlap.begin_sum(p, TP)
    assert begun.here
    assert begun.total.dtype == wide
    assert torch.equal(begun.total, p.grad.to(wide))
    assert (begun.total is p.grad) is (dtype == wide)
    assert sent[-1] == (begun.total, TP)
    view = torch.arange(12, dtype=dtype).view(4, 3)
    p.grad = view[:2]
    shared = overlap.begin_sum(p, TP)
    assert shared.total.data_ptr() != view.data_ptr(), "others hold the memory too"
    p.grad = torch.ones(3, 2, dtype=dtype).T
    assert overlap.begin_sum(p, TP).total.is_contiguous()


def test_sums_begin_in_one_order_on_every_rank_however_the_gradients_come(sent, monkeypatch):
    monkeypatch.setattr(overlap, "ALONE", 4)
    stage: Any = nn.ModuleDict({name: mp.RMSNorm(4, tp=TP, sequence_parallel=True) for name in "abc"})
    first, second, third = (stage[name].weight for name in "abc")
    second.requires_grad_(False)
    sums = OverlappedAllReduce(stage, [stage])
    sums.arm()
    assert [p for p, _ in sums.order] == [third, first], "as backward comes to them"
    assert overlap._pending.all == [sums]
    first.sum().backward()
    assert sent == []
    third.sum().backward()
    assert list(sums.begun) == [third, first]
    assert {accumulate.gradient_state(p).name for p in (third, first)} == {"SUMMING"}
    assert [x.data_ptr() for x, _ in sent] == [third.grad.data_ptr(), first.grad.data_ptr()]
    with pytest.raises(ValueError, match=r"of shape \(4,\) got another gradient after the backward that"):
        first.sum().backward()
    overlap.drop_begun([first])
    del sent[:]
    sums.arm()
    third.sum().backward()
    sums.begin_rest()
    assert [here.here for here in sums.begun.values()] == [True, True], "of the step before"
    overlap.drop_begun([first])
    first.grad = third.grad = None
    hooks = list(sums.hooks)
    sums.arm()
    assert all(one is other for one, other in zip(sums.hooks, hooks, strict=True)), "nothing has changed"
    del sent[:]
    stage["a"].weight = replaced = nn.Parameter(torch.ones(4))
    sums.arm()
    assert len(sums.order) == 2
    assert sums.order[1][0] is replaced
    first.sum().backward()
    third.sum().backward()
    assert list(sums.begun) == [third]
    replaced.sum().backward()
    assert len(sums.begun) == 2
    overlap.drop_begun([third])
    twice = OverlappedAllReduce(stage, [stage, nn.ModuleDict({"tied": stage["c"]})])
    twice.arm()
    assert len(twice.order) == 1, "stages share the other"
    assert twice.order[0][0] is replaced


def test_a_gradient_is_known_to_be_summed_until_something_is_added():
    p = nn.Parameter(torch.ones(2))
    assert accumulate.is_reduced(p), "there is none"
    p.grad = torch.ones(2)
    assert not accumulate.is_reduced(p)
    accumulate.mark_reduced(p)
    p.grad.mul_(2)
    assert accumulate.is_reduced(p), "clipping adds nothing"
    for other in (copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
        other.grad = torch.ones(2)
        assert not accumulate.is_reduced(other), "a copy's gradient is another one"
    p.grad = torch.ones(2)
    assert not accumulate.is_reduced(p)
    layer: Any = mp.gradients.main_gradients(nn.Linear(2, 1, bias=False, dtype=torch.bfloat16))
    assert accumulate.is_reduced(layer.weight)
    assert accumulate.gradient_of(layer.weight) is None
    layer.weight.grad = torch.ones(1, 2, dtype=torch.bfloat16)
    assert not accumulate.is_reduced(layer.weight)
    assert torch.equal(accumulate.gradient_of(layer.weight), torch.ones(1, 2))
    assert layer.weight.grad is None
    assert not accumulate.is_reduced(layer.weight)
    accumulate.mark_reduced(layer.weight)
    assert accumulate.is_reduced(layer.weight)
    layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    assert not accumulate.is_reduced(layer.weight)
    assert torch.equal(layer.weight.main_grad, torch.full((1, 2), 2.0))
    mp.gradients.zero_gradients(layer.parameters())
    assert accumulate.gradient_of(layer.weight) is None
    assert not layer.weight.main_grad.any()


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


def test_an_optimizer_is_read_anew_when_a_group_is_added():
    model: Any = nn.Sequential(nn.Linear(2, 2), mp.RMSNorm(2, tp=TP, sequence_parallel=True))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    mp.gradients.guard_optimizer(optimizer, model).step()
    optimizer.add_param_group({"params": list(model[1].parameters())})
    model[1].weight.grad = torch.ones(2)
    with pytest.raises(ValueError, match=r"the gradient of 1.weight is this rank's term of a sum over tp \(2 ranks\)"):
        optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7))]})
    with pytest.raises(ValueError, match=r"a parameter of shape \(7,\) in the optimizer is none of the model's"):
        optimizer.step()


def test_a_gradient_that_torchs_optimizer_would_not_see_is_refused():
    model: Any = mp.gradients.main_gradients(nn.Linear(2, 2, dtype=torch.bfloat16))
    optimizer = mp.gradients.guard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.step()
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(ValueError, match=r"is in main_grad, and SGD reads .grad alone"):
        optimizer.step()
    ours = mp.AdamW(model)
    ours.step()
    ours.zero_grad()
    optimizer.step()


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
