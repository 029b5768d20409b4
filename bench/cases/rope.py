"""Rotary positions of a packed projection: 8192 tokens, 32 query heads and 8 key heads of 128."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.protocol import Function, Inputs, Kernel, Shape, always, compiled, imported
from mpcore.kernels.rope import rope_qkv, rope_reference

GROUP = 4  # query heads to a key head


def inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """One projection [B, T, (H + 2 Hkv) K] of queries, keys and values; cos and sin [T, K/2]."""
    B, T, H, Hkv, K = (shape[name] for name in ("B", "T", "H", "Hkv", "K"))
    rates = 10000.0 ** (-torch.arange(0, K, 2, device=device, dtype=torch.float32) / K)
    angles = torch.arange(T, device=device)[:, None] * rates
    qkv = torch.randn(B, T, (H + 2 * Hkv) * K, dtype=dtype, device=device)
    return {"qkv": qkv, "cos": angles.cos(), "sin": angles.sin()}


def heads(qkv: Tensor, cos: Tensor) -> tuple[int, int]:
    """Those of the queries and of the keys."""
    Hkv = qkv.shape[2] // (2 * cos.shape[1] * (GROUP + 2))
    return GROUP * Hkv, Hkv


def ours(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Read where they lie; the gradient is packed again."""
    return rope_qkv(qkv, *heads(qkv, cos), cos, sin)


def of_views(turn: Callable[..., Any]) -> Function:
    """What turns queries and keys, given views of the projection; autograd packs the gradient."""

    def run(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        H, Hkv = heads(qkv, cos)
        q, k, v = qkv.unflatten(2, (H + 2 * Hkv, -1)).split([H, Hkv, Hkv], 2)
        return *turn(q, k, cos, sin), v

    return run


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

    return of_views(run)


def cost(s: Shape, b: int) -> tuple[float, float]:
    """q and k read and written once forward; backward the values' gradient too, which goes to its place."""
    head = 2 * b * s["B"] * s["T"] * s["K"]
    return head * (s["H"] + s["Hkv"]), head * (2 * s["H"] + 3 * s["Hkv"])


ROPE = Kernel(
    "rope",
    inputs,
    ours,
    of_views(rope_reference),
    {
        "eager": always(of_views(eager)),
        "torch.compile": compiled(of_views(eager)),
        "Liger": imported("liger_kernel.ops.rope", "LigerRopeFunction", liger),
    },
    cost=cost,
    shapes=[{"B": 1, "T": 8192, "H": 32, "Hkv": 8, "K": 128}, {"B": 4, "T": 2048, "H": 32, "Hkv": 8, "K": 128}],
    toy={"B": 2, "T": 5, "H": 8, "Hkv": 2, "K": 16},
    constants=("cos", "sin"),
)
