"""`mpcore verify package.module:build --layouts tp2,pp2` (see `mpcore.tools.verify`)."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from mpcore.tools import parsers
from mpcore.tools.command_line import find_object, reports_errors
from mpcore.tools.verify import verify
from mpcore.tools.verify.hugging_face import HuggingFaceModel, token_loss
from mpcore.tools.verify.judge import Verdict
from mpcore.tools.verify.page import draw, table

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@reports_errors("mpcore verify", ImportError)
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 1 if a layout differs or fails, otherwise 0."""
    args = parsers.verify().parse_args(argv)
    if (args.hf is None) == (args.model is None) or (args.set and args.hf is None):
        raise ValueError("give either package.module:build, or --hf PATH, and --set with --hf alone")
    build, batch, loss = find(args.model) if args.hf is None else _hugging_face(args.hf, args.set)
    if loss is None:
        print(f"no loss(output, target) beside {args.model}: half the sum of squares of full outputs is compared")
    if not (layouts := [name for name in args.layouts.split(",") if name]):
        raise ValueError(f"--layouts {args.layouts!r} names no layout: write some, such as tp2,dp2")
    verdicts = verify(
        build, batch, layouts,
        loss=loss, dtype=_DTYPES[args.dtype], seed=args.seed, timeout=args.timeout, report=_tell,
        virtual=args.bitwise,
    )  # fmt: skip
    print(table(verdicts))
    if args.plot:
        draw(verdicts, args.plot)
        print(f"wrote {args.plot}")
    return int(not all(v.equal for v in verdicts))


def find(name: str) -> tuple[Any, ...]:
    """Return the builder, the batch and the loss for `package.module:build`. The loss may be None."""
    module_name, _, function = name.partition(":")
    build = find_object(f"{module_name}:{function or 'build'}")
    batch = getattr(sys.modules[module_name], "batch", None)
    if batch is None:
        raise ValueError(
            f"{module_name} has {function or 'build'}, and no batch: also write batch(), which returns a dict of "
            f"the arguments of forward and the target, such as dict(tokens=tokens, target=target)"
        )
    try:
        inspect.signature(batch).bind()
    except TypeError as missing:
        raise ValueError(
            f"{module_name}:batch can't be called without arguments ({missing}): give each argument a default, such as "
            f"batch(step=0)"
        ) from None
    return build, batch(), getattr(sys.modules[module_name], "loss", None)


def _hugging_face(path: str, changes: list[str]) -> tuple[Any, ...]:
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
