"""Compute the seconds of a step from the counts of a layout and the rates of a machine.

    product     = operations / (peak e_gemm)
    attention   = operations of the pairs that the mask leaves / (peak e_attention)
    other       = bytes / (hbm e_hbm)
    block       = product + attention + other + x_tp (collectives over tp, cp, ep - hidden) + tau
    hidden      = of forward's collectives over tp and ep, and of rings and all-to-alls in backward too: the shorter one
                  of the messages that have products between start and wait, and these products
    pipeline    = the schedule run on 4 micro-batches per rank, and for each other one the difference from 3
    data        = x_dp (collectives over data ranks)
    optimizer   = bytes of parameters, gradients and state / (hbm e_hbm)
    step        = cluster (pipeline + data + optimizer)

Unfused attention counts the operations of all pairs, and 9 bytes per score in each pass. If the head dimension is no
multiple of 16 bytes, its products run at peak_vector e_gemm.

Source of 9 bytes: Korthikanti et al. 2022, arXiv:2205.05198, section 4.1 counts 5 bytes per score that are kept; a
pass reads and writes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from mpcore.pipeline.prove import in_order
from mpcore.pipeline.schedules import COMPUTE, Action, Schedule
from mpcore.tools.analysis.counts import Count
from mpcore.tools.analysis.layout import Layout
from mpcore.tools.analysis.machine import Machine
from mpcore.tools.analysis.operators import OperatorCounts
from mpcore.tools.analysis.work import PassWork, Sent

INSIDE = ("tp", "cp", "cp_outer", "cp_inner", "ep", "etp")
"""Axes that a micro-batch waits for. pp passes messages; the others carry gradients and parameters."""
SCORE_BYTES = 9


@dataclass(frozen=True)
class Seconds:
    """The parts of a step's seconds, on the pipeline rank with the most work.

    Attributes:
        products, attention, operators: computation; `operators` are all operators but products and attention.
        exposed: by axis, communication that is not overlapped with computation.
        bubble: waiting for other pipeline ranks, and for messages.
        host: kernel launches, the host and small shapes.
        optimizer: the optimizer's step.
        cluster: what the machine's factor of the whole step adds.
        hidden: by axis, communication that runs beside computation, and is no part of the step. Of "pp" it is the
            messages' time without what they add to the schedule, which is in `bubble`.
    """

    products: float = 0.0
    attention: float = 0.0
    operators: float = 0.0
    exposed: Mapping[str, float] = field(default_factory=dict)
    bubble: float = 0.0
    host: float = 0.0
    optimizer: float = 0.0
    cluster: float = 0.0
    hidden: Mapping[str, float] = field(default_factory=dict)

    @property
    def step(self) -> float:
        """The seconds per step."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Return each part by name, in the order of the table."""
        communication = {f"{axis} sent": seconds for axis, seconds in self.exposed.items()}
        return {
            "products": self.products, "attention": self.attention, "operators": self.operators, **communication,
            "bubble": self.bubble, "host": self.host, "optimizer": self.optimizer, "cluster": self.cluster,
        }  # fmt: skip


def estimate(layout: Layout, machine: Machine, unfused: bool = False) -> Seconds:
    """Estimate the parts of a step's seconds. With `unfused`, attention writes its scores to memory.

    Example:
        >>> from examples.gpt.plan import build  # in a clone of the repository
        >>> from mpcore.tools.analysis import Counter, estimate, load_machine
        >>> layout = Counter(build).layout(["--preset", "tiny"], tp=2)
        >>> seconds = estimate(layout, load_machine("h100"))
        >>> sum(seconds.parts().values()) == seconds.step
        True
    """
    stages = [
        [
            _part(part, blocks * share, layout, machine, unfused, share < 0.5)  # each pass with its share of the host
            for part, share in ((kept.middle.forward, 1 / 3), (kept.middle.backward, 2 / 3))
        ]
        for kept, blocks in zip(layout.stages, layout.blocks, strict=True)
    ]
    forward = [sum(f.values()) for f, _ in stages]
    backward = [sum(b.values()) for _, b in stages]
    message = 0.0
    if len(layout.held) > 1:  # the largest, between neighbors along pp
        stride = math.prod(layout.sizes.get(axis, 1) for axis in ("tp", "cp", "dp"))
        largest = max(max(kept.received, kept.sent_back) for kept in layout.stages)
        message = machine.seconds("send", largest, 1, (0, stride))
    makespan = _makespan(layout, forward, backward, message)
    busy = [sum(forward[i] + backward[i] for i in layout.short.stages_of(r)) for r in range(len(layout.held))]
    slowest = max(range(len(busy)), key=busy.__getitem__)
    sums: dict[str, float] = {}
    sent: dict[str, float] = {}
    for i in layout.short.stages_of(slowest):
        for half in stages[i]:
            for name, seconds in half.items():
                sums[name] = sums.get(name, 0.0) + layout.micro_batches * seconds
        middle = layout.stages[i].middle
        for part in (middle.forward, middle.backward):
            for axis, seconds in _by_axis(part.sent, layout, machine).items():
                sent[axis] = sent.get(axis, 0.0) + layout.micro_batches * seconds
    data = max((_data(layout, machine, rank) for rank in range(len(layout.held))), key=lambda each: sum(each.values()))
    held = layout.held[slowest]
    optimizer = 2 * (held.parameters + held.optimizer) + held.gradients
    exposed = {axis: sums.pop(axis) for axis in INSIDE if axis in sums} | data
    before = sum(sums.values()) + sum(exposed.values())
    sent |= {axis: seconds / (machine.x_dp or 1.0) for axis, seconds in data.items()}
    hidden = {axis: sent[axis] - seconds for axis, seconds in exposed.items() if sent[axis] > seconds}
    rank_of, mine = layout.short.rank_of, layout.short.stages_of(slowest)
    arriving = layout.micro_batches * sum(
        rank_of.get(near, slowest) != slowest for i in mine for near in (i - 1, i + 1)
    )
    late = makespan - (_makespan(layout, forward, backward, 0.0) if arriving else 0.0)
    if arriving:
        hidden["pp"] = max(arriving * message - late, 0.0)
    bubble = max(makespan - layout.micro_batches * busy[slowest], 0.0)
    stepping = optimizer / (machine.hbm * machine.e_hbm)
    return Seconds(
        sums["products"], sums["attention"], sums["operators"], exposed, bubble, sums["host"], stepping,
        cluster=(machine.cluster - 1) * (before + bubble + stepping), hidden=hidden,
    )  # fmt: skip


def _part(
    part: PassWork, blocks: float, layout: Layout, machine: Machine, unfused: bool, forward: bool
) -> dict[str, float]:
    """Return the seconds of one micro-batch's forward or backward in one stage, by part; axes are parts too."""
    tally = part.operators
    found = {
        "products": sum(flops / machine.rate(dtype) for dtype, flops in tally.products.items()),
        "attention": _attention(tally, machine, unfused),
        "operators": (tally.bytes + unfused * SCORE_BYTES * tally.scores) / (machine.hbm * machine.e_hbm),
        "host": blocks * machine.tau,
    }
    for (axis, kind), count in part.sent.items():
        if axis in INSIDE:
            seconds = _seconds(axis, kind, count, layout, machine)
            if count.flops and axis in ("tp", "ep") and (forward or kind == "all_to_all"):
                per_flop = found["products"] / sum(tally.products.values())
                seconds -= min(seconds * count.beside / count.bytes, count.flops * per_flop)
            found[axis] = found.get(axis, 0.0) + machine.x_tp * seconds
    return found


def _attention(tally: OperatorCounts, machine: Machine, unfused: bool) -> float:
    """Return the seconds of attention.

    Unfused attention computes batches of matrices as narrow as a head. Tensor cores can't compute heads that are no
    multiple of 16 bytes; fused kernels pad such heads.
    """
    if not unfused:
        return tally.attention / (machine.peak * machine.e_attention)
    slow = tally.unaligned if machine.peak_vector else 0
    aligned = (tally.all_pairs - slow) / (machine.peak * machine.e_attention)
    return aligned + (slow / (machine.peak_vector * machine.e_gemm) if slow else 0.0)


def _by_axis(sent: Sent, layout: Layout, machine: Machine) -> dict[str, float]:
    found: dict[str, float] = {}
    for (axis, kind), count in sent.items():
        found[axis] = found.get(axis, 0.0) + _seconds(axis, kind, count, layout, machine)
    return found


def _seconds(axis: str, kind: str, count: Count, layout: Layout, machine: Machine) -> float:
    """Return the seconds of calls of one kind. All-to-alls over tp are the steps of a ring: each has one receiver."""
    kind = "send" if (axis, kind) == ("tp", "all_to_all") else kind
    return machine.seconds(kind, count.bytes, count.calls, layout.axes.get(axis, ()))


def _data(layout: Layout, machine: Machine, rank: int) -> dict[str, float]:
    """Return the seconds per step of the collectives that carry gradients and parameters, by axis."""
    found: dict[str, float] = {}
    for i in layout.short.stages_of(rank):
        for times, round_ in zip(layout.rounds[i], layout.stages[i].rounds, strict=True):
            for part in (round_.forward, round_.backward):
                for axis, seconds in _by_axis(part.sent, layout, machine).items():
                    found[axis] = found.get(axis, 0.0) + times * seconds
    for axis, seconds in _by_axis(layout.held[rank].sent, layout, machine).items():
        found[axis] = found.get(axis, 0.0) + seconds
    return {axis: machine.x_dp * seconds for axis, seconds in found.items() if axis not in (*INSIDE, "pp")}


@dataclass(frozen=True)
class Resolved:
    """A schedule's actions in an order in which each action comes after those it waits for.

    Attributes:
        steps: for each action its rank, kind, stage, and the index here of the action on another rank whose result it
            needs, or -1.
    """

    ranks: int
    steps: tuple[tuple[int, str, int, int], ...]

    def makespan(self, times: Mapping[str, Sequence[float]], message: float = 0.0) -> float:
        """Return the seconds from the first start to the last end.

        Args:
            times: for each kind (F, I, W, B), the seconds of an action of each stage.
            message: seconds between the end of an action and the start of the action on another rank that waits for it.
        """
        clock, ends = [0.0] * self.ranks, [0.0] * len(self.steps)
        for i, (rank, kind, stage, needed) in enumerate(self.steps):
            start = clock[rank]
            if needed >= 0 and ends[needed] + message > start:
                start = ends[needed] + message
            clock[rank] = ends[i] = start + times[kind][stage]
        return max(clock)


@lru_cache(maxsize=64)
def resolve(schedule: Schedule) -> Resolved:
    """Order the actions of a schedule of F, B, I and W."""
    rows = tuple(tuple(a for a in actions if a.kind in COMPUTE) for actions in schedule.ranks)
    place: dict[Action, int] = {}
    steps: list[tuple[int, str, int, int]] = []
    for rank, action, before in in_order(replace(schedule, ranks=rows), named=False):
        remote = [place[other] for other in before if schedule.rank_of[other.stage] != rank]
        place[action] = len(steps)
        steps.append((rank, action.kind, action.stage, remote[0] if remote else -1))
    return Resolved(len(rows), tuple(steps))


def _makespan(layout: Layout, forward: list[float], backward: list[float], message: float) -> float:
    """Return the seconds of the pipeline.

    The schedule is run for a few micro-batches. Each other micro-batch adds the difference between two such runs.
    """
    times = {"F": forward, "B": backward, "I": [b / 2 for b in backward], "W": [b / 2 for b in backward]}
    found = resolve(layout.short).makespan(times, message)
    if layout.shorter is None:
        return found
    step = layout.short.micro_batches - layout.shorter.micro_batches
    slope = (found - resolve(layout.shorter).makespan(times, message)) / step
    return found + (layout.micro_batches - layout.short.micro_batches) * slope


NOISE = 0.03
"""The relative standard deviation of a run's time."""

SPREADS = {"e_gemm": 0.15, "e_hbm": 0.3, "x_tp": 0.5, "x_dp": 0.8, "tau": 1.0, "cluster": 0.05}
"""The rates that may be fitted, and what is believed of each before any run: the profile's value within a factor of
e^spread, two times out of three."""
NAMES = tuple(SPREADS)


def sensitivities(layout: Layout, machine: Machine, unfused: bool = False) -> list[float]:
    """Return [6], the derivative of the logarithm of the step's seconds by the logarithm of each rate of `NAMES`.

    The bubble is divided in proportion to the other parts. `cluster` multiplies the whole step.
    """
    found = estimate(layout, machine, unfused)
    busy = found.products + found.attention + found.operators + found.host
    inside = sum(found.exposed.get(axis, 0.0) for axis in INSIDE)
    grown = 1 + found.bubble / max(busy + inside, 1e-30)
    parts = [  # a higher rate lowers the time
        -found.products * grown, -(found.operators * grown + found.optimizer), inside * grown,
        sum(found.exposed.values()) - inside, found.host * grown,
    ]  # fmt: skip
    whole = found.step / machine.cluster
    return [*(part / whole for part in parts), 1.0]


def errors_of(layout: Layout, machine: Machine, unfused: bool = False) -> tuple[float, ...]:
    """Return the relative error of a predicted step that one standard error of each rate causes, with its sign.

    A rate that was never fitted has the standard deviation of its prior. The errors are taken as independent.
    """
    J = sensitivities(layout, machine, unfused)
    return tuple(j * machine.errors.get(name, SPREADS[name]) for j, name in zip(J, NAMES, strict=True))
