"""The page and the plot of a run's results."""

from __future__ import annotations

import importlib.metadata
import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.machine import describe
from bench.peers.measure import Result

PACKAGES = ("torch", "transformers", "safetensors", "megatron-core", "fairscale")
ABOUT = """# How does mpcore compare with other libraries?

`python -m bench.peers{runs} --write docs/peers.md` wrote this page in {minutes:.1f} minutes. Each row
runs in processes of its own. First the benchmark compares the results of mpcore and the peer. If losses or gradients
differ, the row shows an error and no numbers. Then the benchmark times mpcore and the peer alternately, in several
rounds. torch computes with one thread per rank.

**The ratio is the peer's CPU time divided by mpcore's: above 1 mpcore is faster.** The table shows its median over
all rounds of all runs, its 20th and 80th percentiles (p20-p80), and the median of each run. CPU time is summed over
ranks. Wall time is unreliable: other programs use the machine. A row with *host time* runs one rank of tp 8, with small
layers and a process group that sends nothing. So the row measures mostly the host's work, which a step on a GPU
needs too.

The target is the smallest ratio that we accept; a target below 1 accepts a slower mpcore.
`met`: the median reaches it. `missed`: the 80th percentile is below it.
`unclear`: the median is below it, and the 80th percentile is not. The numbers are compared before they are rounded. The
benchmark uses no GPU.
"""

EXPLAINED = """## Why are some rows below their target?

The benchmark also counted the work of rank 0 in one step of mpcore and of the peer. "122 + 86 calls" are 122 calls of
Python functions and 86 calls of C functions on the main thread, as cProfile counts them. Operators are torch's, views
included. A product is a matrix product. A message is a collective, a send or a receive. A copy is an operator that only
copies; the MiB are the sum over all copies.

| what | peer | work of mpcore | work of the peer | what costs the time |
|---|---|---|---|---|
"""


def line(result: Result) -> str:
    """One row for the terminal."""
    row = result.row
    head = f"{row.name} | {row.peer}"
    if result.problem:
        return f"{head}: {result.problem}"
    low, middle, high = result.ratio()
    memory = "".join(f", {mib:.0f} MiB" for mib in result.peak_mib.values())
    return f"{head}: {middle:.3f} ({low:.3f}-{high:.3f}), at least {row.at_least:.3g}: {result.verdict}{memory}"


def write(page: Path, results: Sequence[Result], took: float) -> None:
    """Write the page, and the plot as a PNG beside it."""
    about, runs = describe(), max(len(result.runs) for result in results)
    versions = [f"{name} {version}" for name in PACKAGES if (version := _version(name))]
    machine = f"{about['device']}, {about['cores']} cores, Python {about['python']}"
    lines = [
        ABOUT.format(minutes=took / 60, runs=f" --runs {runs}" if runs > 1 else ""),
        f"Machine: {machine}. Date: {about['date']}, commit {about['commit']}. Versions: {', '.join(versions)}.",
        "",
        f"![The peer's CPU time divided by mpcore's, by row]({page.stem}.png)",
        "",
        "| what | peer | ratio (p20-p80) | each run | target | result | CPU ms per step: mpcore, peer "
        "| wall-time ratio | peak MiB: mpcore, peer |",
        "|---|---|---|---|---|---|---|---|---|",
        *map(_row, results),
        "",
        EXPLAINED + "\n".join(_explained(result) for result in results if result.verdict in ("missed", "unclear")),
    ]
    page.write_text("\n".join(lines) + "\n")
    _plot([result for result in results if not result.problem], page.with_suffix(".png"), machine)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _row(result: Result) -> str:
    row = result.row
    if result.problem:
        return f"| {row.name} | {row.peer} | {result.problem} | | | | | | |"
    low, middle, high = result.ratio()
    times = ", ".join(f"{1e3 * statistics.median(each):.3g}" for each in result.cpu.values())
    memory = ", ".join(f"{mib:.0f}" for mib in result.peak_mib.values())
    runs = ", ".join(f"{ratio:.2f}" for ratio in result.runs or [middle])
    return (
        f"| {row.name} | {row.peer} | **{middle:.2f}** ({low:.2f}-{high:.2f}) | {runs} "
        f"| {row.at_least:.2f} | {result.verdict} | {times} | {result.ratio('wall')[1]:.2f} | {memory} |"
    )


def _explained(result: Result) -> str:
    row = result.row
    ours, theirs = ([result.work[side].told() for side in result.cpu] or [""] * 2) if result.work else ("", "")
    return f"| {row.name} | {row.peer} | {ours} | {theirs} | {row.why} |"


def _plot(results: Sequence[Result], file: Path, title: str) -> None:
    figure = Figure(figsize=(9, 0.32 * len(results) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, result in enumerate(results):
        low, middle, high = result.ratio()
        axes.barh(place, middle, color="tab:blue" if result.verdict == "met" else "tab:orange")
        axes.plot([low, high], [place, place], color="black", linewidth=1)
        axes.plot([result.row.at_least], [place], marker="|", color="tab:red", markersize=12)
    names = [f"{result.row.name} / {result.row.peer}" for result in results]
    axes.set_yticks(range(len(results)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("the peer's CPU time divided by mpcore's (black: p20 to p80; red: target)", fontsize=8)
    axes.set_title(title, fontsize=8)
    figure.savefig(file, dpi=100)
