"""The band of a run and its twins, and the distance of each number, by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from mpcore.tools.analysis.compare import LEAST, NEAR, WIDTH, Curves, Outside, compare_runs, make_band, read_curves

LOSS = ("loss", "")


def of(*values: float | None, start: int = 0, key: tuple[str, str] = LOSS) -> Curves:
    return {key: dict(enumerate(values, start=start))}


def test_the_band_is_the_largest_spread_of_the_steps_around():
    """Spreads 0, 8, 0, 0, 0, 2, 1 of values 100: two steps before and after count."""
    a = of(*[100.0] * 7)
    twins = [of(100, 104, 100, 100, 100, 102, 101), of(100, 96, 100, 100, 100, 101, 100)]
    band = make_band(a, twins)[LOSS]
    want = [8, 8, 8, 8, 2, 2, 2]
    assert list(band.values()) == pytest.approx([max(x, x + LEAST * 100) for x in want])
    assert NEAR == 2


def test_a_number_that_twins_share_by_chance_has_the_median_spread_of_its_kind():
    keys = [("weight", name) for name in "abcd"]
    a: Curves = {key: {3: value} for key, value in zip(keys, (1.0, 10.0, -100.0, 50.0), strict=True)}
    twins: list[Curves] = [
        {keys[0]: {3: 1.5}, keys[1]: {3: 11.0}, keys[2]: {3: -100.0}, keys[3]: {3: 60.0}},
        {keys[0]: {3: 1.0}, keys[1]: {3: 10.0}, keys[2]: {3: -100.0}, keys[3]: {3: 50.0}},
    ]
    band = make_band(a, twins)
    median = (0.1 + 0.2) / 2  # of 0.5, 0.1, 0 and 0.2
    assert [band[key][3] for key in keys] == pytest.approx([0.5, 1.5, 15.0, 10.0])
    assert median == pytest.approx(0.15)


def test_zeros_and_numbers_that_are_not_finite_have_no_relative_spread():
    a = of(0.0, None, 5.0)
    band = make_band(a, [of(0.0, None, 5.0), of(0.0, None, 5.0)])[LOSS]
    assert band == {0: 1e-300, 1: 1e-300, 2: pytest.approx(LEAST * 5)}
    far = make_band(of(1.0), [of(None), of(1.0)])[LOSS]
    assert far == {0: math.inf}


def test_only_steps_and_curves_of_all_are_in_the_band():
    a = of(1.0, 1.0, 1.0)
    assert list(make_band(a, [of(1.0, 1.0, start=1), a])[LOSS]) == [1, 2]
    assert make_band(a, [a, {}])[LOSS] == {}
    assert make_band({}, [a, a]) == {}


def twins(*, by: float = 0.01) -> list[Curves]:
    return [of(*[1 + by] * 6), of(*[1.0] * 6)]


@pytest.mark.parametrize(("factor", "inside"), [(0.99, True), (1.01, False)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_run_may_be_off_by_some_spreads_of_its_twins(factor, inside, sign):
    a, off = of(*[1.0] * 6), sign * factor * WIDTH * 0.01
    b = of(1, 1, 1 + off, 1, 1 + 3 * off * (not inside), 1)
    found = compare_runs(a, b, twins())
    assert (found.first is None) == inside
    assert (found.count, found.steps) == (6, 6)
    if found.first:
        assert (found.first.step, found.first.kind, found.first.tensor) == (2, "loss", "")
        assert (found.first.a, found.first.b) == (1.0, 1 + off)
        assert found.first.times == pytest.approx(factor)
        assert found.nearest == pytest.approx(3 * factor)
        text = str(found)
        assert f"step 2, loss: 1 and {1 + off:.9g}, {factor:.3g} times the band of 2 twins" in text
    else:
        assert found.nearest == pytest.approx(0.99)
        assert "6 numbers of 6 steps" in str(found)
        assert "of 2 twins, the farthest of them at 99% of the band" in str(found)


def test_a_wider_band_forgives_more():
    a, b = of(*[1.0] * 6), of(*[1.08] * 6)
    assert compare_runs(a, b, twins()).first is not None
    assert compare_runs(a, b, twins(), width=9.0).first is None
    assert WIDTH == 5


def test_of_numbers_of_one_step_the_farthest_is_named_and_earlier_steps_come_first():
    def run(w: float, v: float, loss: float) -> Curves:
        return {("weight", "w"): {0: 1.0, 1: w}, ("weight", "v"): {0: 1.0, 1: v}, LOSS: {0: 1.0, 1: 1.0, 2: loss}}

    band = [run(1.01, 1.01, 1.01), run(1.0, 1.0, 1.0)]
    found = compare_runs(run(1, 1, 1), run(1.5, 1.9, 99.0), band)
    assert found.first is not None
    assert (found.first.step, found.first.tensor) == (1, "v")
    assert str(found.first).startswith("step 1, weight of v: 1 and 1.9")
    assert found.count == 2 + 2 + 3


def test_each_twin_is_measured_against_the_others():
    a = of(*[1.0] * 6)
    three = [of(*[1.01] * 6), of(*[0.99] * 6), of(*[1.2] * 6)]
    found = compare_runs(a, a, three)
    spreads = [0.21, 0.2, 0.02]  # of the other two and the run
    assert found.twins == pytest.approx([0.01 / (5 * spreads[0]), 0.01 / (5 * spreads[1]), 0.2 / (5 * spreads[2])])
    assert "1 of 3 twins lie outside" in str(found)


def test_what_would_be_seen_is_half_of_the_numbers_in_the_first_and_the_last_step():
    a: Curves = {
        ("weight", name): dict.fromkeys(range(9), value) for name, value in zip("abc", (1.0, 2.0, 4.0), strict=True)
    }
    twin: Curves = {key: {step: value * 1.01 if step < 4 else value * 1.03 for step, value in curve.items()}  # type: ignore[operator]
                    for key, curve in a.items()}  # fmt: skip
    found = compare_runs(a, a, [twin, a])
    assert [step for step, _ in found.sees] == [0, 8]
    assert [size for _, size in found.sees] == pytest.approx([5 * 0.01, 5 * 0.03])
    assert "in step 0 a difference of 5.0e-02 is seen, in step 8 a difference of 1.5e-01" in str(found)
    one = compare_runs(of(1.0), of(1.0), [of(1.1), of(1.0)])
    assert one.sees == ((0, pytest.approx(0.5)),)


def test_numbers_that_are_not_finite_differ_from_those_that_are():
    a, b = of(1.0, None, 1.0), of(1.0, 1.0, 1.0)
    found = compare_runs(a, b, [a, a])
    assert found.first == Outside(1, "loss", "", None, 1.0, math.inf)
    assert "not finite and 1" in str(found)
    assert compare_runs(a, a, [a, a]).count == 2, "what neither has is not compared"
    short = compare_runs(b, of(1.0, 1.0), [b, b])
    assert (short.count, short.steps, short.first) == (2, 2, None), "a step that a run lacks"
    anything = compare_runs(of(1.0), of(9.0), [of(None), of(1.0)])
    assert (anything.first, anything.nearest) == (None, 0.0), "twins that differ so say nothing"


def test_a_twin_that_ended_early_is_measured_on_the_steps_that_it_has():
    a, short = of(*[1.0] * 6), of(*[1.2] * 3)
    found = compare_runs(a, a, [of(*[1.01] * 6), of(*[0.99] * 6), short])
    assert found.count == 3, "the band has the steps of all"
    assert found.twins == pytest.approx([0.01 / (5 * 0.21), 0.01 / (5 * 0.2), 0.2 / (5 * 0.02)])


def test_a_curve_that_one_run_lacks_is_named():
    a: Curves = of(1.0)
    a["weight", "w"] = {0: 1.0}
    with pytest.raises(ValueError, match="the first run has the weight of w, the second has not"):
        compare_runs(a, of(1.0), [a, a])
    with pytest.raises(ValueError, match="the second run has the weight of w, the first has not"):
        compare_runs(of(1.0), a, [a, a])
    with pytest.raises(ValueError, match="the second run has the loss, the first has not"):
        compare_runs({}, of(1.0), [a, a])
    with pytest.raises(ValueError, match="0 twins"):
        compare_runs(a, a, [])


def test_curves_are_read_by_kind_and_tensor(tmp_path):
    lines: list[dict[str, Any]] = [
        {"step": 0, "loss": 1.0, "grad_norm": 2.0, "lr": 3.0, "val_loss": 4.0, "seconds": 9.0},
        {"step": 1, "loss": None},
        {"step": 5, "val_loss": 7.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    whole = {
        ("loss", ""): {0: 1.0, 1: None}, ("gradient norm", ""): {0: 2.0}, ("learning rate", ""): {0: 3.0},
        ("validation loss", ""): {0: 4.0, 5: 7.0},
    }  # fmt: skip
    assert read_curves(tmp_path) == whole
    (tmp_path / "tensors.jsonl").write_text(json.dumps({"step": 2, "gradient": {"w": 5.0}, "weight": {"w": 6.0}}))
    assert read_curves(tmp_path) == whole | {("gradient", "w"): {2: 5.0}, ("weight", "w"): {2: 6.0}}
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="name the --out folder of a run"):
        read_curves(tmp_path)
