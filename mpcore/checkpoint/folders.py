"""Directories of checkpoints: which ones are complete, which is the newest, which may go.

A checkpoint at PATH is written as `.NAME.mpcore-tmp` beside it and renamed when it is whole. An older one at PATH is
first renamed to `.NAME.mpcore-old`, and removed last: whenever the machine stops, a whole one is there.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from mpcore.checkpoint.format import MANIFEST, Manifest, read_manifest
from mpcore.checkpoint.ranks import merged
from mpcore.checkpoint.tensor_file import sync_folder
from mpcore.mesh.axis import Mesh
from mpcore.mesh.log import get_logger

log = get_logger("mpcore.checkpoint")
_TEMPORARY, _OLD = ".mpcore-tmp", ".mpcore-old"


def step_path(root: str | os.PathLike[str], step: int) -> Path:
    """Return the path of a step's checkpoint in a directory of checkpoints."""
    return Path(root) / f"step-{step:08d}"


def temporary(path: Path) -> Path:
    """Where a checkpoint is written before it is whole."""
    return path.with_name(f".{path.name}{_TEMPORARY}")


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}{_OLD}")


def _has_successor(folder: Path) -> bool:
    """Whether this checkpoint was set aside, and the one that replaces it is there."""
    return folder.name.endswith(_OLD) and folder.with_name(folder.name[1 : -len(_OLD)]).exists()


def resolve(path: str | os.PathLike[str]) -> Path:
    """The directory that holds checkpoint `path`: itself, or the one set aside by a save that was killed over it."""
    path = Path(path)
    old = _old(path)
    return old if not path.exists() and (old / MANIFEST).is_file() else path


def prepare(path: Path) -> None:
    """Clear what a killed save left, and make the directory to write into; refuse a `path` that is no checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    old, new = _old(path), temporary(path)
    if old.is_dir() and not path.exists():
        os.rename(old, path)
    if path.exists() and not (path / MANIFEST).is_file() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is there and is no checkpoint: it is not overwritten")
    for left in (old, new):
        if left.exists():
            shutil.rmtree(left)
    new.mkdir()


def publish(path: Path) -> None:
    """Put a checkpoint that is whole in its place; after an OSError what was there before is there still."""
    new, old = temporary(path), _old(path)
    sync_folder(new)
    if path.exists():
        os.rename(path, old)
    try:
        os.rename(new, path)
    except OSError:
        if old.exists():
            os.rename(old, path)
        raise
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def discard(path: Path) -> None:
    """Remove what a failed save has written."""
    shutil.rmtree(temporary(path), ignore_errors=True)


def checkpoints(root: str | os.PathLike[str], mesh: Mesh = Mesh()) -> list[Path]:
    """List the complete checkpoints in a directory, the newest step first; log the incomplete ones.

    A complete checkpoint has a valid manifest and all files in their full size. `verify` also reads every byte.

    Args:
        root: the directory.
        mesh: all its ranks call this together: rank 0 reads the directory, and all ranks get the same answer.
    """
    return merged(mesh.world, lambda: _complete(Path(root)) if mesh.world.rank == 0 else [], lambda found: found[0])


def latest(root: str | os.PathLike[str], mesh: Mesh = Mesh()) -> Path | None:
    """Return the path of the newest complete checkpoint of a folder; None where there is none.

    Args:
        root: the folder that `Run.save` was given.
        mesh: rank 0 of its world reads the folder and tells the others, so that all ranks load the same checkpoint.

    Example:
        >>> mpcore.latest("no such folder") is None
        True
    """
    return next(iter(checkpoints(root, mesh)), None)


def _complete(root: Path) -> list[Path]:
    found = []
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        if not folder.is_dir() or _has_successor(folder):
            continue
        if folder.name.endswith(_TEMPORARY):
            log.warning("%s is incomplete: its save was killed, or is running", folder)
            continue
        if not (folder / MANIFEST).is_file() and not any(folder.glob("*.safetensors")):
            continue  # nothing of ours
        try:
            manifest = read_complete(folder)
        except (ValueError, OSError) as error:
            log.warning("%s is incomplete, and ignored: %s", folder, error)
            continue
        found.append((manifest.step, folder.stat().st_mtime, folder))
    return [folder for _, _, folder in sorted(found, reverse=True)]


def read_complete(folder: Path) -> Manifest:
    """Read a checkpoint's manifest; refuse a checkpoint of which a file is missing or has another size."""
    manifest = read_manifest(folder)
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        if path.stat().st_size != record.bytes:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, written were {record.bytes}")
    return manifest


def prune(root: str | os.PathLike[str], keep: int, keep_every: int | None = None, spare: Path | None = None) -> None:
    """Remove all complete checkpoints of a directory except the newest `keep`, and remains of killed saves.

    Args:
        root: the directory; other files stay.
        keep: how many to keep, at least 1.
        keep_every: also keep every step that is a multiple of this number.
        spare: a checkpoint that is never removed.

    Raises:
        ValueError: if `keep` is smaller than 1.
    """
    if keep < 1:
        raise ValueError(f"keep {keep} is smaller than 1: the last checkpoint is never removed")
    for folder in checkpoints(root)[keep:]:
        if folder == spare or (keep_every and read_manifest(folder).step % keep_every == 0):
            continue
        doomed = temporary(folder)  # renamed first: killed here, it isn't taken for a damaged one
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(folder, doomed)
    for folder in Path(root).iterdir():
        if folder.name.endswith(_TEMPORARY) or _has_successor(folder):
            shutil.rmtree(folder, ignore_errors=True)
