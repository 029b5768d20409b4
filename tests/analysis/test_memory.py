"""The table of what a rank holds, number by number."""

from __future__ import annotations

import re

import pytest

from mpcore.tools.analysis.memory import parts_of, table, unit_of
from mpcore.tools.analysis.work import DryRunCounts, MicroBatchMemory, StepMemory

KIB, MIB, GIB = 2**10, 2**20, 2**30


@pytest.mark.parametrize(
    ("size", "unit"),
    [
        (0, "KiB"), (1, "KiB"), (103, "KiB"), (104857, "KiB"), (104858, "MiB"), (MIB, "MiB"), (107374182, "MiB"),
        (107374183, "GiB"), (2**50, "GiB"),
    ],
)  # fmt: skip
def test_a_size_is_printed_in_the_largest_unit_that_leaves_a_tenth(size, unit):
    assert unit_of(size) == unit


def found(unit: int) -> DryRunCounts:
    """Of 1 + 2 + 3 + 4 between steps, and 5 of activations besides 6 of what operators hold."""
    held = StepMemory(unit, 4 * unit, 2 * unit, 3 * unit)
    stages = [
        MicroBatchMemory(activations=7 * unit, gathered=8 * unit, unsummed=unit // 2),
        MicroBatchMemory(activations=9 * unit),
    ]
    return DryRunCounts(held, stages, peak=5 * unit, work_peak=11 * unit)


def test_the_parts_of_a_rank_are_its_largest_bytes_of_each_kind():
    assert parts_of(found(1)) == {
        "parameters": 1, "gradients": 2, "optimizer": 3, "buffers": 4, "activations": 5, "working set": 6,
    }  # fmt: skip


@pytest.mark.parametrize(("unit", "name"), [(KIB, "KiB"), (MIB, "MiB"), (GIB, "GiB")])
def test_the_table_has_a_line_for_each_part_and_each_stage(unit, name):
    lines = table(found(unit)).splitlines()
    numbers = [[float(x) for x in re.findall(r"\d+\.\d+", line)] for line in lines]
    assert [line.split()[0] for line in lines[:7]] == [
        "parameters", "gradients", "optimizer", "buffers", "activations", "working", "total",
    ]  # fmt: skip
    assert lines[4].startswith("activations and gathered ")
    assert numbers == [[1], [2], [3], [4], [5], [6], [21], [7, 8.5], [9]]
    assert all(name in line for line in lines)
    assert [line.split(":")[0] for line in lines[7:]] == ["stage 0", "stage 1"]
    alone = found(unit)
    alone.stages[:] = alone.stages[1:]
    assert table(alone).splitlines()[4].startswith(f"activations {5:>13.3f} {name}"), "nothing is gathered"
