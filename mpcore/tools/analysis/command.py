"""Parse the command lines of `mpcore memory` and `mpcore ledger`: a target, the mesh and the rank."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from mpcore.tools.command_line import Parser


def sizes_of(args: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(args, name) for name in ("tp", "cp", "pp", "ep", "dp", "etp", "cp_inner")}


def parse(parser: Callable[[Sequence[str]], Parser], argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line. All flags that the parser doesn't know are for the target, and returned as `arguments`."""
    argv = sys.argv[1:] if argv is None else argv
    args, args.arguments = parser(argv).parse_known_args(argv)
    args.arguments += [] if args.hf is None else ["--hf", args.hf]
    return args
