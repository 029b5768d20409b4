"""What a rank of a layout runs, as planners ask for it, and what they count of it.

A planner is given a function of the user, `build(mesh, arguments)`, which returns a `Work`. Where that function is a
`Model`, the planner asks for parts of a stage, and counts a stage of 96 blocks from stages of one and two.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mpcore.analysis.counts import Count, Ledger
from mpcore.analysis.operators import Tally
from mpcore.mesh.axis import Mesh
from mpcore.pipeline.prove import prove
from mpcore.pipeline.schedules import Schedule, build_schedule, find_schedule
from mpcore.training.policies import Precision, Recompute, Zero
from mpcore.training.prepare import lay_out

Sent = dict[tuple[str, str], Count]
"""Calls and bytes by (axis, kind)."""


@dataclass(frozen=True)
class Work:
    """What a rank runs in a step.

    Attributes:
        stages: this rank's stages, lowest first, on the meta device, cut over data and recomputing as they shall.
        plan: the pipeline's schedule; its micro-batches are those of the step.
        inputs: `inputs(i)` makes the arguments of `stages[i]` for one micro-batch, `(args, kwargs)`, where `args` are
            the tensors that the stage before returns.
        loss: of the last stage's output.
        optimizer: makes the optimizer of some parameters.
        autocast: the dtype of matrix products; None: that of the parameters.
        theory: by (axis, kind) the bytes that the step's collectives should have.
    """

    stages: Sequence[nn.Module]
    plan: Schedule
    inputs: Callable[[int], tuple[tuple, dict[str, Any]]]
    loss: Callable[[Tensor], Tensor]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW
    autocast: torch.dtype | None = None
    theory: dict[tuple[str, str], int] = field(default_factory=dict)


def make_work(
    model: nn.Module, mesh: Mesh, *, inputs: Sequence[Any], loss: Callable[[Tensor], Tensor],
    blocks: Sequence[nn.Module], micro_batches: int = 1, data: Zero = Zero(), precision: Precision | str = "float32",
    recompute: Recompute | str = "none",
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
) -> Work:  # fmt: skip
    """Make the work of a rank that holds a whole model: one pipeline stage, laid out as `prepare` would.

    Args:
        model: on the meta device, built for the mesh.
        mesh: of one pipeline rank.
        inputs: the arguments of the model for one micro-batch of this rank; their values don't matter.
        loss: of what the model returns.
        blocks: the units of ZeRO and of recomputation.
        micro_batches: those of a step.
        data, precision, recompute: as of `prepare`.
        optimizer: makes the optimizer of some parameters.

    Raises:
        ValueError: if the mesh has several pipeline ranks.

    Example:
        >>> import mpcore as mp
        >>> from mpcore.analysis import dry_run, make_work
        >>> def work(mesh, arguments):
        ...     with torch.device("meta"):
        ...         model = mp.ParallelMLP(64, 256, tp=mesh.tp, bias=False)
        ...     return make_work(model, mesh, inputs=(torch.empty(8, 64),), loss=torch.sum, blocks=[model])
        >>> dry_run(work, tp=2).parameters  # bytes
        98304
    """
    if mesh.pp.size > 1:
        raise ValueError(
            f"make_work has one pipeline stage, and the mesh has {mesh.pp.size}: give --pp 1, or return a Work of this "
            "rank's stages"
        )
    precision = Precision(precision) if isinstance(precision, str) else precision
    recompute = Recompute(recompute) if isinstance(recompute, str) else recompute
    lay_out([model], mesh, blocks, seed=0, initialize=False, data=data, precision=precision, recompute=recompute,
            compile=None)  # fmt: skip
    plan = build_schedule("1f1b", 1, micro_batches)

    def made(_: int) -> tuple[tuple, dict[str, Any]]:
        return tuple(torch.empty_like(x) if isinstance(x, Tensor) else x for x in inputs), {}

    return Work([model], plan, made, loss, optimizer, autocast=precision.autocast_dtype)


Build = Callable[[Mesh, list[str]], Work]
Choice = Mapping[int, Sequence[int]]
"""The blocks, by their places in the model, that each of some stages shall have."""


def _no_theory(stages: Sequence[int]) -> dict[tuple[str, str], int]:
    return {}


@dataclass(frozen=True)
class Outline:
    """What a planner asks about a layout before any stage is built.

    Attributes:
        schedule: the schedule's name, or a path that ends in .csv.
        ranks: pipeline ranks.
        micro_batches: those of a step.
        virtual_stages: stages a rank; None: as many as the schedule takes.
        blocks: for each stage the blocks, by their places in the model.
        kind: `kind(block)` is equal for blocks that cost the same.
        work: `work(plan, blocks, choice)` makes the mesh's rank's work on the stages of `choice` with those blocks.
        linear: whether counts are linear in the blocks of a stage; not where each block decides by what others take,
            as with a budget of recomputation, or where stages share parameters on one rank.
        sharded: whether parameters, gradients and optimizer state lie in equal shards over data ranks.
        few: how many blocks of each kind a stage needs before another one adds the same to every count: 2 where
            gradients of a block are reduced while the backward of the next one runs.
        key: all that the counts of a stage depend on, besides the mesh and its blocks; layouts share by it.
        theory: by (axis, kind) the bytes that the collectives of some stages of a rank should have.
        given: the schedule, where it is built already.
        parameters: of the whole model; 0 where it isn't told.
        least: bytes that the fullest rank holds at least, by arithmetic: a layout that has less room isn't counted.
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
    theory: Callable[[Sequence[int]], dict[tuple[str, str], int]] = _no_theory
    given: Schedule | None = None
    parameters: int = 0
    least: int = 0

    def plan(self, micro_batches: int | None = None) -> Schedule:
        """The schedule, of all micro-batches or of fewer."""
        if self.given is not None:
            return self.given
        return plan_of(self.schedule, self.ranks, micro_batches or self.micro_batches, self.virtual_stages)

    def short(self, rounds: int) -> Schedule:
        """The schedule of so many micro-batches a rank, or of all if that is not more.

        A plan in a file, and one that holds every micro-batch at once, is never shortened.
        """
        least = rounds * self.ranks
        whole = (
            self.given is not None
            or self.schedule.endswith(".csv")
            or self.schedule in HOLD_ALL
            or self.micro_batches <= least
        )
        return self.plan(None if whole else least)


HOLD_ALL = ("gpipe", "bfs")


@lru_cache(maxsize=64)
def plan_of(schedule: str, ranks: int, micro_batches: int, virtual_stages: int | None) -> Schedule:
    """As `mpcore.pipeline.schedules.find_schedule`; remembered."""
    return find_schedule(schedule, ranks, micro_batches, virtual_stages)


@dataclass(frozen=True)
class Model:
    """A `Build` that planners may ask for an outline first: `outline(mesh, arguments)`."""

    outline: Callable[[Mesh, list[str]], Outline]

    def __call__(self, mesh: Mesh, arguments: list[str]) -> Work:
        """Build all stages of the mesh's rank."""
        outline = self.outline(mesh, arguments)
        plan = outline.plan()
        prove(plan)
        choice = {stage: outline.blocks[stage] for stage in plan.stages_of(mesh.pp.rank)}
        work = outline.work(plan, outline.blocks, choice)
        return replace(work, theory=outline.theory(list(choice)))


@dataclass
class Part:
    """What the forward or the backward of one micro-batch of a stage computes and sends.

    Attributes:
        operators: what its operators compute.
        sent: its collectives and messages.
    """

    operators: Tally = field(default_factory=Tally)
    sent: Sent = field(default_factory=dict)


@dataclass
class Round:
    """What some micro-batches of a stage compute and send: all alike, each of them so much.

    Attributes:
        forward: the forward.
        backward: the backward, both of its halves where it is split, with what it computes again.
    """

    forward: Part = field(default_factory=Part)
    backward: Part = field(default_factory=Part)


@dataclass
class Kept:
    """What a stage holds of one micro-batch, in bytes.

    Attributes:
        received: its inputs.
        activations: after forward, with its inputs and outputs.
        output: the outputs, unless backward needs them: they are held until they have arrived at the next stage.
        between: between the two halves of a split backward, with the gradients of layers' outputs that the second half
            takes; of its inputs what backward still needs.
        between_inputs: of that, what is left of the inputs.
        returned: the gradients that the next stage sends back.
        sent_back: the gradients of its inputs.
        gathered: parameters gathered over data that are there after a forward.
        unsummed: gradients that aren't summed over data yet, from the first backward on.
        made: gradients that its first backward makes where they stay, since a step begins without any.
        forward_more, backward_more: the most that operators hold within forward and backward, besides what is there
            before; of a split backward within its first half.
        weight_more: the same within the second half.
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
    rounds: list[Round] = field(default_factory=list)

    @property
    def middle(self) -> Round:
        """A micro-batch that is neither the first nor the last, where there is one."""
        return self.rounds[min(1, len(self.rounds) - 1)]

    @property
    def forward_flops(self) -> int:
        """Floating-point operations of products in one micro-batch's forward, of attention those of all pairs."""
        return self.middle.forward.operators.flops

    @property
    def backward_flops(self) -> int:
        """The same of its backward."""
        return self.middle.backward.operators.flops


@dataclass
class Held:
    """What a rank holds between steps, in bytes: parameters, buffers, gradients after backward, optimizer state; and
    what a step sends after its last backward."""

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    sent: Sent = field(default_factory=dict)

    @property
    def all(self) -> int:
        """Bytes of parameters, buffers, gradients and optimizer state."""
        return self.parameters + self.buffers + self.gradients + self.optimizer


def most_bytes(held: Held, stages: Sequence[Kept], work_peak: int) -> int:
    """The most bytes that a rank holds at any time.

    Gradients that wait to be summed over data come before the summed ones: both are there at the end of a step, when
    activations are gone.
    """
    unsummed = sum(kept.unsummed for kept in stages)
    if 2 * unsummed < held.gradients:  # gradients are summed where they are
        return held.all + work_peak
    return max(held.all - held.gradients + work_peak, held.all + unsummed)


@dataclass
class Found:
    """What a dry run counted of one rank and one step.

    Attributes:
        held: what it holds between steps.
        stages: what each stage of the rank holds in between.
        times: of each stage, for how many micro-batches each of its rounds stands.
        peak: the most bytes that the stages hold at once at the end of a forward, in the order of the schedule.
        work_peak: the same at any time, with what operators hold while they run.
        ledger: the step's collectives and messages.
        theory: by (axis, kind) the bytes that they should have, where the work says.
        plan: the schedule of the pipeline, perhaps with fewer micro-batches.
    """

    held: Held = field(default_factory=Held)
    stages: list[Kept] = field(default_factory=list)
    times: list[list[int]] = field(default_factory=list)
    peak: int = 0
    work_peak: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    theory: dict[tuple[str, str], int] = field(default_factory=dict)
    plan: Schedule = field(default_factory=lambda: build_schedule("gpipe", 1, 1))

    @property
    def parameters(self) -> int:
        """Bytes of parameters between steps."""
        return self.held.parameters

    @property
    def buffers(self) -> int:
        """Bytes of buffers."""
        return self.held.buffers

    @property
    def gradients(self) -> int:
        """Bytes of gradients after backward."""
        return self.held.gradients

    @property
    def optimizer(self) -> int:
        """Bytes of the optimizer's state, with master weights."""
        return self.held.optimizer

    @property
    def between(self) -> int:
        """Bytes of all of these."""
        return self.held.all

    @property
    def total(self) -> int:
        """All of them and the peak at the end of a forward, each at its largest."""
        return self.between + self.peak

    @property
    def most(self) -> int:
        """All of them and the peak at any time: what an allocator is asked for."""
        return most_bytes(self.held, self.stages, self.work_peak)


T = TypeVar("T")


def combine(terms: Sequence[tuple[int, T]]) -> T:
    """Add integers times factors, within dataclasses, dictionaries and lists of one shape.

    Args:
        terms: factors and values; what one dictionary lacks counts as 0, and sums of 0 are left out.

    Example:
        >>> combine([(2, {"a": 3}), (1, {"a": 1, "b": 5})])
        {'a': 7, 'b': 5}
    """
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
