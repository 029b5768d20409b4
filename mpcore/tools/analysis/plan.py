"""Find the layouts of a model that fit a machine, and estimate how long a step of each takes there.

`mpcore plan examples.gpt.plan:build --world 1024 --machine h100 --preset llama3-70b --dtype bfloat16
--global-batch 1024 --wide` tries every mesh of 1,024 ranks with every choice of the usual flags.

`layout` counts memory, operators and messages on fake tensors. `seconds` computes times from these counts and the rates
of a profile. docs/planner.md shows the error of the estimates.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from torch import nn

from mpcore.tools import parsers
from mpcore.tools.analysis.dry_run import call_build, on_mesh
from mpcore.tools.analysis.layout import Counter
from mpcore.tools.analysis.machine import Machine, load_machine
from mpcore.tools.analysis.report import draw, explain, table
from mpcore.tools.analysis.search import Choice, Estimate, choices, frontier, meshes, ranked, search, useful
from mpcore.tools.analysis.work import Build, Model
from mpcore.tools.command_line import find_object
from mpcore.tools.parsers import AXES, OVERLAP, PICTURES, WIDE

ROOM = 0.05
"""The part of the memory to leave free: twice the largest measured error of a planned peak (docs/memory.md)."""
CLOSE = 0.2
"""How much slower than the fastest row one may be that is 'perhaps as fast', however little is known about it."""
EVERY = 10.0
"""Seconds between lines of progress where there is no terminal."""


def _size_of_model(build: Build, arguments: Sequence[str], layouts: Sequence[Choice]) -> str:
    """Return the number of parameters as text for the head of the table, or "".

    It is that of the first layout that isn't refused. A `Work` is made on one rank, which then holds the unsharded
    model.
    """
    for sizes, option in layouts:
        with suppress(ValueError), on_mesh(0, **(sizes if isinstance(build, Model) else {})) as mesh:
            if isinstance(build, Model):
                count = build.outline(mesh, [*arguments, *option]).parameters
            else:
                stages = nn.ModuleList(call_build(build, mesh, [*arguments, *option]).stages)
                count = sum(p.numel() for p in stages.parameters())
            return f"; a model of {count:,} parameters" if count else ""
    return ""


class Progress:
    """Report progress on stderr: a bar on a terminal, otherwise a line every `EVERY` seconds."""

    def __init__(self, of: int) -> None:
        self.of = of
        self.done: int = 0
        self.began: float = time.monotonic()
        self.told: float = self.began

    def __call__(self, done: int, found: Sequence[Estimate]) -> None:
        """Report how many layouts are done."""
        self.done = done
        left = (time.monotonic() - self.began) / done * (self.of - done)
        progress = f"{done} of {self.of} layouts, about {left:.0f} s left; Ctrl-C prints the table of those done"
        if not sys.stderr.isatty():
            if time.monotonic() - self.told > EVERY:
                self.told = time.monotonic()
                print(progress, file=sys.stderr, flush=True)
        else:
            bar = "#" * (30 * done // self.of)
            print(f"\r[{bar:<30}] {progress}", end="\n" if done == self.of else "", file=sys.stderr, flush=True)


def _rows_to_choose(fits: Sequence[Estimate], machine: Machine, top: int) -> tuple[int, list[str]]:
    """Return the row to choose, and lines for below the table. `fits` are the layouts that fit, the fastest first."""

    def named(rows: Sequence[int]) -> str:
        below = f", and {sum(row > top for row in rows)} more (--top {rows[-1]} prints them)" if rows[-1] > top else ""
        return f"row{'s' * (len(rows) > 1)} {', '.join(str(row) for row in rows if row <= top)}{below}"

    def free(row: int) -> float:
        return 1 - (fits[row - 1].memory + machine.reserve) / machine.memory

    differences = [e.slower(fits[0]) for e in fits]
    close = [row for row, (later, error) in enumerate(differences, start=1) if later <= min(2 * error, CLOSE)]
    best = [fits.index(e) + 1 for e in frontier(fits, machine)]
    roomy = [row for row in close if free(row) >= ROOM]
    row = min(roomy or close, key=lambda row: (sum(size > 1 for size in fits[row - 1].sizes.values()), row))
    why = f"of those that leave {ROOM:.0%} of the memory free, it has the fewest axes above 1"
    if not roomy:
        why = f"it has the fewest axes above 1, but leaves {free(row):.0%} free; planned peaks were up to 2.44% off"
    return row, [
        f"no other layout is both faster and smaller than these: {named(best)}",
        f"perhaps as fast as row 1, by two standard errors and at most {CLOSE:.0%}: {named(close)}",
        f"choose row {row}: {why}",
    ]


def _commands(args: argparse.Namespace, build: Build, row: int, e: Estimate, node: int) -> list[str]:
    """Return a command that explains this layout, and one that trains it if the target has a trainer."""
    target = [args.target] if args.hf is None else []  # the flag --hf takes its place
    words = ["mpcore", "plan", *target, "--world", str(args.world), "--machine", args.machine]
    for name in ("memory", "node"):
        words += [] if getattr(args, name) is None else [f"--{name}", f"{getattr(args, name):g}"]
    words += [f"--{name}" for name in ("unfused", "cpu") if getattr(args, name)]
    for axis, size in e.sizes.items():
        is_default = axis == "dp" or (axis in ("cp", "ep") and size == 1)
        words += [] if is_default else [f"--{axis.replace('_', '-')}", str(size)]
    lines = [f"explain row {row}: {shlex.join([*words, *e.arguments, *args.arguments])} --explain 1"]
    flags = [*e.flags.split(), *args.arguments]
    try:
        program = build.trainer(flags) if isinstance(build, Model) else ""
    except ValueError as error:
        return [*lines, f"no command trains row {row}: {error}"][args.explain is not None :]
    if program:
        slurm = f"srun -n {args.world} --ntasks-per-node {node} --gpus-per-node {node} python"
        launch = f"torchrun --nproc-per-node {args.world}" if args.world <= node else slurm
        lines.append(f"train as row {row}: {launch} {program}")
    return lines if args.explain is None else lines[1:]


def main(argv: list[str] | None = None) -> None:
    args = parsers.parse_target(parsers.plan, argv)
    if args.target is None or args.world is None:
        parsers.plan().error("a target and --world are needed, or --hf FOLDER and --world")
    changes = {} if args.memory is None else {"memory": args.memory * 2**30}
    machine = load_machine(args.machine, **changes, **({} if args.node is None else {"node": args.node}))
    if args.out and (args.out.suffix not in PICTURES or not args.out.parent.is_dir()):
        raise ValueError(f"--out {args.out} is no {' or '.join(PICTURES)} in a folder that is there")
    build = find_object(args.target)
    cuts = list(meshes(args.world, machine.node, **{name: getattr(args, name) for name in AXES}))
    if not cuts:
        raise ValueError(f"no mesh of these sizes has {args.world} ranks, with tp up to {machine.node}")
    options = list(choices([*args.vary, *(WIDE if args.wide else ())]))
    layouts = useful((cut, option) for option in options for cut in cuts)  # layouts with the same flags share counts
    counter = Counter(build, not args.cpu, share=True)
    size = _size_of_model(build, args.arguments, layouts)
    print(f"{args.world} ranks of {machine.name}, {machine.node} per node: {machine.memory / 2**30:.1f} GiB each, "
          f"of which {machine.reserve / 2**30:.1f} are a reserve{size}")  # fmt: skip
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit ends the search as Ctrl-C does
    try:
        progress = Progress(len(layouts))
        found = search(counter, machine, args.arguments, layouts, args.unfused, progress)
        if args.wide:  # of the best alone: it changes the counts of every layout
            best = [e for e in found[: args.top] if e.fits(machine) and e.sizes["tp"] > 1]
            more = [(e.sizes, (*e.arguments, *OVERLAP)) for e in best]
            found = ranked([*found, *search(counter, machine, args.arguments, more, args.unfused)], machine)
    finally:
        signal.signal(signal.SIGTERM, before)
    fits = [e for e in found if e.fits(machine)]
    row = 1 if args.explain is None else args.explain
    if fits and not 1 <= row <= len(fits):
        raise ValueError(f"--explain {row} is no row from 1 to {len(fits)}")
    if fits and args.explain is not None:
        lines = [f"row {row} of {len(fits)}:", explain(fits[row - 1], machine, args.arguments)]
    else:
        lines = [table(found, machine, args.top)]
        if fits:
            row, chosen = _rows_to_choose(fits, machine, args.top)
            lines += chosen
    lines += _commands(args, build, row, fits[row - 1], machine.node) if fits else []
    print("\n".join(lines))
    if args.out and fits:
        head = f"{args.world} ranks of {machine.name}{size}: {' '.join(args.arguments)}"
        draw(found, machine, args.out, row, head)
        print(f"wrote {args.out}")
    if found and all(e.refused for e in found):
        raise ValueError(f"no layout could be counted: {found[0].refused}")
    if not fits and progress.done < len(layouts):
        raise ValueError(
            f"the search was stopped: of {len(layouts)} layouts, {progress.done} were counted, and none of these fits. "
            f"Let it finish, or count fewer"
        )
    if not fits:
        raise ValueError(
            "no layout fits: try --vary recompute=selective,full, --vary zero=3, more ranks or smaller micro-batches"
        )
