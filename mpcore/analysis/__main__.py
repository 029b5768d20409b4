"""`python -m mpcore.analysis {memory,ledger,plan} ...`: one command line for the three."""

from __future__ import annotations

import sys

from mpcore.analysis import counts, memory
from mpcore.analysis.dry_run import dry_run, parse, sizes_of
from mpcore.analysis.plan import main as plan
from mpcore.command_line import find_object

COMMANDS = ("memory", "ledger", "plan")


def main(argv: list[str] | None = None) -> None:
    """Run the command that the first argument names."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name not in COMMANDS:
        sys.exit(f"usage: python -m mpcore.analysis {{{','.join(COMMANDS)}}} ...")
    if name == "plan":
        return plan(rest)
    args = parse(f"mpcore {name}", memory.__doc__ if name == "memory" else counts.__doc__, rest)
    try:
        found = dry_run(find_object(args.target), args.arguments, args.rank, **sizes_of(args))
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(memory.table(found) if name == "memory" else found.ledger.table(found.theory))


if __name__ == "__main__":
    main()
