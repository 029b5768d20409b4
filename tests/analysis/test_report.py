"""The tables and pictures of estimates, number by number and point by point."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from mpcore.tools.analysis.machine import Machine
from mpcore.tools.analysis.report import COLOURS, COMPUTE, LEGEND, MARKERS, WORDS, draw, explain, table, why
from mpcore.tools.analysis.search import Estimate
from mpcore.tools.analysis.seconds import Seconds

GIB = 2**30
MACHINE = Machine("test", 1.0, 1.0, memory=10 * GIB, reserve=GIB)


def fits(step: float, memory: int, *arguments: str, **sizes: int) -> Estimate:
    return Estimate({"tp": 1} | sizes, arguments, memory, Seconds(step), spread=0.07)


def numbers(line: str) -> list[float]:
    return [float(x) for x in re.findall(r"(?<![\w-])\d+\.?\d*", line)]


def test_why_names_the_three_largest_parts_besides_computation():
    seconds = Seconds(40, 30, 12, {"tp": 8, "dp": 0.1}, 6, 3.9, 0, 0)
    assert seconds.step == pytest.approx(100)
    assert why(seconds) == "operators 12%, tp sent 8%, bubble 6%"
    assert why(Seconds(995, 0, 5)) == "operators 0%", "half a percent is named"
    assert why(Seconds(996, 0, 4)) == ""
    assert COMPUTE == ("products", "attention")


@pytest.mark.parametrize(("scale", "unit"), [(1.0, "s"), (0.04, "s"), (0.03, "ms")])
def test_a_row_has_its_mesh_its_memory_its_seconds_and_its_flags(scale, unit):
    first = Estimate(
        {"tp": 2, "pp": 4, "cp": 1, "ep": 1, "dp": 8}, ("--zero", "3"), 3 * GIB,
        Seconds(1.5 * scale, 0.5 * scale, bubble=0.5 * scale), spread=0.07,
    )  # fmt: skip
    second = replace(first, sizes={**first.sizes, "tp": 4}, arguments=(), memory=5 * GIB, seconds=Seconds(3 * scale))
    head, one, two, *legend = table([first, second], MACHINE).splitlines()
    clock = 1.0 if unit == "s" else 1e3
    assert head.split()[:4] == ["row", "tp", "pp", "dp"], "cp and ep are of one rank"
    assert f"step, {unit}" in head
    assert one.split() == [
        "1", "2", "4", "8", "3.0", f"{2.5 * scale * clock:.3f}", "7%", "80.0%", "bubble", "20%", "--zero", "3",
    ]  # fmt: skip
    slower = ["20%", "+-", f"{1.2 * math.hypot(0.03, 0.03):.0%}"]
    assert two.split() == ["2", "4", "4", "8", "5.0", f"{3 * scale * clock:.3f}", "7%", *slower, "100.0%"]
    assert "\n".join(legend) == LEGEND.replace("UNIT", "GiB")
    assert table([first, second], MACHINE, legend=False).splitlines() == [head, one, two]
    for name in ("tp", "pp", "dp"):
        end = re.search(rf"\b{name}\b", head).end()  # type: ignore[union-attr]
        assert one[:end].split()[-1] == str(first.sizes[name]), "below its name"


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [
        ({"tp": 1}, ["tp"]),
        ({"tp": 1, "cp": 1, "ep": 1}, ["tp"]),
        ({"tp": 1, "cp": 2, "ep": 1}, ["tp", "cp"]),
        ({"tp": 1, "cp": 1, "ep": 2, "etp": 1}, ["tp", "ep", "etp"]),
        ({"tp": 1, "cp": 4, "cp_inner": 2}, ["tp", "cp", "cp_inner"]),
    ],
)
def test_axes_are_shown_that_any_layout_has(sizes, shown):
    other = fits(1.0, GIB)
    for estimates in ([fits(2.0, GIB, **sizes), other], [other, fits(2.0, GIB, **sizes)]):
        head = table(estimates, MACHINE).splitlines()[0].split()
        assert head[1 : 1 + len(shown)] == shown
        assert head[1 + len(shown)] == "GiB"


def test_the_unit_is_that_of_the_largest_layout_that_fits():
    lines = table([fits(1.0, 2**20), fits(2.0, GIB), Estimate({}, (), 2**50)], MACHINE).splitlines()
    assert "GiB" in lines[0]
    assert (lines[1].split()[2], lines[2].split()[2]) == ("0.0", "1.0")


def test_as_many_rows_are_printed_as_asked_and_the_others_counted():
    found = [fits(1.0 + i, GIB) for i in range(25)]
    for told, top in (({}, 20), ({"top": 3}, 3), ({"top": 25}, 25)):
        lines = table(found, MACHINE, **told).splitlines()
        rows = [line for line in lines if re.match(r" *\d+ ", line)]
        assert [int(row.split()[0]) for row in rows] == list(range(1, top + 1))
        more = [line for line in lines if line.startswith("..")]
        assert [numbers(line) for line in more] == ([[25.0 - top]] if top < 25 else [])


def test_what_does_not_fit_is_counted_and_the_smallest_is_described():
    large = [Estimate({"tp": 2, "pp": 3, "cp": 1}, ("--zero", "1"), int(9.5 * GIB)), Estimate({"tp": 8}, (), 20 * GIB)]
    (line,) = table(large, MACHINE).splitlines()
    assert numbers(line.partition(":")[0]) == [2, 9.5, 9.0], "of the memory without the reserve"
    assert line.partition(": ")[2] == "tp 2 pp 3 --zero 1"
    assert "at least" not in line
    assert "at least 9.5 GiB" in table([replace(large[0], bound=True)], MACHINE)


def test_refusals_are_counted_by_reason_the_most_frequent_first():
    refused = [Estimate({}, (), refused=f"reason {i}") for i in range(7) for _ in range(7 - i)]
    *lines, last = table(refused, MACHINE).splitlines()
    assert [re.findall(r"\d+", line) for line in lines] == [[str(7 - i), str(i)] for i in range(5)]
    assert numbers(last) == [2 + 1]
    assert len(table(refused[:-3], MACHINE).splitlines()) == 5, "five reasons"
    assert table([], MACHINE) == ""


@pytest.mark.parametrize(("scale", "unit"), [(1.0, "s"), (0.001, "ms")])
def test_a_layout_is_explained_part_by_part(scale, unit):
    seconds = Seconds(5 * scale, 0.0, 2.5 * scale, {"tp": 1.5 * scale}, 0.5 * scale, optimizer=0.5 * scale)
    e = Estimate({"tp": 2, "pp": 1}, ("--zero", "3"), 3 * GIB, seconds, spread=0.12)
    head, *parts, free, flags = explain(e, MACHINE, ["--preset", "x"]).splitlines()
    shown = scale if unit == "s" else 1000 * scale
    assert numbers(head) == [10 * shown, 12, 3.0]
    want = {"products": 5, "operators": 2.5, "tp sent": 1.5, "bubble": 0.5, "optimizer": 0.5}
    assert [(line[2:18].strip(), numbers(line[18:])) for line in parts] == [
        (name, [part * shown, part / 10 * 100]) for name, part in want.items()
    ], "parts of 0 are left out"
    assert all(f" {unit} " in line for line in parts)
    meanings = [line.partition("%")[2].strip() for line in parts]
    assert meanings == ["", *(WORDS[word] for word in ("operators", "AXIS sent", "bubble", "optimizer"))]
    assert numbers(free) == [6.0, 1.0]
    assert flags.split(": ")[1] == "--tp 2 --zero 3 --preset x"
    assert explain(e, MACHINE).endswith("--tp 2 --zero 3")
    assert "MiB" in explain(replace(e, memory=2**20), MACHINE).splitlines()[0]


def test_a_layout_without_seconds_is_not_explained():
    with pytest.raises(ValueError, match=r"^--tp 2: why$"):
        explain(Estimate({"tp": 2}, (), refused="why"), MACHINE)
    with pytest.raises(ValueError, match=r"^the layout: it does not fit$"):
        explain(Estimate({}, ()), MACHINE)


# --- the picture ------------------------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch) -> list[tuple[Figure, Any]]:
    found: list[tuple[Figure, Any]] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **__: found.append((figure, path)))
    return found


def test_layouts_are_points_in_the_colour_of_their_tp_and_the_best_are_named(drawn):
    """By tp; memory in GiB; the best: (1, 8), (2, 4), (9, 1)."""
    at = [(8, 1, 8), (1, 2, 4), (1, 2.5, 6), (2, 3, 4.5), (1, 9, 1), (1, 0.5, 40), (4, 5, 4)]
    found = [fits(s, int(memory * GIB), f"--n={i}", tp=tp) for i, (tp, s, memory) in enumerate(at)]
    draw([*found, Estimate({"tp": 16}, (), refused="no")], MACHINE, "mine.png")
    ((figure, path),) = drawn
    (axes,) = figure.axes
    assert path == "mine.png"
    dots = {c.get_label(): c for c in axes.collections}
    assert list(dots) == ["tp 1", "tp 2", "tp 4", "tp 8"], "what doesn't fit is left out"
    for i, (label, dot) in enumerate(dots.items()):
        want = [(memory, s) for tp, s, memory in at if f"tp {tp}" == label and memory < 9]
        assert [tuple(xy) for xy in dot.get_offsets().tolist()] == want
        assert dot.get_facecolor()[0].tolist()[:3] == pytest.approx(
            [int(COLOURS[i][j : j + 2], 16) / 255 for j in (1, 3, 5)]
        )
        assert MARKERS[i] != MARKERS[i + 1]
    line, room = axes.lines
    assert line.get_xydata().tolist() == [[8, 1], [4, 2], [1, 9]]
    assert room.get_xdata() == [9, 9]
    assert {text.get_text(): text.xy for text in axes.texts} == {"1": (8, 1), "2": (4, 2), "5": (1, 9)}  # type: ignore[attr-defined]
    low, high = axes.get_ylim()
    assert (low, high) == (0, pytest.approx(1.05 * 4 * 1)), "four times the fastest at most"
    assert "9.0" in axes.get_xlabel()
    title = axes.get_title(loc="left").splitlines()
    assert title[0].endswith("on test:")
    assert title[1:] == ["row 1: --tp 8 --n=0", "row 2: --n=1", "row 5: --n=4"]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == list(dots)


def test_the_axis_ends_behind_the_slowest_if_all_are_fast(drawn):
    draw([fits(1.0, 2 * GIB), fits(3.0, GIB)], MACHINE, Path("x.svg"))
    assert drawn[0][0].axes[0].get_ylim() == (0, pytest.approx(3 * 1.05))


def test_eight_are_named_and_colours_repeat(drawn):
    found = [fits(1.0 + i, (20 - i) * GIB // 4, tp=i + 1) for i in range(12)]
    draw(found, replace(MACHINE, memory=99 * GIB), "x.png")
    axes = drawn[0][0].axes[0]
    assert len(axes.texts) == 8
    colours = [tuple(c.get_facecolor()[0]) for c in axes.collections]
    assert colours[:4] == colours[8:12]
    assert len(set(colours)) == 8
    paths = [c.get_paths()[0].vertices.tolist() for c in axes.collections]
    assert paths[:4] == paths[8:12]
    assert len({str(p) for p in paths}) == 8
