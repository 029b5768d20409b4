"""Tokens to the experts that they chose, and back: a row for each (token, choice), all rows of an expert together.

    y[row[t, k]] = x[t]                              permute
    out[t] = sum over k of weight[t, k] y[row[t, k]] unpermute

Rows are stable: expert by expert, in an expert by (t, k). A choice that is no expert (a masked token, a full or a
remote expert) has no row. The map of rows is made on the device and nothing is read back: the number of rows is a bound that
the caller gives, and rows that no choice has are zero. Each of the two is the other's backward, a gather both times: no
atomics, so results repeat bit for bit.

Source: Gale et al. 2022, "MegaBlocks" (arXiv:2211.15841), section 5.2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def moe_rows(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Give each choice its row: expert by expert, in an expert in the order of (token, choice).

    Args:
        experts: `[T, K]` integers, the experts that each token chose; those outside `[0, num_experts)` are none.
        num_experts: E.

    Returns:
        `(row [T, K], counts [E])`, int32: the row of each choice, or -1, and the rows of each expert.
    """
    return moe_rows_reference(experts, num_experts)


def moe_rows_reference(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """`moe_rows` in plain torch, on any device without waiting for it."""
    flat = experts.reshape(-1).long()
    key = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    ordered, order = torch.sort(key, stable=True)
    places = torch.arange(len(flat), device=flat.device)
    row = torch.empty_like(flat).scatter_(0, order, places)
    row = torch.where(key < num_experts, row, -1)
    bounds = torch.searchsorted(ordered, torch.arange(num_experts + 1, device=flat.device))
    return row.view(experts.shape).int(), bounds.diff().int()


def moe_permute(x: Tensor, row: Tensor, rows: int) -> Tensor:
    """Copy each token to the rows of its choices.

    Args:
        x: `[T, D]`.
        row: `[T, K]`, no row twice; negative ones, and those not below `rows`, are none.
        rows: R, how many rows there are.

    Returns:
        `[R, D]`; rows of no choice are zero.
    """
    return moe_permute_reference(x, row, rows)


def moe_permute_reference(x: Tensor, row: Tensor, rows: int) -> Tensor:
    """`moe_permute` in plain torch, under torch's own autograd."""
    T, K = row.shape
    slot = torch.where((row >= 0) & (row < rows), row, rows).reshape(-1).long()
    source = slot.new_full((rows + 1,), T)  # no token
    source = source.scatter_(0, slot, torch.arange(T * K, device=x.device) // max(K, 1))[:rows]
    return torch.cat([x, x.new_zeros(1, x.shape[1])])[source]


def moe_unpermute(y: Tensor, row: Tensor, weight: Tensor | None = None) -> Tensor:
    """Sum for each token the rows of its choices, times their weights.

    Args:
        y: `[R, D]`.
        row: `[T, K]`, as `moe_permute` takes it.
        weight: `[T, K]`, or `None` for ones.

    Returns:
        `[T, D]` in the dtype of `y`, summed in float32 (float64 for float64) in the order of k.
    """
    return moe_unpermute_reference(y, row, weight)


def moe_unpermute_reference(y: Tensor, row: Tensor, weight: Tensor | None = None) -> Tensor:
    """`moe_unpermute` in plain torch, under torch's own autograd."""
    exact = torch.promote_types(y.dtype, torch.float32)
    index = torch.where((row >= 0) & (row < len(y)), row, len(y)).long()
    chosen = torch.cat([y, y.new_zeros(1, y.shape[1])])[index].to(exact)  # [T, K, D]
    if weight is not None:
        chosen = chosen * weight.to(exact)[..., None]
    return chosen.sum(1).to(y.dtype)
