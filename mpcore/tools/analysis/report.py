"""Print and draw the results of `mpcore plan`, and draw those of `mpcore memory`."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mpcore.tools.analysis.machine import Machine
from mpcore.tools.analysis.memory import UNITS, parts_of, unit_of
from mpcore.tools.analysis.search import Estimate, frontier
from mpcore.tools.analysis.seconds import Seconds
from mpcore.tools.analysis.work import DryRunCounts
from mpcore.tools.draw import matplotlib_part
from mpcore.tools.parsers import AXES

COMPUTE = ("products", "attention")
WORDS = {
    "UNIT": "total of the fullest rank; the reserve comes on top",
    "+-": "standard error of the step, mostly common to all rows",
    "slower": "than row 1, +- the standard error of this difference",
    "compute": "matrix products and attention",
    "hidden": "communication during computation, as a share of the step; it adds no time",
    "not compute": "the three largest other parts; --explain ROW prints all parts",
    "operators": "all other kernels",
    "AXIS sent": "exposed communication over an axis",
    "bubble": "waiting for other pipeline ranks",
    "host": "kernel launches and small shapes",
    "optimizer": "the optimizer's step",
    "cluster": "stragglers, jitter, and what isn't modeled",
    "flags": "what to pass besides the sizes of the mesh and this command's flags",
}
"""The words of the table, and what each means."""
LEGEND = textwrap.fill(
    " ".join(f"{word}: {meaning}.".replace(" ", "\0") for word, meaning in WORDS.items()), 118, break_on_hyphens=False
).replace("\0", " ")
LARGE_BUBBLE = 0.2
SMALLER_BUBBLE = "more micro-batches make it smaller, by a smaller --micro-batch or a larger --global-batch"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")  # Okabe and Ito
MARKERS = "osD^vP*X"


def _clock(seconds: float) -> tuple[str, float]:
    """Return the unit in which a time is printed, s or ms, and how many of the unit a second has."""
    return ("s", 1.0) if seconds >= 0.1 else ("ms", 1e3)


def why(seconds: Seconds) -> str:
    """Return text that names the largest parts of a step besides products and attention."""
    parts = [(name, part / seconds.step) for name, part in seconds.parts().items() if name not in COMPUTE]
    largest = sorted(parts, key=lambda pair: -pair[1])[:3]
    return ", ".join(f"{name} {share:.0%}" for name, share in largest if share >= 0.005)


def table(estimates: Sequence[Estimate], machine: Machine, top: int = 20) -> str:
    """Return a table of the layouts that fit, one line each, the fastest first.

    After the table come what its words mean, the number of layouts that don't fit or are refused, and why.
    """
    fits = [e for e in estimates if e.fits(machine)]
    large = [e for e in estimates if not e.fits(machine) and not e.refused]
    axes = [a for a in AXES if any(e.sizes.get(a, 0) > (a in ("cp", "ep")) for e in estimates)]
    wide = {a: max(4, len(a) + 1) for a in axes}
    lines = []
    unit = unit_of(max((e.memory for e in fits), default=0))
    second, clock = _clock(fits[0].step if fits else 1.0)
    if fits:
        head = "".join(f"{a:>{wide[a]}}" for a in axes)
        numbers = f"{unit:>7} {f'step, {second}':>9} {'+-':>4} {'slower':>11} {'compute':>8} {'hidden':>6}"
        lines.append(f"row{head} {numbers}  {'not compute':<44} flags")
    for i, e in enumerate(fits[:top], start=1):
        assert e.seconds is not None
        compute = sum(e.seconds.parts()[name] for name in COMPUTE) / e.step
        cells = "".join(f"{e.sizes.get(a, ''):>{wide[a]}}" for a in axes)
        later = "{:.0%} +- {:.0%}".format(*e.slower(fits[0])) if i > 1 else ""
        hidden = min(sum(e.seconds.hidden.values()) / e.step, 1.0)  # axes may send at the same time
        numbers = f"{e.memory / UNITS[unit]:>7.1f} {e.step * clock:>9.3f} {e.spread:>4.0%} {later:>11} {compute:>8.1%}"
        lines.append(f"{i:>3}{cells} {numbers} {hidden:>6.0%}  {why(e.seconds):<44} {' '.join(e.arguments)}".rstrip())
    if fits:
        lines.append(LEGEND.replace("UNIT", unit))
    same = [f"{' '.join(more)} (row {i})" for i, e in enumerate(fits[:top], start=1) for more in e.same]
    if same:
        lines.append(f"left out, because memory and time are equal: {', '.join(same)}")
    waits = [(i, e.seconds.bubble / e.step) for i, e in enumerate(fits[:top], start=1) if e.seconds]
    for row, share in [each for each in waits if each[1] >= LARGE_BUBBLE][:1]:
        lines.append(f"row {row}: bubble {share:.0%}: {SMALLER_BUBBLE}")
    if len(fits) > top:
        lines.append(f".. and {len(fits) - top} slower ones that fit")
    if large:
        what = " ".join([*(f"{a} {size}" for a, size in large[0].sizes.items() if a in axes), *large[0].arguments])
        room = machine.memory - machine.reserve
        needs = f"{'at least ' * large[0].bound}{large[0].memory / 2**30:.1f} GiB of {room / 2**30:.1f}"
        lines.append(f"{len(large)} don't fit; the smallest of them needs {needs}: {what}")
    reasons = Counter(e.refused for e in estimates if e.refused)
    lines += [f"{count} refused: {reason}" for reason, count in reasons.most_common(5)]
    if len(reasons) > 5:
        lines.append(f"{sum(reasons.values()) - sum(n for _, n in reasons.most_common(5))} refused for other reasons")
    return "\n".join(lines)


def explain(e: Estimate, machine: Machine, given: Sequence[str] = ()) -> str:
    """Return where the seconds and the memory of a layout go, and its flags with those `given` for all layouts.

    Raises:
        ValueError: if the layout doesn't fit or is refused.
    """
    if e.seconds is None:
        raise ValueError(f"{e.flags or 'the layout'}: {e.refused or 'it does not fit'}")
    second, clock = _clock(e.step)
    unit = unit_of(int(e.memory))
    step, memory = e.step * clock, e.memory / UNITS[unit]
    lines = [f"{step:.3f} {second} per step (standard error {e.spread:.0%}), total {memory:.1f} {unit}"]
    lines += [
        f"  {'compute: ' * (name in COMPUTE) + name:<20}{part * clock:>10.3f} {second} {part / e.step:>7.1%}  "
        f"{WORDS.get('AXIS sent' if name.endswith(' sent') else name, '')}".rstrip()
        for name, part in e.seconds.parts().items()
        if part
    ]
    lines += [
        f"  {f'{axis} hidden':<20}{part * clock:>10.3f} {second}          beside computation, no part of the step"
        for axis, part in e.seconds.hidden.items()
        if part * clock >= 0.0005
    ]
    if e.seconds.bubble >= LARGE_BUBBLE * e.step:
        lines.append(f"  bubble: {SMALLER_BUBBLE}")
    free = machine.memory - machine.reserve - e.memory
    lines.append(f"  {free / 2**30:.1f} GiB are free, besides the reserve of {machine.reserve / 2**30:.1f} GiB")
    lines.append(f"  flags: {' '.join([e.flags, *given])}")
    return "\n".join(lines)


def draw(estimates: Sequence[Estimate], machine: Machine, path: Path | str, row: int = 1, title: str = "") -> None:
    """Draw the layouts that fit: time per step over memory, in the units and with the rows of the table.

    A line joins the layouts that no other layout beats in both; up to eight of them have the numbers of their rows. The
    chosen row gets a ring.
    """
    fits = [e for e in estimates if e.fits(machine)]
    if not fits:
        raise ValueError("there is nothing to draw: no layout fits")
    unit = unit_of(int(max(e.memory for e in fits)))
    second, clock = _clock(fits[0].step)
    shown = [e for e in fits if e.step <= 4 * fits[0].step]
    at = {id(e): (e.memory / UNITS[unit], e.step * clock) for e in fits}
    figure = matplotlib_part("figure").Figure(figsize=(6, 6), layout="constrained")
    axes = figure.add_subplot()
    for i, tp in enumerate(sorted({e.sizes["tp"] for e in shown})):
        x, y = zip(*(at[id(e)] for e in shown if e.sizes["tp"] == tp), strict=True)
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        axes.scatter(x, y, s=22, color=colour, marker=marker, label=f"tp {tp}", alpha=0.7, linewidths=0)
    front = [e for e in frontier(estimates, machine) if e in shown]
    best = front[:8]
    axes.plot(*zip(*(at[id(e)] for e in front), strict=True), color="#000000", linewidth=0.8, zorder=0)
    ring = {"facecolor": "none", "edgecolor": "#000000", "linewidths": 1.2, "label": f"chosen: row {row}"}
    axes.scatter(*([value] for value in at[id(fits[row - 1])]), s=120, **ring)
    free = machine.memory - machine.reserve
    room = free / UNITS[unit]
    if room < 3 * max(x for x, _ in at.values()):  # further away it would push all points to one side
        axes.axvline(room, color="#000000", linestyle="--", linewidth=1, label=f"room of {machine.name}")
    hidden = f"\n{len(fits) - len(shown)} slower layouts are not shown" if len(fits) > len(shown) else ""
    axes.set_xlabel(f"total of the fullest rank, {unit} (room: {free / 2**30:.1f} GiB){hidden}")
    axes.set_ylabel(f"step, {second}, estimated")
    axes.margins(x=0.1)
    low, high = (extreme(e.step for e in shown) * clock for extreme in (min, max))
    axes.set_ylim(max(0, 2 * low - high), high * 1.1)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    rows = {fits.index(e) + 1: e for e in best}
    more = f"\n.. and {len(front) - len(best)} more" if len(front) > len(best) else ""
    names = "\n".join(textwrap.shorten(f"row {row}: {e.flags}", 90, placeholder=" ..") for row, e in rows.items())
    head = textwrap.fill(textwrap.shorten(title or machine.name, 180, placeholder=" .."), 78)
    title = f"{head}\nno other layout is both faster and smaller than"
    axes.set_title(f"{title}\n{names}{more}", loc="left", fontsize=9)
    figure.draw_without_rendering()  # so that labels can avoid each other
    taken: list[tuple[float, float]] = []
    for number, e in rows.items():
        x, y = axes.transData.transform(at[id(e)])
        away = next(d for d in range(5, 500) if all(abs(x - a) > 22 or abs(y + d - b) > 18 for a, b in taken))
        taken.append((x, y + away))
        axes.annotate(str(number), at[id(e)], xytext=(6, away * 72 / figure.dpi), fontsize=9, weight="bold",
                      textcoords="offset points", arrowprops={"arrowstyle": "-", "linewidth": 0.5})  # fmt: skip
    figure.savefig(path, dpi=150)


def draw_memory(
    ranks: Sequence[DryRunCounts], path: Path | str, machine: Machine | None = None, title: str = ""
) -> None:
    """Draw what each pipeline rank holds as stacked bars, and name the rank that holds the most.

    With a machine, also draw a line at the memory of its GPU without the reserve. `title` is the title's first line.
    """
    most = max(found.most for found in ranks)
    fullest = next(i for i, found in enumerate(ranks) if found.most == most)
    name = unit_of(most)
    figure = matplotlib_part("figure").Figure(figsize=(5, 4), layout="constrained")
    axes = figure.add_subplot()
    bottom = [0.0] * len(ranks)
    for colour, kind in zip(COLOURS, parts_of(ranks[0]), strict=False):
        sizes = [parts_of(found)[kind] / UNITS[name] for found in ranks]
        if any(sizes):
            axes.bar(range(len(ranks)), sizes, 0.8, bottom, color=colour, label=kind, edgecolor="white", linewidth=0.5)
            bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
    totals = [found.most / UNITS[name] for found in ranks]  # not all parts are largest at the same time
    size = (190 / max(len(ranks), 8)) ** 2
    axes.scatter(range(len(ranks)), totals, size, color="#000000", marker="_", label="total", zorder=3)
    if machine is not None:
        usable = (machine.memory - machine.reserve) / UNITS[name]
        axes.axhline(usable, color="#000000", linestyle="--", label=f"room of {machine.name}")
    kind, size = max(parts_of(ranks[fullest]).items(), key=lambda part: part[1])
    axes.set(xlabel="pipeline rank", ylabel=f"{name} of one GPU", xticks=range(0, len(ranks), -(-len(ranks) // 16)))
    title += f"\nthe largest total is {most / UNITS[name]:.1f} {name}, of pipeline rank {fullest};\n"
    axes.set_title(f"{title.lstrip()}its largest part: {kind}, {size / most:.0%} of it", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
