"""The calls of a pipeline in one process: what is cut, checked, timed and passed on."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.layers import materialize
from mpcore.layers.linear import ParallelLinear
from mpcore.pipeline import checks, engine
from mpcore.pipeline import executor as of_executor
from mpcore.pipeline.engine import Pipeline
from mpcore.pipeline.executor import MicroBatchState
from mpcore.pipeline.messages import Meta
from mpcore.pipeline.partition import join_stages, measured_costs
from mpcore.pipeline.prove import Times, prove
from mpcore.pipeline.schedules import Action, Schedule, Span, build_schedule, write_csv
from mpcore.pipeline.split import backward_inputs, backward_weights


def squares(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().sum()


def pipe(model: nn.Module | None = None, micro_batches: int = 2, **options: Any) -> Pipeline:
    torch.manual_seed(0)
    model = model or nn.Linear(3, 2).double()
    return Pipeline(model, mp.Mesh(), micro_batches, **{"loss": squares, **options})


X, T = torch.arange(12.0, dtype=torch.float64).view(4, 3), torch.ones(4, 2, dtype=torch.float64)


# --- micro-batches ----------------------------------------------------------------------------------------------------


def test_tensors_are_cut_along_their_rows_and_lists_are_taken_as_they_are():
    line = pipe()
    cut = line._cut({"x": X, "target": T, "mask": torch.arange(4)})
    assert [each.x.tolist() for each in cut] == [X[:2].tolist(), X[2:].tolist()]
    assert [each.arguments["mask"].tolist() for each in cut] == [[0, 1], [2, 3]]
    assert [set(each.arguments) for each in cut] == [{"mask"}] * 2
    assert cut[0].key == cut[1].key
    lists = line._cut({"x": [X[:1], X[1:]], "target": (T[:1], T[1:])})
    assert [len(each.x) for each in lists] == [1, 3]
    assert lists[0].key != lists[1].key
    with torch.autocast("cpu", torch.bfloat16):
        assert line._cut({"x": X, "target": T})[0].key != line._cut({"x": X.float(), "target": T})[0].key
        within = line._cut({"x": X, "target": T})[0].key
    assert line._cut({"x": X, "target": T})[0].key != within, "under autocast the messages have other dtypes"


@pytest.mark.parametrize(("given", "said"), [
    ({"x": X[:3], "target": T[:3]}, "a batch of 3 is not a multiple of 2 micro-batches: pad it to 4 with rows"),
    ({"x": X[:0], "target": T[:0]}, "a batch of 0 is not a multiple of 2 micro-batches: pad it to 2 with rows"),
    ({"x": [X], "target": [T]}, "x is 1 tensors, and x is a list: give a list with one tensor for each of 2"),
    ({"x": [X, X], "target": T}, "target is a Tensor, and x is a list"),
    ({"x": [X, X], "target": [T, T], "m": [T]}, "m is 1 tensors, and x is a list"),
])  # fmt: skip
def test_what_cant_be_cut_is_refused_with_the_numbers(given, said):
    with pytest.raises(ValueError, match=said):
        pipe()._cut(given)


def test_rows_that_differ_are_refused_in_each_micro_batch():
    for given in ({"x": X, "target": T[:2]}, {"x": [X[:2], X], "target": [T[:2], T[:2]]}):
        with pytest.raises(ValueError, match=r"target has 2 rows, x has 4"):
            pipe()._cut(given)


def test_arguments_are_tensors_with_rows():
    assert engine._check_rows({"x": X, "target": T}) == 4
    for wrong, said in ((torch.tensor(1.0), "target is a tensor without rows"), (None, "target is a NoneType")):
        with pytest.raises(ValueError, match=said):
            engine._check_rows({"x": X, "target": wrong})
    with pytest.raises(ValueError, match="x is a tensor without rows"):
        engine._check_rows({"x": torch.tensor(1.0)})


def test_losses_are_summed_and_so_are_gradients():
    model = nn.Linear(3, 2).double()
    dense = nn.Linear(3, 2).double()
    dense.load_state_dict(model.state_dict())
    found = pipe(model).forward_backward(X, T)
    want = squares(dense(X), T)
    want.backward()
    assert found.dtype == torch.float64
    assert not found.requires_grad
    torch.testing.assert_close(found, want.detach())
    for p, q in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize(("loss", "said"), [
    (lambda y, t: y, r"the loss is a tensor of shape \(2, 2\): return a tensor of one number"),
    (lambda y, t: squares(y, t).detach(), "the loss is a tensor that needs no gradient"),
    (lambda y, t: 3.0, "the loss is float"), (lambda y, t: None, "the loss is NoneType"),
])  # fmt: skip
def test_what_is_no_loss_is_refused(loss, said):
    with pytest.raises(ValueError, match=said):
        pipe(loss=loss).forward_backward(X, T)


def test_a_loss_lies_in_memory_of_its_own():
    line = pipe()
    x = torch.ones(2, 2, requires_grad=True)
    line.loss = lambda y, t: y.sum()
    alone = line._checked_loss(x, T)
    assert alone.dim() == 0
    line.loss = lambda y, t: (y * 2)[0, :1]
    part = line._checked_loss(x, T)
    assert (part.dim(), part.untyped_storage().nbytes()) == (0, 4)
    assert part.requires_grad
    line.loss = lambda y, t: y.sum().reshape(1, 1)
    assert line._checked_loss(x, T).shape == ()


def test_parameters_that_were_frozen_since_are_refused_and_trained_as_built():
    model = nn.Linear(3, 2).double()
    line = pipe(model)
    line.forward_backward(X, T)
    model.weight.requires_grad_(False)
    with line._trained_as_built() as problems:
        assert model.weight.requires_grad
        assert [str(problem).partition(":")[0] for problem in problems] == [
            "parameters were frozen or freed after the first step"
        ]
    assert not model.weight.requires_grad
    model.weight.requires_grad_(True)
    with line._trained_as_built() as problems:
        assert problems == []


# --- forward, times ---------------------------------------------------------------------------------------------------


class Options(nn.Linear):
    """Adds what it is told."""

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        return super().forward(x) + more


def test_a_forward_has_one_argument_for_all_batches_or_one_for_each():
    model = Options(3, 2).double()
    line = pipe(model)
    with torch.no_grad():
        plain = nn.Linear.forward(model, X)
    batches = [X[:1], X[1:]]
    for more, want in ((torch.tensor(2.0), [2.0, 2.0]), ([torch.tensor(3.0), torch.tensor(4.0)], [3.0, 4.0])):
        got = list(line.forward(batches, more=more))
        torch.testing.assert_close(got[0], plain[:1] + want[0])
        torch.testing.assert_close(got[1], plain[1:] + want[1])
    assert line.from_last(X) is X
    assert line.last_rank == 0


def test_actions_are_recorded_from_the_first_on_and_read_once(monkeypatch):
    line = pipe(trace=True)
    clock = iter(range(100, 200))
    monkeypatch.setattr(engine.time, "time", lambda: float(next(clock)))
    line.forward_backward(X, T)
    spans = line.recorded()
    rows = [("F", 0), ("B", 0), ("F", 1), ("B", 1)]
    assert spans == [Span(0, Action(kind, 0, m), 2.0 * i, 2.0 * i + 1) for i, (kind, m) in enumerate(rows)]
    assert line.recorded() == []
    with pytest.raises(ValueError, match="nothing was recorded: make the Pipeline with trace=True"):
        pipe().recorded()


def test_each_backward_is_followed_by_a_call_with_its_stage():
    followed: list = []
    model = nn.Linear(3, 2).double()
    line = pipe(model, after_backward=followed.append, trace=True)
    line.forward_backward(X, T)
    assert followed == [model, model]
    assert len(line.recorded()) == 4
    line.set_micro_batches(4)
    assert (line.micro_batches, line.plan.micro_batches) == (4, 4)
    line.forward_backward(X, T)
    assert followed == [model] * 6


# --- schedules are checked --------------------------------------------------------------------------------------------


def test_a_schedule_must_be_for_these_ranks_micro_batches_and_stages(tmp_path):
    pp = mp.Axis(2, 1, role="pp")
    check: Any = checks._check_plan
    assert check("1f1b", pp, 4, 1).name == "1f1b"
    assert check("interleaved", pp, 4, 2).stages == 4
    assert check("interleaved", pp, 4, 3).stages == 6
    path = tmp_path / "mine.csv"
    write_csv(build_schedule("interleaved", 2, 4), path)
    assert check(str(path), pp, 4, 2).name == "mine.csv"
    with pytest.raises(ValueError, match=r"the schedule mine.csv lays 2 stages on rank 1, which holds 1"):
        check(str(path), pp, 4, 1)
    for plan in (build_schedule("1f1b", 3, 4), build_schedule("1f1b", 2, 5)):
        ranks, count = len(plan.ranks), plan.micro_batches
        said = f"is for {ranks} ranks and {count} micro-batches, the pipeline has 2 and 4"
        with pytest.raises(ValueError, match=said):
            check(plan, pp, 4, 1)
    rows = (("0F0", "0SEND_F0", "0RECV_B0", "0B0"), ("1RECV_F0", "1F0", "1B0", "1SEND_B0"))
    named = Schedule("x", tuple(tuple(Action(a[1:-1], int(a[0]), int(a[-1])) for a in row) for row in rows), 2, 1)
    with pytest.raises(ValueError, match="the schedule x names messages, such as 0SEND_F0: leave them out"):
        check(named, pp, 1, 1)
    uneven = Schedule("y", ((Action("F", 0, 0), Action("F", 1, 0), Action("B", 1, 0), Action("B", 0, 0)), ()), 2, 1)
    with pytest.raises(ValueError, match="the schedule y lays 0 stages on rank 1, which holds 1"):
        check(uneven, pp, 1, 1)


def test_linear_layers_are_told_whether_backward_is_split():
    stage = nn.ModuleDict({"up": mp.ColumnParallelLinear(2, 2), "plain": nn.Linear(2, 2)})
    for name, split in (("zb", True), ("1f1b", False)):
        checks.split_linears([stage], build_schedule(name, 2, 4))
        layer: Any = stage["up"]
        assert isinstance(layer, ParallelLinear)
        assert layer.product.split_backward is split


def pending(on_middle: bool) -> str:
    on = mp.build_mesh(pp=3, device_type="cpu")
    stage = nn.Linear(2, 2)
    if on.pp.rank != 1 or on_middle:
        mp.add_partial(stage, "weight", on.ends if not on_middle else on.pp)
    if on_middle and on.pp.rank == 2:
        stage = nn.Linear(2, 2)
    try:
        checks.check_pending([stage], on)
    except ValueError as error:
        return str(error)
    return ""


def test_a_pending_parameter_must_be_on_every_rank_of_its_axis():
    assert mp.simulate(pending, False, ranks=3) == [""] * 3
    said = mp.simulate(pending, True, ranks=3)
    start = "ranks 0 and 2 disagree about the number of parameters pending over pp, which all its ranks must hold"
    assert all(text.startswith(start) for text in said)


# --- the executor's parts ---------------------------------------------------------------------------------------------


def test_backward_begins_where_the_next_stage_returned_a_gradient():
    x = torch.ones(2, requires_grad=True)
    y, z = x * 2, x * 3
    edge = torch.autograd.graph.get_gradient_edge
    held = MicroBatchState(ends=[edge(y), None, edge(z)], grads=(torch.ones(2), torch.zeros(2), torch.full((2,), 5.0)))
    ends, grads = of_executor._begin(held)
    assert [g.tolist() for g in grads] == [[1, 1], [5, 5]]
    assert (held.ends, held.grads) == ([], ())
    torch.autograd.backward(ends, grads)
    assert x.grad is not None
    assert x.grad.tolist() == [17, 17]
    assert of_executor._begin(MicroBatchState(ends=[edge(x * 1)])) == ([], [])


NARROW = Meta((2,), torch.float32, False)


@pytest.mark.parametrize(("x", "meta", "said"), [
    (torch.ones(2), Meta((2,), torch.float32, True), ""), (torch.ones(2), NARROW, ""),
    (torch.ones(3), NARROW, r"output 1 of stage 4 in micro-batch 5 is \(3,\) of torch.float32, .* was \(2,\) of"),
    (torch.ones(2).double(), NARROW, r"is \(2,\) of torch.float64, .* was \(2,\) of torch.float32: .* pad it"),
    (torch.ones(2, requires_grad=True), NARROW, r"is in need of a gradient, .* was in need of none: .*; y \+ 0 \* x"),
])  # fmt: skip
def test_outputs_must_be_what_the_first_of_their_shape_were(x, meta, said):
    first = torch.ones(1), Meta((1,), torch.float32, False)
    if said:
        with pytest.raises(ValueError, match=said):
            of_executor._check_promise([first[1], meta], [first[0], x], 4, 5)
    else:
        of_executor._check_promise([first[1], meta], [first[0], x], 4, 5)
    with pytest.raises(ValueError, match="stage 4 returns 1 outputs in micro-batch 5, 2 in its first forward"):
        of_executor._check_promise([first[1], meta], [x], 4, 5)


def test_one_rank_runs_each_micro_batch_through_all_stages_and_back():
    plan = of_executor._one_by_one(build_schedule("interleaved", 1, 2, 3))
    (row,) = plan.ranks
    assert [str(action) for action in row] == [
        f"{stage}{kind}{m}" for m in range(2) for kind, order in (("F", (0, 1, 2)), ("B", (2, 1, 0))) for stage in order
    ]
    assert (plan.stages, plan.micro_batches) == (3, 2)


# --- a split backward -------------------------------------------------------------------------------------------------


def test_the_two_halves_give_the_gradients_of_one():
    for seed in range(3):
        torch.manual_seed(seed)
        a, b, c = (nn.Linear(3, 3).double() for _ in range(3))
        x, extra = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)

        def run(x: Tensor, extra: Tensor = extra) -> tuple[Tensor, Tensor, Tensor]:
            y = b(torch.tanh(a(x)) * a.weight.sum())  # noqa: B023
            return y * y, c(extra), y + c(x)  # noqa: B023  the second depends on no input

        parameters = [p for layer in (a, b, c) for p in layer.parameters()]
        one = x.clone().requires_grad_()
        outs = run(one)
        dys = [torch.randn_like(y) for y in outs]
        want = torch.autograd.grad(outs, [one, *parameters], dys)
        two, frozen = x.clone().requires_grad_(), x.clone()
        (dx, none, number), deferred = backward_inputs(run(two), dys, [two, frozen, 3])
        assert (none, number) == (None, None)
        torch.testing.assert_close(dx, want[0])
        assert dx is not None
        assert dx.is_contiguous()
        assert all(p.grad is None for p in parameters), "the first half leaves the weights alone"
        backward_weights(deferred)
        for p, g in zip(parameters, want[1:], strict=True):
            torch.testing.assert_close(p.grad, g)
        assert (deferred.ends, deferred.groups) == ([], [])


def test_an_output_without_a_gradient_is_left_out():
    w = nn.Parameter(torch.ones(2))
    x = torch.ones(2, requires_grad=True)
    (dx,), deferred = backward_inputs([x * w, x * 5, x.detach()], [torch.ones(2), None, torch.ones(2)], [x])
    assert dx is not None
    assert dx.tolist() == [1, 1]
    backward_weights(deferred)
    assert w.grad is not None
    assert w.grad.tolist() == [1, 1]
    (none,), nothing = backward_inputs([], [], [x])
    assert none is None
    backward_weights(nothing)


def test_the_second_half_frees_what_an_operation_saved_before_the_next_runs():
    class Saved:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    saved, left = weakref.WeakSet(), []

    def pack(x: Tensor) -> Saved:
        saved.add(found := Saved(x))
        return found

    layers = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4)))
    for p in layers.parameters():
        p.register_post_accumulate_grad_hook(lambda _: left.append(len(saved)))
    x = torch.ones(2, 3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each.x):
        y = layers(x)
    each = len(saved) // 4
    _, deferred = backward_inputs([y], [torch.ones_like(y)], [x])
    backward_weights(deferred)
    assert left == [3 * each, 2 * each, each, 0]


class Fails(torch.autograd.Function):
    """Raises in the backward of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        raise OSError("in backward")


class Failing(nn.Module):
    def __init__(self, of: str) -> None:
        super().__init__()
        self.of, self.weight = of, nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return Fails.apply(x) * self.weight if self.of == "x" else x * Fails.apply(self.weight)


class Step(of_executor._Step):
    """The step of one rank, whose messages go nowhere."""

    def __init__(self, size: int, module: nn.Module) -> None:
        self.of: Any = SimpleNamespace(stages={1: module}, pp=mp.Axis(size, 0), problems=[], noted=self.note)
        self.at: list[Any] = []
        self.held, self.last = {}, None

    @contextmanager
    def note(self, *at: Any) -> Iterator[None]:
        self.at.append(at)
        yield

    def _await(self, action: Action) -> None: ...

    def _finish(self, action: Action, stage: int) -> None:
        self.at.append("finished")

    def _send_back(self, stage: int, m: int, held: MicroBatchState, dxs: Any) -> None:
        self.at.append(list(dxs))

    def _is_last(self, stage: int, m: int) -> bool:
        return True


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("of", "kind"), [("x", "B"), ("weight", "B"), ("x", "I"), ("weight", "W")])
def test_an_error_in_backward_is_raised_on_one_rank_and_kept_on_several(of, kind, size):
    """There the step goes on with zeros, so that no other rank waits for a message, and all are told at its end."""
    module = Failing(of)
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    y = module(x)
    step = Step(size, module)
    held = MicroBatchState((x,), (True,), [torch.autograd.graph.get_gradient_edge(y)], (torch.ones_like(y),))
    step.held[1, 0] = held
    if kind == "W":
        step.backward_inputs(Action("I", 1, 0), 1, 0)
        (dx,) = step.at[-1]
        assert torch.equal(dx, torch.ones_like(x))
        assert held.inputs is None
    run = {"B": step.backward, "I": step.backward_inputs, "W": step.backward_weights}[kind]
    if size == 1:
        with pytest.raises(OSError, match="in backward"):
            run(Action(kind, 1, 0), 1, 0)
        assert step.of.problems == []
        return
    run(Action(kind, 1, 0), 1, 0)
    assert [str(error) for error in step.of.problems] == ["in backward"]
    assert (kind, 1, 0) in step.at
    assert ("finished" in step.at) is (kind != "I")
    assert any(isinstance(told, list) for told in step.at), "what the previous rank waits for"
    assert step.held == ({} if kind != "I" else {(1, 0): held})


# --- times and stages -------------------------------------------------------------------------------------------------


def test_a_time_is_that_of_its_kind_and_stage():
    times = Times(2.0, 3.0, 5.0, stages=(1.0, 10.0))
    kinds = {"F": 2.0, "I": 3.0, "W": 5.0, "B": 8.0, "SEND_F": 0.0}
    assert {kind: times.of(Action(kind, 1, 0)) for kind in kinds} == {kind: 10 * x for kind, x in kinds.items()}
    assert Times(backward=7.0).of(Action("B", 0, 0)) == 7.0
    assert Times().of(Action("B", 3, 0)) == 2.0
    with pytest.raises(ValueError, match="times of 3 stages for a schedule of 2"):
        prove(build_schedule("1f1b", 2, 4), Times(stages=(1.0, 1.0, 1.0)))


def test_a_measured_cost_is_the_median_after_a_warm_up(monkeypatch):
    seconds = iter([0.0, 99.0, 0.0, 3.0, 0.0, 1.0, 0.0, 2.0])
    monkeypatch.setitem(measured_costs.__globals__, "_now", lambda x: next(seconds))
    assert measured_costs([nn.Linear(2, 2)], torch.ones(1, 2), repeats=3) == [2.0]


def test_stages_are_joined_under_the_models_names():
    first, second = nn.Module(), nn.Module()
    first.blocks, second.blocks = nn.ModuleDict({"0": nn.Linear(2, 2)}), nn.ModuleDict({"3": nn.Linear(2, 2)})
    first.norm = second.norm = nn.LayerNorm(2)
    first.head, second.head = nn.Identity(), nn.Linear(2, 2)
    joined: Any = join_stages([first, second])
    assert [name for name, _ in joined.named_parameters()] == [
        "blocks.0.weight", "blocks.0.bias", "blocks.3.weight", "blocks.3.bias", "norm.weight", "norm.bias",
        "head.weight", "head.bias",
    ]  # fmt: skip
    assert joined.head is second.head
    second.norm = nn.LayerNorm(2)
    with pytest.raises(ValueError, match="2 stages hold a LayerNorm norm each, with tensors in it"):
        join_stages([first, second])
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(ValueError, match="2 stages hold a parameter weight each: which of them is the model's"):
        join_stages([one, two])
    two.weight, two.bias = one.weight, one.bias
    assert join_stages([one, two]).weight is one.weight
    empty = join_stages([nn.ModuleDict({"a": nn.Identity()}), nn.ModuleDict({"a": nn.Identity()})])
    assert list(empty.children())
    full, shard = (
        materialize(join_stages([nn.Module(), mp.ColumnParallelLinear(2, 4, tp=tp, device="meta")]), 5)
        for tp in (mp.Axis(), mp.Axis(2, 1, name="tp"))
    )
    torch.testing.assert_close(shard.weight, full.weight[2:], rtol=0, atol=0)
