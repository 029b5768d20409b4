"""Counts of a layout from a few blocks of its stages, against runs of all blocks; and what a layout adds up."""

from __future__ import annotations

import math
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from mpcore import Mesh
from mpcore.parallel.data import shard_data_parallel
from mpcore.pipeline.schedules import Schedule, build_schedule
from mpcore.tools.analysis.dry_run import dry_run
from mpcore.tools.analysis.layout import PEAKS, ROUNDS, Counter, TooLargeError
from mpcore.tools.analysis.work import Choice, DryRunCounts, LayoutSpec, Model, Work
from tests.analysis.test_dry_run import B, D, Stage


class Blocks(nn.Sequential):
    """A stage of blocks by their numbers; each third is a single product if kinds alternate."""

    def __init__(self, numbers: list[int], mixed: bool) -> None:
        made = {i: nn.Linear(D, D, bias=False, device="meta") if mixed and i % 3 == 2 else Stage(i, torch.float32)
                for i in numbers}  # fmt: skip
        super().__init__(OrderedDict({f"block {i}": block for i, block in made.items()}))


calls: list[tuple[Any, ...]] = []


def outline(mesh: Mesh, arguments: list[str]) -> LayoutSpec:
    """Arguments: the schedule, the micro-batches, a stage of ZeRO, the blocks of each stage, and words."""
    name, m, zero, sizes, *words = arguments
    counts = [int(n) for n in sizes.split(",")]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    blocks = [range(start, start + n) for start, n in zip(starts, counts, strict=True)]
    mixed = "mixed" in words

    def work(plan: Schedule, blocks: Any, choice: Choice) -> Work:
        calls.append((mesh.pp.rank, mesh.dp.rank, mesh.cp.rank, mesh.tp.rank, dict(choice)))
        stages = [Blocks(list(numbers), mixed) for numbers in choice.values()]
        shard_data_parallel(stages, mesh, [b for stage in stages for b in stage], zero=int(zero))
        return Work(stages, plan, lambda i: ((torch.empty(B, D),), {}), lambda y: (y * y).sum())

    return LayoutSpec(
        name, mesh.pp.size, int(m), len(counts) // mesh.pp.size, blocks, kind=lambda i: mixed and i % 3 == 2, work=work,
        linear="whole" not in words, sharded=zero != "0", few=max(int(zero), 1) if mesh.dp.size > 1 else 1,
        key=(zero, mixed), least=1000 if "bound" in words else 0,
    )  # fmt: skip


model = Model(outline)
several = Counter(model, False)  # what one layout needs is not what another one left


def whole(found: DryRunCounts) -> dict[str, Any]:
    return {name: getattr(found, name) for name in ("held", "stages", "times", "peak", "plan")}


@pytest.mark.parametrize(("arguments", "sizes"), [
    ("gpipe 3 0 3", {}), ("zb 6 0 1,3", {"pp": 2}), ("dualpipev 8 0 1,3,1,1", {"pp": 2}),
    ("interleaved 4 0 1,1,1,1", {"pp": 2}),
    ("1f1b 2 2 3", {"dp": 5}),  # the last shard of 24 rows is smaller
])  # fmt: skip
def test_few_blocks_count_what_all_blocks_count(arguments, sizes):
    words, world = arguments.split(), math.prod(sizes.values())
    layout = several.layout(words, **sizes)
    pp, every = sizes.get("pp", 1), []
    for rank in [*range(0, world, world // pp), *([world - 1] if pp == 1 < world else [])]:  # firsts, the last shard
        full, fast = (count(words, rank, **sizes) for count in (partial(dry_run, model), several.rank))
        assert whole(fast) == whole(full), rank
        assert (fast.work_peak, fast.ledger.counts) == (full.work_peak, full.ledger.counts), rank
        every.append(full)
    firsts = every[:pp]
    stages = {i: kept for rank, found in enumerate(firsts) for i, kept in zip(
        layout.short.stages_of(rank), found.stages, strict=True)}  # fmt: skip
    assert layout.stages == tuple(stages[i] for i in range(len(stages)))
    assert layout.held == tuple(found.held for found in firsts)
    times = {i: each for rank, found in enumerate(firsts) for i, each in zip(
        layout.short.stages_of(rank), found.times, strict=True)}  # fmt: skip
    assert layout.rounds == tuple(times[i] for i in range(len(times)))
    most = max(found.most for found in firsts)
    assert (layout.fullest, layout.bytes_of(layout.fullest[0])) == ((layout.fullest[0], most), most)
    assert layout.blocks == tuple(map(int, words[3].split(",")))
    assert (layout.sizes, layout.micro_batches) == (sizes, int(words[1]))
    if "dp" in sizes:
        assert layout.axes["dp"] == tuple(range(sizes["dp"]))


def test_kinds_of_blocks_have_counts_of_their_own():
    words, counter = ["1f1b", "6", "0", "7,5", "mixed"], Counter(model, False)
    for rank in (0, 1):
        full, fast = (count(words, rank, pp=2) for count in (partial(dry_run, model), counter.rank))
        for got, want in zip(fast.stages, full.stages, strict=True):
            for name in PEAKS:
                assert getattr(got, name) == pytest.approx(getattr(want, name), abs=0.04 * full.work_peak), name
                setattr(got, name, getattr(want, name))
        assert whole(fast) == whole(full)


def test_a_layout_is_counted_on_the_ranks_with_the_last_part_of_the_sequences():
    calls.clear()
    Counter(model).layout(["1f1b", "8", "0", "1,1"], tp=2, cp=3, dp=2, pp=2)
    assert [call[:4] for call in calls] == [(0, 0, 2, 0), (1, 0, 2, 0)]


def test_what_is_not_linear_is_run_in_full():
    arguments, counter = ["zb", "40", "0", "1,2", "whole"], Counter(model, False)
    calls.clear()
    layout = counter.layout(arguments, pp=2)
    counter.rank(arguments, 1, pp=2)
    assert [dict(choice) for *_, choice in calls] == [{0: range(1)}, {1: range(1, 3)}, {1: range(1, 3)}]
    found = [dry_run(model, arguments, rank, pp=2) for rank in (0, 1)]
    assert layout.stages == tuple(f.stages[0] for f in found)
    assert layout.held == tuple(f.held for f in found)
    assert layout.blocks == (1, 2)
    assert layout.short == build_schedule("zb", 2, 2 * ROUNDS)
    one = counter.rank(arguments, 1, pp=2)
    assert (whole(one), one.ledger.counts) == (whole(found[1]), found[1].ledger.counts)
    assert whole(counter.rank(arguments, pp=2)) == whole(found[0])


def test_a_layout_whose_lower_bound_is_too_large_is_not_counted():
    words = ["1f1b", "4", "0", "1", "bound"]
    calls.clear()
    with pytest.raises(TooLargeError, match="holds 1000 bytes at least, of 999") as error:
        Counter(model).layout(words, room=999)
    assert (error.value.least, calls) == (1000, [])
    assert Counter(model).layout(words, room=1000).micro_batches == 4


@pytest.mark.parametrize(("m", "rounds"), [(1, [1]), (2, [1, 1]), (3, [1, 1, 1]), (4, [1, 2, 1]), (30, [1, 28, 1])])
def test_a_layout_of_many_micro_batches_has_a_short_schedule_and_one_that_is_shorter_by_one_a_rank(m, rounds):
    layout = Counter(model).layout(["1f1b", str(m), "0", "1"])
    assert layout.rounds == (rounds,)
    assert layout.short.micro_batches == min(m, 4)
    assert (layout.shorter and layout.shorter.micro_batches) == (3 if m > 4 else None)
    longer = Counter(model).layout(["1f1b", "24", "0", "1,1"], pp=2)
    assert longer.shorter is not None
    assert (longer.short.micro_batches, longer.shorter.micro_batches) == (8, 6)
