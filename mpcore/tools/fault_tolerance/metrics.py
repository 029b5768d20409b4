"""Write the files of a run's folder: metrics, one line of JSON per step, and files that are whole or not there."""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mpcore.checkpoint.schema import read_lines


class MetricsWriter:
    """Append lines of JSON to a file. A number that isn't finite becomes null.

    A line that can't be written, for example on a full disk, is kept in memory and written with the next line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: bytes = b""

    def add(self, entry: dict[str, Any]) -> None:
        """Write the waiting lines and this one.

        Raises:
            OSError: if the lines can't be written. The file stays as it was, and the lines wait for the next call.
        """
        self.waiting += (json.dumps(read_line(json.dumps(entry))) + "\n").encode()
        with open(self.path, "ab", buffering=0) as file:
            end = os.fstat(file.fileno()).st_size
            try:
                if file.write(self.waiting) < len(self.waiting):  # only a part fitted on the disk
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with suppress(OSError):  # a device file can't be truncated
                    file.truncate(end)
                raise
        self.waiting = b""


def read_line(line: str) -> dict[str, Any]:
    """Read a line of JSON. The values NaN and Infinity, which Python writes but JSON doesn't have, become None."""
    return json.loads(line, parse_constant=lambda _: None)


def read_records(path: Path, steps: int) -> list[dict[str, Any]]:
    """Read the records that an earlier run wrote of its first `steps` steps."""
    return [entry for entry in read_lines(path) if entry["step"] < steps] if steps and path.is_file() else []


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with whole(path) as part:
        part.write_text(text)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to. It becomes `path` if the block succeeds, and is removed if it fails."""
    part = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.tmp{path.suffix}")  # no link can lie there
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
