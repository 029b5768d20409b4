"""`python -m mpcore.fault_tolerance FOLDER`: explain the logs that a watchdog left."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mpcore.command_line import Parser
from mpcore.fault_tolerance.trace import Log, explain


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = Parser(prog="mpcore explain", description="Say why a run hung.")
    parser.add_argument("folder", metavar="FOLDER", help="where a watchdog left the ranks' logs, such as OUT/hang")
    folder = parser.parse_args(argv).folder
    files = sorted(Path(folder).glob("rank*.json"))
    if not files:
        sys.exit(f"error: {folder} has no rank*.json")
    try:
        logs = [Log.from_json(file.read_text()) for file in files]
    except (ValueError, TypeError, KeyError, OSError) as problem:
        sys.exit(f"error: {folder} holds a log that can't be read: {problem}")
    size = 1 + max(rank for log in logs for _, ranks in log.groups.values() for rank in ranks)
    print(explain(logs, size))


if __name__ == "__main__":
    main()
