"""`python -m mpcore.tools.analysis {memory,ledger,plan} ...`: one command line for the three commands."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from functools import partial

from mpcore.tools import parsers
from mpcore.tools.analysis import command, memory
from mpcore.tools.analysis.layout import Counter
from mpcore.tools.analysis.machine import load_machine
from mpcore.tools.analysis.pictures import draw_memory
from mpcore.tools.analysis.plan import main as plan
from mpcore.tools.command_line import find_object, reports_errors

COMMANDS = ("memory", "ledger", "plan")


def main(argv: list[str] | None = None) -> int:
    """Run the command that the first argument names, and return its exit status."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name not in COMMANDS:
        sys.exit(f"usage: python -m mpcore.tools.analysis {{{','.join(COMMANDS)}}} ...")
    run: Callable[[list[str]], None] = plan if name == "plan" else partial(_count, name)
    return reports_errors(f"mpcore {name}", ImportError)(run)(rest)


def _count(name: str, argv: list[str]) -> None:
    args = command.parse(getattr(parsers, name), argv)
    counter = Counter(find_object(args.target), not args.cpu)
    found = counter.rank(args.arguments, args.rank, **command.sizes_of(args))
    stage = args.tp * args.cp * args.dp  # ranks per pipeline rank
    machine = load_machine(args.machine) if name == "memory" and args.machine else None
    print(memory.table(found, args.rank // stage) if name == "memory" else found.ledger.table(found.theory))
    if machine is not None:
        print(memory.fit(found, machine))
    if name == "memory" and args.plot:
        column = range(args.rank % stage, stage * args.pp, stage)
        ranks = [counter.rank(args.arguments, rank, **command.sizes_of(args)) for rank in column]
        sizes = [f"{axis} {size}" for axis, size in command.sizes_of(args).items() if (size or 1) > 1]
        title = f"{', '.join(sizes) or 'one rank'}: {' '.join(args.arguments)}"
        draw_memory(ranks, args.plot, machine, textwrap.fill(textwrap.shorten(title, 165, placeholder=" .."), 56))
        print(f"wrote {args.plot}")


if __name__ == "__main__":
    sys.exit(main())
