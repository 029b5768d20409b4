"""Find the layouts of a model that fit a machine, and estimate how long a step of each takes there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mpcore.tools.analysis.layout import Counter, TooLargeError
from mpcore.tools.analysis.machine import Machine
from mpcore.tools.analysis.seconds import NOISE, Seconds, errors_of, estimate
from mpcore.tools.parsers import AXES

Choice = tuple[dict[str, int], tuple[str, ...]]
IDLE: dict[str, Any] = {
    "schedule": ("pp",),
    "virtual-stages": ("pp",),
    "sequence-parallel": ("tp",),
    "overlap": ("tp",),
    "overlap-experts": ("ep",),
    "zero": ("dp", "cp"),
}
"""Varied flags that change nothing where each of these axes has one rank."""


@dataclass(frozen=True)
class Estimate:
    """A layout, and the estimate of its step.

    Attributes:
        arguments: the arguments of the build function in which this layout differs from others.
        memory: the bytes that the fullest rank holds, without the machine's reserve.
        bound: whether `memory` is only a lower bound. It was too large, so the layout wasn't counted.
        errors: the relative error of the step's seconds that one standard error of each of the machine's rates causes.
        same: the arguments of other layouts on this mesh with this estimate. They have no row of their own.
        seconds: the parts of the step's seconds. None: the layout doesn't fit or is refused.
        spread: the relative standard error of the step's seconds.
        refused: why the layout is refused, or "".
    """

    sizes: dict[str, int]
    arguments: tuple[str, ...]
    memory: int = 0
    seconds: Seconds | None = None
    spread: float = 0.0
    refused: str = ""
    bound: bool = False
    errors: tuple[float, ...] = ()
    same: tuple[tuple[str, ...], ...] = field(default=(), compare=False)

    @property
    def step(self) -> float:
        """The seconds per step; infinite if there is no estimate."""
        return float("inf") if self.seconds is None else self.seconds.step

    def slower(self, other: Estimate) -> tuple[float, float]:
        """Return by how much this step takes longer than another layout's, relative to it, and the standard error.

        Both steps are computed from the same rates. So most of a rate's error changes both alike, and the difference
        of two similar layouts has a smaller error than each step.
        """
        ratio = self.step / other.step
        apart = (mine - its for mine, its in zip(self.errors, other.errors, strict=True))
        return ratio - 1, ratio * math.hypot(*apart, NOISE, NOISE)

    def fits(self, machine: Machine) -> bool:
        """Return whether the layout is not refused and fits into the machine's memory."""
        return not self.refused and self.memory + machine.reserve <= machine.memory

    @property
    def flags(self) -> str:
        sizes = {axis: size for axis, size in self.sizes.items() if size > 1 or axis in ("etp", "cp_inner")}
        mesh = [f"--{axis.replace('_', '-')} {size}" for axis, size in sizes.items()]
        return " ".join([*mesh, *self.arguments])


def meshes(world: int, node: int, **sizes: Sequence[int] | None) -> Iterator[dict[str, int]]:
    """Yield every mesh of this number of ranks with tp inside a node, large tp first.

    Args:
        sizes: the allowed sizes of each axis. An axis that is missing or None may have: any size for tp, pp and dp;
            size 1 for cp and ep; the size of tp for etp; no `cp_inner`.
    """
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    tps = sizes.get("tp") or [n for n in divisors if n <= node][::-1]
    for tp, cp, pp, ep, etp, inner in itertools.product(
        tps, sizes.get("cp") or (1,), sizes.get("pp") or divisors, sizes.get("ep") or (1,), sizes.get("etp") or (None,),
        sizes.get("cp_inner") or (None,),
    ):  # fmt: skip
        dp, rest = divmod(world, tp * pp * cp)
        divided = (dp * cp * tp) % (ep * (etp or 1)) == 0 and cp % (inner or 1) == 0
        if rest == 0 and dp in (sizes.get("dp") or (dp,)) and divided:
            more = {name: size for name, size in (("etp", etp), ("cp_inner", inner)) if size is not None}
            yield {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "dp": dp, **more}


def choices(vary: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yield the arguments of every combination of `name=value,value,..`.

    The value `on` gives the flag without a value; `off` leaves the flag out.
    """
    options = []
    for text in vary:
        name, equals, values = text.partition("=")
        if not (name and equals and all(values.split(","))):
            raise ValueError(f"--vary {text} isn't of the form name=value,value: such as zero=1,2,3")
        flag = f"--{name.lstrip('-').replace('_', '-')}"
        if flag[2:].replace("-", "_") in AXES:
            raise ValueError(f"--vary {text}: the axes of the mesh are the planner's own flags: {flag} {values}")
        each: dict[str, tuple[str, ...]] = {"on": (flag,), "off": ()}
        options.append([each.get(value, (flag, value)) for value in values.split(",")])
    for combination in itertools.product(*options):
        yield tuple(itertools.chain(*combination))


def useful(layouts: Iterable[Choice]) -> list[Choice]:
    """Remove varied flags that change nothing on their mesh. Of layouts that are then equal, keep the first."""
    found: dict[object, Choice] = {}
    for sizes, own in layouts:
        kept, is_idle = [], False
        for word in own:
            if word.startswith("--"):
                axes = IDLE.get(word[2:], ())
                is_idle = bool(axes) and all(sizes.get(axis, 1) == 1 for axis in axes)
            kept += [] if is_idle else [word]
        found.setdefault((*sizes.items(), *kept), (sizes, tuple(kept)))
    return list(found.values())


def consider(counter: Counter, machine: Machine, given: Sequence[str], choice: Choice, unfused: bool) -> Estimate:
    """Estimate one layout: first its memory, and its seconds if it fits."""
    sizes, own = choice
    try:
        layout = counter.layout([*given, *own], machine.memory - machine.reserve, **sizes)
    except TooLargeError as error:
        return Estimate(sizes, own, error.least, bound=True)
    except (ValueError, RuntimeError) as error:  # the second is torch's: a forward that has wrong shapes on this mesh
        return Estimate(sizes, own, refused=("the model: " if isinstance(error, RuntimeError) else "") + str(error))
    memory = layout.fullest[1]
    if memory + machine.reserve > machine.memory:
        return Estimate(sizes, own, memory)
    errors = errors_of(layout, machine, unfused)
    spread = math.hypot(*errors, NOISE)
    return Estimate(sizes, own, memory, estimate(layout, machine, unfused), spread, errors=errors)


def search(
    counter: Counter, machine: Machine, given: Sequence[str], layouts: Sequence[Choice], unfused: bool = False,
    each: Callable[[int, Sequence[Estimate]], None] = lambda done, found: None,
) -> list[Estimate]:  # fmt: skip
    """Estimate layouts. Ctrl-C stops the search and keeps its results.

    If a mesh doesn't fit with one micro-batch size, a larger size is not tried: it needs at least the same memory.
    """
    found: list[Estimate] = []
    too_large: dict[object, tuple[int, int]] = {}  # the least size that doesn't fit, and its bytes
    try:
        for done, (sizes, own) in enumerate(layouts, start=1):
            size, rest = _micro_batch(own)
            key = tuple(sizes.items()), rest
            least, memory = too_large.get(key, (size + 1, 0))
            if size >= least:
                found.append(Estimate(sizes, own, memory, bound=True))
            else:
                found.append(consider(counter, machine, given, (sizes, own), unfused))
                if not found[-1].fits(machine) and not found[-1].refused:
                    too_large[key] = size, found[-1].memory
            each(done, found)
    except KeyboardInterrupt:
        pass
    return ranked(found, machine)


def _micro_batch(arguments: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    """Return the micro-batch size in some arguments (0 if there is none), and the other arguments."""
    if "--micro-batch" not in arguments:
        return 0, arguments
    i = arguments.index("--micro-batch")
    return int(arguments[i + 1]), (*arguments[:i], *arguments[i + 2 :])


def ranked(found: Sequence[Estimate], machine: Machine) -> list[Estimate]:
    """Sort estimates: those that fit by time, those that don't by memory, then the refused ones.

    Of layouts on one mesh that fit and have equal estimates, only the first is kept, with the others in its `same`.
    """
    unique: dict[object, Estimate] = {}
    for e in found:
        if e.fits(machine):
            key = (*e.sizes.items(), e.memory, e.step)
            first = unique.get(key)
            unique[key] = e if first is None else replace(first, same=(*first.same, e.arguments))
    fits = sorted(unique.values(), key=lambda e: (round(e.step, 9), e.memory))
    large = sorted((e for e in found if not e.fits(machine) and not e.refused), key=lambda e: e.memory)
    return [*fits, *large, *(e for e in found if e.refused)]


def frontier(found: Sequence[Estimate], machine: Machine) -> list[Estimate]:
    """Return the layouts that fit and for which no other layout is as fast in less memory. The fastest comes first."""
    best, least = [], float("inf")
    for e in ranked(found, machine):
        if e.fits(machine) and e.memory < least:
            best.append(e)
            least = e.memory
    return best
