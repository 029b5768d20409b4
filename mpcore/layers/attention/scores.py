"""Attention with masks, additive biases, ALiBi or sinks, where a query does not simply see one run of keys.

    z = softcap(scale q k^T) + bias,  p = e^z / (e^sink + sum e^z) over the keys that a query sees

Source: ALiBi, Press et al. 2022 (arXiv:2108.12409); sinks, Xiao et al. 2023 (arXiv:2309.17453), learned for each head
as in GPT-OSS (arXiv:2508.10925), section 2.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from mpcore.layers.module import LayerOptions, ParallelModule, constant, input_error
from mpcore.sharding.declare import cut


class AttentionSinks(ParallelModule):
    """One learned logit per head, initialized to 0, that takes part in the softmax and has no value.

    Args:
        num_heads: H of the unsharded layer; the logits are sharded over tp.
        options: `LayerOptions`.

    Example:
        >>> sinks = mpcore.layers.attention.AttentionSinks(2)
        >>> sinks(torch.ones(1, 3, 2, 4), torch.zeros(1, 2, 3))[0, 0, 0]  # the sink gets half of each head's weight
        tensor([0.5000, 0.5000, 0.5000, 0.5000], grad_fn=<SelectBackward0>)
    """

    weight: Tensor

    def __init__(self, num_heads: int, **options: Unpack[LayerOptions]) -> None:
        super().__init__(**options)
        self.declare("weight", (num_heads,), constant(0.0), shard=cut(num_heads, self.tp, 0))

    def forward(self, y: Tensor, lse: Tensor) -> Tensor:
        """Add the sink to an attention result [B, T, H, V] computed without it, using its log-sum-exp [B, H, T]."""
        return (y * torch.sigmoid(lse.transpose(1, 2) - self.weight.to(lse.dtype)).unsqueeze(-1)).to(y.dtype)


def alibi_bias(heads: range, num_heads: int, queries: range, keys: int, like: Tensor) -> Tensor:
    """Return the ALiBi bias [len(heads), len(queries), keys]: minus the distance, times the head's slope.

    Args:
        num_heads: the number of heads n of the layer. If n is a power of two, the slopes are 2^(-8/n), 2^(-16/n), ...;
            otherwise the slopes of the next lower power, then every other slope of the next higher power.
        like: a tensor with the device and dtype of the result.
    """
    below = 2 ** int(math.log2(num_heads))
    exponents = [8 * (i + 1) / below if i < below else 4 * (2 * (i - below) + 1) / below for i in heads]
    place = torch.arange(keys, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
    distance = (place[queries.start : queries.stop, None] - place).abs()
    # Multiply head by head: a tensor of slopes would be copied to the GPU in each call.
    return torch.stack([distance * -(2.0**-exponent) for exponent in exponents]).to(like.dtype)


def scored_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None,
    scale: float | None = None, softcap: float | None = None, sinks: AttentionSinks | None = None,
) -> Tensor:  # fmt: skip
    """Compute attention with torch's kernel, or in plain torch operations for a soft cap or sinks. Needs O(T S) memory.

    Args:
        q, k, v: [B, T, H, K], [B, S, Hkv, K] and [B, S, Hkv, V]. H must be a multiple of Hkv.
        mask: bool [T, S], [B, T, S] or [B, 1, S], True if a query sees a key; None: all keys are seen.
        bias: [H, T, S] or [B, H, T, S], added to the scores.
        sinks: the `AttentionSinks` of these heads.

    Returns:
        [B, T, H, V]. A query that sees no key gets 0 and no gradient.
    """
    if mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(1)  # the same of all heads
    blind = None if mask is None else ~mask.any(-1, keepdim=True)
    if mask is not None and blind is not None:
        mask = mask | blind  # a softmax over no key may be NaN: let such queries see all keys, then zero the result
    bias = None if bias is None else bias.to(q.dtype)
    group = q.shape[2] // max(k.shape[2], 1)
    q, k, v = (rearrange(t, "b t h k -> b h t k") for t in (q, k, v))
    if softcap is None and sinks is None:
        added = mask if bias is None else bias if mask is None else bias.masked_fill(~mask, -math.inf)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=scale, enable_gqa=group > 1)
    else:
        wide = torch.promote_types(q.dtype, torch.float32)
        k, v = (t.repeat_interleave(group, 1) if group > 1 else t for t in (k, v))
        z = (q @ k.mT).to(wide) * (q.shape[-1] ** -0.5 if scale is None else scale)
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        z = z if bias is None else z + bias
        z = z if mask is None else z.masked_fill(~mask, -math.inf)
        y, lse = z.softmax(-1).to(v.dtype) @ v, z.logsumexp(-1)
        y = y if sinks is None else sinks(y.transpose(1, 2), lse).transpose(1, 2)
    return (y if blind is None else y.masked_fill(blind, 0)).transpose(1, 2)


def check_scores_mask(mask: Tensor, rows: int, queries: int, keys: int) -> None:
    """Raise ValueError if the mask's shape doesn't fit `rows` samples, `queries` and `keys`."""
    check_boolean(mask)
    shape = tuple(mask.shape)
    if (
        len(shape) not in (2, 3)
        or shape[-2:] not in ((queries, keys), (1, keys))
        or shape[:-2] not in ((), (1,), (rows,))
    ):
        raise input_error(
            f"mask {shape} is none of [{queries}, {keys}], [{rows}, {queries}, {keys}] and [{rows}, 1, {keys}], for "
            f"{rows} rows of {queries} queries and {keys} keys"
        )


def check_boolean(mask: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise input_error(
            f"the mask is of {mask.dtype}, which torch would add to the scores: give mask.bool(), or add it as `bias`"
        )


def check_bias(bias: Tensor, rows: int, heads: tuple[int, int], queries: int, keys: int) -> None:
    """Raise ValueError if a bias fits neither all heads nor this rank's heads. `heads` holds these two numbers."""
    shape = tuple(bias.shape)
    fits = (
        len(shape) in (3, 4)
        and shape[-3] in heads
        and shape[-2:] == (queries, keys)
        and shape[:-3] in ((), (1,), (rows,))
    )
    if not fits or not bias.is_floating_point():
        of = " or ".join(map(str, dict.fromkeys(heads)))
        raise input_error(
            f"bias {shape} of {bias.dtype} is no float [heads, {queries}, {keys}] or [{rows}, heads, {queries}, {keys}]"
            f" with {of} heads: expand a bias that all heads share"
        )
