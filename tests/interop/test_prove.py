"""How the sharded copy is compared with the unsharded one: what is different, who is named, what is advised."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import nn

from mpcore.interop.parallelize import prove
from mpcore.interop.parallelize.model_copy import ModelCopy
from mpcore.interop.parallelize.plan import Colwise, LocalSizes, Replicate, Rowwise
from mpcore.interop.parallelize.prove import CannotCheckError, Mismatch, PlanTester, Run, compare, run, shapes_of
from mpcore.interop.parallelize.swap import cut_model
from mpcore.mesh.axis import Axis
from mpcore.sharding.declare import Sharding, cut_blocks

X = torch.tensor([[1.0, -4.0], [2.0, 3.0]])


# --- differences ------------------------------------------------------------------------------------------------------


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


def test_a_rank_may_hold_the_whole_or_a_shard():
    def departs(*got, tolerance=1e-4):
        return prove._departure("m", X, list(got), tolerance)

    assert departs(X, X) is departs(X[:1], X[1:]) is departs(X[:, :1], X[:, 1:]) is None
    assert departs(X[1:], X[:1]) is None  # in any order
    assert departs(X, X + 4e-5) is None
    assert departs(X, X + 1) == departs(X + 1, X) == Mismatch("m", "value", 0.25)  # of any rank
    assert departs(X, X + 1, tolerance=0.25) is None
    assert departs(X[:1], X[1:] + 1) == Mismatch("m", "value", 0.25)
    assert departs(X[:1], X[1:] + 1, tolerance=0.25) is None
    assert departs(X[:1], X[:1]) == Mismatch("m", "value", pytest.approx(7 / 4))
    assert departs(X[:1], X) == departs(X[0], X[1]) == departs(X.flatten()) == Mismatch("m", "shape", 1.0)
    square = torch.arange(16.0).view(4, 4)  # each rank has half of the rows: joined along the first dimension that fits
    assert prove._departure("m", square, [square[:2], square[2:]], 0.0) is None


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


def test_a_gradient_of_a_shard_is_compared_with_its_part():
    want = torch.arange(4.0)
    cuts = [{"p": Sharding((4,), (cut_blocks((4,), Axis(2, rank, name="tp"), 0, (1,)),))} for rank in range(2)]
    whole = Run(gradients={"p": want})

    def departs(*got):
        runs = [Run(gradients={"p": x}, shardings=cut) for x, cut in zip(got, cuts, strict=True)]
        return list(prove._gradient_departures(whole, runs, 1e-4))

    assert departs(want[:2], want[2:]) == []
    assert departs(want[:2], want[:2]) == [Mismatch("p", "gradient", pytest.approx(2 / 3))]
    assert departs(want[:2], want) == [Mismatch("p", "gradient", 1.0)]


def test_the_first_module_with_other_values_and_the_last_with_another_gradient():
    x, y = torch.ones(2), torch.zeros(2)
    whole = Run(calls=[("a", [x]), ("b", [x, x]), ("c", [x])])

    def departs(*calls):
        return [(d.name, d.error) for d in prove._call_departures(whole, [Run(calls=c) for c in calls], 1e-4)]

    same = whole.calls
    assert departs(same, same) == []
    assert departs(same, [("a", [x]), ("b", [x, y]), ("c", [y])]) == [("b", 1.0), ("c", 1.0)]
    assert departs(same, [("a", [x]), ("c", [y])]) == []  # other calls: nothing to compare
    assert departs([("a", [x[:1]]), ("b", [x, x]), ("c", [y])], same) == [("c", 1.0)]  # a shard is no other value
    assert departs([("a", []), ("b", [x, x]), ("c", [x])]) == []
    found = [Mismatch(name, "gradient", 1.0) for name in ("a.weight", "c.bias", "input 0", "b.weight")]
    assert prove._last_used(whole, found) == found[1]
    assert prove._last_used(whole, found[2:3]) == found[2]
    assert prove._last_used(whole, [found[2], found[0]]) == found[0]


# --- a run ------------------------------------------------------------------------------------------------------------


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


# --- the verdict ------------------------------------------------------------------------------------------------------


def named(model, names=None):
    return ModelCopy(model, names or {name: name for name, _ in model.named_modules()})


def test_what_is_said_of_a_failure():
    twin = named(nn.Sequential(nn.Linear(2, 2)), {"": "", "0": "layers.3"})
    good, bad = Run(), Run(error=RuntimeError("first\nsecond"), where="0")
    assert compare(twin, Run(), [good, good], [], 1e-4) is None
    said = compare(twin, Run(), [good, bad], [("0", twin.model[0], Rowwise(split_input=True))], 1e-4)
    assert said == "layers.3 fails on 2 ranks: first"
    unequal = Run(error=RuntimeError("other calls"), where="")
    assert compare(twin, Run(), [unequal, good], [], 1e-4).startswith("the model itself fails on 2 ranks: other calls")
    assert prove._first_line(ValueError("  ")) == "ValueError"
    assert prove._first_line(ValueError(" a\n b")) == "a"


def test_what_is_said_of_other_values():
    twin = named(nn.Sequential(nn.ReLU(), nn.ReLU()), {"": "", "0": "layers.3", "1": "layers.4"})
    whole = Run(outputs=[X], calls=[("0", [X]), ("1", [X]), ("", [X])])
    wrong = Run(outputs=[X + 1], calls=[("0", [X]), ("1", [X + 1]), ("", [X + 1])])
    words = "returns other values on 2 ranks than on one, off by 25.0% of the largest"
    assert compare(twin, whole, [whole, wrong], [], 1e-4) == f"layers.4 {words}"
    only = Run(outputs=[X + 1], calls=whole.calls)
    assert compare(twin, whole, [whole, only], [], 1e-4) == f"the output {words}"
    top = Run(outputs=[X + 1], calls=[("0", [X]), ("1", [X]), ("", [X + 1])])
    assert compare(twin, whole, [top, top], [], 1e-4) == f"the model itself {words}"
    assert compare(twin, whole, [whole, wrong], [], 0.25) is None
    inside = Run(outputs=[X], calls=[("0", [X + 1]), ("1", [X]), ("", [X])])
    assert compare(twin, whole, [whole, inside], [], 1e-4) is None  # the outputs are right: so are all that use it


def test_what_is_said_of_another_gradient():
    twin = named(nn.Sequential(nn.Linear(2, 2)), {"": "", "0": "layers.3"})
    g = torch.tensor([2.0])
    whole, wrong = Run(gradients={"0.weight": g}), Run(gradients={"0.weight": g + 1})
    said = compare(twin, whole, [whole, wrong], [("9", twin.model[0], Replicate())], 1e-4)
    assert said == (
        "the gradient of layers.3.weight on 2 ranks is not that of the unsharded model, off by 50.0% of the largest. "
        "If it meets sharded heads or features, write 'replicated_with_grad_allreduce' for its module; if it sees all "
        "of them on every rank, 'replicate'"
    )
    assert compare(twin, whole, [whole, wrong], [("0", twin.model[0], LocalSizes(("heads",)))], 1e-4).endswith(
        "heads or features, call mp.add_partial(module, 'weight', tp) before parallelize, for example in the module's "
        "__init__"
    )
    whole, wrong = Run(gradients={"input 0": g}), Run(gradients={"input 0": g + 1})
    said = compare(twin, whole, [whole, wrong], [("9", twin.model[0], Replicate())], 1e-4)
    assert said.startswith("the gradient of input 0 on 2 ranks is not that")
    assert said.endswith("50.0% of the largest")


def advice(name, *targets, failed=False, size=2, **held):
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "part": nn.ModuleDict({"q": nn.Linear(2, 2), "o": nn.Linear(2, 2)})})
    vars(model["part"]).update(held)
    twin = named(model, {name: f"m.{name}" for name, _ in model.named_modules()})
    return prove._advice(
        twin,
        name,
        [("other", model, Replicate()), *((n, model.get_submodule(n), style) for n, style in targets)],
        size,
        failed,
    )


def test_what_is_advised():
    assert advice("elsewhere") == ""
    assert advice("a") == ". If its input is sharded, write 'm.a': 'rowwise'"
    assert advice("a", ("a", Replicate())) == advice("a", failed=True) == advice("a")
    packed = advice("a", ("a", Rowwise()))
    assert packed.startswith(". What reaches it is not each rank's share of the whole input")
    assert advice("a", ("a", Rowwise(split_input=True))) == packed
    feeds = advice("a", ("a", Rowwise()), failed=True)
    assert feeds == (
        ". 'rowwise' takes the sharded output of a 'colwise' layer: make what feeds m.a 'colwise', or write "
        "'rowwise_split_input' for a whole input"
    )
    assert advice("a", ("a", Rowwise(split_input=True)), failed=True) == ""
    whole = ". 'colwise' takes a whole input: make what feeds m.a 'rowwise', or m.a itself"
    assert advice("a", ("a", Colwise())) == advice("a", ("a", Colwise()), failed=True) == whole
    assert advice("part") == advice("part", n_head=4) == ""
    fused = ". Where m.part.q packs several projections, write Colwise(blocks=.., unit=..)"
    assert advice("part", ("part.q", Colwise())) == fused
    assert advice("part", ("a", Colwise())) == ""
    assert advice("part", ("part.q", Colwise(blocks=3)), width=6, n_head=4, head_dim=2, odd=3, half=2.0) == (
        ". It has the sizes n_head, width: name in LocalSizes those that count sharded heads or features"
    )
    both = advice("part", ("part.q", Colwise()), n_head=4)
    assert both.startswith(". It has the sizes n_head: ")
    assert both.endswith(fused)
    assert advice("part", ("part.q", Rowwise()), n_head=4) == ""
    part, q = ("part", LocalSizes(("n_head",))), ("part.q", Colwise(unit=2))
    assert advice("part", part, q, n_head=4) == (
        ". n_head is divided already: if its forward computes another size from its input's width, as C // n_head "
        "does, write -1 for this size, and chunk for split"
    )
    assert advice("part", part, q, n_head=4, width=6).startswith(". It has the sizes width: name in LocalSizes those")
    assert advice("part", part, n_head=4) == ""
    assert "n_head" not in advice("part", ("part.q", Colwise()), n_head=4, size=3)
    assert advice("", ("part.q", Colwise())) == fused


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
