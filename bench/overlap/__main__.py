"""Measure how much communication is hidden on a slow link: `python -m bench.overlap [--only WORD]` prints a table.

`docs/records/2026-11-29_overlap.md` says what its columns mean. Of each mode: messages, the products in milliseconds,
the time that the slower rank's host is blocked in waits without overlap and with it, and the critical path of both.
"""

from __future__ import annotations

import argparse

from bench.machine import describe
from bench.overlap.link import critical_path
from bench.overlap.measure import BANDWIDTH, LATENCY_S, PRODUCT_S, STEPS, measure
from bench.overlap.modes import MODES
from mpcore.tools.verify.pool import Pool

HEAD = """\
| mode | messages | products, ms | exposed without, ms | exposed, ms | critical path: without, with | what is hidden |
|---|---|---|---|---|---|---|"""


def row(pool: Pool, index: int, product: float, latency: float) -> str:
    """Measure a mode without overlap and with it, and return its row of the table."""
    exposed, critical, work, messages = [], [], 0.0, 0
    for overlaps in (False, True):
        ranks = pool(2, measure, index, overlaps, product, latency)
        events = [rank.events for rank in ranks]
        exposed.append(1e3 * max(rank.waited for rank in ranks))
        critical.append(1e3 * critical_path(events)[1])
        work = 1e3 * max(sum(e.seconds for e in of if e.kind == "compute") for of in events)
        messages = max(sum(e.kind in ("start", "send") for e in of) for of in events)
    mode = MODES[index]
    return (
        f"| {mode.name} | {messages} | {work:.0f} | {exposed[0]:.0f} | **{exposed[1]:.0f}** | "
        f"{critical[0]:.0f}, {critical[1]:.0f} | {mode.hidden} |"
    )


def main() -> None:
    """Run the modes that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.overlap", description=__doc__)
    parser.add_argument("--only", default="", help="modes whose name has this in it")
    given, about = parser.parse_args(), describe()
    print(f"{about['device']}, {about['cores']} cores, {about['date']}, {about['commit']}. A message takes "
          f"{1e3 * LATENCY_S:.0f} ms and its bytes at {BANDWIDTH / 1e6:g} MB/s, a product {1e3 * PRODUCT_S:.0f} ms; "
          f"the median of {STEPS} steps.\n\n{HEAD}")  # fmt: skip
    pool = Pool(2, preload=["bench.overlap.measure"])
    for index, mode in enumerate(MODES):
        if given.only.lower() in mode.name.lower():
            print(row(pool, index, PRODUCT_S, LATENCY_S), flush=True)
    pool.stop()


if __name__ == "__main__":
    main()
