"""Draw a layout: what each pipeline rank holds, and where the ranks are on the machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mpcore.mesh.layout import mesh_ranks
from mpcore.tools.analysis.memory import UNITS, parts_of, unit_of
from mpcore.tools.analysis.report import COLOURS
from mpcore.tools.analysis.work import DryRunCounts
from mpcore.tools.draw import matplotlib_part

MOST_NODES = 16  # more nodes are not drawn


def draw_memory(ranks: Sequence[DryRunCounts], path: Path | str) -> None:
    """Draw what each pipeline rank holds as stacked bars, and name the rank that holds the most."""
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
    axes.scatter(
        range(len(ranks)),
        totals,
        marker="_",
        s=(190 / max(len(ranks), 8)) ** 2,
        color="#000000",
        label="most at once",
        zorder=3,
    )
    kind, size = max(parts_of(ranks[fullest]).items(), key=lambda part: part[1])
    axes.set(xlabel="pipeline rank", ylabel=f"{name} of one GPU", xticks=range(0, len(ranks), -(-len(ranks) // 16)))
    title = f"pipeline rank {fullest} holds most, {most / UNITS[name]:.1f} {name};\n"
    axes.set_title(f"{title}largest part: {kind}, {size / most:.0%}", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9, reverse=True)
    figure.savefig(path, dpi=150)


def crossing(node: int, **sizes: int) -> dict[str, bool]:
    """Return, for each axis with several ranks, whether its groups cross nodes.

    Example:
        >>> from mpcore.tools.analysis.pictures import crossing
        >>> crossing(8, tp=8, dp=2)
        {'tp': False, 'dp': True}
    """
    groups = {name: each for name, each in mesh_ranks(**sizes).items() if name in ("tp", "cp", "ep", "dp", "pp")}
    wide = {name: each for name, each in groups.items() if len(each[0]) > 1}
    return {name: any(len({r // node for r in group}) > 1 for group in each) for name, each in wide.items()}


def draw_ranks(node: int, path: Path | str, cp_inner: int | None = None, **sizes: int) -> None:
    """Draw a layout on the machine: one row per node, one box per GPU with its rank and its rank on each axis."""
    groups, crosses = mesh_ranks(**sizes), crossing(node, **sizes)
    place = {name: {r: i for group in groups[name] for i, r in enumerate(group)} for name in crosses}
    world = sum(map(len, groups["tp"]))
    nodes = -(-world // node)
    shown = min(nodes, MOST_NODES)
    labels = [name for name in crosses if name != "pp"]
    height = 0.35 + 0.15 * ("pp" in place) + 0.16 * len(labels)
    figure = matplotlib_part("figure").Figure(
        figsize=(1.0 + 0.55 * max(min(node, world), 6), 1.3 + height * shown), layout="constrained"
    )
    axes = figure.add_subplot()
    for rank in range(min(world, shown * node)):
        stage = place["pp"][rank] if "pp" in place else 0
        row, column = divmod(rank, node)
        colour = COLOURS[stage % len(COLOURS)]
        axes.barh(row, 0.96, 0.92, column - 0.48, color=colour, alpha=0.35, edgecolor=colour)
        lines = [f"rank {rank}", *(f"{name} {place[name][rank]}" for name in labels)]
        axes.text(column, row, "\n".join(lines), ha="center", va="center", fontsize=8)
        if "pp" in place and (column == 0 or place["pp"][rank - 1] != stage):
            axes.text(column - 0.46, row - 0.42, f"stage {stage}", ha="left", va="top", fontsize=7, weight="bold")
    inside = " and ".join(name for name, crossed in crosses.items() if not crossed)
    outside = " and ".join(name for name, crossed in crosses.items() if crossed)
    says = [f"{inside} inside a node"] * bool(inside) + [f"{outside} across nodes"] * bool(outside)
    more = "" if shown == nodes else f"; the first {shown} of {nodes} nodes"
    flags = " ".join(f"--{name} {size}" for name, size in sizes.items() if name in crosses)
    axes.set_title(f"{', '.join(says) or 'one rank'}{more}\n{flags}", loc="left", fontsize=10)
    axes.set(xlim=(-0.5, min(node, world) - 0.5), ylim=(shown - 0.5, -0.5), xticks=[], yticks=range(shown))
    axes.set_yticklabels([f"node {i}" for i in range(shown)])
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False)
    figure.savefig(path, dpi=150)
