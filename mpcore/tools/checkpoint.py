"""The command `mpcore checkpoint inspect|verify|diff PATH...`."""

from __future__ import annotations

import sys

from mpcore.checkpoint.report import describe, diff, verify
from mpcore.tools.command_line import Parser, reports_errors


@reports_errors("mpcore checkpoint")
def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status. 0: done, undamaged, or equal. 1: damaged or different. 2: there is no checkpoint, or its
        manifest can't be read.
    """
    parser = Parser(
        prog="mpcore checkpoint",
        description="Look into checkpoints.",
        examples=[
            "mpcore checkpoint inspect runs/gpt/checkpoints/step-00000120",
            "mpcore checkpoint diff runs/a/checkpoints/step-00000120 runs/b/checkpoints/step-00000120",
        ],
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in {"inspect": "print what is inside", "verify": "read and check every byte"}.items():
        one = commands.add_parser(name, help=text)
        one.add_argument("path", nargs="+")
        if name == "inspect":
            one.add_argument("--all", action="store_true", help="list each tensor of the optimizer too")
    two = commands.add_parser("diff", help="compare two bit for bit, whatever layouts wrote them")
    two.add_argument(
        "--rtol", type=float, default=0.0, help="ignore differences up to this share of a tensor's largest value"
    )
    two.add_argument("a")
    two.add_argument("b")
    args = parser.parse_args(argv)
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
