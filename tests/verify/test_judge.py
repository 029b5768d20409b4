"""The numbers of `verify.judge`: differences, tolerances, ratios, and the part of a tensor that a rank holds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mpcore.tools.verify import parts as tensors
from mpcore.tools.verify.judge import Judge
from mpcore.tools.verify.layout import Layout, parse_layout
from mpcore.tools.verify.run import RankRecord

EPS = 2.0**-52
VALUES = torch.arange(24.0, dtype=torch.float64).view(4, 6) + 1


def seen(tp: Any = 0, cp: Any = 0, pp: Any = 0, dp: Any = 0, **more: Any) -> RankRecord:
    return RankRecord(tp, cp, pp, dp, **more)  # type: ignore[arg-type]


def number(x: float, *shape: int) -> Tensor:
    return torch.full(shape, x, dtype=torch.float64)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, 1e-10), (torch.float32, 2.0**-23)])
def test_tensors_are_near_within_64_roundings_of_the_largest_value(dtype, rounding):
    want = torch.tensor([0.0, -1024.0], dtype=torch.float64)
    for share, near in ((0.0, True), (0.9, True), (-0.9, True), (1.1, False), (-1.1, False)):
        got = torch.tensor([share * 64 * rounding * 1024, -1024.0], dtype=dtype)
        assert tensors.near(got, want) is near
        assert tensors.near(got.flip(0), want.flip(0).float()) is near
    for nothing in (torch.zeros(2), torch.zeros(0)):
        assert not tensors.near(nothing, nothing), "there is no scale"


def off(got: Tensor, want: Tensor, own: float = 0.0, floor: float = 0.0, **how: object) -> tuple[float, bool]:
    return Judge(seen(), **how)._off(got, want, own, floor)  # type: ignore[arg-type]


def test_float64_may_differ_by_1e_10_of_the_largest_value():
    want = torch.tensor([0.5, -4.0], dtype=torch.float64)
    for error, bad in ((0.0, False), (3.9e-10, False), (4.1e-10, True), (math.inf, True)):
        ulps, is_bad = off(want + torch.tensor([error, 0]), want)
        assert ulps == pytest.approx(error / (4 * EPS), rel=1e-6)
        assert is_bad is bad
    assert off(want * math.nan, want) == (math.inf, True)
    assert off(want, want, exact=True) == (0.0, False)
    assert off(want + 1e-15, want, exact=True)[1] is True
    assert off(torch.zeros(0), torch.zeros(0)) == (0.0, False)
    zero, tiny = number(0.0, 2), number(9e-11, 2)
    assert off(tiny, zero) == (pytest.approx(9e-11 / EPS), False)  # the scale of zeros is 1
    assert off(tiny, zero, floor=0.5)[1] is True
    assert off(tiny, zero, floor=2.0) == (pytest.approx(9e-11 / EPS / 2), False)
    inf = torch.tensor([math.inf, 1.0], dtype=torch.float64)
    assert off(inf + torch.tensor([0, 0.9e-10]), inf) == (pytest.approx(0.9e-10 / EPS, rel=1e-5), False)
    assert off(inf + torch.tensor([0, 1.1e-10]), inf)[1] is True, "an infinity is no scale"


def test_below_float64_twice_the_own_error_and_one_rounding_may_differ():
    want, eps = torch.tensor([0.5, -4.0], dtype=torch.float64), 2.0**-23
    how = {"dtype": torch.float32, "rounded": [seen()]}
    for own in (0.0, 1e-3):
        for share, bad in ((0.99, False), (1.01, True)):
            error = share * (2 * own + eps * 4)
            ulps, is_bad = off(want + torch.tensor([0, error]), want, own, **how)
            assert ulps == pytest.approx(error / (eps * 4), rel=1e-6)
            assert is_bad is bad


def test_indices_must_be_equal_in_float64_and_may_differ_below():
    one, other = torch.tensor([3, 5]), torch.tensor([3, 6])
    assert off(one, one) == (0.0, False)
    assert off(other, one) == (pytest.approx(1 / 5 / EPS), True)
    assert off(other, one, dtype=torch.float32) == (0.0, False)


def test_the_own_error_is_the_largest_of_the_rounded_runs():
    def run(x: float, *shape: int) -> RankRecord:
        return seen(gradients={"w": number(x, *(shape or (2,)))})

    rounded = [run(1.25), run(0.5), run(9.0, 3), seen()]
    assert Judge(run(1.0), torch.float32, rounded)._own("gradients", "w") == 0.5
    assert Judge(run(1.0))._own("gradients", "w") == 0.0
    assert Judge(run(1.0), torch.float32, rounded[2:])._own("gradients", "w") == 0.0


def runs(count: int, axis: str, **fields: object) -> tuple[RankRecord, list[RankRecord]]:
    """The unsharded model's record, and those of the ranks of an axis, all with these fields."""
    fields = {"output": {}, "evaluated": {}, **fields}

    def copied(value: object) -> object:
        return {k: v.clone() for k, v in value.items()} if isinstance(value, dict) else value

    ranks = [seen(**{axis: i}, **{k: copied(v) for k, v in fields.items()}) for i in range(count)]  # type: ignore[arg-type]
    return seen(**fields), ranks


def judged(truth: RankRecord, layout: Layout, ranks: list[RankRecord]) -> Any:
    return Judge(truth)(layout, ranks)


def test_a_small_tensor_is_measured_by_a_thousandth_of_the_largest_of_all():
    for size, bad in ((1e3, True), (1e4, False)):  # the allowed difference is 1e-10 of 1e-3 of the largest
        fields = {"w": number(size, 2), "v": number(1e-6, 2), "none": torch.zeros(0)}
        truth, ranks = runs(2, "tp", initial=fields, gradients=fields)
        ranks[1].gradients["v"] += 5e-10
        verdict = judged(truth, parse_layout("tp2"), ranks)
        want = 5e-10 / (1e-3 * size * EPS)
        assert verdict.gradients == {"w": 0.0, "v": pytest.approx(want, rel=1e-4), "none": 0.0}
        assert verdict.worst["gradient"] == verdict.gradients["v"]
        assert verdict.equal is not bad
        found = verdict.mismatch
        assert (found and (found.stage, found.name, found.ulps)) == (("gradient", "v", want) if bad else None) or (
            found is not None and found.ulps == pytest.approx(want, rel=1e-4)
        )


def test_where_gradients_of_several_parameters_differ_the_last_of_them_is_named_too():
    fields = {name: number(1.0, 2) for name in "abc"}
    for wrong, said in (("ab", "the gradients behind b are right"), ("b", "")):
        truth, ranks = runs(2, "tp", initial=fields, gradients=fields)
        for name in wrong:
            ranks[1].gradients[name][0] += 0.3
        found = judged(truth, parse_layout("tp2"), ranks).mismatch
        assert found.name == wrong[0]
        assert (said in found.cause, "gradients behind" in found.cause) == (True, bool(said))


def test_the_first_tensor_that_differs_is_named_and_the_worst_is_counted():
    fields = {name: number(1.0, 2) for name in "abc"}
    truth, ranks = runs(2, "tp", initial=fields, updated=fields)
    ranks[1].updated["b"] += 1e-6
    ranks[0].updated["b"] += 1e-7
    ranks[0].updated["c"] += 1e-5
    verdict = judged(truth, parse_layout("tp2"), ranks)
    found = verdict.mismatch
    assert found is not None
    assert (found.stage, found.name) == ("update", "b")
    assert found.ulps == pytest.approx(1e-6 / EPS, rel=1e-6)
    assert verdict.worst["update"] == pytest.approx(1e-5 / EPS, rel=1e-6)
    assert verdict.gradients == {}


def test_a_parameter_that_ranks_lack_or_shape_otherwise_is_infinitely_off():
    fields = {"w": number(1.0, 2), "zero": number(0.0, 2)}
    truth, ranks = runs(3, "tp", initial=fields, gradients=fields)
    layout = parse_layout("tp3")
    del ranks[1].gradients["zero"]  # a gradient of zeros may be missing on some ranks
    assert judged(truth, layout, ranks).equal
    del ranks[1].gradients["w"]
    verdict = judged(truth, layout, ranks)
    assert (verdict.mismatch.name, verdict.gradients["w"], verdict.worst["gradient"]) == ("w", math.inf, math.inf)
    assert "1 of the 3 ranks" in verdict.mismatch.cause
    for rank in ranks:
        rank.initial.pop("w")
        rank.gradients.pop("w", None)
    verdict = judged(truth, layout, ranks)
    assert (verdict.mismatch.stage, verdict.mismatch.name, verdict.mismatch.ulps) == ("first values", "w", math.inf)
    truth, ranks = runs(2, "tp", initial=fields, gradients=fields)
    for rank in ranks:
        rank.gradients["w"] = number(1.0, 1)
    verdict = judged(truth, parse_layout("tp2"), ranks)
    assert (verdict.mismatch.name, verdict.gradients["w"]) == ("w", math.inf)
    assert 'declare("w", (2,), init, shard=mpcore.sharding.cut(2, tp, 0))' in verdict.mismatch.cause


def test_a_gradient_that_the_unsharded_model_lacks_is_named():
    fields = {"w": number(1.0, 2)}
    for zero, value, named in (("", 0.0, True), ("zero1", 0.0, False), ("zero1", 1.0, True)):
        truth, ranks = runs(2, "dp", initial={**fields, "v": number(1.0, 1)}, gradients=fields)
        ranks[1].gradients["v"] = number(value, 1)
        verdict = judged(truth, parse_layout(f"dp2{zero}"), ranks)
        assert (verdict.mismatch is not None) is named
        assert verdict.worst["gradient"] == (math.inf if named else 0.0)
        if verdict.mismatch is not None:
            assert (verdict.mismatch.stage, verdict.mismatch.name) == ("gradient", "v")
    ranks[0].gradients["b"] = ranks[0].gradients["x"] = number(1.0, 1)
    found = judged(truth, parse_layout("dp2"), ranks).mismatch
    assert (found.name, found.ulps) == ("b", math.inf), "a name that the unsharded model hasn't comes first"


def test_the_loss_and_the_norm_have_the_tolerance_of_the_rounded_runs():
    truth, ranks = runs(2, "tp", loss=4.0, norm=2.0)
    for name in ("loss", "norm"):
        for error, bad in ((0.9, False), (1.1, True)):
            truth, ranks = runs(2, "tp", loss=4.0, norm=2.0)
            value = getattr(truth, name)
            rounded = [seen(**{"loss": 4.0, "norm": 2.0, name: value + near}) for near in (0.001, -0.004)]  # type: ignore[arg-type]
            allowed = 2 * 0.004 + 2.0**-23 * value
            setattr(ranks[1], name, value + error * allowed)
            verdict = Judge(truth, torch.float32, rounded)(parse_layout("tp2"), ranks)
            assert verdict.worst[name] == pytest.approx(error * allowed / (2.0**-23 * value), rel=1e-4)
            assert (verdict.mismatch is not None) is bad
