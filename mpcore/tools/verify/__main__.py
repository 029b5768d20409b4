"""`mpcore verify package.module:build --layouts tp2,pp2` (see `mpcore.tools.verify`)."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from mpcore.tools.command_line import Parser, find_object, reports_errors
from mpcore.tools.verify import verify
from mpcore.tools.verify.hugging_face import HuggingFaceModel, token_loss
from mpcore.tools.verify.judge import Verdict
from mpcore.tools.verify.page import draw, page, table

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@reports_errors("mpcore verify", ImportError)
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 1 if a layout differs or fails, otherwise 0."""
    parser = Parser(
        prog="mpcore verify",
        description="Compare a model under each layout with itself on one process: what it returns in training and in "
        "eval(), loss, gradients, and parameters and persistent buffers after a step. Write build as a def at module "
        "level, which other processes import. The module also has batch, called without arguments: it returns a dict "
        'with "x" and "target". And if '
        "needed loss(output, target, mesh), a sum. For pp build(mesh) returns the "
        "stage of mesh.pp.rank, for sp it takes sequence_parallel.",
        examples=[
            "mpcore verify mine:build --layouts tp2,tp2sp,pp2,dp2zero3 --html verify.html",
            "mpcore verify --hf path/to/model --layouts tp2,tp3,pp2,tp2pp2,dp2zero3 --set hidden_size=96",
        ],
    )
    parser.add_argument(
        "model", nargs="?", metavar="package.module:build", help="build(mesh) or build(mesh, sequence_parallel)"
    )
    parser.add_argument(
        "--hf", metavar="PATH", help="instead of build: the folder or config.json of a Hugging Face model"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="change a field of the config of --hf"
    )
    run = parser.add_argument_group("what runs")
    run.add_argument("--layouts", default="tp2,dp2", help="such as tp2,tp2sp,pp2,dp2zero3 (default tp2,dp2)")
    run.add_argument("--dtype", choices=_DTYPES, default="float64", help="of the layouts' runs (default float64)")
    run.add_argument("--seed", type=int, default=0, help="of the first values (default 0)")
    run.add_argument("--timeout", type=float, default=120.0, help="seconds of a run under a layout (default 120)")
    text = "require equal bits, with this virtual degree (docs/bitwise.md); also pass --dtype float32"
    run.add_argument("--bitwise", type=int, default=0, metavar="V", help=text)
    output = parser.add_argument_group("output")
    output.add_argument("--html", metavar="PATH", help="write the result as a page too")
    output.add_argument("--plot", metavar="PATH", help="draw each gradient's difference, as .png, .svg or .pdf")
    args = parser.parse_args(argv)
    if (args.hf is None) == (args.model is None) or (args.set and args.hf is None):
        raise ValueError("give either package.module:build, or --hf PATH, and --set with --hf alone")
    build, batch, loss = find(args.model) if args.hf is None else _hugging_face(args.hf, args.set)
    layouts = [name for name in args.layouts.split(",") if name]
    verdicts = verify(
        build, batch, layouts,
        loss=loss, dtype=_DTYPES[args.dtype], seed=args.seed, timeout=args.timeout, report=_tell,
        virtual=args.bitwise,
    )  # fmt: skip
    print(table(verdicts))
    if args.html:
        Path(args.html).write_text(page(f"{args.model or args.hf} under {len(verdicts)} layouts", verdicts))
    if args.plot:
        draw(verdicts, args.plot)
    return int(not all(v.equal for v in verdicts))


def find(name: str) -> tuple:
    """Return the builder, the batch and the loss for `package.module:build`. The loss may be None.

    Raises:
        ValueError: if the module can't be imported, or has no such builder or no `batch`, or if `batch` can't be called
            without arguments.
    """
    module_name, _, function = name.partition(":")
    build, batch = (find_object(f"{module_name}:{what}") for what in (function or "build", "batch"))
    try:
        inspect.signature(batch).bind()
    except TypeError as missing:
        raise ValueError(
            f"{module_name}:batch can't be called without arguments ({missing}): give each argument a default, such as "
            f"batch(step=0)"
        ) from None
    return build, batch(), getattr(sys.modules[module_name], "loss", None)


def _hugging_face(path: str, changes: list[str]) -> tuple:
    """Return the builder, the batch and the loss of a Hugging Face model."""
    fields = {}
    for change in changes:
        name, _, value = change.partition("=")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    build = HuggingFaceModel(path, tuple(fields.items()))
    return build, build.batch(), token_loss


def _tell(verdict: Verdict) -> None:
    print(f"compared {verdict.layout}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
