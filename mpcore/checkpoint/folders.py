"""Directories of checkpoints: find the complete and the newest ones, and remove old ones."""

from __future__ import annotations

import operator
import os
from functools import cache
from pathlib import Path
from typing import Any

from mpcore.checkpoint.format import Manifest, read_manifest
from mpcore.checkpoint.remote import as_path, store_of
from mpcore.checkpoint.store import MANIFEST, TEMPORARY, has_successor, is_complete, old
from mpcore.mesh.agreement import merged
from mpcore.mesh.axis import Mesh
from mpcore.mesh.log import Logger, get_logger

log: Logger = get_logger("mpcore.checkpoint")


def step_path(root: str | os.PathLike[str], step: int) -> Path:
    """Return the path of the checkpoint of a step: `root/step-00000120`.

    Args:
        root: the directory of checkpoints.
        step: the number of optimizer steps done.
    """
    return as_path(root) / f"step-{step:08d}"


def resolve(path: str | os.PathLike[str]) -> Path:
    """Return the directory that holds checkpoint `path`.

    It is `path`, or the renamed old checkpoint if a save that would replace `path` was killed.
    """
    path = as_path(path)
    return old(path) if path.name and not is_complete(path) and is_complete(old(path)) else path


def checkpoints(root: str | os.PathLike[str], mesh: Mesh = Mesh()) -> list[Path]:
    """Return the paths of the complete checkpoints in a directory, the newest step first. Log the incomplete ones.

    A complete checkpoint has a valid manifest and all its files, each of the right size. `verify` also reads every
    byte.

    Args:
        root: the directory.
        mesh: all ranks of the mesh must call this function. Rank 0 reads the directory, and every rank gets its answer.

    Returns:
        The paths. If `root` doesn't exist, the list is empty.
    """

    def find() -> list[str]:
        return [*map(str, _complete(as_path(root)))] if mesh.world.rank == 0 else []

    return [*map(as_path, merged(mesh.world, find, lambda found: found[0]))]


def latest(root: str | os.PathLike[str], mesh: Mesh = Mesh()) -> Path | None:
    """Return the path of the newest complete checkpoint in a directory, or None if there is none.

    Args:
        root: the directory that `Run.save` was given.
        mesh: all ranks of the mesh must call this function. Rank 0 reads the directory, and every rank gets its answer,
            so that all ranks load the same checkpoint.

    Example:
        >>> mpcore.checkpoint.latest("no such folder") is None
        True
    """
    return next(iter(checkpoints(root, mesh)), None)


def _complete(root: Path) -> list[Path]:
    found = []
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        if not folder.is_dir() or has_successor(folder):
            continue
        if folder.name.endswith(TEMPORARY):
            log.warning("%s is incomplete: its save was killed, or is running", folder)
            continue
        if not (folder / MANIFEST).is_file() and not any(folder.glob("*.safetensors")):
            continue  # not a checkpoint
        try:
            manifest = read_complete(folder)
        except (ValueError, OSError) as error:
            log.warning("%s is incomplete, and ignored: %s", folder, error)
            continue
        found.append((manifest.step, folder.stat().st_mtime, folder))
    return [folder for _, _, folder in sorted(found, reverse=True)]


def read_complete(folder: Path) -> Manifest:
    """Read a checkpoint's manifest and check that all files exist with the right size."""
    manifest = read_manifest(folder)
    records = manifest.files | manifest.beside
    found = store_of(folder).sizes(folder, records)
    for name, record in records.items():
        if name not in found:
            raise ValueError(f"{folder / name} is missing")
        if found[name] != record.bytes:
            raise ValueError(f"{folder / name} has {found[name]} bytes, written were {record.bytes}")
    return manifest


def check_keep(keep: int) -> None:
    if operator.index(keep) < 1:
        raise ValueError(f"keep {keep} is smaller than 1: the last checkpoint is never removed")


@cache
def running() -> list[Any]:
    """Return the list of the last `Saving` in the background of this process."""
    return []


def prune(root: str | os.PathLike[str], keep: int, keep_every: int | None = None, spare: Path | None = None) -> None:
    """Remove all complete checkpoints of a directory except the newest `keep`. Remove the remains of killed saves too.

    A save that this process writes in the background ends first.

    Args:
        root: the directory; other files and links stay.
        keep: the number of checkpoints to keep, at least 1.
        keep_every: also keep every checkpoint whose step is a multiple of this number. None: no others.
        spare: the checkpoint just written, which stays. Later ones stay too and don't count; a warning names them.

    Raises:
        ValueError: if `keep` is smaller than 1.

    Example:
        >>> from tempfile import mkdtemp
        >>> from mpcore import Mesh
        >>> from mpcore.checkpoint import prune, save
        >>> folder = Path(mkdtemp())
        >>> for step in (1, 2, 3):
        ...     _ = save(folder / f"step-{step}", torch.nn.Linear(2, 2), mesh=Mesh(), step=step)
        >>> prune(folder, keep=2)
        >>> sorted(path.name for path in folder.glob("step-*"))
        ['step-2', 'step-3']
    """
    check_keep(keep)
    for saving in running():
        saving.join()
    root, spare = as_path(root), spare and resolve(spare)
    store = store_of(root)
    found = [folder for folder in checkpoints(root) if not folder.is_symlink()]  # a link is no checkpoint more
    if later := found[: found.index(spare)] if spare in found else []:
        names = ", ".join(folder.name for folder in later)
        log.warning(
            "%s is earlier than %s. `latest` returns %s: remove them if the run went back", spare, names, later[0]
        )
    for folder in found[len(later) :][keep:]:
        if not keep_every or read_manifest(folder).step % keep_every:
            store.retire(folder)
    for folder in filter(store.is_remains, root.iterdir()):
        store.remove(folder)
