"""Keep a model's tokenizer files, and the token ids of its config.json, through import, training and export."""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpcore.checkpoint import inspect
from mpcore.checkpoint.folders import resolve
from mpcore.interop.hugging_face.architectures import TOKENS
from mpcore.interop.hugging_face.config import read_json

FOLDER = "hugging_face"  # in a checkpoint
GENERATION = "generation_config.json"
_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", GENERATION,
)  # fmt: skip


@dataclass(frozen=True)
class ExtraFiles:
    """What is stored with a model's weights: fields of config.json, and files (tokenizer, generation_config.json).

    The fields are `model_type`, the token ids, and the maximum length if the run's sequences are shorter.
    """

    config: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def extra(self) -> dict[str, Any]:
        """The entry for `extra` in a checkpoint's manifest: the config and each file's CRC-32."""
        sums = {name: zlib.crc32(data) for name, data in self.files.items()}
        return {FOLDER: {"config": self.config, "files": sums}} if self.config or self.files else {}

    @property
    def beside(self) -> dict[str, bytes]:
        """The content of the files, by their path inside a checkpoint."""
        return {f"{FOLDER}/{name}": data for name, data in self.files.items()}

    def with_tokenizer(self, content: bytes | None, end_id: int, end_name: str | None = None) -> ExtraFiles:
        """Return what to store when the model trains with this tokenizer. It may be the tokenizer stored already.

        The result always has the id of the end-of-document token. Without it, transformers would use its architecture's
        default, and generation would not stop.

        Args:
            content: the content of the tokenizer.json. None: the tokenizer has no file.
            end_id, end_name: the token that ends a document. Without a name, only the model's own tokenizer is stored.
        """
        own = content == self.files.get("tokenizer.json")
        if own and "eos_token_id" in self.config:
            return self
        ids = {"bos_token_id": None, "eos_token_id": end_id}
        if own:
            return dataclasses.replace(self, config=ids | self.config)
        if content is None or end_name is None:
            return ExtraFiles(ids)
        settings = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end_name}, indent=2).encode()
        return ExtraFiles(ids, {"tokenizer.json": content, "tokenizer_config.json": settings})


def carried_by_hf(folder: str | os.PathLike[str], values: Mapping[str, Any]) -> ExtraFiles:
    """Read the tokenizer files of a Hugging Face folder, and the token ids of `values`, its config.json."""
    kept = {name: value for name, value in values.items() if name in TOKENS | {"model_type"}}
    return ExtraFiles(kept, _read_files(Path(folder)))


def carried_by_checkpoint(path: str | os.PathLike[str]) -> ExtraFiles:
    """Read the tokenizer files and token ids that are stored in a checkpoint of mpcore."""
    found = inspect(path).extra.get(FOLDER, {})
    return ExtraFiles(found.get("config", {}), _read_files(resolve(path) / FOLDER, found.get("files", {})))


def tokenizer_files(path: str | os.PathLike[str]) -> dict[str, bytes]:
    path = Path(path)
    if path.is_file() and not isinstance(read_json(path).get("model"), dict):
        raise ValueError(f"{path} is no tokenizer.json: it holds no model. Pass the folder of the tokenizer's files")
    found = {"tokenizer.json": path.read_bytes()} if path.is_file() else _read_files(path)
    if not found:
        raise ValueError(f"{path} is no tokenizer.json, and no folder with one of {', '.join(_FILES)}")
    return found


def _read_files(folder: Path, sums: Mapping[str, int] | None = None) -> dict[str, bytes]:
    """Read the files of a folder, by name. With `sums`, check each file against its CRC-32."""
    found = {name: (folder / name).read_bytes() for name in _FILES if (folder / name).is_file()}
    if sums is None:
        return found
    for name in _FILES:
        got, written = zlib.crc32(found[name]) if name in found else None, sums.get(name)
        if got is None and written is not None:
            raise ValueError(f"{folder / name} is missing")
        if got != written:
            raise ValueError(f"{folder / name} is damaged: its CRC-32 is {got:08x}, written was {written}")
    return found
