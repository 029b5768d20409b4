"""Say under torchrun why a rank failed: one line, and the traceback in a file."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
import zlib
from contextlib import suppress
from pathlib import Path
from types import TracebackType

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # names the file in which torchrun looks for the cause of a failure


def tell_launcher(text: str, later: int = 0) -> None:
    """Write the root cause for torchrun, which prints it below its own traceback. Without torchrun, do nothing.

    Args:
        text: what failed on this rank, in a line or two.
        later: seconds to add to the time of the failure. torchrun prints the earliest failure last.
    """
    path = os.environ.get(ERROR_FILE)
    if path:
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": text, "timestamp": int(time.time()) + later}))


def report_failures(rank: int) -> None:
    """Let torchrun print an uncaught error of this process as its last lines, once for all ranks of the host.

    The traceback goes to a new file, which each rank names. Without torchrun Python prints the traceback, as always.
    """

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".txt", prefix=f"mpcore-rank{rank}-", delete=False) as file:
            traceback.print_exception(kind, error, trace, file=file)
        cause, where, later = f"{kind.__name__}: {error}", f"(traceback: {file.name})", 0
        sys.stderr.write(f"rank {rank} failed {where}\n")
        attempt = Path(os.environ[ERROR_FILE]).parents[1]  # has a folder for each rank of this host
        try:
            (attempt / f"cause-{zlib.crc32(cause.encode()):08x}").touch(exist_ok=False)
        except FileExistsError:
            cause, later = "the error of another rank", 1
        tell_launcher(f"rank {rank} failed: {cause} {where}", later)

    if os.environ.get(ERROR_FILE):
        sys.excepthook = report
