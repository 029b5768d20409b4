"""The command `mpcore convert`: convert between Hugging Face folders and checkpoints of mpcore."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch

from mpcore.checkpoint.folders import resolve
from mpcore.interop.hugging_face.config import ModelSpec
from mpcore.interop.hugging_face.convert import export_hf, import_hf
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
    named = " examples.gpt.hf:SPEC" if spec is None else " convert"
    parser = convert = Parser(
        prog=prog,
        description="Convert models between Hugging Face and checkpoints.",
        examples=[
            f"{prog}{named} --from-hf llama/ --to checkpoints/step-00000000",
            f"{prog}{named} --from checkpoints/step-00000120 --to-hf out/ --tokenizer llama/",
        ],
    )
    if spec is None:
        parser.add_argument("spec", metavar="package.module:SPEC", help="the ModelSpec, such as examples.gpt.hf:SPEC")
    else:
        commands = parser.add_subparsers(dest="command", required=True)
        convert = commands.add_parser("convert", help="Hugging Face to a checkpoint, or back")
    read = convert.add_argument_group("import")
    write = convert.add_argument_group("export")
    read.add_argument("--from-hf", metavar="DIR", help="a folder with config.json and safetensors files")
    read.add_argument("--to", metavar="CKPT", help="the checkpoint to make of it")
    write.add_argument("--from", metavar="CKPT", dest="source", help="a checkpoint, of any layout")
    write.add_argument("--to-hf", metavar="DIR", help="the folder to make of it")
    read.add_argument("--force", action="store_true", help="replace an existing checkpoint")
    write.add_argument(
        "--tokenizer", metavar="PATH", help="a tokenizer.json, or a folder whose tokenizer files go along"
    )
    convert.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="cast to it (default: no cast)")
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
