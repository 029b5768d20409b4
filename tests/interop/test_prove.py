"""How the sharded copy is compared with the unsharded one: what is different, who is named, what is advised."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import nn

from mpcore.interop.parallelize import prove
from mpcore.interop.parallelize.model_copy import ModelCopy
from mpcore.interop.parallelize.plan import Colwise, Experts, LocalSizes, Replicate, Rowwise
from mpcore.interop.parallelize.prove import CannotCheckError, Mismatch, PlanTester, Run, run, shapes_of
from mpcore.interop.parallelize.swap import cut_model
from mpcore.mesh.axis import Axis

X = torch.tensor([[1.0, -4.0], [2.0, 3.0]])


@pytest.mark.parametrize(
    ("got", "want", "scale", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, 0.0), ([1.0, 3.0], [1.0, 2.0], 0.0, 0.5), ([1.0, 3.0], [1.0, -4.0], 0.0, 7 / 4),
        ([1.0, 3.0], [1.0, 2.0], 10.0, 0.1), ([0.5], [0.0], 0.0, 0.5 / 1e-30), ([0.5], [0.0], 2.0, 0.25),
        ([math.nan], [math.nan], 0.0, 0.0), ([math.nan, 1.0], [1.0, 1.0], 0.0, math.inf), ([], [], 0.0, 0.0),
        ([math.inf], [math.inf], 0, 0.0), ([-math.inf, 1.0], [-math.inf, 2.0], 0.0, 0.5),
        ([math.inf, 1.0], [1.0, 1.0], 0.0, math.inf),
        ([1.0, 1.0], [math.inf, 1.0], 0.0, math.inf), ([1], [2], 0.0, 0.5),
    ],
)  # fmt: skip
def test_an_error_is_relative_to_the_largest_value(got, want, scale, error):
    assert prove._error(torch.tensor(got), torch.tensor(want), scale) == pytest.approx(error)


def gradients(want, *got, cuts=None, tolerance=1e-4):
    whole = Run(gradients=want)
    runs = [Run(gradients=each, shardings=cuts or {}) for each in got]
    return list(prove._gradient_departures(whole, runs, tolerance))


def test_gradients_that_are_missing_or_of_another_value():
    two = torch.tensor([2.0, 4.0])
    assert gradients({"p": two}, {"p": two}, {"p": two}) == []
    assert gradients({"p": two}, {"p": two}, {"p": two + 1}) == [Mismatch("p", "gradient", 0.25)]
    assert gradients({"p": two}, {"p": two}, {"p": two + 1}, tolerance=0.25) == []
    gone = [Mismatch("p", "presence", 1.0)]
    assert gradients({"p": two}, {"p": two}, {"p": None}) == gradients({"p": two}, {"p": two}, {}) == gone
    assert gradients({"p": None}, {"p": None}, {"p": two}) == gone
    zero = torch.zeros(2)
    assert gradients({"p": zero}, {"p": None}, {"p": None}) == []  # zero is as none
    assert gradients({"p": None}, {"p": zero}, {"p": None}) == gradients({"p": None}, {"p": None}) == []
    # small gradients are relative to a hundredth of the largest of all
    small = torch.tensor([0.01])
    assert gradients({"p": two, "q": small}, {"p": two, "q": small + 0.01}) == [
        Mismatch("q", "gradient", pytest.approx(0.01 / 0.04))
    ]
    assert gradients({"p": two, "q": small * 10}, {"p": two, "q": small * 11}) == [
        Mismatch("q", "gradient", pytest.approx(0.1))
    ]
    assert gradients({"p": torch.zeros(0)}, {"p": torch.zeros(0)}) == []


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.idle = nn.Linear(2, 4), nn.Linear(4, 2), nn.Linear(2, 2)

    def forward(self, x, add=None, count=None):
        y = self.two(self.one(x).relu())
        return {"y": y if add is None else y + add, "n": torch.ones(1, dtype=torch.int64)}


def test_a_run_keeps_what_is_compared():
    torch.manual_seed(0)
    model, x, add = Model().double(), torch.randn(3, 2), torch.randn(2)
    found = run(model, ((x,), {"add": add, "count": torch.ones(1, dtype=torch.int64)}))
    y = model(x.double(), add.double())["y"]
    assert [o.tolist() for o in found.outputs] == [y.tolist()]
    assert not found.outputs[0].requires_grad
    assert [name for name, _ in found.calls] == ["one", "two", ""]
    assert torch.equal(found.calls[1][1][0], model.two(model.one(x.double()).relu()))
    assert (found.error, found.where) == (None, "the backward")
    leaves = [x.double().requires_grad_(), add.double().requires_grad_()]
    model.zero_grad()
    out = model(*leaves)["y"]
    (out + out.square() / 2).sum().backward()  # of which an output and its shards have one gradient
    assert found.gradients.keys() == {n for n, _ in model.named_parameters()} | {"input 0", "input 1"}
    for name, p in model.named_parameters():
        assert (found.gradients[name] is None) == name.startswith("idle")
        assert found.gradients[name] is None or torch.equal(found.gradients[name], p.grad)
    assert [torch.equal(found.gradients[f"input {i}"], leaf.grad) for i, leaf in enumerate(leaves)] == [True, True]
    assert found.shardings["one.weight"].shards == ()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert x.grad is None


class Fails(nn.Module):
    def __init__(self, inner, error):
        super().__init__()
        self.inner, self.error = inner, error

    def forward(self, x):
        if not self.inner:
            raise self.error
        return self.inner[0](x)


def test_a_run_that_fails_says_where():
    deep = Fails([], ArithmeticError("no"))
    model = nn.Sequential(nn.Linear(2, 2), Fails(nn.ModuleList([deep]), None))
    found = run(model.double(), ((X,), {}))
    assert (type(found.error), found.where) == (ArithmeticError, "1.inner.0")
    assert [name for name, _ in found.calls] == ["0"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(prove.CommunicatesError):
        run(Fails([], prove.CommunicatesError("no")), ((X,), {}))

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("in backward")

    layer = nn.Linear(2, 2).double()
    layer.register_forward_hook(lambda m, given, out: Backward.apply(out))
    found = run(layer, ((X,), {}))
    assert (str(found.error), found.where) == ("in backward", "the backward")


def two(style, other):
    return {"0": style, "2": other}


def test_verdicts_of_right_and_wrong_plans():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    prover = PlanTester(shapes_of(model))
    assert prover.tolerance == prove.TOLERANCE == 1e-4
    assert prover.verdict(two(Colwise(), Rowwise()), 2, cut_model) is None
    assert prover.verdict(two(Colwise(), Rowwise()), 4, cut_model) is None
    assert prover.verdict({}, 2, cut_model) is None
    assert prover.verdict(two(Colwise(), Replicate()), 2, cut_model).startswith("2 fails on 2 ranks: ")
    wrong = prover.verdict(two(Replicate(), Replicate(partial_gradient=True)), 2, cut_model)
    assert wrong.startswith("the gradient of 2.")
    assert PlanTester(shapes_of(model), tolerance=1e9).verdict(
        two(Replicate(), Replicate(partial_gradient=True)), 2, cut_model
    ) is None  # fmt: skip
    with pytest.raises(ValueError, match="odd"):
        prover.verdict(two(Colwise(), LocalSizes(("odd",))), 2, refuse)
    assert all(p.grad is None for p in prover.whole[0].model.parameters())


def test_experts_are_named_although_their_layers_run_as_often_as_experts_have_tokens():
    model = nn.Sequential(nn.Sequential(nn.Identity()), nn.Identity())
    twin = ModelCopy(model, {name: name for name, _ in model.named_modules()})
    whole = Run(outputs=[X], calls=[("0.0", [X]), ("0.0", [X]), ("0", [X]), ("1", [X])])
    part = Run(outputs=[X + 1], calls=[("0.0", [X]), ("0", [X + 1]), ("1", [X + 1])])
    said = prove.compare(twin, whole, [part, part], [("0", model[0], Experts())], 1e-4)
    assert said.startswith("0 returns other values on 2 ranks")
    assert said.endswith("build_mesh(.., etp=1)")


def test_a_forward_that_draws_in_evaluation_is_named():
    class Drops(nn.Sequential):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x, 0.5))

    plan, draws = two(Colwise(), Rowwise()), ". The forward draws random numbers, although the copy is in eval(): if"
    prover = PlanTester(shapes_of(Drops(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))))
    state = torch.get_rng_state()
    told = prover.verdict(plan, 2, cut_model)
    assert told.startswith("2 returns other values on 2 ranks than on one")
    assert draws in told
    assert torch.equal(state, torch.get_rng_state())  # the other ranks of tp draw nothing
    prover = PlanTester(shapes_of(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))))
    assert prover.verdict(plan, 2, cut_model) is None
    assert draws not in prover.verdict(two(Colwise(), Replicate()), 2, cut_model)


def refuse(*_):
    raise ValueError("odd")


def test_what_cannot_be_tested_is_said():
    class Needs(nn.Module):
        def __init__(self, out):
            super().__init__()
            self.one, self.out = nn.Linear(2, 2), out

        def forward(self, x, y):
            return self.one(x) * self.out

    with pytest.raises(CannotCheckError, match=r"^on a copy with random weights, .*missing 1 required positional"):
        _ = PlanTester(shapes_of(Needs(1.0))).whole
    example = ((X, X), {})
    for out in (math.nan, math.inf):
        with pytest.raises(CannotCheckError, match="its output has no finite floats"):
            _ = PlanTester(shapes_of(Needs(out)), example).whole
    with pytest.raises(CannotCheckError, match=r"^no arguments of its forward are known$"):
        _ = PlanTester(shapes_of(nn.ReLU())).whole

    class First(nn.Linear):
        def forward(self, input):
            if input[0, 0] != X[0, 0]:
                raise IndexError("not the first rows")
            return super().forward(input)

    with pytest.raises(CannotCheckError, match=r"^not the first rows$"):  # the second data rank's rows
        PlanTester(shapes_of(First(2, 2)), ((X,), {})).verdict({"": Experts(ep=Axis(2, role="ep"))}, 1, cut_model)

    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    with pytest.raises(CannotCheckError, match=r"^it can't be copied \(cannot pickle"):
        shapes_of(Held())


def test_few_layers_are_tried_first_and_a_copy_may_have_so_many_elements(monkeypatch):
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2) for _ in range(5)]))

    class Layers(nn.Module):
        def __init__(self, need=0):
            super().__init__()
            self.layers, self.need = nn.ModuleList([nn.Linear(2, 2) for _ in range(5)]), need

        def forward(self, x):
            if len(self.layers) < self.need:
                raise IndexError("too few")
            for layer in self.layers:
                x = layer(x)
            return x

    assert len(model[0]) == 5
    assert len(PlanTester(shapes_of(Layers())).whole[0].model.layers) == 5
    monkeypatch.setattr(prove, "SMALL", 30)  # exactly its parameters
    assert len(PlanTester(shapes_of(Layers())).whole[0].model.layers) == 5
    monkeypatch.setattr(prove, "SMALL", 29)
    assert len(PlanTester(shapes_of(Layers())).whole[0].model.layers) == 2
    assert len(PlanTester(shapes_of(Layers(3))).whole[0].model.layers) == 5
    monkeypatch.setattr(prove, "MOST", 30)
    assert len(PlanTester(shapes_of(Layers(3))).whole[0].model.layers) == 5
    monkeypatch.setattr(prove, "MOST", 29)
    assert len(PlanTester(shapes_of(Layers())).whole[0].model.layers) == 2
    with pytest.raises(CannotCheckError, match=r"^it has 30 parameters, and a copy may have 29$"):
        _ = PlanTester(shapes_of(Layers(3))).whole


def test_a_model_that_communicates_itself_is_not_run():
    said = r"the model calls _c10d_functional\.all_reduce\.default itself"
    with pytest.raises(prove.CommunicatesError, match=said), prove.WithoutCollectives():
        torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", "another group")
