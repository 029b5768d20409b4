"""The picture of memory."""

from __future__ import annotations

from mpcore.tools.analysis.pictures import draw_memory
from mpcore.tools.analysis.work import DryRunCounts, MicroBatchMemory, StepMemory

GIB = 2**30


def holds(parameters: int, gradients: int, optimizer: int, activations: int, working: int) -> DryRunCounts:
    held = StepMemory(parameters * GIB, 0, gradients * GIB, optimizer * GIB)
    peak = (activations + 7) * GIB  # 7 gathered
    return DryRunCounts(held, [MicroBatchMemory(gathered=7 * GIB)], peak=peak, work_peak=peak + working * GIB)


def test_pictures_of_memory_are_written(tmp_path):
    draw_memory([holds(1, 2, 3, 4, 5), holds(2, 2, 9, 1, 4)], tmp_path / "memory.svg")
    assert "pipeline rank 1 holds most, 25.0 GiB;" in (tmp_path / "memory.svg").read_text()
