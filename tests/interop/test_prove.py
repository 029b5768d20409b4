"""How the sharded copy is compared with the unsharded one: what is different, who is named, what is advised."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mpcore.interop.parallelize import prove
from mpcore.interop.parallelize.model_copy import ModelCopy, guesses, shape_copy, twin_of
from mpcore.interop.parallelize.plan import Colwise, Experts, Replicate, Rowwise
from mpcore.interop.parallelize.prove import Mismatch, PlanTester, Run, shapes_of
from mpcore.interop.parallelize.swap import cut_model

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


def two(style, other):
    return {"0": style, "2": other}


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


def test_the_weights_of_a_copy_are_tied_as_the_models():
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "head": nn.Linear(4, 7, bias=False)})
    model["head"].weight = model["embed"].weight
    copied = twin_of(shape_copy(model), False).model
    assert copied["head"].weight is copied["embed"].weight


class Takes(nn.Module):
    """A model with these names in its forward, a config, a table and a linear layer."""

    def __init__(self, signature, config=None, words=None, features=5):
        super().__init__()
        self.config = config
        if words:
            self.table, self.small = nn.Embedding(words, 2), nn.Embedding(2, 2)
        if features:
            self.linear = nn.Linear(features, 2)
        scope = {}
        exec(f"def forward(self, {signature}): return None", scope)
        self.forward = scope["forward"].__get__(self)


@pytest.mark.parametrize(
    ("vocab", "tables", "low", "high"), [(6, 100, 2, 5), (100, 6, 2, 5), (None, 6, 2, 5), (None, 2, 1, 1), (3, 9, 2, 2)]
)
def test_ids_are_in_the_smaller_of_vocabulary_and_table_and_neither_0_nor_1(vocab, tables, low, high):
    """0 and 1 may stand for padding, whose embedding has no gradient."""
    config = None if vocab is None else SimpleNamespace(vocab_size=vocab)
    ((ids,), _) = list(guesses(Takes("x", config, tables)))[-1]
    assert (ids.min().item(), ids.max().item()) == (low, high)
    ((again,), _) = list(guesses(Takes("x", config, tables)))[-1]
    assert torch.equal(ids, again)
