"""Tokens to the rows of their experts and back."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.protocol import Inputs, Kernel, Shape, always, compiled
from mpcore.kernels.moe_permute import (
    moe_permute,
    moe_permute_reference,
    moe_rows,
    moe_unpermute,
    moe_unpermute_reference,
)


def inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """x [T, D], the row of each of K choices [T, K] and their weights [T, K]."""
    T, D, K, E = (shape[name] for name in ("T", "D", "K", "E"))
    experts = torch.rand(T, E, device=device).topk(K).indices
    return {
        "x": torch.randn(T, D, dtype=dtype, device=device),
        "row": moe_rows(experts, E, impl="reference")[0],
        "weight": torch.rand(T, K, device=device),
    }


def ours(x: Tensor, row: Tensor, weight: Tensor) -> Tensor:
    """There and back."""
    return moe_unpermute(moe_permute(x, row, row.numel()), row, weight)


def reference(x: Tensor, row: Tensor, weight: Tensor) -> Tensor:
    """The same in plain torch."""
    return moe_unpermute_reference(moe_permute_reference(x, row, row.numel()), row, weight)


def eager(x: Tensor, row: Tensor, weight: Tensor) -> Tensor:
    """By index_select, as most models write it."""
    T, K = row.shape
    order = row.flatten().argsort()
    rows = x.index_select(0, order // K)
    back = rows.index_select(0, row.flatten()).view(T, K, -1)
    return (back * weight[..., None]).sum(1).to(x.dtype)


MOE_PERMUTE = Kernel(
    "moe_permute",
    inputs,
    ours,
    reference,
    {"eager": always(eager), "torch.compile": compiled(eager)},
    # (1 + K) T D there and as much back; backward also reads the rows again for the gradient of the weights
    cost=lambda s, b: (2 * b * (1 + s["K"]) * s["T"] * s["D"], b * (4 + 5 * s["K"]) * s["T"] * s["D"]),
    shapes=[{"T": 8192, "D": 4096, "K": 8, "E": 64}, {"T": 8192, "D": 2048, "K": 4, "E": 32}],
    toy={"T": 7, "D": 8, "K": 2, "E": 5},
)
