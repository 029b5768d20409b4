"""Measure how much communication is hidden on a slow link: `python -m bench.overlap --write PAGE`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.machine import describe
from bench.overlap.link import critical_path
from bench.overlap.measure import BANDWIDTH, LATENCY_S, PRODUCT_S, STEPS, measure
from bench.overlap.modes import MODES, Mode
from mpcore.tools.verify.pool import Pool


class Line(NamedTuple):
    """Of a mode, in seconds: the products in the step with overlap; and, without and with overlap, what is exposed and
    the critical path.
    """

    mode: Mode
    messages: int
    work: float
    exposed: tuple[float, float]
    critical: tuple[float, float]

    def row(self) -> str:
        """A row of the table."""
        without, overlapped = self.exposed
        return (
            f"| {self.mode.name} | {self.messages} | {1e3 * self.work:.0f} | {1e3 * without:.0f} | "
            f"**{1e3 * overlapped:.0f}** | {1e3 * self.critical[0]:.0f}, {1e3 * self.critical[1]:.0f} | "
            f"{self.mode.hidden} |"
        )


def both(pool: Pool, index: int, product: float, latency: float) -> Line:
    """Measure a mode without overlap and with it."""
    exposed, critical, work, messages = [], [], 0.0, 0
    for overlaps in (False, True):
        ranks = pool(2, measure, index, overlaps, product, latency)
        events = [rank.events for rank in ranks]
        exposed.append(max(rank.waited for rank in ranks))
        critical.append(critical_path(events)[1])
        work = max(sum(e.seconds for e in of if e.kind == "compute") for of in events)
        messages = max(sum(e.kind in ("start", "send") for e in of) for of in events)
    return Line(MODES[index], messages, work, (exposed[0], exposed[1]), (critical[0], critical[1]))


ABOUT = """# How much communication is hidden?

`python -m bench.overlap --write PAGE` wrote this page. Two gloo ranks run a step of a tiny model over a link
that is slow on purpose. Each message takes {latency:.0f} ms and its bytes at {bandwidth:g} MB/s, after the later of its
starts on both ranks and the end of the message before it in its group. If the ranks send different numbers of bytes,
the larger number counts. Each matrix product sleeps {product:.0f} ms; in the rows of `overlap_communication` and
`overlap_experts` a part of a product sleeps its share of that.

**Exposed** is the time for which the slower rank's host is blocked in waits: the median of {steps} steps. "Without"
overlap, the host waits for each message as soon as it has started it. The critical path is computed from the
events of the last step of the same run: starts, waits and products in the order of each host. Other work of the host
counts as no time.

Machine: {machine}. Date: {date}, commit {commit}.

![Exposed communication by mode]({plot})

| mode | messages | products, ms | exposed without, ms | exposed, ms | critical path: without, with | what is hidden |
|---|---|---|---|---|---|---|
{rows}

- In the first four rows ZeRO-0 all-reduces each gradient in a message of its own. In training it does so for gradients
  of 2^18 elements or more.
- ZeRO-1 to 3 use torch's `fully_shard`. On a CPU it waits for each message, so nothing is hidden. On a GPU it
  communicates on separate streams, which this benchmark does not measure.
- The exposed time of a pipeline includes its bubble.
- [Decisions](../decisions.md) lists the messages that nothing hides, and why.
"""


def main() -> None:
    """Run the modes that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.overlap", description=__doc__)
    parser.add_argument("--only", default="", help="modes whose name has this in it")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write a page of the results, and a plot beside it")
    given = parser.parse_args()
    pool, lines = Pool(2, preload=["bench.overlap.measure"]), list[Line]()
    for index, mode in enumerate(MODES):
        if given.only.lower() in mode.name.lower():
            lines.append(both(pool, index, PRODUCT_S, LATENCY_S))
            print(lines[-1].row(), flush=True)
    pool.stop()
    if given.write:
        about, plot = describe(), given.write.with_suffix(".png")
        given.write.write_text(
            ABOUT.format(
                latency=1e3 * LATENCY_S,
                bandwidth=BANDWIDTH / 1e6,
                product=1e3 * PRODUCT_S,
                steps=STEPS,
                machine=f"{about['device']}, {about['cores']} cores",
                date=about["date"],
                commit=about["commit"],
                plot=plot.name,
                rows="\n".join(line.row() for line in lines),
            )
        )
        draw(lines, plot)


def draw(lines: Sequence[Line], file: Path) -> None:
    """Draw exposed communication as bars, without overlap and with it; the critical path as marks."""
    figure = Figure(figsize=(8, 0.5 * len(lines) + 1), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for i, (name, color) in enumerate((("without overlap", "tab:gray"), ("with", "tab:green"))):
        places = [place + 0.4 * i - 0.2 for place in range(len(lines))]
        axes.barh(places, [1e3 * line.exposed[i] for line in lines], 0.38, color=color, label=name)
        axes.plot([1e3 * line.critical[i] for line in lines], places, "|", color="black", markersize=12,
                  label=None if i else "critical path")  # fmt: skip
    axes.set_yticks(range(len(lines)), [line.mode.name for line in lines], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("exposed communication, ms a step", fontsize=8)
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    main()
