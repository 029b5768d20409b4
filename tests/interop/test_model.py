"""`parallelize` as a whole: what it warns of, and when a plan is tested."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mpcore as mp
from mpcore.interop.parallelize import model as module
from mpcore.interop.parallelize.model import parallelize
from mpcore.layers.linear import ColumnParallelLinear
from mpcore.mesh.axis import Axis

TP = Axis(2, 0, name="tp")


class Half(nn.Module):
    """Two layers, of which a plan may name one."""

    def __init__(self, one, two):
        super().__init__()
        self.one, self.two = nn.Linear(4, one, bias=False), nn.Linear(4, two, bias=False)

    def forward(self, x):
        return self.one(x), self.two(x)


@pytest.mark.parametrize(("one", "two", "warned"), [(8, 8, False), (8, 10, True), (8, 6, False), (2, 14, True)])
def test_a_plan_that_shards_less_than_half_is_warned_of(one, two, warned):
    plan = {"one": "colwise_rep"}
    percent = f"{two / (one + two):.0%}"
    said = (
        rf"leaves {percent} of the model's {16 * (one + two)} bytes whole on each of 2 ranks, most of all two.weight "
    )
    said += rf"\({16 * two} bytes\): name its module"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        parallelize(Half(one, two), plan, TP, check=False)
        parallelize(Half(one, two), plan, Axis(2, 1, name="tp"), check=False)  # rank 0 alone warns
        parallelize(Half(one, two), plan, Axis(name="tp"))
    assert len(seen) == warned
    assert module.FLOOR == 0.5
    if warned:
        assert __file__ == seen[0].filename
        with pytest.raises(ValueError, match=said):
            parallelize(Half(one, two), plan, Axis(2, 1, name="tp"), strict=True)
    else:
        parallelize(Half(one, two), plan, TP, strict=True)
    parallelize(nn.Sequential(nn.ReLU(), nn.Linear(1, 1)), {"1": "replicate"}, Axis(name="tp"), strict=True)


def test_the_plan_that_a_model_carries_is_not_asked_for_its_heads():
    class Hub(nn.Module):
        config = SimpleNamespace(base_model_tp_plan={"q": "colwise", "o": "rowwise"}, model_type="x")

        def __init__(self):
            super().__init__()
            self.q, self.o, self.num_heads = nn.Linear(4, 4), nn.Linear(4, 4), 2

    for plan in ("auto", None):
        assert type(parallelize(Hub(), plan, TP, check=False).q) is ColumnParallelLinear
    with pytest.raises(ValueError, match="num_heads is 2 on each of 2 ranks"):
        parallelize(Hub(), Hub.config.base_model_tp_plan, TP, check=False)


class Needs(nn.Module):
    """Its argument can't be guessed."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, y):
        return self.two(self.one(x)) + y


RIGHT, WRONG = {"one": "colwise", "two": "rowwise"}, {"one": "colwise", "two": "colwise_rep"}
X = torch.ones(2, 4)


def test_what_cannot_be_tested_waits_for_the_first_forward(monkeypatch):
    model = parallelize(Needs(), WRONG, TP)
    assert len(model._forward_pre_hooks) == 2
    with pytest.raises(ValueError, match="two fails on 2 ranks"):
        model(X, X)
    assert len(model._forward_pre_hooks) == 1  # it is tested once
    monkeypatch.setattr(module, "_cannot_try", lambda why, strict=False: pytest.fail(why))
    right = parallelize(Needs(), RIGHT, TP)
    hook = next(iter(right._forward_pre_hooks.values()))
    hook(right, (X.to("meta"), X), {})  # a dry run has no values: the test waits
    assert len(right._forward_pre_hooks) == 2
    hook(right, (X, X), {})
    assert len(right._forward_pre_hooks) == 1


class Scales(nn.Module):
    """A parameter of its own beside sharded features; its all-reduce, if it is given an axis, is one of its own."""

    def __init__(self, talks=Axis()):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.scale = nn.Linear(4, 8), nn.Linear(8, 4), nn.Parameter(torch.full((2,), 0.5))
        self.shift = nn.Parameter(torch.zeros(2))
        self.talks = talks

    def forward(self, x):
        return self.down(self.up(x) * self.scale[0]) + self.shift[0] + mp.collectives.reduce(x.new_zeros(1), self.talks)


SCALES = {"up": "colwise", "down": "rowwise"}


def gradient(model):
    model(X).square().sum().backward()
    mp.gradients.reduce_gradients(model)
    return model.scale.grad


@pytest.mark.parametrize("axis", ["mesh", "own"])
def test_a_partial_gradient_may_be_declared_before_the_plan_is_tested(axis):
    want = gradient(Scales())

    def work(mesh):
        tp = mesh.tp if axis == "mesh" else Axis(2, mesh.tp.rank, mesh.tp.group)
        model = Scales()
        mp.add_partial(model, "scale", tp)
        mp.add_partial(model, "scale", tp)  # once more changes nothing
        parallelize(model, SCALES, tp, strict=True)
        assert mp.sharding.shardings(model)["scale"].partial == (tp,)
        torch.testing.assert_close(gradient(model), want)
        with pytest.raises(ValueError, match=r"the gradient of scale on 2 ranks is not that of the unsharded model"):
            parallelize(Scales(), SCALES, tp)
        single = Scales()
        single.scale = nn.Parameter(torch.ones(1))
        with pytest.raises(ValueError, match=r"the model itself has a parameter '\w+' of one element"):
            parallelize(single, SCALES, tp)
        mp.add_partial(single, "scale", tp)
        mp.add_partial(single, "shift", Axis(2, 0, name="other"))  # whose ranks the copy doesn't have
        parallelize(single, SCALES, tp, strict=True)

    mp.simulate(work, tp=2)


def test_a_model_that_communicates_is_not_run_on_one_rank():
    def work(mesh):
        return parallelize(Scales(mesh.tp), SCALES, mesh.tp)(X)

    with pytest.warns(UserWarning, match="the model calls .*all_reduce.* itself, which one process can't run"):
        results = mp.simulate(work, tp=2)
    for got in results:
        torch.testing.assert_close(got, Scales()(X))
