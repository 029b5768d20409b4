"""Draw results: for each kernel and pass how near all providers come to the machine's own rate; host times as bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # of Okabe and Ito, 2008
MARKERS, TICKS = "osD^vPX*<>", (0.5, 0.7, 1, 1.5, 2, 3, 5, 10)
COLUMNS, WIDTH, HEIGHT = 3, 5.5, 3.2
YARDSTICK = {"GB/s": "a copy", "TFLOP/s": "a matrix product"}


def picture(width: float, height: float) -> Figure:
    """Return a figure that needs no screen."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plot(entries: Sequence[dict[str, Any]], file: Path) -> bool:
    """Write one picture of all benches that have something to draw; say whether there were any.

    Args:
        entries: pytest-benchmark's, with what the benches put into `extra_info`.
        file: a PNG.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        info = entry["extra_info"]
        if "kernel" in info:
            groups.setdefault(f"{info['kernel']}, {info['pass']}", []).append(info)
        elif "microseconds" in info:
            groups.setdefault(entry["fullname"].rpartition("::")[2], []).append(info)
    if not groups:
        return False
    columns = min(COLUMNS, len(groups))
    lines = -(-len(groups) // columns)
    figure = picture(columns * WIDTH, lines * HEIGHT)
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes, (title, infos) in zip(grid, groups.items(), strict=False):
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=7)
        (_rates if "kernel" in infos[0] else _host_times)(axes, infos)
    for axes in grid[len(groups) :]:
        axes.set_axis_off()
    about = groups[next(iter(groups))][0]
    figure.suptitle(f"{about['device']}, {about['date']}, {about['commit']}", fontsize=10)
    figure.savefig(file, dpi=100)
    return True


def compare(entries: Sequence[dict[str, Any]], file: Path) -> bool:
    """Write one picture of all kernels on a GPU: the time of each peer over ours, of the longest pass.

    Args:
        entries, file: the parameters of `plot`.

    Returns:
        Whether there was a kernel with a peer.
    """
    rows = {f"{e['extra_info']['kernel']}, {e['extra_info']['shape']}": e["extra_info"] for e in entries
            if e["extra_info"].get("peer_ratios")}  # fmt: skip
    peers = list(dict.fromkeys(name for info in rows.values() for name in info["peer_ratios"]))
    if not rows:
        return False
    figure = picture(9, 1.6 + 0.34 * len(rows))
    axes = figure.subplots()
    for i, name in enumerate(peers):
        dots = [(info["peer_ratios"][name], y) for y, info in enumerate(rows.values()) if name in info["peer_ratios"]]
        color, marker = COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]
        axes.scatter(*zip(*dots, strict=True), color=color, marker=marker, s=45, label=name, zorder=3)
    axes.axvline(1, color="black", linewidth=1.2)
    axes.set_xscale("log")
    axes.set_xticks(TICKS, [f"{t:g}x" for t in TICKS], minor=False)
    axes.minorticks_off()
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.invert_yaxis()
    axes.grid(alpha=0.4)
    about = next(iter(rows.values()))
    axes.set_xlabel("time of the peer / time of mpcore: right of 1x mpcore is faster", fontsize=9)
    figure.suptitle(f"Each kernel's forward and backward, {about['device']}, {about['date']}", fontsize=11)
    figure.legend(fontsize=8, loc="outside lower center", ncols=5)
    figure.savefig(file, dpi=100)
    return True


def _rates(axes: Axes, infos: Sequence[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for info in infos for name in info["providers"]))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        there = [(x, info["providers"][name]) for x, info in enumerate(infos) if name in info["providers"]]
        axes.bar([x + i * width for x, _ in there], [p["percent"] for _, p in there], width, label=name)
    axes.axhline(100, color="black", linewidth=0.8, linestyle="--")
    labels = [f"{info['shape']}\n{info['dtype']}" for info in infos]
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(infos))], labels, rotation=20, ha="right")
    axes.set_ylabel(f"% of {YARDSTICK[infos[0]['unit']]}", fontsize=8)
    axes.legend(fontsize=6)


def _host_times(axes: Axes, infos: Sequence[dict[str, Any]]) -> None:
    times = infos[-1]["microseconds"]
    axes.barh(list(times), list(times.values()))
    axes.invert_yaxis()
    axes.set_xlabel("host µs", fontsize=8)
