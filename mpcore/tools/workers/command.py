"""`mpcore replay-workers`: train a run of workers again in one process, or draw its journal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from mpcore.mesh import build_mesh
from mpcore.tools import parsers
from mpcore.tools.command_line import reports_errors
from mpcore.tools.draw import matplotlib_part
from mpcore.tools.simulation.ranks import simulate
from mpcore.tools.simulation.replay import saved_arguments
from mpcore.tools.simulation.turns import RankError
from mpcore.tools.workers.elastic import replay_runs
from mpcore.tools.workers.journal import Replayed, read_lines
from mpcore.tools.workers.outer import ENDED, STOPPED, Line, Outer
from mpcore.training.run import Run

EVERY = 5.0
"""Seconds between two lines of progress."""
COLOURS = {"train": "#4477aa", "wait": "#ddaa33", "lost": "#ee6677", "stop": "#cccccc"}
MEANINGS = {"train": "trains", "wait": "waits", "lost": "steps of a worker that left, trained again by others",
            "stop": "stopped"}  # fmt: skip

OF_WORKERS = ("listen", "join", "wait", "token", "staleness", "dynamic_steps", "worker_timeout", "replicas",
              "update_dtype", "overlap_exchange", "local_steps", "outer_lr", "outer_momentum")  # fmt: skip
"""Settings of a run that a replay takes from the journal."""


class Span(NamedTuple):
    """What a worker did, from `start` to `end` in seconds since the run began: a kind of `MEANINGS`."""

    worker: int
    kind: str
    start: float
    end: float


def spans(lines: Sequence[Line]) -> tuple[list[Span], list[float], dict[int, float]]:
    """Return what each worker did, when the anchor moved, and when workers left."""
    zero, found, moved, left = lines[0]["at"], list[Span](), list[float](), dict[int, float]()
    since, last = dict[int, tuple[str, float]](), dict[int, int]()

    def turn(worker: int, kind: str, at: float) -> None:
        before, start = since.get(worker, (kind, at))
        if at > start:
            found.append(Span(worker, before, start, at))
        since[worker] = kind, max(at, start)

    for line in lines:
        at = line["at"] - zero
        if line["op"] in ("join", "lease"):
            turn(line["worker"], "wait" if line["op"] == "join" else "train", at)
            last[line["worker"]] = line.get("phase", 0)
        for entry in line.get("updates", ()):
            turn(entry["worker"], "wait", entry["handed"] - zero - entry.get("waited", 0.0))
            if last[entry["worker"]] > entry["phase"]:  # it trains its next phase while the update travels
                turn(entry["worker"], "train", entry["handed"] - zero)
            moved += [at] if entry["applied"] and at not in moved else []
        if line["op"] == "leave":
            kind, start = since.pop(line["worker"], ("wait", at))
            found.append(Span(line["worker"], "lost" if kind == "train" else kind, start, at))
            left[line["worker"]] = at
            if line["why"] in (ENDED, STOPPED):
                found.append(Span(line["worker"], "stop", at, lines[-1]["at"] - zero))
    return found, moved, left


def draw(lines: Sequence[Line], path: Path) -> None:
    """Draw a journal: a row for each worker, a line for each outer step.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    found, moved, left = spans(lines)
    patches, figures = matplotlib_part("patches"), matplotlib_part("figure")
    workers = max((span.worker for span in found), default=0) + 1
    figure = figures.Figure(figsize=(10, 1.6 + 0.4 * workers), layout="constrained")
    axes = figure.add_subplot()
    for at in moved:
        axes.axvline(at, color="#cccccc", linewidth=0.6, zorder=0)
    for span in found:
        axes.barh(span.worker, span.end - span.start, 0.8, span.start, color=COLOURS[span.kind])
    axes.plot([*left.values()], [*left], "k|", markersize=14)
    axes.set_yticks(range(workers), [f"worker {worker}" for worker in range(workers)])
    axes.invert_yaxis()
    axes.set_xlabel("seconds; grey: the anchor moves; black: the worker leaves")
    handles = [patches.Patch(color=COLOURS[kind], label=text) for kind, text in MEANINGS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)


def replay_program(run: Path, program: str) -> Replayed:
    """Replay a run of a training program on the layout of the worker whose folder it is.

    Args:
        run: the folder.
        program: a module with `parse(flags)`, `mesh_arguments(args)` and `Trainer(args, mesh)`.

    Raises:
        ValueError: if the folder has no config.json or no journal.
    """
    module = import_module(program)
    args, usual = saved_arguments(module, run), vars(module.parse([]))
    vars(args).update({name: usual[name] for name in OF_WORKERS if name in usual})
    args.resume = "none" if args.resume == "auto" else args.resume  # else all workers began with this checkpoint
    args.dp = args.dp or 1
    arguments = module.mesh_arguments(args)
    entries = [entry for line in read_lines(run) for entry in line.get("updates", ())]
    steps = sum(last - first for first, last in (entry["steps"] for entry in entries))

    def play() -> Replayed:
        mesh, trainers = build_mesh(**arguments), dict[int, object]()
        done, told = 0, time.monotonic()

        def make() -> Run:
            trainer = module.Trainer(args, mesh)
            trainers[id(trainer.run)] = trainer
            return trainer.run

        def step(one: Run) -> None:
            nonlocal done, told
            trainers[id(one)].step()  # type: ignore[attr-defined]
            done += 1
            if mesh.world.rank == 0 and time.monotonic() > told + EVERY:
                told = time.monotonic()
                print(f"replayed {done} of {steps} steps", file=sys.stderr, flush=True)

        return replay_runs(run, make, step)

    ranks = math.prod(arguments[axis] or 1 for axis in ("tp", "cp", "pp", "dp"))
    return simulate(play, ranks=ranks)[0]


def why(outer: Outer) -> str:
    """Return why a journal ends before the last step, as far as it says."""
    if not outer.members:  # the last worker that leaves is the leader, which writes this
        return "all workers had left the run, so no folder has more"
    here = ", ".join(map(str, sorted(outer.members)))
    return f"in the run then: {here} (if a worker went on, its folder has more; if all stopped or died, none has)"


@reports_errors("mpcore replay-workers", RankError, ImportError)
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status. 0: the same bits, or the picture is drawn. 1: some bits differ. 2: it can't be replayed.
    """
    args = parsers.replay_workers().parse_args(argv)
    if args.picture:
        draw(read_lines(args.run), args.picture)
        print(f"wrote {args.picture}")
        return 0
    found = replay_program(args.run, args.program)
    outer = found.outer
    total = f"{found.updates} updates in {outer.version} outer steps, to step {outer.done} of {outer.until}"
    if not outer.ended:
        print(f"{args.run} ends with outer step {outer.version}, at step {outer.done} of {outer.until}: {why(outer)}")
    if found.differing:
        print(f"{total}: {len(found.differing)} hashes differ, the first of {found.differing[0]}")
        print(f"workers of another layout than {args.run} round otherwise: compare their values with replay_runs")
        return 1
    print(f"{total}: the same bits")
    return 0
