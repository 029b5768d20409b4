"""The table of what a rank holds, number by number."""

from __future__ import annotations

import pytest

from mpcore.tools.analysis.memory import parts_of, unit_of
from mpcore.tools.analysis.work import DryRunCounts, MicroBatchMemory, StepMemory

KIB, MIB, GIB = 2**10, 2**20, 2**30


@pytest.mark.parametrize(("size", "unit"), [
    (0, "KiB"), (1, "KiB"), (103, "KiB"), (104857, "KiB"), (104858, "MiB"), (MIB, "MiB"), (107374182, "MiB"),
    (107374183, "GiB"), (2**50, "GiB"),
])  # fmt: skip
def test_a_size_is_printed_in_the_largest_unit_that_leaves_a_tenth(size, unit):
    assert unit_of(size) == unit


def found(unit: int) -> DryRunCounts:
    """Of 1 + 2 + 3 + 4 between steps, 1 of activations, 17 gathered or unreduced, and 6 of what operators hold."""
    held = StepMemory(unit, 4 * unit, 2 * unit, 3 * unit)
    stages = [
        MicroBatchMemory(activations=7 * unit, gathered=8 * unit, unsummed=9 * unit),
        MicroBatchMemory(activations=9 * unit),
    ]
    return DryRunCounts(held, stages, peak=18 * unit, work_peak=24 * unit)


def test_the_parts_of_a_rank_are_its_largest_bytes_of_each_kind():
    assert parts_of(found(1)) == {
        "parameters": 1, "gradients": 2, "optimizer": 3, "buffers": 4, "activations": 1, "gathered": 17,
        "working set": 6,
    }  # fmt: skip
