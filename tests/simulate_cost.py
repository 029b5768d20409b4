"""Compare the processor time of the layers' tests in a pool of processes and under `simulate`, in turns.

python -m tests.simulate_cost --runs 2
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import statistics
import subprocess
import sys

FILES = [f"tests/layers/test_{name}.py" for name in ("linear", "embedding", "loss", "mlp")]
_PR_SET_CHILD_SUBREAPER = 36


def processor_seconds(command: list[str]) -> tuple[float, str]:
    """Run a command; return the processor seconds of it and of all its descendants, and its last line."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the pool's processes outlive their parent
    run, seconds = subprocess.Popen(command, stdout=subprocess.PIPE, text=True), 0.0
    assert run.stdout is not None
    last = run.stdout.read().strip().splitlines()[-1]
    while True:
        try:
            used = os.wait4(-1, 0)[2]
        except ChildProcessError:
            return seconds, last
        seconds += used.ru_utime + used.ru_stime


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("tests", nargs="*", default=FILES, help="what to run (default: four files of layers)")
    parser.add_argument("--runs", type=int, default=2, help="of each (default 2)")
    args = parser.parse_args()
    found: dict[str, list[float]] = {"pool": [], "simulate": []}
    for _ in range(args.runs):
        for way, flags in (("pool", []), ("simulate", ["--simulate"])):
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "-m",
                "not slow",
                *args.tests,
                *flags,
            ]
            seconds, last = processor_seconds(command)
            print(f"{way}: {seconds:.1f} s, {re.sub(' in .*', '', last)}", flush=True)
            found[way].append(seconds)
    pool, simulated = (statistics.median(each) for each in found.values())
    print(f"processor time: {pool:.1f} s in the pool, {simulated:.1f} s under simulate, {pool / simulated:.2f} times")


if __name__ == "__main__":
    main()
