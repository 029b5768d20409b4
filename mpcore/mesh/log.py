"""The library's log.

Every record has the rank. Records are printed to standard error if the program configures no logging.
"""

from __future__ import annotations

import logging
import os
import sys
from logging import Logger

import torch.distributed as dist

from mpcore.mesh.launch import read_launch


def get_logger(name: str) -> Logger:
    """Return a logger of the library. Its records have `rank`, for formats such as `%(rank)s`."""
    log = logging.getLogger(name)
    log.addFilter(_add_rank)
    return log


def _add_rank(record: logging.LogRecord) -> bool:
    record.rank = _rank()
    return True


def _rank() -> int | str:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    try:
        return read_launch(os.environ).rank
    except ValueError:  # another launcher
        return os.environ.get("RANK", "?")


class _Lines(logging.Handler):
    """Write records to standard error if the program has no handlers of its own, as `logging.lastResort` does."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and logging.getLogger("mpcore").handlers == [self]:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()


_lines = _Lines()
_lines.setFormatter(logging.Formatter("%(asctime)s rank %(rank)s: %(message)s", "%Y-%m-%d %H:%M:%S"))
logging.getLogger("mpcore").addHandler(_lines)
