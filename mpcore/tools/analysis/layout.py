"""Count a layout in seconds instead of minutes: every count is linear in the number of blocks of a stage.

The counts of a stage of 12 blocks are those of a stage of one block plus eleven times what a second block adds. So each
kind of stage (first, middle, last, only) is run with one and with two blocks, and the results are cached: layouts that
differ only in the number of pipeline ranks or the global batch share them. `Counter.rank` returns the same integers as
`dry_run`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from mpcore.mesh.axis import Mesh
from mpcore.pipeline.checks import split_linears
from mpcore.pipeline.schedules import Schedule
from mpcore.tools.analysis.counts import CommunicationCounter
from mpcore.tools.analysis.dry_run import (
    assemble,
    call_build,
    check_stages,
    count_stages,
    dry_run,
    on_mesh,
    rounds_of,
    run_dry,
)
from mpcore.tools.analysis.peak import peak
from mpcore.tools.analysis.work import (
    Build,
    DryRunCounts,
    LayoutSpec,
    MicroBatchMemory,
    Model,
    StepMemory,
    combine,
    most_bytes,
)

ROUNDS = 4
"""Micro-batches a pipeline rank of a shortened schedule: time and memory of more follow from it."""
Sizes = dict[str, int]
Enter = Callable[[], AbstractContextManager[tuple[Mesh, LayoutSpec]]]


@dataclass(frozen=True)
class Layout:
    """What the ranks of a layout hold, send and compute.

    Attributes:
        sizes: the sizes of the mesh's axes.
        short, shorter: the schedule with `ROUNDS` micro-batches per pipeline rank, and with one less. `shorter` is None
            if `short` is the full schedule.
        stages, blocks: the counts and the number of blocks of each stage.
        rounds: for each stage, how many micro-batches each of its rounds stands for.
        held: what each pipeline rank holds between steps, and sends after its last backward.
        axes: the ranks of each axis that this rank is on.
        early: whether receives are posted early, as on a CPU.
    """

    sizes: Sizes
    micro_batches: int
    short: Schedule
    shorter: Schedule | None
    stages: tuple[MicroBatchMemory, ...]
    blocks: tuple[int, ...]
    rounds: tuple[list[int], ...]
    held: tuple[StepMemory, ...]
    axes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    early: bool = False

    @cached_property
    def fullest(self) -> tuple[int, int]:
        """The pipeline rank that holds the most, and its bytes.

        Of ranks with equal stages only the first and the last are compared: one of them holds the most micro-batches.
        """
        alike: dict[Any, list[int]] = {}
        for rank in range(len(self.held)):
            mine = self.short.stages_of(rank)
            alike.setdefault(tuple(self.signature(i) for i in mine), []).append(rank)
        ranks = {rank for each in alike.values() for rank in (each[0], each[-1])}
        return max(((rank, self.bytes_of(rank)) for rank in ranks), key=lambda pair: pair[1])

    def signature(self, index: int) -> tuple[bool, bool, int]:
        """Return what distinguishes a stage: whether it is the first, whether it is the last, its number of blocks."""
        return index == 0, index == len(self.stages) - 1, self.blocks[index]

    def bytes_of(self, rank: int) -> int:
        """Return the most bytes that a pipeline rank holds at any time."""
        stages = [self.stages[i] for i in self.short.stages_of(rank)]
        return most_bytes(self.held[rank], stages, peak(self.short, rank, stages, self.early)[1])


PEAKS = ("forward_more", "backward_more", "weight_more")
"""The only counts that are not linear in the blocks, since each is a maximum."""


class TooLargeError(ValueError):
    """A layout needs more memory than there is. `least` is a lower bound of the bytes that it needs."""

    def __init__(self, least: int, room: float) -> None:
        super().__init__(f"the fullest rank holds {least} bytes at least, of {room:.0f}")
        self.least = least


class Counter:
    """Count layouts of one model, and cache what they have in common.

    Args:
        build: the function that makes a rank's work. If it is a `Model`, stages of one and two blocks are run;
            otherwise all stages are run in full.
        stands_for_gpu: whether to run the operators that a GPU runs, or those of a CPU.
        share: whether layouts that differ only in the size of dp share their counts. The sizes of shards are then
            scaled by the size of dp, which ignores the padding of uneven shards.

    Example:
        >>> from examples.gpt.plan import build
        >>> flags = ["--preset", "llama3-8b", "--dtype", "bfloat16", "--global-batch", "64", "--micro-batch", "1"]
        >>> layout = mpcore.tools.analysis.Counter(build).layout(flags, tp=2, pp=4, dp=2)
        >>> layout.blocks, round(layout.fullest[1] / 2**30)
        ((9, 9, 8, 6), 39)
    """

    def __init__(self, build: Build, stands_for_gpu: bool = True, share: bool = False) -> None:
        self.build = build
        self.stands_for_gpu = stands_for_gpu
        self.share = share
        self._memo: dict[Any, tuple[MicroBatchMemory, StepMemory, int]] = {}
        self._slopes: dict[Any, tuple[MicroBatchMemory, StepMemory, int, Sizes]] = {}
        self._stages: dict[Any, tuple[MicroBatchMemory, StepMemory]] = {}

    def rank(self, arguments: Sequence[str] = (), rank: int = 0, **sizes: Any) -> DryRunCounts:
        """Count one rank, with the same integers as `dry_run`.

        If kinds of blocks alternate, the peaks while operators run are within a few percent.
        """
        if not isinstance(self.build, Model):
            return dry_run(self.build, arguments, rank, self.stands_for_gpu, **sizes)
        with on_mesh(rank, **sizes) as mesh:
            outline = self.build.outline(mesh, list(arguments))
            if not outline.linear:
                return run_dry(self.build(mesh, list(arguments)), mesh, self.stands_for_gpu)
            plan, ledger = outline.plan(), CommunicationCounter(mesh)
            mine = plan.stages_of(mesh.pp.rank)
            here = sizes | {"at": rank % (mesh.world.size // mesh.pp.size)}  # shards of data ranks may differ
            counted = [self._stage(outline, here, index, lambda: nullcontext((mesh, outline))) for index in mine]
            times = [[time for _, time in rounds_of(plan, index)] for index in mine]
            stages, held = [kept for kept, _ in counted], _of_rank([held for _, held in counted])
            return assemble(plan, mesh.pp.rank, stages, times, held, ledger, early=not self.stands_for_gpu)

    def layout(self, arguments: Sequence[str] = (), room: float = math.inf, **sizes: Any) -> Layout:
        """Count all pipeline ranks of a layout, for the ranks that hold the last part of the sequences.

        With causal masks, these ranks compute the most if cp isn't balanced.

        Raises:
            TooLargeError: if the layout's lower bound is larger than `room`, the bytes of memory of a rank.
        """
        arguments, pp = list(arguments), sizes.get("pp", 1)
        tp, cp, dp = (sizes.get(axis, 1) for axis in ("tp", "cp", "dp"))
        first = [rank * tp * cp * dp + (cp - 1) * tp for rank in range(pp)]
        if not isinstance(self.build, Model):
            return self._whole(arguments, sizes, first, None)
        with on_mesh(first[0], **sizes) as mesh:
            outline, axes = self.build.outline(mesh, arguments), CommunicationCounter(mesh).ranks_of
        if outline.least > room:
            raise TooLargeError(outline.least, room)
        if not outline.linear:
            return self._whole(arguments, sizes, first, outline)
        short = outline.short(ROUNDS)

        @contextmanager
        def enter(rank: int) -> Iterator[tuple[Mesh, LayoutSpec]]:
            assert isinstance(self.build, Model)
            with on_mesh(first[rank], **sizes) as mesh:
                yield mesh, self.build.outline(mesh, arguments)

        counted = [self._stage(outline, sizes, i, partial(enter, short.rank_of[i])) for i in range(short.stages)]
        held = [_of_rank([counted[index][1] for index in short.stages_of(rank)]) for rank in range(pp)]
        stages = tuple(kept for kept, _ in counted)
        return _layout(outline, sizes, stages, held, axes, not self.stands_for_gpu)

    def _stage(
        self, outline: LayoutSpec, sizes: Sizes, index: int, enter: Enter
    ) -> tuple[MicroBatchMemory, StepMemory]:
        """Count a stage from a few of its blocks."""
        pattern, by_kind = _pattern(outline, index), dict[Any, list[int]]()
        for block in outline.blocks[index]:
            by_kind.setdefault(outline.kind(block), []).append(block)
        known = sizes.get("dp"), self._key(outline, sizes, index, pattern, list(outline.blocks[index]))
        if known not in self._stages:
            self._stages[known] = self._extrapolate(outline, sizes, index, pattern, by_kind, enter)
        return self._stages[known]

    def _extrapolate(
        self, outline: LayoutSpec, sizes: Sizes, index: int, pattern: tuple[bool, ...],
        by_kind: dict[Any, list[int]], enter: Enter,
    ) -> tuple[MicroBatchMemory, StepMemory]:  # fmt: skip
        """Run the stage with a few blocks of each kind, and add what the other blocks would add."""
        few = outline.few
        base = sorted(block for blocks in by_kind.values() for block in blocks[:few])
        found = self._run(outline, sizes, index, pattern, base, enter)
        terms: list[tuple[int, tuple[MicroBatchMemory, StepMemory]]] = []
        raised: list[Sizes] = []
        for kind, blocks in by_kind.items():
            if len(blocks) <= few:
                continue
            slope = (self._key(outline, sizes, index, pattern, base, shared=True), kind)
            if slope not in self._slopes:
                more = self._run(outline, sizes, index, pattern, sorted([*base, blocks[few]]), enter)
                kept, held = combine([(1, more[0]), (-1, found[0])]), combine([(1, more[1]), (-1, found[1])])
                grows = _growth(kept, any(pattern))
                above = {name: getattr(kept, name) - grows[name] for name in PEAKS}
                self._slopes[slope] = replace(kept, **grows), held, sizes.get("dp", 1), above
            kept, held, counted, above = self._slopes[slope]
            if len(by_kind) > 1:  # backward begins with the last block: a block of another kind doesn't raise the peak
                above = {**above, "backward_more": min(above["backward_more"], 0)}
            raised.append(above)
            terms.append((len(blocks) - few, (kept, _resharded(outline, held, counted, sizes.get("dp", 1)))))
        peaks = {name: getattr(found[0], name) + max((above[name] for above in raised), default=0) for name in PEAKS}
        terms.append((1, (replace(found[0], **peaks), found[1])))
        kept = combine([(factor, kept) for factor, (kept, _) in terms])
        return kept, combine([(factor, held) for factor, (_, held) in terms])

    def _run(
        self, outline: LayoutSpec, sizes: Sizes, index: int, pattern: tuple[bool, ...], blocks: list[int], enter: Enter
    ) -> tuple[MicroBatchMemory, StepMemory]:
        """Run a stage with these blocks, or return the cached result of an equal stage."""
        dp, short = sizes.get("dp", 1), outline.short(ROUNDS)
        key = self._key(outline, sizes, index, pattern, blocks)
        if key not in self._memo:
            with enter() as (mesh, here):
                work = here.work(short, here.blocks, {index: blocks})
                split_linears(work.stages, short)
                (kept,), held, _ = count_stages(work, [(index, pattern)], mesh, self.stands_for_gpu)
            self._memo[key] = kept, held, dp
        kept, held, counted = self._memo[key]
        return kept, _resharded(outline, held, counted, dp)

    def _key(
        self, outline: LayoutSpec, sizes: Sizes, index: int, pattern: tuple[bool, ...], blocks: list[int],
        shared: bool = False,
    ) -> Any:  # fmt: skip
        """Return everything that the counts of a stage depend on, as a key of the cache.

        With `shared`, return what the counts that one more block adds depend on.
        """
        dp, pp, last = sizes.get("dp", 1), sizes.get("pp", 1), len(outline.blocks) - 1
        on = outline.short(ROUNDS).rank_of
        near = [0 <= i <= last and on[i] == on[index] for i in (index - 1, index + 1)]
        place = () if shared and not any(pattern) else (index == 0, index == last, *near)
        mesh = tuple(sorted((name, size) for name, size in sizes.items() if name not in ("dp", "pp")))
        kinds = tuple(outline.kind(block) for block in blocks)
        return outline.key, mesh, dp > 1 if self.share else dp, pp > 1, place, pattern, kinds

    def _whole(self, arguments: list[str], sizes: Sizes, ranks: Sequence[int], outline: LayoutSpec | None) -> Layout:
        """Count a layout by running every stage of every pipeline rank in full."""
        found: list[DryRunCounts] = []
        for rank in ranks:
            with on_mesh(rank, **sizes) as mesh:
                work = call_build(self.build, mesh, arguments)
                found.append(run_dry(work, mesh, self.stands_for_gpu))
        check_stages(self.build, arguments, **sizes)
        plan, places = found[0].plan, [(r, k) for r, f in enumerate(found) for k in range(len(f.stages))]
        places.sort(key=lambda place: plan.stages_of(place[0])[place[1]])
        stages = tuple(found[r].stages[k] for r, k in places)
        held, axes, early = [f.held for f in found], found[0].ledger.ranks_of, not self.stands_for_gpu
        if outline is not None:
            return _layout(outline, sizes, stages, held, axes, early)
        m, rounds, blocks = plan.micro_batches, tuple(found[r].times[k] for r, k in places), (1,) * len(stages)
        return Layout(dict(sizes), m, plan, None, stages, blocks, rounds, tuple(held), dict(axes), early)


def _of_rank(held: Sequence[StepMemory]) -> StepMemory:
    """Combine what a rank's stages hold and send. `reduce_gradients` packs one message per axis for all of them."""
    joined = combine([(1, each) for each in held])
    for key, count in joined.sent.items():
        if key[1] == "all_reduce":
            joined.sent[key] = replace(count, calls=count.calls + 1 - sum(key in each.sent for each in held))
    return joined


def _growth(more: MicroBatchMemory, is_split: bool) -> Sizes:
    """Return how much each peak of a stage grows per further block.

    `more` is what one more block added to a short stage. Forward holds the most at its end, so each block adds its
    activations. Backward holds the most at its beginning, so a further block adds nothing. Only in a split backward the
    peak may grow: if the data that wait for the second half grow faster than activations are freed.
    """
    waits = more.between - more.activations if is_split and more.backward_more > 0 else 0
    weights = is_split * max(more.weight_more, 0)
    return {"forward_more": more.activations, "backward_more": waits, "weight_more": weights}


def _resharded(outline: LayoutSpec, held: StepMemory, counted: int, dp: int) -> StepMemory:
    """Return what is held between steps on `dp` data ranks, from counts on `counted` data ranks."""
    if counted == dp or not outline.sharded:
        return held
    parts = {name: getattr(held, name) * counted // dp for name in ("parameters", "gradients", "optimizer")}
    return replace(held, **parts)


def _pattern(outline: LayoutSpec, index: int) -> tuple[bool, ...]:
    """Return, for each micro-batch of a stage that is run, whether its backward is split."""
    plan = outline.plan() if outline.short(ROUNDS).splits_backward else outline.short(ROUNDS)
    return tuple(split for split, _ in rounds_of(plan, index))


def _layout(
    outline: LayoutSpec, sizes: Sizes, stages: tuple[MicroBatchMemory, ...], held: Sequence[StepMemory],
    axes: dict[str, tuple[int, ...]], early: bool,
) -> Layout:  # fmt: skip
    short, m = outline.short(ROUNDS), outline.micro_batches
    shorter = None if short.micro_batches == m else outline.short(ROUNDS - 1)
    if short.splits_backward:
        rounds = [[time for _, time in rounds_of(outline.plan(), index)] for index in range(short.stages)]
    else:
        rounds = [[1] * m if m < 4 else [1, m - 2, 1]] * short.stages
    blocks = tuple(len(of) for of in outline.blocks)
    return Layout(dict(sizes), m, short, shorter, stages, blocks, tuple(rounds), tuple(held), dict(axes), early)
