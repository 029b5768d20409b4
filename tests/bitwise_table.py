"""The table of docs/bitwise.md: 50 steps on each layout, and the SHA-256 of what they leave.

`OMP_NUM_THREADS=1 python -m tests.bitwise_table [float32|bfloat16]` prints a row for each layout, or for those that
`--only` names.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from dataclasses import replace

import torch

import mpcore as mp
from tests.training.test_bitwise import CONFIG, Case, on

STEPS = 50
LAYOUTS = (
    "tp1", "mb2", "mb4", "tp2", "tp2sp", "tp4", "tp4sp", "dp2zero0", "dp2zero1", "dp2zero2", "dp2zero3", "dp4zero0",
    "dp4zero2", "dp4zero3", "pp2", "pp2mb2", "pp2 gpipe", "pp2dp2zero1", "pp2dp2zero1 gpipe", "pp2dp2zero3", "tp2pp2",
    "tp2sppp2", "tp2dp2zero0", "tp2spdp2zero1", "tp2spdp2zero2", "tp2dp2zero3", "tp2sppp2dp2zero2", "tp4spdp2zero3",
)  # fmt: skip
OTHERS = (  # a layout, what of its blocks is recomputed, and the layout of the first half of the steps
    ("tp1", "full", ""), ("tp2sp", "selective", ""), ("pp2dp2zero1", "full", ""),
    ("tp2sp", "none", "dp2zero1"), ("pp2dp2zero1", "none", "tp4sp"), ("dp4zero3", "none", "pp2"),
)  # fmt: skip
DEEP = ("tp1", "pp2 interleaved", "pp2dp2zero1 interleaved", "tp2sppp2 interleaved", "pp4")  # of four blocks


def row(case: Case, layout: str, recompute: str = "none", first: str = "") -> tuple[str, str, str]:
    """The SHA-256 of losses and norms, of the weights and of the masters."""
    if first:
        with tempfile.TemporaryDirectory() as folder:
            on(first, replace(case, steps=case.steps // 2), save=folder)
            found = on(layout, case, resume=str(mp.latest(folder)))
    else:
        found = on(layout, case, recompute=recompute)
    masters = {name: value for name, value in found.items() if name.startswith("master of ")}
    weights = {name: value for name, value in found.items() if name not in masters and name != "losses and norms"}
    return found["losses and norms"][:16], _joined(weights), _joined(masters)


def _joined(hashes: dict[str, str]) -> str:
    return hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()[:16]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dtype", nargs="?", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", nargs="*", metavar="ROW", help="such as tp2 'pp2 gpipe' 'dp2zero1, resumed on tp2sp'")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| {args.dtype}, {args.steps} steps on | losses and norms | weights | masters | equal |")
    print("| --- | --- | --- | --- | --- |")
    equal = count = 0
    for layers, rows in (
        (2, [(layout, "none", "") for layout in LAYOUTS] + list(OTHERS)),
        (4, [(layout, "none", "") for layout in DEEP]),
    ):
        case = Case(replace(CONFIG, vocab_size=36, layers=layers), dtype=args.dtype, steps=args.steps, samples=4)
        truth = None
        for layout, recompute, first in rows:
            name = f"{first}, resumed on {layout}" if first else layout
            name += "" if recompute == "none" else f", {recompute} recompute"
            name += "" if layers == 2 else f", {layers} blocks"
            if args.only and truth and name not in args.only:
                continue
            found = row(case, layout, recompute, first)
            truth = truth or found
            equal, count = equal + (found == truth), count + 1
            print(f"| {name} | {' | '.join(found)} | {found == truth} |", flush=True)
    print(f"{equal} of {count} equal")


if __name__ == "__main__":
    main()
