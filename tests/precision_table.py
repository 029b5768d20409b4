"""The table of docs/precision.md, counted: `python -m tests.precision_table --write docs/precision.md`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from examples.gpt.plan import build
from mpcore.tools.analysis.dry_run import dry_run

FLAGS = (
    "--layers 8 --d-model 512 --heads 8 --d-ff 1408 --seq-len 512 --global-batch 16 "
    "--sequence-parallel --dtype bfloat16"
)
SIZES = {"tp": 2, "pp": 2, "dp": 2}
KINDS = {
    "autocast": "--set autocast=true",
    "bfloat16": "",
    "bfloat16, float32 residual": "--set residual_dtype=float32",
}
RUNS = ("--zero 0 --recompute none", "--zero 0 --recompute full", "--zero 1 --recompute full")
HEAD = (
    "run", "precision", "weights", "gradients", "masters and moments", "activations and gathered weights",
    "messages", "sent over tp", "sent over dp",
)  # fmt: skip


def row(run: str, kind: str) -> str:
    """Count the bytes of rank 0 of a run, by kind."""
    found = dry_run(build, [*FLAGS.split(), *run.split(), *KINDS[kind].split()], **SIZES)
    counts = {axis: sum(c.bytes for (on, _), c in found.ledger.counts.items() if on == axis) for axis in ("tp", "dp")}
    messages = found.ledger.counts["pp", "send"].bytes
    cells = (found.parameters, found.gradients, found.optimizer, found.peak, messages, *counts.values())
    return f"| `{run}` | {kind} | " + " | ".join(f"{cell:,}" for cell in cells) + " |"


def table() -> str:
    """Markdown."""
    lines = ["| " + " | ".join(HEAD) + " |", "| " + " | ".join(["---"] * len(HEAD)) + " |"]
    return "\n".join([*lines, *(row(run, kind) for run in RUNS for kind in KINDS)])


def main() -> None:
    """Replace the table of a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, required=True)
    page = parser.parse_args().write
    page.write_text(re.sub(r"\| run \|.*?\n\n", lambda _: table() + "\n\n", page.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
