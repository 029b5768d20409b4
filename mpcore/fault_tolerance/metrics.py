"""Write metrics, one line of JSON a step."""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from pathlib import Path


class MetricsWriter:
    """Append lines of JSON to a file; non-finite numbers are null. A failed line is written by the next call."""

    def __init__(self, path: Path) -> None:
        self.path, self.waiting = path, b""

    def add(self, entry: dict) -> None:
        """Write a line, after the lines that could not be written before.

        Raises:
            OSError: if the file can't be written; it stays as it was.
        """
        self.waiting += (json.dumps(read_line(json.dumps(entry))) + "\n").encode()
        with open(self.path, "ab", buffering=0) as file:
            end = os.fstat(file.fileno()).st_size
            try:
                if file.write(self.waiting) < len(self.waiting):  # a part fitted on the disk
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with suppress(OSError):  # a device keeps what it took
                    file.truncate(end)
                raise
        self.waiting = b""


def read_line(line: str) -> dict:
    """Read a line of JSON, with None for the NaN and Infinity that Python writes and JSON doesn't have."""
    return json.loads(line, parse_constant=lambda _: None)
