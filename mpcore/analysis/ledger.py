"""Print what a step would send, with theory beside it: `python -m mpcore.analysis ledger module:build --tp 8 ...`."""

from __future__ import annotations

import sys

from mpcore.analysis.dry_run import dry_run, parse, sizes_of, target


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = parse("python -m mpcore.analysis ledger", __doc__, argv)
    try:
        found = dry_run(target(args.target), args.arguments, args.rank, **sizes_of(args))
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(found.ledger.table(found.theory))
