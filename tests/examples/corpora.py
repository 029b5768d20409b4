"""Small corpora for the tests of the example."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from examples.gpt.indexed_dataset import IndexedDatasetWriter


def write(prefix: Path | str, documents: Iterable[Sequence[int]], dtype: str = "uint16") -> str:
    """Write documents of these tokens, and return their prefix."""
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)
