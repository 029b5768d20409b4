"""Checkpoints that any layout can write and any layout can read.

Loading runs no code from the files. A save that is killed never damages the checkpoint before it. The package uses
`sharding`. Read `format.py` first: it describes the files.
"""

from mpcore.checkpoint.folders import checkpoints, latest, prune, step_path
from mpcore.checkpoint.format import VERSION, Chunk, Entry, FileRecord, Manifest
from mpcore.checkpoint.loading import Loaded, load
from mpcore.checkpoint.report import describe, diff, inspect, verify
from mpcore.checkpoint.saving import Saving, save, save_async

__all__ = [
    "VERSION", "Chunk", "Entry", "FileRecord", "Loaded", "Manifest", "Saving", "checkpoints", "describe", "diff",
    "inspect", "latest", "load", "prune", "save", "save_async", "step_path", "verify",
]  # fmt: skip
