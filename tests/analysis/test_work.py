"""The planner's inputs and sums, checked with numbers, and the parts of a rank's memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mpcore.tools.analysis.dry_run import dry_run
from mpcore.tools.analysis.memory import parts_of, unit_of
from mpcore.tools.analysis.work import DryRunCounts, MicroBatchMemory, StepMemory, make_work, most_bytes


@pytest.mark.parametrize(("gradients", "unsummed", "work", "most"), [
    (40, 0, 70, 10 + 3 + 40 + 20 + 70),  # in place
    (40, 19, 70, 10 + 3 + 40 + 20 + 70),
    (40, 20, 70, 10 + 3 + 20 + 70),  # shards are made when activations are gone
    (40, 90, 100, 10 + 3 + 40 + 20 + 90), (40, 90, 140, 10 + 3 + 20 + 140), (0, 0, 5, 10 + 3 + 20 + 5),
])  # fmt: skip
def test_gradients_before_and_after_their_reduction_exist_together_only_at_the_end(gradients, unsummed, work, most):
    held = StepMemory(parameters=10, buffers=3, gradients=gradients, optimizer=20)
    stages = [MicroBatchMemory(unsummed=unsummed // 3), MicroBatchMemory(unsummed=unsummed - unsummed // 3)]
    assert held.all == 33 + gradients
    assert most_bytes(held, stages, work) == most
    assert DryRunCounts(held, stages, peak=work - 2, work_peak=work).most == most


def test_an_optimizer_that_expects_the_model_is_refused_in_a_line():
    def work(mesh, arguments):
        block = nn.Linear(4, 4, device="meta")
        inputs = {"inputs": (torch.ones(2, 4),), "loss": Tensor.sum, "blocks": [block]}
        return make_work(block, mesh, optimizer=lambda model: torch.optim.SGD(model.parameters()), **inputs)

    words = r"^optimizer= gets a list of 2 parameters, not the model, and raised AttributeError.*: give optimizer"
    with pytest.raises(ValueError, match=words):
        dry_run(work)


@pytest.mark.parametrize(("size", "unit"), [
    (0, "KiB"), (1, "KiB"), (103, "KiB"), (104857, "KiB"), (104858, "MiB"), (2**20, "MiB"), (107374182, "MiB"),
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
