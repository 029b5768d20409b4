"""What a step would send: `python -m mpcore.ledger module:build --tp 8 --pp 4 --dp 32 ...`, with theory beside it."""

from __future__ import annotations

import sys

from mpcore.dry_run import dry_run, parse, sizes_of, target


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = parse("python -m mpcore.ledger", __doc__, argv)
    try:
        found = dry_run(target(args.target), args.arguments, args.rank, **sizes_of(args))
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(found.ledger.table(found.theory))


if __name__ == "__main__":
    main()
