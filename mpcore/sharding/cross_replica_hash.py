"""A hash of a tensor's bits that does not depend on the order of summation, to compare replicas.

    hash = sum over i of mix(w_i + i C)  mod 2^64

    w:      the bytes, eight to a word, zeros after the last; then one word more, the number of bytes

    mix(z): z ^= z >> 32, z *= K, z ^= z >> 32, z *= K, z ^= z >> 32

Each term of the sum depends on the place of its word, so a permuted tensor has another hash. Any split of the work
gives the same 64 bits, on any device. It is plain torch, in pieces that fit into a GPU's cache: replicas are compared
far too seldom for a kernel to matter. Equal hashes mean that replicas agree, unless someone constructed a collision.

Carter and Wegman, "Universal classes of hash functions" (1979), for sums of keyed terms; C is 2^64 over the golden
ratio, as in Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), figure 15; mix has their
shape.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

WORDS = 2**20  # of a piece: 8 MB, and as much for each intermediate result


def cross_replica_hash(x: Tensor) -> Tensor:
    """Hash the bits of a tensor on its device; the host does not wait for the device.

    The hash reads the elements in logical order and does not depend on strides, and on shape and dtype only through the
    bytes. Zeros of different sign differ, and so do NaNs of different bits.

    Returns:
        `[]` int64.
    """
    if x.layout != torch.strided or x.is_quantized:
        raise ValueError(f"x is {x.layout}{' and quantized' if x.is_quantized else ''}; only dense bits can be hashed")
    data = _bytes(x.detach())
    size, total, first = data.numel(), data.new_zeros((), dtype=torch.int64), 0
    rest = F.pad(data[size - size % 8 :], (0, -size % 8)).view(torch.int64)
    end = torch.cat([rest, data.new_tensor([size], dtype=torch.int64)])
    for words in (*data[: size - size % 8].view(torch.int64).split(WORDS), end):
        place = torch.arange(first, first + len(words), device=x.device)
        z = words + place * _signed(0x9E3779B97F4A7C15)
        for _ in range(2):  # int64 wraps as uint64 does; only the shift must drop the sign
            z = (z ^ (z >> 32 & 0xFFFFFFFF)) * _signed(0xD6E8FEB86659FD93)
        total += (z ^ (z >> 32 & 0xFFFFFFFF)).sum()
        first += len(words)
    return total


def _signed(word: int) -> int:
    return word - (word >> 63 << 64)


def _bytes(x: Tensor) -> Tensor:
    """Return the bytes of `x` in logical order, `[n]`, starting at a multiple of 8; copies only if it must."""
    x = x.resolve_conj().resolve_neg().contiguous()
    data = x.as_strided((x.numel(),), (1,)).view(torch.uint8)  # one element may be contiguous with any stride
    return data.clone() if data.storage_offset() % 8 or data.data_ptr() % 8 else data
