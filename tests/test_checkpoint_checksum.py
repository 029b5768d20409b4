"""The checksum of a checkpoint's tensors, by its definition."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest

from mpcore.checkpoint import tensor_file as checkpoint_format
from mpcore.checkpoint.tensor_file import ROWS, WORDS, checksum

SIZE = 2 * 8 * WORDS * ROWS + 5 * 8 * WORDS + 4099  # two whole groups, one of five rows, and bytes that fill no row


def slowly(data: bytes, words: int, rows: int) -> int:
    """The definition, in Python's integers."""
    found = list(struct.unpack(f"<{len(data) // 8}Q", data[: len(data) // 8 * 8]))
    whole = len(found) // words * words
    seen = b""
    for first in range(0, whole, words * rows):
        group = found[first : min(first + words * rows, whole)]
        seen += struct.pack(f"<{words}Q", *(sum(group[column::words]) % 2**64 for column in range(words)))
    return zlib.crc32(seen + data[8 * whole :])


@pytest.mark.parametrize(("words", "rows"), [(3, 2), (5, 3), (1, 1), (WORDS, ROWS)])
def test_it_is_the_crc_of_the_sums_and_of_the_rest_aligned_or_not(monkeypatch, words, rows):
    monkeypatch.setattr(checkpoint_format, "WORDS", words)
    monkeypatch.setattr(checkpoint_format, "ROWS", rows)
    data = np.random.default_rng(0).bytes(SIZE)
    for size in (SIZE,) if words == WORDS else (*range(40), 160, 239, 241):
        want = slowly(data[:size], words, rows)
        for shift in (0, 1, 4):
            assert checksum(memoryview(bytes(shift) + data)[shift : shift + size]) == want, (size, shift)
