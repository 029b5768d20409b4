"""Play a run of the example again, for `mpcore replay RUN --step N`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import nn

from examples.gpt.arguments import parse
from examples.gpt.checks import inner_size
from examples.gpt.train import Trainer
from mpcore import build_mesh
from mpcore.checkpoint import checkpoints
from mpcore.checkpoint.format import read_manifest

AXES = ("tp", "cp", "pp", "dp")


def replay(run: Path, step: int) -> tuple[int, Callable[[Any], None]]:
    """Return the number of ranks of a run, and what each of them does to play it up to a step.

    It begins at the newest checkpoint with at most `step` steps done; without one, at the first step.

    Raises:
        ValueError: if the folder has no config.json, no checkpoint tells its mesh, or the step is not of this run.
    """
    path = run / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} isn't there: name the --out folder of a run of examples.gpt.pretrain")
    args = argparse.Namespace(**{**vars(parse([])), **json.loads(path.read_text())["run"]})
    if args.workers > 1:
        raise ValueError(f"the run has {args.workers} workers, which merge: only runs of one worker can be replayed")
    if not 0 <= step < args.steps:
        raise ValueError(f"--step {step} lies outside the run's steps 0 to {args.steps - 1}")
    found = [(path, read_manifest(path)) for path in checkpoints(run / "checkpoints")]
    if args.dp is None:
        if not found:
            raise ValueError(f"{run} has no checkpoint, and config.json doesn't tell dp: set run.dp there")
        args.dp = found[0][1].mesh["dp"]
    before = [path for path, manifest in found if manifest.step <= step]
    args.out = str(run / "replay")  # nothing is written: `train` would do so
    args.resume = str(before[0]) if before else "none"
    args.compile, args.trace, args.log_to, args.profile, args.config = None, False, [], None, None
    sizes = {axis: getattr(args, axis) for axis in (*AXES, "ep", "etp")}

    def play(watch: Callable[[Sequence[nn.Module], str], AbstractContextManager]) -> None:
        mesh = build_mesh(**sizes, device_type=args.device or "cpu", cp_inner=inner_size(args))
        trainer = Trainer(args, mesh)
        while trainer.run.step <= step:
            with watch(trainer.run.stages, f"step {trainer.run.step}"):
                trainer.step()

    return math.prod(getattr(args, axis) for axis in AXES), play
