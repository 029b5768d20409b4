"""Train kinds of models on the same seeds, and keep and draw what came of them: the loop of the comparisons."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Runs = dict[str, list[dict]]


def compare(
    argv: Sequence[str] | None,
    kinds: Mapping[str, list[str]],
    train: Callable[[list[str], int, int, int], dict],
    draw: Callable[[Runs, Path], None],
    *,
    prog: str,
    about: str | None,
    steps: int,
    evaluations: int,
    out: str,
) -> Runs:
    """Run the command of a comparison. After each seed, the numbers and the plot of all seeds so far are written.

    Args:
        argv: the arguments; None takes those of the process.
        kinds: flags of each kind of model, by name.
        train: `train(flags, seed, steps, every)` trains one model.
        draw: plots the runs into a file.
        prog, about: name and description of the command.
        steps, evaluations, out: defaults of its flags.

    Returns:
        By kind, what `train` returned for each seed.
    """
    parser = argparse.ArgumentParser(prog=prog, description=about)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--evaluations", type=int, default=evaluations, help="along a run")
    parser.add_argument("--out", default=out, help="the plot; its numbers lie beside it as .json")
    args = parser.parse_args(argv)
    every, plot = max(args.steps // args.evaluations, 1), Path(args.out)
    runs: Runs = {name: [] for name in kinds}
    for seed in range(args.seeds):
        for name, flags in kinds.items():
            runs[name].append(train(flags, seed, args.steps, every))
        plot.with_suffix(".json").write_text(json.dumps(runs) + "\n")
        draw(runs, plot)
    return runs
