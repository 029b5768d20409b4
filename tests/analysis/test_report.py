"""The tables and pictures of estimates, number by number and point by point."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from mpcore.tools.analysis.machine import Machine
from mpcore.tools.analysis.report import COMPUTE, LEGEND, explain, table, why
from mpcore.tools.analysis.search import Estimate
from mpcore.tools.analysis.seconds import Seconds

GIB = 2**30
MACHINE = Machine("test", 1.0, 1.0, memory=10 * GIB, reserve=GIB)


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
    head, one, two, *legend = (line for line in table([first, second], MACHINE).splitlines() if ": bubble" not in line)
    clock = 1.0 if unit == "s" else 1e3
    assert head.split()[:4] == ["row", "tp", "pp", "dp"], "cp and ep are of one rank"
    assert f"step, {unit}" in head
    assert one.split() == [
        "1", "2", "4", "8", "3.0", f"{2.5 * scale * clock:.3f}", "7%", "80.0%", "bubble", "20%", "--zero", "3",
    ]  # fmt: skip
    slower = ["20%", "+-", f"{1.2 * math.hypot(0.03, 0.03):.0%}"]
    assert two.split() == ["2", "4", "4", "8", "5.0", f"{3 * scale * clock:.3f}", "7%", *slower, "100.0%"]
    assert "\n".join(legend) == LEGEND.replace("UNIT", "GiB")
    idle = replace(first, seconds=Seconds(scale, scale, bubble=scale))
    assert table([first, second], MACHINE, legend=False).splitlines()[:3] == [head, one, two]
    said = table([idle], MACHINE, legend=False).splitlines()[-1]
    assert {"bubble", "33%:", "--micro-batch", "--global-batch"} <= set(said.split())
    for name in ("tp", "pp", "dp"):
        end = re.search(rf"\b{name}\b", head).end()  # type: ignore[union-attr]
        assert one[:end].split()[-1] == str(first.sizes[name]), "below its name"


def test_what_does_not_fit_is_counted_and_the_smallest_is_described():
    large = [Estimate({"tp": 2, "pp": 3, "cp": 1}, ("--zero", "1"), int(9.5 * GIB)), Estimate({"tp": 8}, (), 20 * GIB)]
    (line,) = table(large, MACHINE).splitlines()
    assert numbers(line.partition(":")[0]) == [2, 9.5, 9.0], "of the memory without the reserve"
    assert line.partition(": ")[2] == "tp 2 pp 3 --zero 1"
    assert "at least" not in line
    assert "at least 9.5 GiB" in table([replace(large[0], bound=True)], MACHINE)


def test_a_layout_without_seconds_is_not_explained():
    with pytest.raises(ValueError, match=r"^--tp 2: why$"):
        explain(Estimate({"tp": 2}, (), refused="why"), MACHINE)
    with pytest.raises(ValueError, match=r"^the layout: it does not fit$"):
        explain(Estimate({}, ()), MACHINE)
