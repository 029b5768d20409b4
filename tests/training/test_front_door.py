"""What `prepare` hands to the functions below it, in which order, and whom it refuses: in one process."""

from __future__ import annotations

import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from mpcore.tools.invariant.run import InvariantStep

module: Any = importlib.import_module("mpcore.training.prepare")


def squares(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().sum()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def prepared(model: Any = None, **told: Any) -> mp.Run:
    model = model or nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    given = {"blocks": list(model.children()), "loss": squares, "optimizer": sgd, "initialize": False}
    return mp.prepare(model, mp.Mesh(), **{**given, **told})


@pytest.fixture
def steps(monkeypatch) -> list:
    """The steps of `lay_out` and `prepare` that change a model, in their order, with what they were given."""
    found: list = []

    def noted(name: str, answer: Any = None) -> None:
        monkeypatch.setattr(module, name, lambda *given, **how: found.append((name, given, how)) or answer)

    before = ("compare_replicas", "materialize", "seed_dropout", "convert_to_fp8", "recompute_blocks")
    after = ("shard_data_parallel", "compile_blocks", "main_gradients", "guard_optimizer", "offload_optimizer")
    for name in (*before, *after):
        noted(name)
    return found


def names(steps: list) -> list[str]:
    return [name for name, *_ in steps]


def test_the_usual_model_is_drawn_recomputed_and_sharded_in_this_order(steps):
    model = nn.Sequential(nn.Linear(3, 2))
    run = prepared(model, initialize=True, seed=7)
    assert names(steps) == ["materialize", "recompute_blocks", "shard_data_parallel", "guard_optimizer"]
    whole, first = run.model, steps[0]
    assert first == ("materialize", (whole, 7, torch.device("cpu")), {})
    assert steps[1] == ("recompute_blocks", ([model[0]], "none"), {"every": 1, "preserve_rng_state": True})
    assert steps[2] == ("shard_data_parallel", ([model], mp.Mesh(), [model[0]]),
                        {"zero": 1, "replicate": 1, "param_dtype": None, "reduce_dtype": torch.float32})  # fmt: skip
    assert steps[3][1] == (run.optimizer, [model])
    assert run.seed == 7


def test_policies_reach_the_steps_that_they_are_of(steps):
    example: Any = lambda block: ((), {})  # noqa: E731
    told = {
        "seed": 5, "precision": mp.Precision("bfloat16", fp8=True), "compile": mp.Compile("eager"),
        "recompute": mp.Recompute("selective", every=3, budget=0.5, example=example, preserve_rng_state=False),
        "data": mp.Zero(2, reduce_dtype=torch.bfloat16), "optimizer": mp.AdamW,
        "offload": mp.Offload(optimizer=True),
    }  # fmt: skip
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    run = prepared(model, **told)
    assert names(steps) == [
        "compare_replicas", "seed_dropout", "convert_to_fp8", "recompute_blocks", "shard_data_parallel",
        "compile_blocks", "main_gradients", "offload_optimizer",
    ]  # fmt: skip
    of: dict[str, Any] = {name: (given, how) for name, given, how in steps}
    blocks = [model[0], model[1]]
    assert of["compare_replicas"][0] == (model, mp.Mesh(), module.OTHER_VALUES)
    assert of["seed_dropout"][0] == (model, 5)
    assert of["convert_to_fp8"][0] == (blocks,)
    options = {"preserve_rng_state": False, "budget": 0.5, "example": example, "axes": (mp.Mesh().tp, mp.Mesh().data)}
    assert of["recompute_blocks"] == ((blocks, "selective"), {"every": 3, **options})
    assert of["shard_data_parallel"][1] == {
        "zero": 2, "replicate": 1, "param_dtype": None, "reduce_dtype": torch.bfloat16,
    }  # fmt: skip
    assert of["compile_blocks"][0] == (blocks, "eager")
    whole, masters = of["main_gradients"][0]
    assert whole is model
    assert set(masters) == set(model.parameters())
    assert of["offload_optimizer"][0] == (run.optimizer,)
    for p, master in masters.items():
        assert run.optimizer.state[p]["master"] is master
        assert (p.dtype, master.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(("precision", "made", "main"), [
    ("float32", mp.AdamW, []), ("float16", mp.AdamW, [1]), ("float16", sgd, []), ("bfloat16", mp.AdamW, [2]),
    (mp.Precision("bfloat16", autocast=True), mp.AdamW, [1]),
])  # fmt: skip
def test_main_gradients_are_made_for_optimizers_that_read_them(steps, precision, made, main):
    prepared(nn.Sequential(nn.Linear(3, 2)), precision=precision, optimizer=made)
    assert [len(given) for name, given, _ in steps if name == "main_gradients"] == main
    assert ("guard_optimizer" in names(steps)) is (made is sgd)


def test_an_optimizer_without_masters_is_refused_for_sixteen_bit_parameters():
    without = partial(mp.AdamW, masters=False)
    for made, name in ((sgd, "SGD"), (lambda model: without(model), "AdamW")):
        with pytest.raises(
            ValueError, match=f"{name} keeps no float32 masters of 2 torch.bfloat16 parameters: take mpcore"
        ):
            prepared(nn.Sequential(nn.Linear(3, 2)), precision="bfloat16", optimizer=made)


def test_a_schedule_says_whether_it_splits_backward(monkeypatch):
    asked: list = []
    monkeypatch.setattr(module, "check_policies", lambda mesh, splits, **how: asked.append(splits) or 1 / 0)
    schedule: Any = SimpleNamespace(splits_backward=True)
    monkeypatch.setattr(module, "Schedule", SimpleNamespace)
    for name in ("1f1b", "gpipe", "interleaved", "bfs", "zb", "zbv", "dualpipev", schedule):
        with pytest.raises(ZeroDivisionError):
            prepared(schedule=name)
    assert asked == [False] * 4 + [True] * 4


def test_ranks_compare_what_they_ask_for(monkeypatch):
    asked: list = []
    monkeypatch.setattr(module, "check_same", lambda what, value: asked.append((what, value)) or 1 / 0)
    for told in ({}, {"seed": 3, "micro_batches": 4, "recompute": "full"}):
        with pytest.raises(ZeroDivisionError):
            prepared(**told)
    (what, usual), (_, other) = asked
    assert what == "arguments of prepare"
    assert usual == {
        "precision": mp.Precision("float32"), "recompute": ("none", 1, None), "micro_batches": 1, "seed": 0,
        "data": mp.Zero(), "offload": mp.Offload(), "compile": None, "observers": [],
    }  # fmt: skip
    assert other == {**usual, "recompute": ("full", 1, None), "micro_batches": 4, "seed": 3}


MADE = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)


@pytest.mark.parametrize(("optimizer", "said"), [
    (MADE, r"optimizer is a SGD that exists already, .*: SGD\(model\.parameters\(\), lr"),
    (mp.AdamW(nn.Linear(2, 2)), r"optimizer is a AdamW that exists already, .*: AdamW\(model, lr"),
    (torch.optim.Adam, r"prepare calls optimizer\(model\) .*: Adam\(model\.parameters\(\), lr"),
    (partial(torch.optim.Adam, lr=1.0), r": Adam\(model\.parameters\(\), lr"),
    (None, r"optimizer is None, .*: AdamW\(model\.parameters\(\), lr"),
])  # fmt: skip
def test_what_makes_no_optimizer_of_a_model_is_refused_with_what_does(optimizer, said):
    with pytest.raises(ValueError, match=said):
        module._check_optimizer(optimizer)
    for good in (mp.AdamW, partial(mp.Muon, lr=1.0), sgd, partial(sgd)):
        module._check_optimizer(good)


def test_values_are_drawn_kept_or_refused():
    real, meta = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")
    usual, wide = mp.Precision(), mp.Precision("float64")
    for stages, initialize, precision, said in (
        ([meta], None, usual, ""), ([real], False, usual, ""), ([real], True, usual, ""), ([meta], True, usual, ""),
        ([meta, real], True, usual, ""), ([real], None, usual, "weight has a value already"),
        ([meta, real], None, usual, "weight has a value already"),
        ([real, meta], False, usual, "initialize=False keeps"),
        ([real], True, wide, "precision is float64, but weight is torch.float32"),
        ([nn.Linear(2, 2).double()], True, wide, ""), ([real], True, mp.Precision("fp64"), "precision is float64"),
    ):  # fmt: skip
        if said:
            with pytest.raises(ValueError, match=said):
                module._check_values(stages, initialize, precision)
        else:
            module._check_values(stages, initialize, precision)


def named(drawn: bool, *lists: list[str]) -> str:
    on = mp.build_mesh(pp=2, device_type="cpu")
    stage = nn.ParameterDict({name: nn.Parameter(torch.ones(1)) for name in lists[on.pp.rank]})
    if "tied" in stage:
        mp.add_partial(stage, "tied", on.ends)
    try:
        module._check_names([stage], on, drawn)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("drawn", "lists", "name"), [
    (True, (["a"], ["b"]), ""), (True, (["a", "c"], ["b", "c"]), "c"), (False, (["a", "c"], ["b", "c"]), ""),
    (False, (["a", "c"], ["c", "a"]), "a"), (True, (["tied", "a"], ["tied", "b"]), ""), (False, ([], []), ""),
    (True, ([], ["a"]), ""),
])  # fmt: skip
def test_a_name_on_two_stages_is_refused_unless_it_is_tied(drawn, lists, name):
    for said in mp.simulate(named, drawn, *lists, ranks=2):
        assert said.startswith(f"pipeline ranks 0 and 1 both hold a parameter {name}. " if name else "")
        assert bool(said) is bool(name)


# --- invariant numerics -----------------------------------------------------------------------------------------------


def invariant(model: nn.Module, **more: Any) -> InvariantStep:
    return InvariantStep([model], mp.Mesh(**more), mp.AdamW(model))


def test_leaves_are_summed_by_a_binary_tree_and_few_are_held():
    model: Any = nn.Linear(2, 1).double()
    model.bias.requires_grad_(False)
    steps = invariant(model)
    values = [torch.full((1, 2), float(3**i), dtype=torch.float64) for i in range(7)]
    held = []
    for value in values:
        model.weight.grad = value.clone()
        steps.take(model)
        held.append([level for level, _ in steps.nodes[model.weight]])
        assert model.weight.grad is None
    assert held == [[0], [1], [1, 0], [2], [2, 0], [2, 1], [2, 1, 0]]
    sums = [float(node[0, 0]) for _, node in steps.nodes[model.weight]]
    assert sums == [1 + 3 + 9 + 27, 81 + 243, 729]
    assert model.bias not in steps.nodes
    model.weight.grad = None
    steps.take(model)  # the eighth leaf, which doesn't use it
    total = steps.finish(torch.tensor(9.0))
    assert model.weight.grad.tolist() == [[float(sum(3**i for i in range(7)))] * 2]
    assert total == 9.0, "no loss was watched"
    assert steps.nodes == {}


def test_a_parameter_that_no_leaf_uses_has_no_gradient_and_a_negative_zero_is_none():
    model: Any = nn.Linear(1, 1).double()
    steps = invariant(model)
    for _ in range(2):
        model.weight.grad = torch.tensor([[-0.0]], dtype=torch.float64)
        steps.take(model)
    steps.finish(torch.tensor(0.0))
    assert model.bias.grad is None
    assert torch.signbit(model.weight.grad).item() is False


def test_losses_are_watched_where_gradients_are_and_summed_in_float64():
    model: Any = nn.Linear(1, 1)
    steps = invariant(model)
    loss = steps.watch_loss(lambda y, t: y * t)
    for i in range(4):
        assert loss(torch.tensor(2.0), torch.tensor(float(i))) == 2.0 * i
    with torch.no_grad():
        loss(torch.tensor(5.0), torch.tensor(5.0))
    assert [x.dtype for x in steps.losses] == [torch.float64] * 4
    assert steps.finish(torch.tensor(0.0)) == 12.0
    assert steps.losses == []
    loss(torch.tensor(2.0), torch.tensor(1.0))
    model.weight.grad = torch.ones(1, 1)
    steps.take(model)
    steps.dropped(SimpleNamespace())  # type: ignore[arg-type]
    assert (steps.losses, steps.nodes) == ([], {})


def test_another_optimizer_has_no_invariant_form():
    model = nn.Linear(1, 1)
    for made, name in ((sgd(model), "torch's SGD"), (mp.Muon(model), "mpcore's Muon")):
        with pytest.raises(ValueError, match=f"have no form of {name}: take optimizer=mpcore.AdamW"):
            InvariantStep([model], mp.Mesh(), made)
    ours = mp.AdamW(model)
    InvariantStep([model], mp.Mesh(), ours)
    assert not ours.fused
