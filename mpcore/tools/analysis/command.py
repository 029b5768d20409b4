"""Parse the command lines of `mpcore memory` and `mpcore ledger`: a target, the mesh and the rank."""

from __future__ import annotations

import argparse
import sys

from mpcore.tools.command_line import Parser

HF_TARGET = "mpcore.tools.analysis.hugging_face:build"
HF_HELP = "a config.json of transformers, not a target"


def sizes_of(args: argparse.Namespace) -> dict[str, int]:
    """Return the sizes of the mesh's axes from the parsed command line."""
    return {name: getattr(args, name) for name in ("tp", "cp", "pp", "ep", "dp", "etp", "cp_inner")}


def parse(prog: str, about: str | None, argv: list[str] | None) -> argparse.Namespace:
    """Parse a target, the mesh and the rank. All other flags are for the target and are returned as `arguments`."""
    example = f"{prog} examples.gpt.plan:build --tp 8 --pp 4 --dp 32 --preset llama3-70b --global-batch 1024"
    parser = Parser(prog=prog, description=(about or "").partition("\n\n")[0], examples=[example])
    text = "module:function, called as function(mesh, arguments), which returns a Work; flags not listed here are its "
    add_target(parser, argv, f"{text}arguments")
    for name in ("tp", "cp", "pp", "ep", "dp"):
        parser.add_argument(f"--{name}", type=int, default=1, help=f"size of the {name} axis (default 1)")
    parser.add_argument("--etp", type=int, help="tensor parallel size inside each expert (default: tp)")
    parser.add_argument("--cp-inner", type=int, help="ranks of a sub-group of cp, for two-level (default: none)")
    parser.add_argument("--rank", type=int, default=0, help="the rank to plan (default 0)")
    if prog.endswith("memory"):
        text = "draw what each rank of the pipeline holds, as .png, .svg or .pdf"
        parser.add_argument("--plot", metavar="FILE", help=text)
    parser.add_argument("--cpu", action="store_true", help="count the operators of a CPU instead of a GPU's kernels")
    args, args.arguments = parser.parse_known_args(argv)
    use_folder(args)
    return args


def add_target(parser: argparse.ArgumentParser, argv: list[str] | None, about: str, nargs: str | None = None) -> None:
    """Add the flag --hf, and the target unless this flag is in `argv`: its place could take the value of another."""
    parser.add_argument("--hf", metavar="FOLDER", help=HF_HELP)
    if any(word.partition("=")[0] == "--hf" for word in (sys.argv[1:] if argv is None else argv)):
        parser.set_defaults(target=HF_TARGET)
    else:
        parser.add_argument("target", help=about, nargs=nargs)


def use_folder(args: argparse.Namespace) -> None:
    """Pass the folder of --hf to its target."""
    args.arguments += [] if args.hf is None else ["--hf", args.hf]
