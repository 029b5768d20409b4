"""Draw results: for each kernel and pass how near all providers come to the machine's own rate; host times as bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLUMNS, WIDTH, HEIGHT = 3, 5.5, 3.2
YARDSTICK = {"GB/s": "a copy", "TFLOP/s": "a matrix product"}


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
    figure = Figure(figsize=(columns * WIDTH, lines * HEIGHT), layout="constrained")
    FigureCanvasAgg(figure)
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
