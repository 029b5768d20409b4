"""Compare the code and the data that ranks run with."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import torch


def code_versions(*folders: str | os.PathLike[str]) -> dict[str, str]:
    """Return a hash of each source file of mpcore and of `folders`, and the versions of Python and torch.

    For `check_same("code", code_versions(...))`, which names the files that differ.

    Raises:
        ValueError: if folders of one name hold different files of one name.
    """
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for folder in map(Path, (Path(__file__).parents[1], *folders)):
        for parent, _, files in sorted(os.walk(folder, followlinks=True)):  # mpcore/kernels may be a link
            for path in (Path(parent, file) for file in sorted(files) if file.endswith(".py")):
                name = f"{folder.name}/{path.relative_to(folder)}"
                version = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
                if found.setdefault(name, version) != version:
                    raise ValueError(
                        f"two of the folders are called {folder.name}, and each has a {path.relative_to(folder)} of "
                        f"its own: give the folder that holds both"
                    )
    return found


def file_versions(*paths: str | os.PathLike[str], ends: int = 2**16) -> dict[str, str]:
    """Return the size of each file and a hash of its first and last bytes, for `check_same("data", ...)`.

    Args:
        paths: the files.
        ends: how many bytes at either end are hashed: a change between them that keeps the size is not seen.

    Returns:
        By path in the folder that all files share: ranks may keep that folder at different places.
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
