"""The hash of a tensor, which reads it once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.protocol import FORWARD, Inputs, Kernel, Shape, always, compare, compiled
from mpcore.kernels.cross_replica_hash import cross_replica_hash, cross_replica_hash_reference


def inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """x [n]."""
    return {"x": torch.randn(shape["n"], dtype=dtype, device=device)}


def plain(x: Tensor) -> Tensor:
    """The reference of bytes that begin at a multiple of eight, which nothing that is compiled can ask."""

    def mix(z: Tensor) -> Tensor:
        for _ in range(2):
            z = (z ^ (z >> 32 & 0xFFFFFFFF)) * (0xD6E8FEB86659FD93 - 2**64)
        return z ^ (z >> 32 & 0xFFFFFFFF)

    step = 0x9E3779B97F4A7C15 - 2**64
    words = F.pad(x.view(torch.uint8), (0, -x.nbytes % 8)).view(torch.int64)
    last = words.new_full((), x.nbytes) + words.new_full((), words.numel()) * step
    return mix(words + torch.arange(words.numel(), device=x.device) * step).sum() + mix(last)


HASH = Kernel(
    "cross_replica_hash",
    inputs,
    cross_replica_hash,
    cross_replica_hash_reference,
    {"eager": always(cross_replica_hash_reference), "torch.compile": compiled(plain)},
    cost=lambda s, b: (b * s["n"], 0),
    shapes=[{"n": 2**24}, {"n": 2**28}],
    toy={"n": 101},
    passes=(FORWARD,),
    in_float64=False,
)


@pytest.mark.parametrize(("kernel", "shape", "dtype", "which"), HASH.cases())
def test_cross_replica_hash(request, kernel, shape, dtype, which) -> None:
    """Right, and on CUDA as fast as it is."""
    compare(request, kernel, shape, dtype, which)
