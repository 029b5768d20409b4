"""Define what planners need of a layout (`Work`, `LayoutSpec`, `Model`) and what they count.

A planner calls a function of the user, `build(mesh, arguments)`, which returns a `Work`. If this function is a `Model`,
the planner can build parts of a stage. It then counts a stage of 96 blocks from stages of one and two blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mpcore.mesh.axis import Mesh
from mpcore.pipeline.prove import prove
from mpcore.pipeline.schedules import Schedule, build_schedule, find_schedule
from mpcore.tools.analysis.counts import CommunicationCounter, Count
from mpcore.tools.analysis.operators import OperatorCounts
from mpcore.training.policies import Precision, Recompute, Zero
from mpcore.training.prepare import lay_out

Sent = dict[tuple[str, str], Count]
"""Calls and bytes by (axis, kind)."""


@dataclass(frozen=True)
class Work:
    """What a rank runs in a step.

    Attributes:
        stages: this rank's stages, the lowest first, on the meta device, with data parallelism and recomputation
            applied.
        plan: the pipeline's schedule. It has the micro-batches of the step.
        inputs: `inputs(i)` returns the arguments (args, kwargs) of `stages[i]` for one micro-batch. `args` are the
            tensors that the previous stage returns.
        loss: the loss, as a function of the last stage's output.
        optimizer: the function that makes an optimizer from a list of parameters.
        autocast: the dtype of matrix products. None: that of the parameters.
    """

    stages: Sequence[nn.Module]
    plan: Schedule
    inputs: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    loss: Callable[[Tensor], Tensor]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW
    autocast: torch.dtype | None = None


def make_work(
    model: nn.Module, mesh: Mesh, *, inputs: Sequence[Any], loss: Callable[[Tensor], Tensor],
    blocks: Sequence[nn.Module], micro_batches: int = 1, data: Zero = Zero(), precision: Precision | str = "float32",
    recompute: Recompute | str = "none",
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
) -> Work:  # fmt: skip
    """Make the work of a rank that holds all blocks in one pipeline stage, laid out as `prepare` would.

    Args:
        model: the model, on the meta device, built for the mesh.
        inputs: the model's arguments for one micro-batch of this rank. Their values don't matter.
        loss: the loss, as a function of what the model returns.
        blocks: the modules that ZeRO and recomputation treat as units.
        data, precision, recompute: as for `prepare`.
        optimizer: the function that makes an optimizer from a list of parameters.

    Raises:
        ValueError: if the mesh has several pipeline ranks, or an input has no samples.

    Example:
        >>> import mpcore as mp
        >>> from mpcore.tools.analysis import dry_run, make_work
        >>> def work(mesh, arguments):
        ...     with torch.device("meta"):
        ...         model = mp.ParallelMLP(64, 256, tp=mesh.tp, bias=False)
        ...     return make_work(model, mesh, inputs=(torch.empty(8, 64),), loss=torch.sum, blocks=[model])
        >>> dry_run(work, tp=2).held.parameters  # bytes
        98304
    """
    if mesh.pp.size > 1:
        raise ValueError(
            f"make_work has one pipeline stage, and the mesh has {mesh.pp.size}: give --pp 1, or return a Work of this "
            "rank's stages"
        )
    for x in inputs:
        if isinstance(x, Tensor) and not x.numel():
            raise ValueError(
                f"an input has the shape {tuple(x.shape)}, without samples: the samples of a step must be a multiple "
                f"of dp x micro-batches = {mesh.dp.size} x {micro_batches}"
            )
    precision = Precision(precision) if isinstance(precision, str) else precision
    recompute = Recompute(recompute) if isinstance(recompute, str) else recompute
    lay_out([model], mesh, blocks, seed=0, initialize=False, data=data, precision=precision, recompute=recompute,
            compile=None)  # fmt: skip
    plan = build_schedule("1f1b", 1, micro_batches)

    def made(_: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(torch.empty_like(x) if isinstance(x, Tensor) else x for x in inputs), {}

    return Work([model], plan, made, loss, optimizer, autocast=precision.autocast_dtype)


Build = Callable[[Mesh, list[str]], Work]
Choice = Mapping[int, Sequence[int]]
"""The blocks, by their places in the model, that each of some stages shall have."""


@dataclass(frozen=True)
class LayoutSpec:
    """What a planner needs to know of a layout before a stage is built.

    Attributes:
        schedule: the schedule's name, or a path that ends in .csv.
        ranks: the number of pipeline ranks.
        micro_batches: the micro-batches per step.
        virtual_stages: the stages per rank. None: the schedule's default.
        blocks: for each stage, the indices of its blocks in the model.
        kind: `kind(block)` is equal for blocks that cost the same.
        work: `work(plan, blocks, choice)` makes the work of the mesh's rank, on the stages in `choice` with the blocks
            given there.
        linear: whether counts are linear in the number of blocks of a stage. They are not if the decision about a block
            depends on other blocks, as with a memory budget of recomputation, or if stages on one rank share
            parameters.
        sharded: whether parameters, gradients and optimizer state are sharded evenly over data ranks.
        few: the number of blocks of each kind that a stage needs before another one adds the same to every count. It is
            2 if the gradients of a block are reduced while the backward of the next block runs.
        key: everything else that the counts of a stage depend on, besides the mesh and its blocks. Layouts with equal
            keys share counts.
        parameters: the number of parameters of the unsharded model. 0: unknown.
        least: a lower bound of the bytes that the fullest rank holds, by arithmetic. A layout with less memory isn't
            counted.
    """

    schedule: str
    ranks: int
    micro_batches: int
    virtual_stages: int | None
    blocks: Sequence[range]
    kind: Callable[[int], Hashable]
    work: Callable[[Schedule, Sequence[range], Choice], Work]
    linear: bool = True
    sharded: bool = False
    few: int = 1
    key: Hashable = None
    parameters: int = 0
    least: int = 0

    def plan(self, micro_batches: int | None = None) -> Schedule:
        """Return the schedule, of all micro-batches or of `micro_batches`."""
        return plan_of(self.schedule, self.ranks, micro_batches or self.micro_batches, self.virtual_stages)

    def short(self, rounds: int) -> Schedule:
        """Return the schedule of `rounds` micro-batches per rank, or of all micro-batches if that is not more.

        A schedule in a file, and one that holds every micro-batch at the same time, is never shortened.
        """
        least = rounds * self.ranks
        whole = self.schedule.endswith(".csv") or self.schedule in HOLD_ALL or self.micro_batches <= least
        return self.plan(None if whole else least)


HOLD_ALL = ("gpipe", "bfs")
plan_of = lru_cache(maxsize=64)(find_schedule)


@dataclass(frozen=True)
class Model:
    """A `Build` that can describe its layout first.

    Attributes:
        outline: `outline(mesh, arguments)` returns an `LayoutSpec`.
        trainer: `trainer(arguments)` returns what stands behind `python` in the command that trains with these
            arguments, or "". It raises a `ValueError` if no program accepts them.
    """

    outline: Callable[[Mesh, list[str]], LayoutSpec]
    trainer: Callable[[list[str]], str] = lambda arguments: ""

    def __call__(self, mesh: Mesh, arguments: list[str]) -> Work:
        """Build all stages of the mesh's rank."""
        outline = self.outline(mesh, arguments)
        plan = outline.plan()
        prove(plan)
        choice = {stage: outline.blocks[stage] for stage in plan.stages_of(mesh.pp.rank)}
        return outline.work(plan, outline.blocks, choice)


@dataclass
class PassWork:
    """What the forward or backward of one micro-batch in a stage computes and sends."""

    operators: OperatorCounts = field(default_factory=OperatorCounts)
    sent: Sent = field(default_factory=dict)


@dataclass
class MicroBatchWork:
    """What each of several equal micro-batches of a stage computes and sends.

    Attributes:
        backward: the backward with its recomputation. If it is split, both halves.
    """

    forward: PassWork = field(default_factory=PassWork)
    backward: PassWork = field(default_factory=PassWork)


@dataclass
class MicroBatchMemory:
    """What a stage holds of one micro-batch, in bytes.

    Attributes:
        received: its inputs.
        activations: everything after the forward, with inputs and outputs.
        output: the outputs that backward doesn't need. They are held until they have arrived at the next stage.
        between: everything between the two halves of a split backward: the gradients of layers' outputs that the second
            half needs, and the inputs that backward still needs.
        between_inputs: the inputs in `between`.
        returned: the gradients that the next stage sends back.
        sent_back: the gradients of its inputs.
        gathered: the parameters gathered over data that exist after a forward.
        unsummed: the gradients that aren't yet reduced over data, from the first backward on.
        made: the gradients that the first backward allocates and that stay. A step begins without them.
        forward_more, backward_more: the most that operators hold within forward and backward, in addition to what was
            held before. For a split backward, within its first half.
        weight_more: the same for the second half of a split backward.
        rounds: what its micro-batches send and compute: the first, one of each kind of backward, the last.
    """

    received: int = 0
    activations: int = 0
    output: int = 0
    between: int = 0
    between_inputs: int = 0
    returned: int = 0
    sent_back: int = 0
    gathered: int = 0
    unsummed: int = 0
    made: int = 0
    forward_more: int = 0
    backward_more: int = 0
    weight_more: int = 0
    rounds: list[MicroBatchWork] = field(default_factory=list)

    @property
    def middle(self) -> MicroBatchWork:
        """A micro-batch that is neither the first nor the last, if there is one."""
        return self.rounds[min(1, len(self.rounds) - 1)]


@dataclass
class StepMemory:
    """What a rank holds between steps, in bytes, and what a step sends after its last backward.

    Attributes:
        sent: the collectives after the last backward, by (axis, kind).
    """

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    sent: Sent = field(default_factory=dict)

    @property
    def all(self) -> int:
        """The bytes of parameters, buffers, gradients and optimizer state."""
        return self.parameters + self.buffers + self.gradients + self.optimizer


def most_bytes(held: StepMemory, stages: Sequence[MicroBatchMemory], work_peak: int) -> int:
    """Return the most bytes that a rank holds at any time.

    Gradients before and after their reduction over data exist together only at the end of a step, when the activations
    are freed.
    """
    unsummed = sum(kept.unsummed for kept in stages)
    if 2 * unsummed < held.gradients:  # gradients are reduced in place
        return held.all + work_peak
    return max(held.all - held.gradients + work_peak, held.all + unsummed)


@dataclass
class DryRunCounts:
    """The counts of a dry run: one rank and one step.

    Attributes:
        held: what the rank holds between steps.
        stages: what each stage of the rank holds during a step.
        times: for each stage, how many micro-batches each of its rounds stands for.
        peak: the most bytes that the stages hold at the end of a forward, in the order of the schedule.
        work_peak: the most bytes at any time, with what operators hold while they run.
        ledger: the step's collectives and messages.
        plan: the schedule of the pipeline, possibly with fewer micro-batches.
    """

    held: StepMemory = field(default_factory=StepMemory)
    stages: list[MicroBatchMemory] = field(default_factory=list)
    times: list[list[int]] = field(default_factory=list)
    peak: int = 0
    work_peak: int = 0
    ledger: CommunicationCounter = field(default_factory=CommunicationCounter)
    plan: Schedule = field(default_factory=lambda: build_schedule("gpipe", 1, 1))

    @property
    def most(self) -> int:
        """The most bytes at any time, which an allocator must provide."""
        return most_bytes(self.held, self.stages, self.work_peak)


T = TypeVar("T")


def combine(terms: Sequence[tuple[int, T]]) -> T:
    """Return the sum of factor times value, for integers in dataclasses, dictionaries and lists of the same form."""
    values: list[Any] = [value for _, value in terms]
    first = values[0]
    if isinstance(first, int):
        return sum(factor * value for factor, value in terms)  # type: ignore[return-value, operator]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for value in values for key in value)
        each = {key: [(f, v[key]) for f, v in terms if key in v] for key in keys}  # type: ignore[operator, index]
        sums = {key: combine(found) for key, found in each.items()}
        return {key: value for key, value in sums.items() if value != type(value)()}  # type: ignore[return-value]
    if isinstance(first, list):
        factors = [factor for factor, _ in terms]
        return [combine(list(zip(factors, parts, strict=True))) for parts in zip(*values, strict=True)]  # type: ignore
    assert is_dataclass(first)
    parts = {f.name: combine([(factor, getattr(value, f.name)) for factor, value in terms]) for f in fields(first)}
    return replace(first, **parts)  # type: ignore[return-value, type-var]
