"""Directories of checkpoints: find the complete and the newest ones, replace and remove checkpoints.

A checkpoint at PATH is written to `.NAME.mpcore-tmp` beside PATH and renamed when it is complete. An older checkpoint
at PATH is first renamed to `.NAME.mpcore-old` and removed after that. So a complete checkpoint exists at every moment,
even if the machine stops.

In an object store (`Remote`) nothing is renamed. A checkpoint is written to PATH, or, if a complete one is there, to
`.NAME.mpcore-old`. The manifest completes it; then the other one is removed, its manifest first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
from pathlib import Path
from typing import IO, TypeVar

from mpcore.checkpoint.format import MANIFEST, Manifest, read_manifest
from mpcore.checkpoint.ranks import merged
from mpcore.checkpoint.remote import Remote, as_path, check_local
from mpcore.checkpoint.tensor_file import sync_folder
from mpcore.mesh.axis import Mesh
from mpcore.mesh.log import get_logger

log = get_logger("mpcore.checkpoint")
P = TypeVar("P", bound=Path)
_TEMPORARY, _OLD = ".mpcore-tmp", ".mpcore-old"
LOCK = ".lock"
"""The name of the file that locks a folder."""


def step_path(root: str | os.PathLike[str], step: int) -> Path:
    """Return the path of the checkpoint of a step: `root/step-00000120`.

    Args:
        root: the directory of checkpoints.
        step: the number of optimizer steps done.
    """
    return as_path(root) / f"step-{step:08d}"


def temporary(path: P) -> P:
    """Return the path where a checkpoint is written before it is complete."""
    if isinstance(path, Remote):  # the one that `prepare` marked
        return _old(path) if (_old(path) / LOCK).is_file() else path
    return path.with_name(f".{path.name}{_TEMPORARY}")


def _old(path: P) -> P:
    return path.with_name(f".{path.name}{_OLD}")


def is_complete(path: Path) -> bool:
    """Return whether there is a checkpoint at `path`: its manifest is there."""
    return (path / MANIFEST).is_file()


def _has_successor(folder: Path) -> bool:
    return folder.name.endswith(_OLD) and is_complete(folder.with_name(folder.name[1 : -len(_OLD)]))


def resolve(path: str | os.PathLike[str]) -> Path:
    """Return the directory that holds checkpoint `path`.

    It is `path`, or the renamed old checkpoint if a save that would replace `path` was killed.
    """
    path = as_path(path)
    return _old(path) if path.name and not is_complete(path) and is_complete(_old(path)) else path


def lock_folder(folder: Path) -> IO[str] | None:
    """Create a folder and lock it against other processes, so that two runs don't mix their files.

    Returns:
        A file that holds the lock until it is closed. None: the lock belongs to another object of this process, or the
        file system has no locks, as no object store has.
    """
    if isinstance(folder, Remote):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    file, mine = os.fdopen(handle, "r+", errors="replace"), f"process {os.getpid()} on {socket.gethostname()}"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate()
        file.write(mine)
        file.flush()
    except BlockingIOError:
        with file:
            owner = file.read(200)
        if owner == mine:
            return None
        raise ValueError(f"{folder} is in use by {owner!r}: wait for its end, or save into another folder") from None
    except OSError:
        file.close()
        return None
    return file


def prepare(path: Path) -> IO[str] | None:
    """Remove the remains of a killed save, create the temporary directory to write into, and lock it.

    Returns:
        See `lock_folder`.

    Raises:
        ValueError: if `path` exists and is not a checkpoint, or another process is saving it.
    """
    if isinstance(path, Remote):
        return _prepare_remote(path)
    check_local(path).parent.mkdir(parents=True, exist_ok=True)
    old, new = _old(path), temporary(path)
    if new.is_dir() and (left := lock_folder(new)):
        left.close()
    if old.is_dir() and not path.exists():
        os.rename(old, path)
    if path.exists() and not is_complete(path) and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is there and is no checkpoint: it is not overwritten")
    for remains in (old, new):
        if remains.exists():
            shutil.rmtree(remains)
    new.mkdir()
    return lock_folder(new)


def _prepare_remote(path: Remote) -> None:
    """Remove the remains of a killed save, and mark the folder to write into by a lock file, which locks nothing."""
    kept, new = resolve(path), _old(path) if is_complete(path) else path
    for folder in (path, _old(path)):
        if folder == kept and is_complete(folder):
            (folder / LOCK).unlink(missing_ok=True)
        elif folder.exists():
            if not is_complete(folder) and not (folder / LOCK).is_file() and any(folder.iterdir()):
                raise ValueError(f"{folder} is there and is no checkpoint: it is not overwritten")
            _retract(folder).remove(LOCK)
    new.mkdir()
    (new / LOCK).write_bytes(b"")


def _retract(folder: Remote) -> Remote:
    """Mark a folder as remains, and make it no checkpoint."""
    (folder / LOCK).write_bytes(b"")
    (folder / MANIFEST).unlink(missing_ok=True)
    return folder


def publish(path: Path) -> None:
    """Rename a complete checkpoint to its final path.

    If an OSError is raised, the checkpoint before it is still there.
    """
    if isinstance(path, Remote):
        new = temporary(path)
        other = _old(path) if new == path else path
        remains = [_retract(other)] if is_complete(other) else []
        with contextlib.suppress(OSError, RuntimeError):  # the checkpoint is there
            for folder in remains:
                folder.remove(LOCK)
            (new / LOCK).unlink()
        return
    new, old = temporary(path), _old(path)
    (new / LOCK).unlink(missing_ok=True)
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
    if not isinstance(path, Remote):
        shutil.rmtree(temporary(path), ignore_errors=True)
        return
    with contextlib.suppress(OSError, RuntimeError):  # of a store that can't be reached: the next save removes it
        _retract(temporary(path)).remove(LOCK)


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
        if not folder.is_dir() or _has_successor(folder):
            continue
        if folder.name.endswith(_TEMPORARY):
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
    if isinstance(folder, Remote):
        found = folder.sizes()
    else:
        found = {name: (folder / name).stat().st_size for name in records if (folder / name).is_file()}
    for name, record in records.items():
        if name not in found:
            raise ValueError(f"{folder / name} is missing")
        if found[name] != record.bytes:
            raise ValueError(f"{folder / name} has {found[name]} bytes, written were {record.bytes}")
    return manifest


def prune(root: str | os.PathLike[str], keep: int, keep_every: int | None = None, spare: Path | None = None) -> None:
    """Remove all complete checkpoints of a directory except the newest `keep`. Remove the remains of killed saves too.

    Args:
        root: the directory; other files stay.
        keep: the number of checkpoints to keep, at least 1.
        keep_every: also keep every checkpoint whose step is a multiple of this number. None: no others.
        spare: a checkpoint to keep whatever its step is.

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
    if keep < 1:
        raise ValueError(f"keep {keep} is smaller than 1: the last checkpoint is never removed")
    root, spare = as_path(root), spare and resolve(spare)
    for folder in checkpoints(root)[keep:]:
        if folder == spare or (keep_every and read_manifest(folder).step % keep_every == 0):
            continue
        if isinstance(folder, Remote):
            _retract(folder).remove(LOCK)
            continue
        doomed = temporary(folder)  # renamed first: a half-removed one must not look damaged
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(folder, doomed)
    for folder in root.iterdir():
        if isinstance(folder, Remote):
            if _has_successor(folder) or ((folder / LOCK).is_file() and not is_complete(folder)):
                _retract(folder).remove(LOCK)
        elif folder.name.endswith(_TEMPORARY) or _has_successor(folder):
            shutil.rmtree(folder, ignore_errors=True)
