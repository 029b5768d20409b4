"""Checkpoints in an object store: paths such as s3://bucket/run, read and written through fsspec.

A store has no rename and no locks. So a save uploads the files to their final folder, and the manifest last, in one
request: a folder without a manifest is no checkpoint. `folders.py` has the rules of a save that replaces a checkpoint.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PosixPath
from typing import Any

import fsspec.core

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


def check_local(path: Path) -> Path:
    if "".join(path.parts[:1]).endswith(":"):
        raise ValueError(f"{path} is a URL that became a local path: only run.save and run.load take URLs, as strings")
    return path


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
        """Open a small file for reading."""
        return io.BytesIO(self.read())

    def write_bytes(self, data: Any) -> int:
        with self._store() as (store, path):
            store.pipe_file(path, bytes(data))
        return len(data)

    def rename(self, target: Any) -> Remote:
        """Move a small file; a store copies it, in one request."""
        with self._store() as (store, path):
            store.mv(path, fsspec.core.url_to_fs(str(target))[1])
        return target

    def stream(self, parts: Iterable[bytes | memoryview]) -> None:
        """Write a large file part by part."""
        with self._store() as (store, path), store.open(path, "wb") as file:
            for part in map(memoryview, parts):
                for start in range(0, len(part), _BLOCK):
                    file.write(part[start : start + _BLOCK])
