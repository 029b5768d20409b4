"""Say under torchrun why a rank failed: one line, and the traceback in a file."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # names the file in which torchrun looks for the cause of a failure


def tell_launcher(text: str) -> None:
    """Write the root cause for torchrun, which prints it below its own traceback. Without torchrun, do nothing.

    Args:
        text: what failed on this rank, in a line or two.
    """
    path = os.environ.get(ERROR_FILE)
    if path:
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": text, "timestamp": int(time.time())}))


def report_failures(rank: int) -> None:
    """Print an uncaught error of this process as one line. torchrun repeats the first rank's as the last line.

    The traceback goes to a new file, which the line names. Without torchrun Python prints the traceback, as always.
    """

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".txt", prefix=f"mpcore-rank{rank}-", delete=False) as file:
            traceback.print_exception(kind, error, trace, file=file)
        cause = f"rank {rank} failed: {kind.__name__}: {error} (traceback: {file.name})"
        sys.stderr.write(f"{cause}\n")
        tell_launcher(cause)

    if os.environ.get(ERROR_FILE):
        sys.excepthook = report
