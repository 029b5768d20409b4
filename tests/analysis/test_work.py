"""What planners are told and what they add up, on numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpcore import Mesh
from mpcore.pipeline.schedules import NAMES, build_schedule
from mpcore.tools.analysis.counts import Count
from mpcore.tools.analysis.dry_run import dry_run, on_mesh
from mpcore.tools.analysis.operators import OperatorCounts
from mpcore.tools.analysis.work import (
    DryRunCounts,
    LayoutSpec,
    MicroBatchMemory,
    MicroBatchWork,
    Model,
    PassWork,
    StepMemory,
    Work,
    combine,
    make_work,
    most_bytes,
    plan_of,
)
from mpcore.training.policies import Precision


def test_sums_are_linear_in_integers_dictionaries_lists_and_dataclasses():
    assert combine([(2, 3), (-1, 10)]) == -4
    assert combine([(3, {"a": 1, "b": 2}), (-1, {"b": 6, "c": 4})]) == {"a": 3, "c": -4}, "a key of sum 0 is dropped"
    assert combine([(2, [1, 2]), (1, [10, 20])]) == [12, 24]
    assert combine([(0, {"a": 5})]) == {}
    one = MicroBatchMemory(
        activations=10,
        made=3,
        rounds=[MicroBatchWork(PassWork(OperatorCounts({"f": 1}, bytes=5), {("tp", "send"): Count(1, 4)}))],
    )
    two = MicroBatchMemory(
        activations=1,
        made=30,
        rounds=[MicroBatchWork(PassWork(OperatorCounts({"f": 1, "g": 2}), {("tp", "send"): Count(2, 4)}))],
    )
    sum_, less = combine([(2, one), (1, two)]), combine([(2, one), (-1, two)])
    assert (sum_.activations, sum_.made) == (21, 36)
    forward = sum_.rounds[0].forward
    assert forward == PassWork(OperatorCounts({"f": 3, "g": 2}, bytes=10), {("tp", "send"): Count(4, 12)})
    assert less.rounds[0].forward.sent == {("tp", "send"): Count(0, 4)}
    assert combine([(1, one), (-1, one)]).rounds[0].forward.sent == {}
    assert one.activations == 10, "its arguments don't change"
    with pytest.raises(ValueError, match="zip"):
        combine([(1, [1]), (1, [1, 2])])


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
    found = DryRunCounts(held, stages, peak=work - 2, work_peak=work)
    assert found.most == most


def test_flops_are_those_of_a_micro_batch_in_the_middle():
    def round_of(n: int) -> MicroBatchWork:
        return MicroBatchWork(
            PassWork(OperatorCounts({"f": n}, all_pairs=1)),
            PassWork(OperatorCounts({"f": 10 * n}, attention=7, all_pairs=2)),
        )

    for count, middle in ((1, 1), (2, 2), (3, 2), (4, 2)):
        kept = MicroBatchMemory(rounds=[round_of(i + 1) for i in range(count)])
        flops = [part.operators.flops for part in (kept.middle.forward, kept.middle.backward)]
        assert flops == [middle + 1, 10 * middle + 2]


def nothing(*_: Any) -> Any:
    raise AssertionError


def outline(schedule: str, ranks: int, micro_batches: int, **more: Any) -> LayoutSpec:
    return LayoutSpec(schedule, ranks, micro_batches, None, [range(1)] * ranks, nothing, nothing, **more)


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_is_shortened_to_some_micro_batches_a_rank_unless_it_holds_all(name):
    for m in (4, 12, 16, 40):
        made = outline(name, 4 if m > 4 else 2, m)
        assert made.plan() == build_schedule(name, made.ranks, m)
        assert made.plan(8) == build_schedule(name, made.ranks, 8)
        short = min(m, 3 * made.ranks) if name not in ("gpipe", "bfs") else m
        assert made.short(3) == build_schedule(name, made.ranks, short)


def test_a_schedule_of_a_file_is_never_shortened(tmp_path):
    plan = build_schedule("1f1b", 2, 40)
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(",".join(map(str, row)) for row in plan.ranks) + "\n")
    assert outline(str(path), 2, 40).short(3).ranks == plan.ranks
    assert plan_of("1f1b", 2, 40, None) is plan_of("1f1b", 2, 40, None)
    assert plan_of("interleaved", 2, 4, 3).stages == 6


def test_a_model_builds_all_stages_of_its_rank():
    told: list[Any] = []

    def work(plan: Any, blocks: Any, choice: Any) -> Work:
        told.append((plan, blocks, choice))
        return Work([], plan, nothing, nothing)

    def draw(mesh: Mesh, arguments: list[str]) -> LayoutSpec:
        blocks = [range(2 * i, 2 * i + 2) for i in range(4)]
        return LayoutSpec(arguments[0], 2, 4, None, blocks, nothing, work)

    with on_mesh(1, pp=2) as mesh:
        Model(draw)(mesh, ["interleaved"])
    ((plan, blocks, choice),) = told
    assert plan == build_schedule("interleaved", 2, 4)
    assert choice == {1: range(2, 4), 3: range(6, 8)}
    assert len(blocks) == 4


def test_the_work_of_a_whole_model_is_laid_out_as_it_would_be_prepared():
    block = nn.Linear(4, 4, device="meta")
    x = torch.ones(2, 4)
    work = make_work(
        block, Mesh(), inputs=(x, 7), loss=Tensor.sum, blocks=[block], micro_batches=3,
        precision="bfloat16", recompute="full",
    )  # fmt: skip
    assert work.plan == build_schedule("1f1b", 1, 3)
    (made, seven), named = work.inputs(0)
    assert (made.shape, made.dtype, seven, named) == (x.shape, x.dtype, 7, {})
    assert made is not x
    assert list(work.stages) == [block]
    assert work.loss is Tensor.sum
    assert work.optimizer is torch.optim.AdamW
    assert work.autocast == Precision("bfloat16").autocast_dtype


def test_an_optimizer_that_expects_the_model_is_refused_in_a_line():
    def work(mesh, arguments):
        block = nn.Linear(4, 4, device="meta")
        inputs = {"inputs": (torch.ones(2, 4),), "loss": Tensor.sum, "blocks": [block]}
        return make_work(block, mesh, optimizer=lambda model: torch.optim.SGD(model.parameters()), **inputs)

    words = r"^optimizer= gets a list of 2 parameters, not the model, and raised AttributeError.*: give optimizer"
    with pytest.raises(ValueError, match=words):
        dry_run(work)
