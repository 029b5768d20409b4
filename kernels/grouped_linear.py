"""Linear layers of many experts in one call: rows come expert by expert, and each group has its own weight.

    y[r] = W[e(r)] x[r]
    dx[r] = W[e(r)]^T dy[r],  dW[e] = sum over the rows of e of dy[r] x[r]^T

How many rows each expert has stands in device memory and is never read by the host, so the call can be captured in a
CUDA graph.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply each group of rows by its expert's weight.

    Args:
        x: `[R, D]`, the rows of expert 0 first.
        weight: `[E, F, D]`.
        counts: `[E]` integers, the rows of each expert; their sum is at most R.

    Returns:
        `[R, F]`; rows past those of the last expert are zero.
    """
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2] or counts.shape != weight.shape[:1]:
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and counts {tuple(counts.shape)} are not [R, D], "
            f"[E, F, D] and [E]"
        )
    return grouped_linear_reference(x, weight, counts)


def grouped_linear_reference(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """`grouped_linear` in plain torch, under torch's own autograd: a loop over experts, which reads their counts."""
    sizes = counts.tolist()
    groups = x.split([*sizes, len(x) - sum(sizes)])
    products = [F.linear(group, w) for group, w in zip(groups, weight.unbind(), strict=False)]
    return torch.cat([*products, groups[-1].new_zeros(len(groups[-1]), weight.shape[1])])
