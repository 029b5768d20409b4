"""The command `mpcore convert`: convert between Hugging Face folders and checkpoints of mpcore."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpcore.checkpoint.folders import resolve
from mpcore.interop.hugging_face.config import ModelSpec
from mpcore.interop.hugging_face.convert import export_hf, import_hf
from mpcore.tools import parsers
from mpcore.tools.command_line import find_object, reports_errors


@reports_errors("mpcore convert")
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Its exit status is 0, or 2 for an error, which was printed."""
    parser = parsers.convert()
    args = parser.parse_args(argv)
    dtype = getattr(torch, args.dtype) if args.dtype else None
    spec: ModelSpec = find_object(args.spec)
    if args.from_hf and args.to and not (args.source or args.to_hf or args.tokenizer):
        if resolve(args.to).exists() and not args.force:
            raise ValueError(f"{args.to} exists: --force replaces it")
        print(f"wrote {import_hf(args.from_hf, args.to, spec=spec, dtype=dtype)}")
    elif args.source and args.to_hf and not (args.from_hf or args.to or args.force):
        print(f"wrote {export_hf(args.source, args.to_hf, spec=spec, dtype=dtype, tokenizer=args.tokenizer)}")
    else:
        parser.error("give --from-hf and --to, with or without --force, or --from and --to-hf, and perhaps --tokenizer")
