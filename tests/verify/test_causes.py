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


def on(axis: str, rank: int, **more: Any) -> RankRecord:
    return RankRecord(**{"tp": 0, "cp": 0, "pp": 0, "dp": 0, axis: rank}, **more)


def module(layout: str, axis: str, outputs: list[Tensor], want: Tensor = W, **more: Any) -> str:
    truth = RankRecord(0, 0, 0, 0, outputs={("m", 0): want}, initial=more.pop("initial", {}))
    held = [on(axis, i, outputs={("m", 0): out}, **more) for i, out in enumerate(outputs)]
    return causes.why_module(truth, parse_layout(layout), "m", 0, held, want)


def test_elements_that_are_not_finite_are_counted():
    bad = W.clone()
    bad[0, 1], bad[2, 2] = torch.nan, torch.inf
    assert module("tp2", "tp", [bad, W]).startswith("2 of its 12 elements are NaN or infinite")


def test_features_in_another_order_and_rows_that_were_normalized_apart():
    order = W[:, [2, 0, 3, 1]]
    assert "another order" in module("tp2", "tp", [order, order])
    assert "another order" not in module("tp2", "tp", [order + 1, order + 1])
    wide = torch.cat([W, NOISE], 1)
    scaled = W * torch.tensor([[2.0], [3.0], [5.0]]) + torch.tensor([[1.0], [-1.0], [0.5]])
    assert "over 8 features sees only the 4" in module("tp2", "tp", [scaled, NOISE], wide, features={"m": [(0, 4)]})
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


def test_a_layer_built_without_sequence_parallelism_is_told_first():
    for names, told in (({"m"}, True), ({"n"}, False)):
        said = module("tp2", "tp", [NOISE, NOISE], forgotten=frozenset(names))
        assert said.startswith("it was built without sequence_parallel=True") is told
        assert said.endswith(causes.faults_of_module(parse_layout("tp2")))


@pytest.mark.parametrize(("shape", "want", "cut"), [
    ((2, 8), (4, 8), "cut(4, tp, 0)"), ((4, 4), (4, 8), "cut(8, tp, 1)"), ((3,), (4, 8), "cut(4, tp, 0)"),
    ((4,), (4, 8), "cut(4, tp, 0)"), ((2,), (), "cut(1, tp, 0)"),
])  # fmt: skip
def test_a_declaration_is_shown_for_the_first_dimension_that_differs(shape, want, cut):
    told = causes.undeclared("a.b.w", shape, want)
    assert f"mpcore.sharding.{cut}" in told
    assert f'self.declare("w", {want}, init, shard=' in told
