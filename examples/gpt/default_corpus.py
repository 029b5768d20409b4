"""A corpus that every machine has: the source of Python's standard library."""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import secrets
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator

from examples.gpt.indexed_dataset import IndexedDataset, IndexedDatasetWriter, smallest_dtype
from examples.gpt.tokenizer import ByteTokenizer, Tokenizer, encode_document


def default_corpus(cache_dir: str | os.PathLike[str] | None = None, tokenizer: Tokenizer | None = None) -> str:
    """Build a corpus of Python's standard library, one document a file, or find it in the cache.

    Many processes may call this at once: each builds in its own folder, and the first to rename it wins.

    Args:
        cache_dir: where to keep it; None: $XDG_CACHE_HOME/mpcore or ~/.cache/mpcore, or a temporary folder if that
            cannot be written.
        tokenizer: None: bytes.

    Returns:
        The prefix, for `IndexedDataset`.

    Raises:
        ValueError: this Python has no source files, or no folder can be written.
    """
    tokenizer = tokenizer or ByteTokenizer()
    root = sysconfig.get_paths()["stdlib"]
    files = list(_stdlib_files(root))
    if not files:
        raise ValueError(f"{root}: 0 source files of the standard library found; prepare another corpus")
    listing = "\n".join(f"{path} {os.path.getsize(os.path.join(root, path))}" for path in files)
    digest = hashlib.blake2b(f"{tokenizer.fingerprint}\n{listing}".encode(), digest_size=8).hexdigest()
    name = f"stdlib-{platform.python_version()}-{digest}"

    faults = []
    for folder in [os.fspath(cache_dir)] if cache_dir is not None else _cache_folders():
        try:
            os.makedirs(folder, exist_ok=True)
            # A damaged copy stays in place, for a process may be reading it; the next free name is taken.
            for attempt in itertools.count():
                home = os.path.join(folder, f"{name}-{attempt}" if attempt else name)
                prefix = os.path.join(home, "corpus")
                if not os.path.exists(home):
                    _build_corpus(home, root, files, tokenizer)
                    return prefix
                if _is_corpus(prefix, tokenizer):
                    return prefix
        except OSError as error:
            faults.append(f"{folder}: {error.strerror}")
    raise ValueError(f"the corpus cannot be kept ({'; '.join(faults)}); pass a cache_dir that can be written")


def _stdlib_files(root: str) -> Iterator[str]:
    """Relative paths of the standard library's modules, sorted, without tests and installed packages."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped]
        relative = os.path.relpath(folder, root)
        found += [os.path.normpath(os.path.join(relative, name)) for name in names if name.endswith(".py")]
    return (path for path in sorted(found) if os.path.isfile(os.path.join(root, path)))


def _cache_folders() -> list[str]:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    user = os.getuid() if hasattr(os, "getuid") else 0
    return [os.path.join(base, "mpcore"), os.path.join(tempfile.gettempdir(), f"mpcore-{user}")]


def _build_corpus(home: str, root: str, files: list[str], tokenizer: Tokenizer) -> None:
    """Builds the corpus in a folder of its own and renames it to home, unless another process came first."""
    building = f"{home}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    os.mkdir(building)
    try:
        writer = IndexedDatasetWriter(os.path.join(building, "corpus"), smallest_dtype(tokenizer.vocab_size))
        with writer:
            for path in files:
                with open(os.path.join(root, path), "rb") as file:
                    content = file.read()
                try:
                    text = content.decode("utf-8")
                except UnicodeDecodeError:
                    continue
                if text:
                    writer.add_document(encode_document(tokenizer, text))
        IndexedDataset(writer.prefix).check_tokens(tokenizer.vocab_size)
        try:
            os.rename(building, home)
        except OSError:
            if not os.path.exists(home):
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _is_corpus(prefix: str, tokenizer: Tokenizer) -> bool:
    try:
        IndexedDataset(prefix).check_tokens(tokenizer.vocab_size)
    except ValueError:
        return False
    return True
