"""Time ours beside its peers, and write the page: `python -m bench.peers --write docs/peers.md`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from bench.peers.measure import Result, Row, run
from bench.peers.page import line, write
from bench.peers.table import ROWS


def main() -> int:
    """Run the rows that are asked for; the status is 1 where a side fails or the sides differ."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name or peer has this in it")
    parser.add_argument("--seconds", type=float, default=4.0, help="for the timing of a row (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=1, help="of all rows, one after the other (default: %(default)s)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write a page of the results, and a plot beside it")
    given = parser.parse_args()
    began, results = time.monotonic(), dict[Row, Result]()
    for _ in range(given.runs):
        for row in ROWS:
            if given.only.lower() in f"{row.name} {row.peer}".lower():
                found = run(row, given.seconds)
                print(line(found), flush=True)
                if row in results:
                    results[row].add(found)
                else:
                    results[row] = found
    took = time.monotonic() - began
    print(f"{len(results)} rows in {took:.0f} s")
    if given.write:
        write(given.write, [*results.values()], took)
    return int(any(result.problem.startswith("error") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
