"""The command `mpcore checkpoint inspect|verify|diff|convert PATH...`."""

from __future__ import annotations

from pathlib import Path

from mpcore.checkpoint.report import describe, diff, verify
from mpcore.interop.dcp_files import METADATA, export_dcp, import_dcp
from mpcore.interop.hugging_face.config import read_json
from mpcore.tools import parsers
from mpcore.tools.command_line import reports_errors


@reports_errors("mpcore checkpoint")
def main(argv: list[str] | None = None) -> int:
    """Run the command. Return 0 (done, undamaged or equal), 1 (damaged or different) or 2 (there is no checkpoint)."""
    args = parsers.checkpoint().parse_args(argv)
    if args.command == "diff":
        lines = diff(args.a, args.b, rtol=args.rtol)
        print("\n".join(lines) or "no difference")
        return 1 if lines else 0
    if args.command == "convert":
        is_dcp = (Path(args.source) / METADATA).is_file()
        if args.config and not is_dcp:
            raise ValueError(f"--config {args.config} is of a folder with {METADATA}, and {args.source} has none")
        found = read_json(Path(args.config)) if args.config else {"model": None}
        if "model" not in found:
            raise ValueError(f"{args.config} has no 'model': give the config.json of a run")
        if is_dcp:
            left = import_dcp(args.source, args.target, config={"model": found["model"]} if args.config else None)
            print("left out", f"{len(left)} entries that are no weights: {', '.join(left[:5])}" if left else "none")
        else:
            export_dcp(args.source, args.target)
        print(f"wrote {args.target}")
        return 0
    bad = 0
    for path in args.path:
        if args.command == "inspect":
            print(describe(path, all_tensors=args.all))
        else:
            problems = verify(path)
            print("\n".join(problems) or f"{path}: every byte is as written")
            bad |= bool(problems)
    return bad
