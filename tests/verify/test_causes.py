"""Which cause is named for which tensors, written by hand for each rank. Of the words only the kind is looked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mpcore.tools.verify import causes
from mpcore.tools.verify.layout import parse_layout
from mpcore.tools.verify.run import RankRecord

W = torch.tensor([[1.0, -2.0, 3.0, 5.0], [4.0, 7.0, -6.0, 11.0], [2.0, 9.0, 8.0, -3.0]], dtype=torch.float64)
NOISE = torch.tensor([[3.0, 1.0, -4.0, 1.0], [-5.0, 9.0, 2.0, 6.0], [5.0, -3.0, 5.0, 8.0]], dtype=torch.float64)
NOWHERE = "in no simple way"


def on(axis: str, rank: int, **more: Any) -> RankRecord:
    return RankRecord(**{"tp": 0, "cp": 0, "pp": 0, "dp": 0, axis: rank}, **more)


def why(layout: str, axis: str, gradients: list[Tensor | None], got: Tensor, **more: Any) -> str:
    held = [on(axis, i, gradients={} if g is None else {"a.w": g}, **more) for i, g in enumerate(gradients)]
    return causes.why_parameter(parse_layout(layout), more.pop("stage", "gradients"), "a.w", held, got, W)


@pytest.mark.parametrize("axis", ["tp", "dp", "cp"])
def test_terms_of_a_gradient_are_told_where_every_rank_has_one(axis):
    layout = f"{axis}2"
    part = W * 0.25
    told = why(layout, axis, [part, W - part], part)
    assert f"each rank of {axis} holds one term" in told
    assert f"mp.add_partial(module, 'w', mesh.{axis})" in told
    assert NOWHERE in why(layout, axis, [NOISE, W], NOISE), "terms of another sum"
    assert "too small" in why(layout, axis, [W / 2, W / 2], W / 2), "equal terms are no terms"
    assert NOWHERE in why(f"{axis}4", axis, [part, W - part], NOISE), "two of four ranks"


def test_a_norm_of_sequence_shards_is_told_which_norm_to_be():
    part = W * 0.25
    for axis, names, said in (("tp", "a", "make it mp.N"), ("dp", "a", "add_partial"), ("tp", "b", "add_partial")):
        assert said in why(f"{axis}2", axis, [part, W - part], part, norms={names: "mp.N"})


def test_stages_that_hold_a_parameter_have_terms_though_others_dont():
    part = W * 0.25
    told = why("pp4", "pp", [part, None, None, W - part], part)
    assert "each pipeline stage holds one term" in told
    assert "mesh.ends" in told
    assert NOWHERE in why("pp4", "pp", [part, None, None, None], NOISE)


def test_a_stage_of_values_and_of_updates_has_its_own_cause():
    for sharded, said in ((set(), "code of yours"), ({"a.w"}, "this rank's shard"), ({"b.w"}, "code of yours")):
        held = [on("tp", 0), on("tp", 1, sharded=sharded)]
        told = causes.why_parameter(parse_layout("tp2"), "first values", "a.w", held, NOISE, W)
        assert told.startswith("its first values depend on the layout")
        assert said in told
    held = [on("tp", i, gradients={"a.w": W / 2}) for i in range(2)]
    assert "optimizer" in causes.why_parameter(parse_layout("tp2"), "update", "a.w", held, W / 2, W)


def module(layout: str, axis: str, outputs: list[Tensor], want: Tensor = W, **more: Any) -> str:
    truth = RankRecord(0, 0, 0, 0, outputs={("m", 0): want}, initial=more.pop("initial", {}))
    held = [on(axis, i, outputs={("m", 0): out}, **more) for i, out in enumerate(outputs)]
    return causes.why_module(truth, parse_layout(layout), "m", 0, held, want)


BIAS = {"m.bias": torch.tensor([1.0, 2.0, -3.0, 4.0], dtype=torch.float64)}


def test_elements_that_are_not_finite_are_counted():
    bad = W.clone()
    bad[0, 1], bad[2, 2] = torch.nan, torch.inf
    assert module("tp2", "tp", [bad, W]).startswith("2 of its 12 elements are NaN or infinite")


@pytest.mark.parametrize("size", [2, 4])
def test_a_bias_that_each_rank_adds_is_told(size):
    more = W + (size - 1) * BIAS["m.bias"]
    assert f"the bias is added {size} times" in module(f"tp{size}", "tp", [more] * size, initial=dict(BIAS))
    for initial in ({}, {"n.bias": BIAS["m.bias"]}, {"m.bias": BIAS["m.bias"][:1]}, {"m.bias": -BIAS["m.bias"]}):
        assert "the bias is added" not in module(f"tp{size}", "tp", [more] * size, initial=initial)
    assert "the bias is added" not in module("dp3", "dp", [W[:1] + BIAS["m.bias"]], initial=dict(BIAS))


def test_terms_that_nobody_adds_are_told_of_tp_alone():
    part = W * 0.25
    assert "one term of a sum" in module("tp2", "tp", [part, W - part])
    both = [part + BIAS["m.bias"], W - part]
    assert "one term of a sum" in module("tp2", "tp", both, initial=dict(BIAS)), "with a bias on each rank"
    assert "one term of a sum" not in module("tp2", "tp", [part + 1, W - part])
    assert "one term of a sum" not in module("tp4", "tp", [part, W - part]), "two of four ranks"
    assert "one term of a sum" not in module("cp2", "cp", [part, W - part])


@pytest.mark.parametrize("axis", ["tp", "cp", "dp"])
def test_an_output_is_off_by_the_size_of_an_axis(axis):
    want = W.repeat(2, 1)  # of which a data rank has one half
    here = want.chunk(2)[0] if axis == "dp" else want
    for factor, said in ((2, f"{axis} = 2 times too large"), (0.5, f"{axis} = 2 times too small")):
        assert said in module(f"{axis}2", axis, [here * factor] * 2, want)
    for factor in (3, 1 / 3, 4, 0.25):
        assert f"{axis} = 2" not in module(f"{axis}2", axis, [here * factor] * 2, want)


def test_other_zeros_are_those_of_a_dropout_mask():
    one, other = W.clone(), W.clone()
    one[0, 0], other[1, 2] = 0, 0
    assert "dropout" in module("dp1tp2", "tp", [other, other], one)
    assert "dropout" not in module("tp2", "tp", [other + NOISE, other + NOISE], one), "the rest differs too"
    assert "sharded_features" not in module("tp2", "tp", [other, other], one)
    assert "pass it tp= and sharded_features=4" in module("tp2", "tp", [one[:, :2], other[:, 2:]], other)


def test_features_in_another_order_and_rows_that_were_normalized_apart():
    order = W[:, [2, 0, 3, 1]]
    assert "another order" in module("tp2", "tp", [order, order])
    assert "another order" not in module("tp2", "tp", [order + 1, order + 1])
    wide = torch.cat([W, NOISE], 1)
    scaled = W * torch.tensor([[2.0], [3.0], [5.0]]) + torch.tensor([[1.0], [-1.0], [0.5]])
    apart = [scaled, NOISE]
    assert "over 8 features sees only the 4" in module("tp2", "tp", apart, wide, features={"m": [(0, 4)]})
    bent = [scaled + 0.1 * NOISE, NOISE]
    assert "a norm or a softmax over" not in module("tp2", "tp", [scaled, scaled]), "each rank has all features"
    assert "over 8 features" not in module("tp2", "tp", bent, wide, features={"m": [(0, 4)]})


@pytest.mark.parametrize(("change", "told"), [
    ({}, True), ({"layout": "dp2"}, False), ({"name": "up"}, False), ({"features": {}}, False),
    ({"features": {"up": [(0, 2), (4, 6)]}}, False), ({"reads": 8}, False), ({"reads": 9}, False),
    ({"features": {"up": [(0, 4)], "down": [(0, 1)]}}, False), ({"norm": True}, True), ({"between": True}, False),
    ({"alone": True}, False),
], ids=str)  # fmt: skip
def test_a_packed_layer_before_one_that_reads_less_is_told(change, told):
    weights = {"up.weight": torch.ones(8, 3), "down.weight": torch.ones(3, change.get("reads", 4))}
    names = ["up", "down"]
    if change.get("norm"):
        weights["norm.weight"] = torch.ones(8)
        names.insert(1, "norm")
    if change.get("between"):
        weights["mid.weight"] = torch.ones(4, 8)
        names.insert(1, "mid")
    if change.get("alone"):
        del names[0]
    truth = RankRecord(0, 0, 0, 0, initial=weights, outputs={(name, 0): W for name in [*names, "after"]})
    held = on("tp", 0, features=change.get("features", {"up": [(0, 4)]}))
    said = causes.packed_before(truth, parse_layout(change.get("layout", "tp2")), change.get("name", "down"), 0, held)
    assert bool(said) is told
    if told:
        assert said.startswith("up returns 8 features, and this one reads 4.")


def test_a_packed_layer_right_before_a_module_without_a_weight_is_told():
    weights = {"up.weight": torch.ones(8, 3), "down.weight": torch.ones(3, 4), "norm.weight": torch.ones(8)}
    truth = RankRecord(
        0, 0, 0, 0, initial=weights, outputs={(n, 0): W for n in ("start", "up", "rope", "norm", "down", "end")}
    )
    held = on("tp", 0, features={"up": [(0, 4)]})
    found = {n: causes.packed_before(truth, parse_layout("tp2"), n, 0, held) for n in ("start", "rope", "norm", "end")}
    assert found["rope"].startswith(
        "if up before it packs q, k and v, or gate and up, it shards them as one matrix: make"
    )
    assert (found["start"], found["norm"], found["end"]) == ("", "", "")
    assert causes.packed_before(truth, parse_layout("dp2"), "rope", 0, held) == ""
    fused = on("tp", 0, features={"up": [(0, 2), (4, 6)]})
    assert causes.packed_before(truth, parse_layout("tp2"), "rope", 0, fused) == ""


@pytest.mark.parametrize(("shape", "want", "cut"), [
    ((2, 8), (4, 8), "cut(4, tp, 0)"), ((4, 4), (4, 8), "cut(8, tp, 1)"), ((3,), (4, 8), "cut(4, tp, 0)"),
    ((4,), (4, 8), "cut(4, tp, 0)"), ((2,), (), "cut(1, tp, 0)"),
])  # fmt: skip
def test_a_declaration_is_shown_for_the_first_dimension_that_differs(shape, want, cut):
    told = causes.undeclared("a.b.w", shape, want)
    assert f"mpcore.sharding.{cut}" in told
    assert f'self.declare("w", {want}, init, shard=' in told


def test_a_layer_built_without_sequence_parallelism_is_told_first():
    for names, told in (({"m"}, True), ({"n"}, False)):
        said = module("tp2", "tp", [NOISE, NOISE], forgotten=frozenset(names))
        assert said.startswith("it was built without sequence_parallel=True") is told
        assert said.endswith(causes.faults_of_module(parse_layout("tp2")))
