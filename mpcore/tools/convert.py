"""The command `mpcore convert`: convert between Hugging Face folders and checkpoints of mpcore."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch

from mpcore.checkpoint.folders import resolve
from mpcore.interop.hugging_face.config import ModelSpec
from mpcore.interop.hugging_face.convert import export_hf, import_hf
from mpcore.tools import parsers
from mpcore.tools.command_line import Parser, find_object, reports_errors


def main(argv: Sequence[str] | None = None, *, spec: ModelSpec | None = None, prog: str = "mpcore convert") -> int:
    """Run the command.

    Args:
        argv: the command's arguments. None: those of the process.
        spec: the model's ModelSpec. None: the first argument names it, as `package.module:SPEC`.
        prog: the name of the command in messages.

    Returns:
        The exit status. 0: done. 2: an error, which was printed.
    """
    parser = parsers.convert(prog, with_spec=spec is None)
    args = parser.parse_args(argv)
    return reports_errors(prog)(_convert)(parser, args, spec)


def _convert(parser: Parser, args: Namespace, spec: ModelSpec | None) -> None:
    dtype = getattr(torch, args.dtype) if args.dtype else None
    model: ModelSpec = spec or find_object(args.spec)
    if args.from_hf and args.to and not (args.source or args.to_hf):
        if resolve(args.to).exists() and not args.force:
            raise ValueError(f"{args.to} exists: --force replaces it")
        print(f"wrote {import_hf(args.from_hf, args.to, spec=model, dtype=dtype)}")
    elif args.source and args.to_hf and not (args.from_hf or args.to):
        print(f"wrote {export_hf(args.source, args.to_hf, spec=model, dtype=dtype, tokenizer=args.tokenizer)}")
    else:
        parser.error("give --from-hf and --to, or --from and --to-hf")
