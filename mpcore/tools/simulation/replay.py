"""Replay steps of a run as all of its ranks in this process, and name the first operator whose output isn't finite.

Use it after a run diverged or met NaN, to find the rank, layer and micro-batch.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from mpcore.checkpoint import checkpoints
from mpcore.checkpoint.format import read_manifest
from mpcore.mesh import build_mesh
from mpcore.tools import parsers
from mpcore.tools.command_line import reports_errors
from mpcore.tools.simulation.nonfinite import FiniteCheck, NonFiniteError
from mpcore.tools.simulation.ranks import simulate
from mpcore.tools.simulation.turns import RankError


def replay(run: Path, step: int, program: str) -> tuple[int, str | None]:
    """Replay the steps of a run up to `step`.

    It begins at the newest checkpoint with at most `step` steps done; without one, at the first step.

    Args:
        run: the run's folder.
        step: the last step to replay, as in metrics.jsonl.
        program: a module with `parse(flags)`, `mesh_arguments(args)` and `Trainer(args, mesh)`.

    Returns:
        The number of ranks, and a description of the first non-finite output, or None if all outputs are finite.

    Raises:
        ValueError: if the run can't be replayed.
    """
    module = import_module(program)
    args = saved_arguments(module, run)
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
    args.resume = str(before[0]) if before else "none"
    args.compile = None
    arguments = module.mesh_arguments(args)

    def play() -> None:
        trainer = module.Trainer(args, build_mesh(**arguments))
        while trainer.run.step <= step:
            with FiniteCheck(trainer.run.stages, f"step {trainer.run.step}"):
                trainer.step()

    ranks = math.prod(arguments[axis] for axis in ("tp", "cp", "pp", "dp"))
    try:
        simulate(play, ranks=ranks)
    except RankError as error:
        if not isinstance(error.__cause__, NonFiniteError):
            raise
        return ranks, str(error).replace(f"{NonFiniteError.__module__}.{NonFiniteError.__name__}: ", "")
    return ranks, None


def saved_arguments(module: ModuleType, run: Path) -> argparse.Namespace:
    """Return the arguments in the config.json of a run, for a trainer that only repeats its steps.

    Raises:
        ValueError: if the folder has no config.json.
    """
    path = run / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} isn't there: name the --out folder of a run of {module.__name__}")
    args = argparse.Namespace(**{**vars(module.parse([])), **json.loads(path.read_text())["run"]})
    args.out = str(run / "replay")  # nothing is written: `train` would do so
    args.device = args.device or "cpu"
    args.trace, args.log_to, args.profile, args.config = False, [], None, None
    return args


@reports_errors("mpcore replay", RankError)
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if all outputs are finite, 1 if one is not, 2 if the run can't be replayed."""
    args = parsers.replay().parse_args(argv)
    ranks, found = replay(Path(args.run), args.step, args.program)
    print(found or f"step {args.step} and those before it, from the checkpoint on: finite on all {ranks} ranks")
    return 0 if found is None else 1
