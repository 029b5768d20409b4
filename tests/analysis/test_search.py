"""Meshes, choices and the search, on a machine and a counter whose answers are written here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from mpcore.pipeline.schedules import build_schedule
from mpcore.tools.analysis.layout import Layout, TooLargeError
from mpcore.tools.analysis.machine import Machine
from mpcore.tools.analysis.operators import OperatorCounts
from mpcore.tools.analysis.search import Estimate, choices, consider, frontier, meshes, ranked, search
from mpcore.tools.analysis.seconds import NOISE, Seconds, errors_of, estimate
from mpcore.tools.analysis.work import MicroBatchMemory, MicroBatchWork, PassWork, StepMemory

MACHINE = Machine("test", peak=1000.0, hbm=1e9, memory=1000.0, reserve=100.0, errors={"tau": 0.5})
ONE = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "dp": 1}


def test_meshes_are_those_whose_axes_multiply_to_the_world_with_tp_in_a_node():
    for world, node in ((12, 4), (8, 8), (1, 8), (6, 1)):
        want = [
            {"tp": tp, "cp": 1, "pp": pp, "ep": 1, "dp": dp}
            for tp, pp, dp in itertools.product(range(world, 0, -1), range(1, world + 1), range(1, world + 1))
            if tp * pp * dp == world and tp <= node
        ]
        assert list(meshes(world, node)) == want, "large tp first"
    assert list(meshes(12, 4, tp=[6])) == [{**ONE, "tp": 6, "dp": 2}, {**ONE, "tp": 6, "pp": 2}], (
        "given sizes are tried"
    )


@pytest.mark.parametrize(("sizes", "want"), [
    ({"cp": [2], "tp": [2]}, [{"tp": 2, "cp": 2, "pp": 1, "dp": 2}, {"tp": 2, "cp": 2, "pp": 2, "dp": 1}]),
    ({"tp": [2], "pp": [2], "dp": [2, 4]}, [{"tp": 2, "cp": 1, "pp": 2, "dp": 2}]), ({"tp": [3], "pp": [1]}, []),
    ({"tp": [1], "pp": [8], "cp": [1]}, [{"tp": 1, "cp": 1, "pp": 8, "dp": 1}]),
])  # fmt: skip
def test_given_sizes_of_axes_are_the_only_ones(sizes, want):
    assert list(meshes(8, 8, **sizes)) == [{**each, "ep": 1} for each in want]


@pytest.mark.parametrize(
    ("ep", "etp", "there"),
    [(4, None, True), (3, None, False), (2, 4, True), (4, 4, False), (8, 1, True), (16, 1, False)],
)
def test_experts_divide_the_ranks_of_a_stage(ep, etp, there):
    """Of a stage of dp 2 x cp 2 x tp 2 = 8 ranks; etp counts in if it is given."""
    found = list(meshes(16, 8, tp=[2], cp=[2], pp=[2], ep=[ep], etp=etp and [etp]))
    more = {} if etp is None else {"etp": etp}
    assert found == ([{"tp": 2, "cp": 2, "pp": 2, "ep": ep, "dp": 2, **more}] if there else [])


@pytest.mark.parametrize(("inner", "there"), [(2, True), (4, True), (3, False), (8, False)])
def test_the_inner_size_divides_cp(inner, there):
    assert len(list(meshes(4, 8, tp=[1], cp=[4], cp_inner=[inner]))) == there


@pytest.mark.parametrize(("vary", "want"), [
    (["zero=1,3"], [("--zero", "1"), ("--zero", "3")]), (["--micro_batch=2"], [("--micro-batch", "2")]),
    (["sequence-parallel=on,off"], [("--sequence-parallel",), ()]),
    (["a=1,2", "b=x=y"], [("--a", "1", "--b", "x=y"), ("--a", "2", "--b", "x=y")]),
])  # fmt: skip
def test_a_varied_flag_has_each_of_its_values(vary, want):
    assert list(choices(vary)) == want


@pytest.mark.parametrize("wrong", ["zero", "zero=", "=1", "zero=1,", "zero=,1", ""])
def test_a_varied_flag_of_another_form_is_refused(wrong):
    with pytest.raises(ValueError, match="isn't of the form"):
        list(choices([wrong]))


def layout(seconds: float, memory: int) -> Layout:
    """Of products alone: forward and backward of one micro-batch, and of parameters alone."""
    part = PassWork(OperatorCounts({"bfloat16": int(350 * seconds)}))
    kept = MicroBatchMemory(rounds=[MicroBatchWork(part, part)])
    return Layout(ONE, 1, build_schedule("gpipe", 1, 1), None, (kept,), (0,), ([1],), (StepMemory(parameters=memory),))


class Counts:
    """A counter that knows the seconds and the bytes of layouts by --name, or refuses."""

    def __init__(self, **found: Any) -> None:
        self.found, self.asked = found, []

    def layout(self, arguments: Sequence[str], room: float, **sizes: int) -> Layout:
        self.asked.append((tuple(arguments), room, sizes))
        name = arguments[arguments.index("--name") + 1]
        what = self.found[name]
        if isinstance(what, BaseException):
            raise what
        return layout(*what)


def own(name: str, *more: str) -> tuple[dict[str, int], tuple[str, ...]]:
    return ONE, ("--name", name, *more)


def test_a_layout_is_estimated_if_it_fits():
    counter: Any = Counts(a=(2.0, 900), b=(2.0, 901), c=TooLargeError(950, 900), d=ValueError("no"))
    found = consider(counter, MACHINE, ["--given", "1"], own("a"), False)
    assert counter.asked == [(("--given", "1", "--name", "a"), 900.0, ONE)]
    assert (found.memory, found.refused, found.bound) == (900, "", False)
    assert found.seconds == estimate(layout(2.0, 900), MACHINE)
    assert found.seconds is not None
    assert found.step == found.seconds.step > 0
    assert found.errors == errors_of(layout(2.0, 900), MACHINE)
    assert found.spread == pytest.approx(math.hypot(*found.errors, NOISE))
    assert len(found.errors) == 6
    assert found.fits(MACHINE)
    large = consider(counter, MACHINE, [], own("b"), False)
    assert large == Estimate(ONE, ("--name", "b"), 901)
    assert not large.fits(MACHINE)
    assert consider(counter, MACHINE, [], own("c"), False) == Estimate(ONE, ("--name", "c"), 950, bound=True)
    assert consider(counter, MACHINE, [], own("d"), False) == Estimate(ONE, ("--name", "d"), refused="no")


def test_the_search_lists_what_fits_by_time_then_what_is_too_large_by_memory_then_what_is_refused():
    counter: Any = Counts(
        slow=(3.0, 10), fast=(1.0, 800), large=(0.1, 950), larger=(0.1, 990), bound=TooLargeError(970, 1),
        no=ValueError("why"), never=ValueError("never"),
    )  # fmt: skip
    told: list[tuple[int, int]] = []
    names = ["larger", "no", "slow", "bound", "fast", "never", "large"]
    found = search(
        counter, MACHINE, [], list(map(own, names)), each=lambda done, so_far: told.append((done, len(so_far)))
    )
    assert [e.arguments[1] for e in found] == ["fast", "slow", "large", "bound", "larger", "no", "never"]
    assert told == [(i, i) for i in range(1, 8)]
    assert search(counter, MACHINE, [], []) == []


def test_a_larger_micro_batch_is_tried_only_where_a_smaller_one_fits():
    counter: Any = Counts(a=(1.0, 950), b=(1.0, 10), c=ValueError("odd"))
    layouts = [own(name, "--micro-batch", n, "--z", z) for name in "abc" for z in "12" for n in "214"]
    found = search(counter, MACHINE, [], layouts)
    asked = [" ".join(words[1:]) for words, *_ in counter.asked]
    of_a = [f"a --micro-batch {n} --z {z}" for z in "12" for n in "21"]
    assert [words for words in asked if words.startswith("a")] == of_a, "4 is no less than 1, and 2 came first"
    assert len(asked) == 4 + 6 + 6
    assert [(e.arguments[3], e.memory) for e in found if e.bound] == [("4", 950), ("4", 950)]
    other = [({**ONE, "dp": 2}, own("a", "--micro-batch", "4")[1]), own("a", "--micro-batch", "2")]
    counter.asked.clear()
    search(counter, MACHINE, [], [own("a", "--micro-batch", "2"), *other])
    assert [sizes["dp"] for *_, sizes in counter.asked] == [1, 2], "another mesh is tried; the same size is not"


def test_an_interrupt_ends_the_search_with_what_it_has():
    counter: Any = Counts(a=(2.0, 10), b=(1.0, 10), c=KeyboardInterrupt())
    found = search(counter, MACHINE, [], [own("a"), own("b"), own("c"), own("a", "--x", "1")])
    assert [e.arguments[1] for e in found] == ["b", "a"]


def fitting(step: float, memory: int, *arguments: str, **sizes: int) -> Estimate:
    return Estimate({"tp": 1, **sizes}, arguments, memory, Seconds(step))


def test_of_equal_estimates_on_a_mesh_the_first_is_listed():
    a, b, c = fitting(1.0, 10, "a"), fitting(1.0, 10, "b"), fitting(1.0, 10, "c", dp=2)
    found = ranked([a, b, c], MACHINE)
    assert found == [a, c]
    assert [e.same for e in found] == [(("b",),), ()], "the table names what has no row"
    less, more = fitting(1.0, 9, "x"), fitting(1.0 + 1e-12, 8, "y")
    assert ranked([a, less, more], MACHINE) == [more, less, a], "equal to a nanosecond: the smaller comes first"
    large = [Estimate({}, (), 2000), Estimate({}, (), 2000)]
    assert ranked(large, MACHINE) == large, "what doesn't fit is counted, each"


def test_the_frontier_are_layouts_that_none_beats_in_both():
    found = [fitting(s, m) for s, m in ((3, 50), (1, 400), (2, 400), (4, 60), (2.5, 399), (5, 49))]
    front = frontier([*found, Estimate({}, (), 5, refused="no"), Estimate({}, (), 2000)], MACHINE)
    assert [(e.step, e.memory) for e in front] == [(1, 400), (2.5, 399), (3, 50), (5, 49)]


def test_the_error_of_a_difference_is_that_of_what_the_steps_do_not_share():
    slow, fast = (Estimate({}, (), 1, Seconds(s), errors=e) for s, e in ((3.0, (0.5, 0.1)), (2.0, (0.5, 0.14))))
    assert slow.slower(fast) == (pytest.approx(0.5), pytest.approx(1.5 * (0.04**2 + 2 * 0.03**2) ** 0.5))
    with pytest.raises(ValueError, match="zip"):
        slow.slower(replace(fast, errors=(0.1,)))
