"""The command `mpcore checkpoint inspect|verify|diff PATH...`."""

from __future__ import annotations

import sys

from mpcore.checkpoint.report import describe, diff, verify
from mpcore.tools import parsers
from mpcore.tools.command_line import reports_errors


@reports_errors("mpcore checkpoint")
def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status. 0: done, undamaged, or equal. 1: damaged or different. 2: there is no checkpoint, or its
        manifest can't be read.
    """
    args = parsers.checkpoint().parse_args(argv)
    if args.command == "diff":
        lines = diff(args.a, args.b, rtol=args.rtol)
        print("\n".join(lines) or "no difference")
        return 1 if lines else 0
    bad = 0
    for path in args.path:
        if args.command == "inspect":
            print(describe(path, all_tensors=args.all))
        else:
            problems = verify(path)
            print("\n".join(problems) or f"{path}: every byte is as written")
            bad |= bool(problems)
    return bad


if __name__ == "__main__":
    sys.exit(main())
