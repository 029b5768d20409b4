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

from mpcore.checkpoint import checkpoints, inspect
from mpcore.checkpoint.format import read_manifest
from mpcore.mesh import build_mesh
from mpcore.tools import parsers
from mpcore.tools.command_line import reports_errors
from mpcore.tools.fault_tolerance.metrics import read_records
from mpcore.tools.invariant import invariant_mesh
from mpcore.tools.simulation.nonfinite import FiniteCheck, NonFiniteError
from mpcore.tools.simulation.ranks import simulate
from mpcore.tools.simulation.turns import RankError


def replay(run: Path, step: int, program: str) -> tuple[int, str | None]:
    """Replay the steps of a run up to `step`.

    It begins at the newest checkpoint with at most `step` steps done; without one, where the run began.

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
    settings = vars(args)
    if merges := [name for name in ("workers", "listen", "join") if settings.get(name, 1) not in (1, None)]:
        told = f"{merges[0]} {settings[merges[0]]}"
        raise ValueError(f"{told}: workers merge, and this replays one; mpcore replay-workers replays jobs that merge")
    if not 0 <= step < args.steps:
        raise ValueError(f"--step {step} lies outside the run's steps 0 to {args.steps - 1}")
    found = {path: read_manifest(path) for path in checkpoints(run / "checkpoints")}
    args.dp = next((manifest.mesh["dp"] for manifest in found.values()), None) if args.dp is None else args.dp
    if args.dp is None:
        raise ValueError(f"{run} has no checkpoint, and config.json doesn't tell dp: set run.dp there")
    before = [path for path, manifest in found.items() if manifest.step <= step]
    args.resume = str(before[0]) if before else "none" if args.resume == "auto" else args.resume
    begins = 0 if args.resume == "none" else inspect(args.resume).step
    first = begins if before else next((r["step"] for r in read_records(run / "metrics.jsonl", args.steps)), begins)
    if begins > step or begins != first:
        raise ValueError(
            f"step {step} can't be replayed from {args.resume}, which is step {begins}: the run began with step "
            f"{first}. Name a later step, or as run.resume in config.json the checkpoint that it began with"
        )
    args.compile = None
    arguments = module.mesh_arguments(args)

    def play() -> None:
        mesh = build_mesh(**arguments)
        trainer = module.Trainer(args, invariant_mesh(mesh, settings["bitwise"]) if settings.get("bitwise") else mesh)
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
        ValueError: if the folder has no config.json of a run.
    """
    path = run / "config.json"
    content = json.loads(path.read_text()) if path.is_file() else None
    found = content.get("run") if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise ValueError(f"{path} isn't there or has no 'run': name the --out folder of a run of {module.__name__}")
    args = argparse.Namespace(**{**vars(module.parse([])), **found})
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
