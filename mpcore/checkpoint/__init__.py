"""Checkpoints that any layout writes and any layout reads, safe to load and safe to be killed over.

Stands on `sharding`. Start with `format`: it says what lies in one.
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
