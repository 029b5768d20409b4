"""Compare the code and the data files that the ranks use."""

from __future__ import annotations

import hashlib
import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def code_versions(*folders: str | os.PathLike[str]) -> dict[str, str]:
    """Return a hash of each source file of mpcore and of `folders`, and the versions of Python and its packages.

    Pass the result to `check_same("code", code_versions(...))`: its error names the files that differ between ranks.

    Args:
        folders: folders with your own source files. Their subfolders are included.

    Raises:
        ValueError: if two folders with the same name hold different files with the same name.
    """
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("numpy", "triton", "einops"):  # each can change what a step computes
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    for folder in map(Path, (Path(__file__).parents[2], *folders)):
        for parent, _, files in sorted(os.walk(folder, followlinks=True)):  # mpcore/kernels may be a link
            for path in (Path(parent, file) for file in sorted(files) if file.endswith(".py")):
                name = f"{folder.name}/{path.relative_to(folder)}"
                digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
                if found.setdefault(name, digest) != digest:
                    raise ValueError(
                        f"two of the folders are called {folder.name}, and each has a {path.relative_to(folder)} of "
                        f"its own: give the folder that holds both"
                    )
    return found


def file_versions(*paths: str | os.PathLike[str], ends: int = 2**16) -> dict[str, str]:
    """Return the size of each file and a hash of its first and last bytes, for `check_same("data", ...)`.

    Args:
        paths: the files.
        ends: the number of bytes to hash at each end of a file. A change between the ends that keeps the size is not
            detected.

    Returns:
        The size and hash of each file by its path relative to the folder that all files share. So ranks may keep this
        folder at different locations.
    """
    found, folder = {}, os.path.commonpath([Path(path).absolute().parent for path in paths]) if paths else ""
    for path in map(Path, paths):
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(file.read(ends))
            file.seek(max(size - ends, 0))
            digest.update(file.read(ends))
        found[os.path.relpath(path, folder)] = f"{size} bytes, {digest.hexdigest()[:12]}"
    return found
