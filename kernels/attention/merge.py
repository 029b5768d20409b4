"""Merge attention over two sets of keys by their log-sum-exps, in one pass over the outputs.

    m = log(e^lse + e^lse'),  output = e^(lse - m) output + e^(lse' - m) output'

It has no gradient: the backward pass of each set of keys reads the merged pair.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._checks import check_shapes
from .._dispatch import operator, runs_triton
from .._math import exp
from .._rows import by_heads, ceil_div, next_power_of_2
from .._triton import launch, tl, triton


def attention_merge(
    output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, *, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """Merge the last queries' attention over other keys into attention over some keys, in place.

    Args:
        output, lse: contiguous `[B, T, H, V]` and `[B, H, T]`, in float32 or float64; both are changed.
        other, other_lse: `[B, t, H, V]` and `[B, H, t]`, of the last t queries. A query that sees none of the other
            keys has log-sum-exp -inf there.
        impl: `"triton"`, `"reference"`, or `None` to choose. No GPU has timed the kernel: without `impl` it's torch.

    Returns:
        `(output, lse)`.

    Raises:
        ValueError: shapes don't go together, or `impl` can't run here.
    """
    check_shapes(output=(output, "B T H V"), lse=(lse, "B H T"))
    check_shapes(output=(output[:, : other.shape[1]], "B t H V"), other=(other, "B t H V"), lse=(other_lse, "B H t"))
    if runs_triton(impl, output, "attention_merge"):
        _merge_op(output, lse, other, other_lse)
        return output, lse
    first = lse.shape[2] - other_lse.shape[2]
    share = (other_lse - lse[..., first:]).sigmoid().masked_fill(other_lse == -torch.inf, 0)
    output[:, first:].lerp_(other.to(output.dtype), share.transpose(1, 2).unsqueeze(-1))
    lse[..., first:] = torch.logaddexp(lse[..., first:], other_lse)
    return output, lse


@operator("attention_merge(Tensor(a!) output, Tensor(b!) lse, Tensor other, Tensor other_lse) -> ()")
def _merge_op(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Iterator[None]:
    yield
    (B, t, H, V), T, block_v = other.shape, output.shape[1], next_power_of_2(other.shape[3])
    block_m = max(2048 // block_v, 1)
    if other.numel() == 0:
        return
    launch(
        _merge_kernel, (ceil_div(B * t * H, block_m), 1, 1), num_warps=4, output_ptr=output, lse_ptr=lse,
        other_lse_ptr=other_lse.contiguous(), **by_heads(other=other), M=B * t * H, first=T - t, T=T, t=t, H=H, V=V,
        BLOCK_M=block_m, BLOCK_V=block_v,
    )  # fmt: skip


@triton.jit
def _merge_kernel(
    output_ptr, lse_ptr, other_ptr, other_lse_ptr, other_batch, other_token, other_head, M, first, T, t,
    H: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    live, head, token, batch = rows < M, rows % H, rows // H % t, rows // H // t
    lse_ptr += (batch * H + head) * T + first + token
    old = tl.load(lse_ptr, mask=live, other=0.0)
    new = tl.load(other_lse_ptr + (batch * H + head) * t + token, mask=live, other=0.0)
    most = tl.maximum(old, new)
    most = tl.where(most == float("-inf"), 0.0, most)  # no key at all: both terms are 0
    added = exp(new - most)
    total = exp(old - most) + added
    lse = tl.where(total == 0.0, float("-inf"), most + tl.log(tl.where(total == 0.0, 1.0, total)))
    cols = tl.arange(0, BLOCK_V)[None, :]
    mask = live & (cols < V)
    output_ptr += ((batch * T + first + token) * H + head) * V + cols
    other_ptr += batch * other_batch + token * other_token + head * other_head + cols
    output = tl.load(output_ptr, mask=mask, other=0.0)
    share = added / tl.where(total == 0.0, 1.0, total)
    output += share * (tl.load(other_ptr, mask=mask, other=0.0).to(tl.float32) - output)
    tl.store(output_ptr, output, mask=mask)
    tl.store(lse_ptr, lse, mask=live)
