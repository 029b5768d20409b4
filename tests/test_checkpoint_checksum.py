"""The checksum of a checkpoint's tensors: what it is, and what damage it must see."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest

from mpcore.checkpoint import tensor_file as checkpoint_format
from mpcore.checkpoint.tensor_file import ROWS, WORDS, checksum

GROUP = 8 * WORDS * ROWS
SIZE = 2 * GROUP + 5 * 8 * WORDS + 4099  # two whole groups, one of five rows, and bytes that fill no row


def of(kind: str) -> bytearray:
    """Data that sums might forget: like at every place, or gone when added up an even number of times."""
    words = SIZE // 8 + 1
    made = {
        "random": np.random.default_rng(0).integers(0, 2**64, words, np.uint64),
        "ones": np.ones(2 * words, np.float32),
        "minus zeros": np.full(words, -0.0),
        "counted": np.arange(2 * words, dtype=np.int32),
    }[kind]
    return bytearray(made.tobytes()[:SIZE])


KINDS = ["random", "ones", "minus zeros", "counted"]


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
    data = bytes(of("random"))
    for size in (SIZE,) if words == WORDS else (*range(40), 160, 239, 241):
        want = slowly(data[:size], words, rows)
        for shift in (0, 1, 4):
            assert checksum(memoryview(bytes(shift) + data)[shift : shift + size]) == want, (size, shift)


def sees(data: bytearray, start: int, size: int, damage: Callable[[bytes], bytes]) -> None:
    """Damage that changes the bytes must change the checksum."""
    view, old = memoryview(data), bytes(data[start : start + size])
    want = checksum(view)
    view[start : start + size] = damage(old)
    changed, found = bytes(view[start : start + size]) != old, checksum(view)
    view[start : start + size] = old
    assert (found != want) == changed, (start, size)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_seen_in_groups_of_the_size_in_use(kind):
    """A bit, a page of zeros or noise, a write that stopped; blocks that change places, begun anywhere."""
    data, draw = of(kind), random.Random(1)
    for bit in range(16):
        at = draw.choice([draw.randrange(SIZE // 8), (SIZE - 4099) // 8 + bit, ROWS * WORDS - 1 + bit])
        sees(data, 8 * at + bit // 8, 1, lambda old, bit=bit: bytes([old[0] ^ 1 << bit % 8]))
    for size in (512, 4096, 8 * WORDS):
        start = draw.randrange(SIZE - size)
        sees(data, start, size, lambda old: bytes(len(old)))
        sees(data, start, size, lambda old: draw.randbytes(len(old)))
    for start in (0, 8 * WORDS, GROUP, GROUP + 512, SIZE - 4099, SIZE - 1):
        sees(data, start, SIZE - start, lambda old: bytes(len(old)))
    for size in (512, 4096) if kind in ("random", "counted") else ():
        begin = 8 * draw.randrange(64)
        count = (SIZE - begin) // size
        one = draw.randrange(count)
        for other in {(one + by) % count for by in (1, ROWS, WORDS, 8 * WORDS // size, draw.randrange(count))} - {one}:
            low, high = sorted((one, other))
            span = (high - low + 1) * size
            sees(data, begin + low * size, span, lambda old, n=size: old[-n:] + old[n:-n] + old[:n])
    for distance in (8, 64, 8 * (WORDS - 1), GROUP, GROUP + 8) if kind == "random" else ():
        sees(data, 8 * WORDS, distance + 8, lambda old: old[-8:] + old[8:-8] + old[:8])


def test_every_bit_counts_where_all_can_be_tried(monkeypatch):
    monkeypatch.setattr(checkpoint_format, "WORDS", 3)
    monkeypatch.setattr(checkpoint_format, "ROWS", 5)
    data = of("random")[: 2 * 120 + 2 * 24 + 7]
    for at in range(len(data)):
        for bit in range(8):
            sees(data, at, 1, lambda old, bit=bit: bytes([old[0] ^ 1 << bit]))
