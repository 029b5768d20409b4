"""Run `mpcore memory`, `mpcore ledger` and `mpcore plan`."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from functools import partial

from mpcore.tools import parsers
from mpcore.tools.analysis import memory
from mpcore.tools.analysis.layout import Counter
from mpcore.tools.analysis.machine import load_machine
from mpcore.tools.analysis.plan import main as plan
from mpcore.tools.analysis.report import draw_memory
from mpcore.tools.command_line import find_object, reports_errors


def main(argv: list[str] | None = None) -> int:
    """Run the command that the first argument names, and return its exit status."""
    name, *rest = sys.argv[1:] if argv is None else argv
    run: Callable[[list[str]], None] = plan if name == "plan" else partial(_count, name)
    return reports_errors(f"mpcore {name}", ImportError)(run)(rest)


def _count(name: str, argv: list[str]) -> None:
    args = parsers.parse_target(getattr(parsers, name), argv)
    sizes = {axis: getattr(args, axis) for axis in parsers.AXES}
    counter = Counter(find_object(args.target), not args.cpu)
    found = counter.rank(args.arguments, args.rank, **sizes)
    stage = args.tp * args.cp * args.dp  # ranks per pipeline rank
    machine = load_machine(args.machine) if name == "memory" and args.machine else None
    print(memory.table(found, args.rank // stage) if name == "memory" else found.ledger)
    if machine is not None:
        print(memory.fit(found, machine))
    if name == "memory" and args.plot:
        column = range(args.rank % stage, stage * args.pp, stage)
        ranks = [counter.rank(args.arguments, rank, **sizes) for rank in column]
        above = [f"{axis} {size}" for axis, size in sizes.items() if (size or 1) > 1]
        title = f"{', '.join(above) or 'one rank'}: {' '.join(args.arguments)}"
        draw_memory(ranks, args.plot, machine, textwrap.fill(textwrap.shorten(title, 165, placeholder=" .."), 56))
        print(f"wrote {args.plot}")


if __name__ == "__main__":
    sys.exit(main())
