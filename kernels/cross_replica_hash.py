"""A hash of a tensor's bits that does not depend on the order of summation, to compare replicas.

    hash = sum over i of mix(w_i + i C)  mod 2^64

    w:      the bytes, eight to a word, zeros after the last; then one word more, the number of bytes

    mix(z): z ^= z >> 32, z *= K, z ^= z >> 32, z *= K, z ^= z >> 32

Each term of the sum depends on the place of its word, so a permuted tensor has another hash. Any split of the work
gives the same 64 bits, on any device. Equal hashes mean that replicas agree, unless someone constructed a collision.

Carter and Wegman, "Universal classes of hash functions" (1979), for sums of keyed terms; C is 2^64 over the golden
ratio, as in Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), figure 15; mix has their
shape, with shifts by 32, which are free where registers have 32 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._dispatch import operator, runs_triton
from ._rows import ceil_div, sum_all
from ._torch import has_no_values
from ._triton import launch, multiprocessors, tl, triton

BLOCK = 2048


def cross_replica_hash(x: Tensor, *, impl: str | None = None) -> Tensor:
    """Hash the bits of a tensor on its device; the host does not wait for the device.

    The hash reads the elements in logical order and does not depend on strides, and on shape and dtype only through the
    bytes. Zeros of different sign differ, and so do NaNs of different bits.

    Args:
        x: any shape and dtype, dense.
        impl: `"triton"`, `"reference"`, or `None` to choose by the device of `x`.

    Returns:
        `[]` int64.

    Raises:
        ValueError: `x` is sparse or quantized, or `impl` can't run here.
    """
    if x.layout != torch.strided or x.is_quantized:
        raise ValueError(f"x is {x.layout}{' and quantized' if x.is_quantized else ''}; only dense bits can be hashed")
    x = x.detach()
    runs = runs_triton(impl, x, "cross_replica_hash", any_dtype=True, n=x.numel())
    return _hash_op(x) if runs else cross_replica_hash_reference(x)


def cross_replica_hash_reference(x: Tensor) -> Tensor:
    """`cross_replica_hash` in plain torch."""
    data = _bytes(x.detach())
    size = data.new_tensor([data.numel()], dtype=torch.int64)
    words = torch.cat([data, data.new_zeros(-data.numel() % 8)]).view(torch.int64)
    z = torch.cat([words, size]) + torch.arange(words.numel() + 1, device=x.device) * _signed(0x9E3779B97F4A7C15)
    for _ in range(2):  # int64 wraps as uint64 does; only the shift must drop the sign
        z = (z ^ (z >> 32 & 0xFFFFFFFF)) * _signed(0xD6E8FEB86659FD93)
    return (z ^ (z >> 32 & 0xFFFFFFFF)).sum()


def _signed(word: int) -> int:
    return word - (word >> 63 << 64)


def _bytes(x: Tensor) -> Tensor:
    """Return the bytes of `x` in logical order, `[n]`, starting at a multiple of 8; copies only if it must."""
    x = x.resolve_conj().resolve_neg().contiguous()
    data = x.as_strided((x.numel(),), (1,)).view(torch.uint8)  # one element may be contiguous with any stride
    return data.clone() if data.storage_offset() % 8 or data.data_ptr() % 8 else data


@operator("cross_replica_hash(Tensor x) -> Tensor hash")
def _hash_op(x: Tensor) -> Tensor:
    total = x.new_empty((), dtype=torch.int64)
    if has_no_values(x):
        return total
    data = _bytes(x)
    size = data.numel()
    words = data[: size - size % 8].view(torch.int64)
    programs = max(1, min(ceil_div(words.numel(), BLOCK), 8 * multiprocessors(x.device)))
    partials = words.new_empty(programs)
    launch(
        _partials_kernel, (programs, 1, 1), num_warps=4,
        words_ptr=words, bytes_ptr=data, partials_ptr=partials, PAIRS=size // 16, SIZE=size, BLOCK=BLOCK,
    )  # fmt: skip
    return sum_all(partials, total)


@triton.jit
def _mix(word, place):
    z = word.to(tl.uint64, bitcast=True) + place.to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 32)) * 0xD6E8FEB86659FD93
    z = (z ^ (z >> 32)) * 0xD6E8FEB86659FD93
    return (z ^ (z >> 32)).to(tl.int64, bitcast=True)


@triton.jit
def _partials_kernel(words_ptr, bytes_ptr, partials_ptr, PAIRS, SIZE, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    W = tl.cast(PAIRS, tl.int64) * 2  # an even number, so that a load takes two words at once
    total = tl.zeros((BLOCK,), tl.int64)
    for start in tl.range(program.to(tl.int64) * BLOCK, W, tl.num_programs(0).to(tl.int64) * BLOCK, num_stages=3):
        place = start + tl.arange(0, BLOCK)
        word = tl.load(words_ptr + place, mask=place < W, other=0, eviction_policy="evict_first")
        total += tl.where(place < W, _mix(word, place), 0)
    partial = tl.sum(total, 0)
    if program == 0:
        size = tl.cast(SIZE, tl.int64)
        place = W + tl.arange(0, 2)[:, None]
        byte = tl.arange(0, 8)[None, :]
        rest = tl.load(bytes_ptr + place * 8 + byte, mask=place * 8 + byte < size, other=0).to(tl.int64)
        word = tl.sum(rest << (byte * 8), 1, keep_dims=True)
        partial += tl.sum(tl.sum(tl.where(place * 8 < size, _mix(word, place), 0), 0), 0)
        partial += _mix(size, tl.cdiv(size, 8))
    tl.store(partials_ptr + program, partial)
