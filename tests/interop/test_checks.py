"""What is checked of a plan before a weight moves: every refusal, and what passes beside it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mpcore.interop.parallelize import checks
from mpcore.interop.parallelize.plan import Colwise, Experts, Hidden, resolve
from mpcore.mesh.axis import Axis

TP = Axis(2, 0, name="tp")


class Part(nn.Module):
    """An attention of this plan, with whatever attributes a test gives it."""

    def __init__(self, n_in=8, n_out=8, **held):
        super().__init__()
        self.q, self.o = nn.Linear(n_in, n_out), nn.Linear(n_out, n_in)
        vars(self).update(held)


class Model(nn.Module):
    def __init__(self, **held):
        super().__init__()
        self.layers = nn.ModuleList([Part(**held) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)


PLAN = {"layers.*.q": "colwise", "layers.*.o": "rowwise"}


def check(model, plan, tp=TP, **how):
    checks.check_plan(model, resolve(model, plan), tp, **how)


@pytest.mark.parametrize(
    ("head_dim", "style", "blocks", "unit"),
    [
        (None, Colwise(), (8,), 1), (4, Colwise(), (8,), 4), (4, Colwise(gather_output=True), (8,), 1),
        (4, Colwise(unit=2), (8,), 2), (None, Colwise(unit=2), (8,), 2), (4, Colwise(), (8, 16), 4),
        (4, Colwise(), (8, 6), 1), (4, Colwise(unit=2, gather_output=True), (8,), 1),
    ],
)  # fmt: skip
def test_features_that_stay_on_one_rank(head_dim, style, blocks, unit):
    assert checks.unit_of("layers.0.q", SimpleNamespace(head_dim=head_dim), style, blocks, TP) == unit


def test_a_number_of_heads_must_be_divided_or_kept():
    for name in ("num_heads", "n_head", "heads", "head", "nhead", "num_key_value_heads", "n_kv_heads"):
        model = Model(**{name: 4})
        with pytest.raises(
            ValueError, match=rf"^layers.0.{name} is 4 on each of 2 ranks, and the plan shards layers.0.q"
        ):
            check(model, PLAN)
    for name, value in (("head_dim", 4), ("headway", 4), ("num_heads", 4.0), ("num_heads", True), ("forehead", 3)):
        check(Model(**{name: value}), PLAN)
    lone = Part(num_heads=2)
    with pytest.raises(ValueError, match=r"^the model itself.num_heads is 2 .* add '': .*LocalSizes.*num_heads"):
        check(lone, {"q": "colwise", "o": "rowwise"})


def test_at_the_root_only_its_own_leaves_are_beside():
    lone = Part()
    lone.gain = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"^the model itself has a parameter '\w+' of one element"):
        check(lone, {"q": "colwise", "o": "rowwise"})
    deep = Part()
    deep.block = nn.Module()
    deep.block.inner = nn.Module()
    deep.block.inner.gain = nn.Parameter(torch.ones(1))
    check(deep, {"q": "colwise", "o": "rowwise"})
    deep.leaf = nn.Module()
    deep.leaf.gain = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"^leaf has a parameter '\w+' of one element"):
        check(deep, {"q": "colwise", "o": "rowwise"})


def resolved(model, plan):
    return {name: style for name, _, style in resolve(model, plan)}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"layers.*.k": "colwise"}, r"^plan pattern 'layers.\*.k' matches no module of Model; near it: \['layers.\*"),
        ({"layers.5.q": "colwise"}, r"matches no module of Model; it has 'layers.0.q' to 'layers.1.q'. Give a part"),
        ({"zzzzzz": "colwise"}, r"matches no module of Model; its modules are \['layers', 'norm', 'head'\]"),
        ({"hea.": "colwise"}, r"^plan pattern 'hea.' matches no module of Model"),
        ({"head": "odd"}, r"^style 'odd' of 'head' is unknown: it is one of \['colwise', "),
        ({"head": "gather"}, "^style 'gather' of 'head' is one that parallelize doesn't support: it knows"),
        ({"layers.*.q": "colwise", "*.0.q": "rowwise"},
         r"^plan patterns 'layers.\*.q' and '\*.0.q' both match layers.0.q, in different styles$"),
        ({"head.weight": "colwise"}, "^head.weight is a parameter, and 'colwise' is for modules: name its module"),
        ({"head.weight": "replicate"}, "^the plan of 1 patterns matches no module of Model: if it is of suggest"),
        ({}, "^the plan of 0 patterns matches no module"),
        ("odd", "^plan 'odd' is neither 'auto' nor a mapping"),
        ("auto", "^Model carries no tp plan: give suggest_plan"), (None, "^Model carries no tp plan"),
    ],
)  # fmt: skip
def test_a_plan_that_fits_nothing_is_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        resolve(Model(), plan)


def test_patterns_of_the_parameters_of_experts_are_those_of_their_module():
    model = nn.ModuleDict({"experts": nn.Module()})
    model["experts"].w = nn.Parameter(torch.ones(2, 4, 4))
    for style in ("moe_tp_experts", Experts({"w": Hidden(-1)})):
        assert resolved(model, {"experts": style, "experts.w": "grouped_gemm"}).keys() == {"experts"}
    with pytest.raises(ValueError, match=r"experts.w is a parameter, and 'grouped_gemm' is for modules"):
        resolve(model, {"experts": "replicate", "experts.w": "grouped_gemm"})
