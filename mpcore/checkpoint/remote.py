"""Checkpoints in an object store: paths such as s3://bucket/run, read and written through fsspec.

A store has no locks, and nothing is renamed but small files. A checkpoint is written to PATH, or, if a complete one is
there, to `.NAME.mpcore-old`. The manifest completes it, in one request; then the other one is removed, its manifest
first. A lock file, which locks nothing, marks a folder without a manifest as the remains of a save, and names the save:
if another save has replaced it, `publish` refuses. No two saves write tensor files of one name.
"""

from __future__ import annotations

import io
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PosixPath
from typing import Any

import fsspec.core
import torch.distributed as dist

from mpcore.checkpoint.store import (
    LOCK,
    MANIFEST,
    Block,
    MappedFile,
    Store,
    check_unused,
    has_successor,
    is_complete,
    old,
    stamp,
)

_OTHER_JOB = "another job has begun or ended a save there since: let one job save into a folder"
_BLOCK = 2**26  # bytes that a stream takes at once: fsspec copies them


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return a path, or the `Remote` of a URL. The URL of a local file becomes its path."""
    text = os.fspath(path)
    protocol, found, rest = text.partition("://")
    if not found:
        return Path(path)
    if protocol in ("file", "local"):
        return Path(rest)
    if ":" in protocol:
        raise ValueError(f"{text} chains two file systems: give the URL of one, such as s3://bucket/folder")
    return Remote(f"{protocol}:{':' if rest.startswith('/') else ''}", rest.strip("/"))


def store_of(path: Path) -> Store[Any]:
    """Return the operations on checkpoints where a path lies."""
    return ObjectStore() if isinstance(path, Remote) else Store[Path]()


class Remote(PosixPath):
    """A path in an object store, with the methods of `pathlib.Path` that checkpoints use.

    Its first part is the protocol and ":", or "::" if the URL has no host, as in hdfs:///run.

    Raises:
        RuntimeError: from each method, with the URL and the store's error. FileNotFoundError is raised as it is.
    """

    def __str__(self) -> str:
        protocol, _, rest = super().__str__().partition("/")
        return f"{protocol.rstrip(':')}://{'/' * protocol.endswith('::')}{rest}"

    def __fspath__(self) -> str:
        return str(self)

    @contextmanager
    def _store(self) -> Iterator[tuple[Any, str]]:
        try:
            store, path = fsspec.core.url_to_fs(str(self))
            store.invalidate_cache()  # other ranks write too
            yield store, path
        except FileNotFoundError:
            raise
        except Exception as error:
            raise RuntimeError(f"{self}: {type(error).__name__}: {error}") from error

    def _type(self) -> str | None:
        try:
            with self._store() as (store, path):  # its `exists` would take an error for an absent file
                return store.info(path)["type"]
        except FileNotFoundError:
            return None

    def exists(self, **_: Any) -> bool:
        return self._type() is not None

    def is_file(self, **_: Any) -> bool:
        return self._type() == "file"

    def is_dir(self, **_: Any) -> bool:
        return self._type() == "directory"

    def iterdir(self) -> Iterator[Remote]:
        with self._store() as (store, path):
            names = {name.rstrip("/") for name in store.ls(path, detail=False)} - {path.rstrip("/")}
        return (self / name.rpartition("/")[2] for name in sorted(names))

    def glob(self, pattern: str, **_: Any) -> Iterator[Remote]:
        with self._store() as (store, path):
            found = store.glob(f"{path}/{pattern}")
        return (self / name[len(path) :].strip("/") for name in found)

    def sizes(self) -> dict[str, int]:
        """Return the size of each file in a folder, by its path within the folder: one request a thousand files."""
        with self._store() as (store, path):
            found = store.find(path, detail=True)
        return {name[len(path) :].strip("/"): info["size"] for name, info in found.items()}

    def stat(self, **_: Any) -> os.stat_result:
        """Return the size, and as inode a number that changes when the file does."""
        with self._store() as (store, path):
            info = store.info(path)
        return os.stat_result((0, hash(str(info)), 0, 0, 0, 0, info["size"] or 0, 0, 0, 0))

    def mkdir(self, *_: Any, **__: Any) -> None:
        with self._store() as (store, path):
            store.makedirs(path, exist_ok=True)

    def unlink(self, missing_ok: bool = False) -> None:
        if not missing_ok or self.is_file():
            with self._store() as (store, path):
                store.rm_file(path)

    def remove(self, last: str) -> None:
        """Remove a folder and everything in it, the file `last` after all others."""
        files = [f"{self / name}" for name in self.sizes() if name != last]
        with self._store() as (store, path):
            if files:
                store.rm(files)
            store.rm(path, recursive=True)

    def read(self, start: int | None = None, end: int | None = None) -> bytearray:
        """Return the bytes of a file, or of a part of it."""
        with self._store() as (store, path):
            data = bytearray(store.cat_file(path, start, end))
            if end is not None and len(data) != end - (start or 0):
                raise ValueError(f"{len(data)} bytes from {start} to {end}: it was cut after it was opened")
            return data

    def open(self, *_: Any, **__: Any) -> io.BytesIO:
        return io.BytesIO(self.read())

    def write_bytes(self, data: Any) -> int:
        with self._store() as (store, path):
            store.pipe_file(path, bytes(data))
        return len(data)

    def rename(self, target: Any) -> Remote:
        """Move a small file; a store copies it, in one request."""
        with self._store() as (store, path):
            store.cp_file(path, fsspec.core.url_to_fs(str(target))[1])  # mv would take * and ? for patterns
            store.rm_file(path)
        return target

    def stream(self, parts: Iterable[bytes | memoryview]) -> None:
        with self._store() as (store, path), store.open(path, "wb") as file:
            for part in map(memoryview, parts):
                for start in range(0, len(part), _BLOCK):
                    file.write(part[start : start + _BLOCK])


class ObjectStore(Store[Remote]):
    """The operations on checkpoints of an object store. Use one object from `prepare` to `publish` or `discard`."""

    def __init__(self) -> None:
        self.suffix: str = f"-{secrets.token_hex(4)}"

    def temporary(self, path: Remote) -> Remote:
        for folder in (old(path), path):
            if (folder / LOCK).is_file():  # `prepare` marked it
                return folder
        raise ValueError(f"{path}: {_OTHER_JOB}")

    def lock(self, folder: Remote, shared: bool = True) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if folder.parts[0].startswith("memory:") and ranks > 1:
            raise ValueError(f"{folder} lies in the memory of one process, and {ranks} save: take file:// or a store")

    def prepare(self, path: Remote) -> None:
        is_replaced = is_complete(path)
        kept = path if is_replaced or not is_complete(old(path)) else old(path)
        for folder in (path, old(path)):
            if folder == kept and is_complete(folder):
                (folder / LOCK).unlink(missing_ok=True)
            elif folder.exists():
                is_ours = is_complete(folder) or (folder / LOCK).is_file()
                check_unused(folder, not is_ours and any(folder.iterdir()))
                self.remove(folder)
        new = old(path) if is_replaced else path
        new.mkdir()
        (new / LOCK).write_bytes(self.suffix.encode())

    def own(self, path: Remote) -> Remote:
        """Return the temporary folder of this save.

        Raises:
            ValueError: if another save has replaced it.
        """
        if self.owns(folder := self.temporary(path)):
            return folder
        raise ValueError(f"{path}: {_OTHER_JOB}")

    def owns(self, folder: Remote) -> bool:
        with suppress(FileNotFoundError):
            return (folder / LOCK).read() == self.suffix.encode()
        return False

    def discard(self, path: Remote) -> None:
        with suppress(OSError, RuntimeError, ValueError):
            self.remove(self.own(path))

    def publish(self, path: Remote) -> None:
        other = path if self.temporary(path) == old(path) else old(path)
        is_replaced = is_complete(other)
        new = self.own(path)
        try:
            for name in [*json.loads(_unpublished(new / MANIFEST).read())["beside"], MANIFEST]:
                _unpublished(new / name).rename(new / name)
        except FileNotFoundError:
            raise ValueError(f"{path}: {_OTHER_JOB}") from None
        if is_replaced:
            self.retire(other)
        with suppress(OSError, RuntimeError):  # the checkpoint is there
            if is_replaced and self.owns(other):
                other.remove(LOCK)
            if self.owns(new):
                (new / LOCK).unlink()

    def retire(self, folder: Remote) -> None:
        (folder / LOCK).write_bytes(self.suffix.encode())
        (folder / MANIFEST).unlink(missing_ok=True)

    def is_remains(self, folder: Remote) -> bool:
        return has_successor(folder) or ((folder / LOCK).is_file() and not is_complete(folder))

    def remove(self, folder: Remote) -> None:
        self.retire(folder)
        folder.remove(LOCK)

    def sizes(self, folder: Remote, names: Iterable[str]) -> dict[str, int]:
        found = folder.sizes()  # fsspec's listing leaves out what it can't read
        rest = [name for name in names if name not in found and (folder / name).is_file()]
        return found | {name: (folder / name).stat().st_size for name in rest}

    def tensor_bytes(self, folder: Remote) -> None:
        return None

    def write(self, path: Remote, data: bytes) -> None:
        _unpublished(path).write_bytes(data)  # `publish` renames it

    def write_blocks(self, path: Remote, size: int, blocks: Sequence[Block], threads: int) -> None:
        path.stream(data() for _, data in sorted(blocks, key=lambda block: block[0]))

    def open(self, path: Remote) -> MappedFile:
        return RemoteFile(path)

    def sync(self, folder: Remote) -> None:
        pass


def _unpublished(path: Remote) -> Remote:
    return path.with_name(f".{path.name}.part")


class RemoteFile(MappedFile):
    """A file in an object store: each read is a request."""

    def __init__(self, path: Remote) -> None:
        found = path.stat()
        self.remote = path
        self.stamp: tuple[int, ...] = stamp(found)
        self.size: int = found.st_size

    def read(self, start: int, end: int) -> bytearray:
        return self.remote.read(start, end)

    def advise(self, start: int, end: int, needed: bool) -> None:
        pass
