"""The hash of a tensor, which reads it once."""

from __future__ import annotations

import pytest
import torch

from bench.kernels.protocol import FORWARD, Inputs, Kernel, Shape, always, compare, compiled
from mpcore.kernels.cross_replica_hash import cross_replica_hash, cross_replica_hash_reference


def inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """x [n]."""
    return {"x": torch.randn(shape["n"], dtype=dtype, device=device)}


HASH = Kernel(
    "cross_replica_hash",
    inputs,
    cross_replica_hash,
    cross_replica_hash_reference,
    {"eager": always(cross_replica_hash_reference), "torch.compile": compiled(cross_replica_hash_reference)},
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
