"""`mpcore explain FOLDER`: explain a hang from the logs that a watchdog wrote."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mpcore.checkpoint.schema import convert, read_json
from mpcore.tools import parsers
from mpcore.tools.command_line import reports_errors
from mpcore.tools.fault_tolerance.trace import LIMIT, Log, explain


@reports_errors("mpcore explain")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0, or 2 if the folder has no logs that can be read."""
    folder = parsers.explain().parse_args(argv).folder
    files = sorted(Path(folder).glob("rank*.json"))
    if not files:
        raise ValueError(f"{folder} has no rank*.json")
    logs = []
    for file in files:
        try:
            logs.append(convert(Log, read_json(file, LIMIT), "the log"))
        except (ValueError, OSError) as problem:
            raise ValueError(f"{file} can't be read: {problem}") from problem
    size = 1 + max(rank for log in logs for _, ranks in [("", (log.rank,)), *log.groups.values()] for rank in ranks)
    print(explain(logs, size))
    return 0


if __name__ == "__main__":
    sys.exit(main())
