"""Local folders of checkpoints: lock, write, publish and remove them, and map their files into memory.

A checkpoint at PATH is written to `.NAME.mpcore-tmp` beside PATH and renamed when it is complete. An older checkpoint
at PATH is first renamed to `.NAME.mpcore-old` and removed after that. So a complete checkpoint exists at every moment,
even if the machine stops.

`remote.py` has the same operations for an object store. The rest of the package asks `store_of(path)` for its store.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Generic, TypeVar

K = TypeVar("K")
R = TypeVar("R")
P = TypeVar("P", bound=Path)
MANIFEST = "manifest.json"
TEMPORARY, OLD = ".mpcore-tmp", ".mpcore-old"
THREADS = 4  # that read or write at the same time
LOCK = ".lock"
"""The name of the file that locks a folder."""
Block = tuple[int, Callable[[], bytes | memoryview]]
"""Where a part of a file begins, and the function that returns its bytes."""


def is_complete(path: Path) -> bool:
    """Return whether there is a checkpoint at `path`: its manifest is there."""
    return (path / MANIFEST).is_file()


def old(path: P) -> P:
    """Return the path of the older checkpoint that a save replaces."""
    return path.with_name(f".{path.name}{OLD}")


def has_successor(folder: Path) -> bool:
    """Return whether a folder is an older checkpoint whose successor is complete."""
    return folder.name.endswith(OLD) and is_complete(folder.with_name(folder.name[1 : -len(OLD)]))


def check_local(path: Path) -> Path:
    if "".join(path.parts[:1]).endswith(":"):
        raise ValueError(f"{path} is a URL that became a local path: only run.save and run.load take URLs, as strings")
    return path


def check_unused(path: Path, is_used: bool) -> None:
    if is_used:
        raise ValueError(f"{path} is there and is no checkpoint: it is not overwritten")


class Store(Generic[P]):
    """The operations on checkpoints in which a file system and an object store differ, of a file system.

    Attributes:
        suffix: ends the names of this save's tensor files.
    """

    suffix: str = ""

    def temporary(self, path: P) -> P:
        """Return the path where a checkpoint is written before it is complete."""
        return path.with_name(f".{path.name}{TEMPORARY}")

    def lock(self, folder: P, shared: bool = True) -> IO[str] | None:
        """Create a folder and lock it against other processes, so that two runs don't mix their files.

        Args:
            folder: the folder.
            shared: whether another object of this process may hold the lock.

        Returns:
            A file that holds the lock until it is closed. None: the lock belongs to another object of this process, or
            the file system has no locks, as no object store has.
        """
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
            if owner == mine and shared:
                return None
            raise ValueError(f"{folder} is in use by {owner!r}: wait for its end, or save to another folder") from None
        except OSError:
            file.close()
            return None
        return file

    def prepare(self, path: P) -> IO[str] | None:
        """Remove the remains of a killed save, create the temporary directory to write into, and `lock` it.

        Raises:
            ValueError: if `path` exists and is not a checkpoint, or another save is writing it.
        """
        check_local(path).parent.mkdir(parents=True, exist_ok=True)
        new = self.temporary(path)
        if new.is_dir() and (left := self.lock(new, shared=False)):
            left.close()
        if old(path).is_dir() and not path.exists():
            os.rename(old(path), path)
        check_unused(path, path.exists() and not is_complete(path) and (not path.is_dir() or any(path.iterdir())))
        for remains in (old(path), new):
            if remains.exists():
                shutil.rmtree(remains)
        new.mkdir()
        return self.lock(new, shared=False)

    def publish(self, path: P) -> None:
        """Rename a complete checkpoint to its final path.

        If an OSError is raised, the checkpoint before it is still there.
        """
        new = self.temporary(path)
        self.sync(new)
        if path.exists():
            os.rename(path, old(path))
        try:
            os.rename(new, path)
        except OSError:
            if old(path).exists():
                os.rename(old(path), path)
            raise
        (path / LOCK).unlink(missing_ok=True)
        self.sync(path.parent)
        self.remove(old(path))

    def discard(self, path: P) -> None:
        """Remove what a failed save wrote. If that fails, the next save removes it."""
        with contextlib.suppress(OSError, RuntimeError):
            self.remove(self.temporary(path))

    def retire(self, folder: P) -> None:
        """Make a checkpoint remains: a half-removed one must not look damaged."""
        self.remove(self.temporary(folder))
        os.rename(folder, self.temporary(folder))

    def is_remains(self, folder: P) -> bool:
        """Return whether a folder is what a killed save left, or a retired checkpoint."""
        if not folder.name.endswith(TEMPORARY):
            return has_successor(folder)
        with contextlib.suppress(ValueError, OSError), self.lock(folder, shared=False) or contextlib.nullcontext():
            return True
        return False  # a save is writing it

    def remove(self, folder: P) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def sizes(self, folder: P, names: Iterable[str]) -> dict[str, int]:
        """Return the size of each of these files that exists, in bytes."""
        return {name: (folder / name).stat().st_size for name in names if (folder / name).is_file()}

    def tensor_bytes(self, folder: P) -> int | None:
        """Return how many bytes the headers of a folder's tensor files have. None: unknown."""
        total = 0
        for path in filter(Path.is_file, folder.glob("*.safetensors")):  # opening a pipe would wait for its writer
            with open(path, "rb") as file:
                total += min(int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size)
        return total

    def write(self, path: P, data: bytes) -> None:
        """Write a small new file, and sync it to the disk."""
        self.write_blocks(path, len(data), [(0, lambda: data)], 1)

    def write_blocks(self, path: P, size: int, blocks: Sequence[Block], threads: int) -> None:
        """Write a new file of `size` bytes, block by block in several threads, and sync it to the disk."""

        def write(block: Block) -> None:
            offset, view = block[0], memoryview(block[1]())
            while view.nbytes:  # one call writes 2 GiB at the most
                done = os.pwrite(file.fileno(), view, offset)
                view, offset = view[done:], offset + done

        try:
            with open(path, "xb") as file:  # follows no link
                if sys.platform == "linux" and size:  # a third less CPU time in the kernel, and a full disk raises now
                    os.posix_fallocate(file.fileno(), 0, size)
                in_threads(write, blocks, threads)
                os.fsync(file.fileno())
        except FileNotFoundError:
            raise ValueError(f"{path.parent} isn't there: let all ranks save to one path that they share") from None
        except OSError as error:  # such as for a full disk
            error.filename = error.filename or str(path)
            raise

    def open(self, path: P) -> MappedFile:
        return MappedFile(path)

    def sync(self, folder: P) -> None:
        """Sync a directory's list of file names to the disk."""
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class MappedFile:
    """A file, mapped into memory: only the pages that are used are read.

    Attributes:
        stamp: changes when the file does.
        size: the size in bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            self.stamp: tuple[int, ...] = stamp(found)
            self.size: int = found.st_size
            # A private mapping: torch needs a writable buffer, and writes to it never reach the file.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if self.size else None

    def read(self, start: int, end: int) -> memoryview | bytearray:
        assert self._map is not None
        if self._map.size() < end:  # a read would end the process with SIGBUS
            raise ValueError(f"{self.path} was cut to {self._map.size()} bytes after it was opened")
        return memoryview(self._map)[start:end]

    def advise(self, start: int, end: int, needed: bool) -> None:
        """Tell the kernel whether bytes are needed now, or no longer."""
        first = start - start % mmap.PAGESIZE
        if self._map and end > first and sys.platform == "linux":
            self._map.madvise(mmap.MADV_WILLNEED if needed else mmap.MADV_DONTNEED, first, end - first)


def stamp(found: os.stat_result) -> tuple[int, ...]:
    """Return numbers of a file that change when the file does."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def in_threads(work: Callable[[K], R], items: Iterable[K], threads: int = THREADS) -> list[R]:
    """Call `work` on each item in several threads, for work that releases the GIL: file I/O, copies and zlib.

    `concurrent.futures` isn't used because it accepts no work while the interpreter waits at exit for a background
    save.
    """
    todo = list(items)
    results: dict[int, R] = {}
    errors: dict[int, Exception] = {}
    numbers = iter(range(len(todo)))
    lock = threading.Lock()

    def run() -> None:
        while not errors:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                results[number] = work(todo[number])
            except Exception as error:  # raised again below
                errors[number] = error

    helpers = [threading.Thread(target=run) for _ in range(min(threads, len(todo)) - 1)]
    for helper in helpers:
        helper.start()
    run()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(len(todo))]
