"""Draw what each pipeline rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mpcore.tools.analysis.machine import Machine
from mpcore.tools.analysis.memory import UNITS, parts_of, unit_of
from mpcore.tools.analysis.report import COLOURS
from mpcore.tools.analysis.work import DryRunCounts
from mpcore.tools.draw import matplotlib_part


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
