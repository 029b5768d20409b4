"""Rotary positions of a packed projection: 8192 tokens, 32 query heads and 8 key heads of 128."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bench.kernels.protocol import Inputs, Kernel, Shape, always, compare, compiled, imported
from mpcore.kernels.rope import rope, rope_reference


def inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """q and k as views of one projection [B, T, (H + 2 Hkv) K]; cos and sin [T, K/2]."""
    B, T, H, Hkv, K = (shape[name] for name in ("B", "T", "H", "Hkv", "K"))
    packed = torch.randn(B, T, H + 2 * Hkv, K, dtype=dtype, device=device)
    rates = 10000.0 ** (-torch.arange(0, K, 2, device=device, dtype=torch.float32) / K)
    angles = torch.arange(T, device=device)[:, None] * rates
    return {"q": packed[:, :, :H], "k": packed[:, :, H : H + Hkv], "cos": angles.cos(), "sin": angles.sin()}


def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As models write it: the halves swapped, one negated."""
    c, s = (torch.cat((table, table), -1)[:, None].to(q.dtype) for table in (cos, sin))

    def turn(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * c + torch.cat((-right, left), -1) * s

    return turn(q), turn(k)


def liger(f):
    """Liger's takes [B, H, T, K] and whole tables."""

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        c, s = (torch.cat((table, table), -1)[None].to(q.dtype) for table in (cos, sin))
        q, k = f.apply(q.transpose(1, 2), k.transpose(1, 2), c, s)
        return q.transpose(1, 2), k.transpose(1, 2)

    return run


def cost(s: Shape, b: int) -> tuple[float, float]:
    """q and k read and written once a pass."""
    once = 2 * b * s["B"] * s["T"] * (s["H"] + s["Hkv"]) * s["K"]
    return once, 2 * once


ROPE = Kernel(
    "rope",
    inputs,
    rope,
    rope_reference,
    {
        "eager": always(eager),
        "torch.compile": compiled(eager),
        "Liger": imported("liger_kernel.ops.rope", "LigerRopeFunction", liger),
    },
    cost=cost,
    shapes=[{"B": 1, "T": 8192, "H": 32, "Hkv": 8, "K": 128}, {"B": 4, "T": 2048, "H": 32, "Hkv": 8, "K": 128}],
    toy={"B": 2, "T": 5, "H": 4, "Hkv": 2, "K": 16},
    constants=("cos", "sin"),
)


@pytest.mark.parametrize(("kernel", "shape", "dtype", "which"), ROPE.cases())
def test_rope(request, kernel, shape, dtype, which) -> None:
    """Right, and on CUDA as fast as it is."""
    compare(request, kernel, shape, dtype, which)
