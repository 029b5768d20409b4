"""`python -m mpcore.analysis {memory,ledger,plan,calibrate} ...`: one command line for the four."""

from __future__ import annotations

import sys

from mpcore.analysis import command, counts, memory
from mpcore.analysis.fit_command import main as calibrate
from mpcore.analysis.layout import Counter
from mpcore.analysis.plan import main as plan
from mpcore.command_line import find_object

COMMANDS = ("memory", "ledger", "plan", "calibrate")


def main(argv: list[str] | None = None) -> None:
    """Run the command that the first argument names."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name not in COMMANDS:
        sys.exit(f"usage: python -m mpcore.analysis {{{','.join(COMMANDS)}}} ...")
    if name in ("plan", "calibrate"):
        return plan(rest) if name == "plan" else calibrate(rest)
    args = command.parse(f"mpcore {name}", memory.__doc__ if name == "memory" else counts.__doc__, rest)
    try:
        counter = Counter(find_object(args.target), not args.cpu)
        found = counter.rank(args.arguments, args.rank, **command.sizes_of(args))
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(memory.table(found) if name == "memory" else found.ledger.table(found.theory))


if __name__ == "__main__":
    main()
