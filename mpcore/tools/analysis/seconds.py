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

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from mpcore.pipeline.schedules import Schedule
from mpcore.tools.analysis.counts import Count
from mpcore.tools.analysis.layout import Layout
from mpcore.tools.analysis.machine import Machine
from mpcore.tools.analysis.makespan import Resolved, resolve
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
    """Estimate a step of a layout.

    Args:
        layout: the counts of the layout.
        machine: the rates of the machine.
        unfused: whether attention writes its scores to memory.

    Returns:
        The parts of the step's seconds. `step` is their sum.

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
    message = max((machine.seconds("send", size, 1, _hop(layout)) for size in _messages(layout)), default=0.0)
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


def _messages(layout: Layout) -> list[int]:
    """Return the largest message of each kind of stage."""
    if len(layout.held) == 1:
        return []
    return sorted({max(kept.received, kept.sent_back) for kept in layout.stages})


def _hop(layout: Layout) -> tuple[int, int]:
    """Return two ranks that pass messages: neighbors along pp."""
    world = 1
    for axis in ("tp", "cp", "pp", "dp"):
        world *= layout.sizes.get(axis, 1)
    return 0, world // len(layout.held)


_resolved = lru_cache(maxsize=64)(resolve)


def _makespan(layout: Layout, forward: list[float], backward: list[float], message: float) -> float:
    """Return the seconds of the pipeline.

    The schedule is run for a few micro-batches. Each other micro-batch adds the difference between two such runs.
    """
    times = {"F": forward, "B": backward, "I": [b / 2 for b in backward], "W": [b / 2 for b in backward]}
    found = _of(layout.short).makespan(times, message)
    if layout.shorter is None:
        return found
    step = layout.short.micro_batches - layout.shorter.micro_batches
    slope = (found - _of(layout.shorter).makespan(times, message)) / step
    return found + (layout.micro_batches - layout.short.micro_batches) * slope


def _of(schedule: Schedule) -> Resolved:
    return _resolved(schedule)
