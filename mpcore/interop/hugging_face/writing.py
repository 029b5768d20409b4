"""Write a folder of safetensors files, with one tensor in memory at a time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mpcore.checkpoint.format import FileRecord
from mpcore.checkpoint.remote import store_of
from mpcore.checkpoint.tensor_file import write_tensors
from mpcore.interop.hugging_face.folder import INDEX

SHARD_BYTES = 5 * 10**9  # the default size limit of a file


def check_new(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists: it is not overwritten, so pass another folder")


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` when the block ends. After an error it is removed."""
    store = store_of(path)
    store.prepare(path)
    try:
        yield store.temporary(path)
        store.publish(path)
    except BaseException:
        store.discard(path)
        raise


def write_weights(folder: Path, likes: Mapping[str, Tensor], read: Callable[[str], Tensor], limit: int) -> None:
    """Write the safetensors files of a Hugging Face folder, by `write_files`, and an index if there are several."""
    written, where = write_files(
        folder, likes, read, limit,
        lambda i, n: f"model-{i + 1:05d}-of-{n:05d}.safetensors" if n > 1 else "model.safetensors",
    )  # fmt: skip
    if len(written) > 1:
        index = {key: file for key, (file, _) in sorted(where.items())}
        size = sum(like.nbytes for like in likes.values())
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": index})


def write_files(
    folder: Path, likes: Mapping[str, Tensor], read: Callable[[str], Tensor], limit: int,
    name: Callable[[int, int], str],
) -> tuple[dict[str, FileRecord], dict[str, tuple[str, int]]]:  # fmt: skip
    """Write tensors to files of at most `limit` bytes. A single larger tensor gets a file of its own.

    Args:
        read: returns the tensor of a key. It is called in the order of `likes`.
        name: returns the name of a file from its index and the number of files.
    """
    shards: list[list[str]] = [[]]
    total = 0
    for key, like in likes.items():
        if shards[-1] and total + like.nbytes > limit:
            shards.append([])
            total = 0
        shards[-1].append(key)
        total += like.nbytes
    files, where = {}, {}
    for i, keys in enumerate(shards):
        file = name(i, len(shards))
        files[file], sums = write_tensors(folder / file, {key: likes[key] for key in keys}, read)
        where |= {key: (file, sums[key]) for key in keys}
    return files, where


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    store_of(path).write(path, f"{json.dumps(values, indent=2)}\n".encode())
