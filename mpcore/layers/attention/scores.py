"""Attention whose scores have more than one run of keys says: masks, additive biases, ALiBi and sinks.

    z = softcap(scale q k^T) + bias,  p = e^z / (e^sink + sum e^z) over the keys that a query sees

Source: ALiBi, Press et al. 2022 (arXiv:2108.12409); sinks, Xiao et al. 2023 (arXiv:2309.17453), learned for each head
as in GPT-OSS (arXiv:2508.10925), section 2.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from mpcore.layers.module import ParallelModule, constant, input_error
from mpcore.sharding.declare import cut

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mpcore.layers.module import LayerOptions


class AttentionSinks(ParallelModule):
    """One learned logit for each head, 0 at first, that takes part in the softmax and has no value.

    Args:
        num_heads: H, logical, sharded over tp.
        options: `LayerOptions`.

    Example:
        >>> sinks = mpcore.layers.attention.AttentionSinks(2)
        >>> sinks(torch.ones(1, 3, 2, 4), torch.zeros(1, 2, 3))[0, 0, 0]  # half of each head's weight is the sink's
        tensor([0.5000, 0.5000, 0.5000, 0.5000], grad_fn=<SelectBackward0>)
    """

    weight: Tensor

    def __init__(self, num_heads: int, **options: Unpack[LayerOptions]) -> None:
        super().__init__(**options)
        self.declare("weight", (num_heads,), constant(0.0), shard=cut(num_heads, self.tp, 0))

    def forward(self, y: Tensor, lse: Tensor) -> Tensor:
        """Attention [B, T, H, V] without a sink and its log-sum-exp [B, H, T] -> attention with it."""
        share = torch.sigmoid(lse.transpose(1, 2) - self.weight.to(lse.dtype))
        return (y * share.unsqueeze(-1)).to(y.dtype)


def alibi_bias(heads: range, num_heads: int, queries: range, keys: int, like: Tensor) -> Tensor:
    """[len(heads), len(queries), keys] of ALiBi: minus the distance of query and key, times the slope of the head.

    Args:
        heads: of all `num_heads`, whose slopes are 2^(-8/n), 2^(-16/n), ... for n heads, a power of two; otherwise
            those of the power below, and then every other slope of the power above.
        queries: their places among the keys.
        keys: how many.
        like: gives device and dtype.
    """
    below = 2 ** int(math.log2(num_heads))
    exponents = [8 * (i + 1) / below if i < below else 4 * (2 * (i - below) + 1) / below for i in heads]
    wide = torch.promote_types(like.dtype, torch.float32)
    place = torch.arange(keys, device=like.device, dtype=wide)
    distance = (place[queries.start : queries.stop, None] - place).abs()
    # One product for each head: a tensor of slopes would be copied to the GPU each time.
    return torch.stack([distance * -(2.0**-exponent) for exponent in exponents]).to(like.dtype)


def scored_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: AttentionSinks | None = None,
) -> Tensor:
    """Attention by torch's own, or written out where that lacks a soft cap or sinks; in memory T S.

    Args:
        q, k, v: [B, T, H, K], [B, S, Hkv, K] and [B, S, Hkv, V]; H is a multiple of Hkv.
        mask: bool [T, S], [B, T, S] or [B, 1, S], True where a query sees a key.
        bias: [H, T, S] or [B, H, T, S], added to the scores.
        scale, softcap: as of `mpcore.kernels.attention.attention`.
        sinks: of these heads.

    Returns:
        [B, T, H, V]; 0, without a gradient, where a query sees no key.
    """
    if mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(1)  # the same of all heads
    blind = None if mask is None else ~mask.any(-1, keepdim=True)
    if mask is not None and blind is not None:
        mask = mask | blind  # a softmax over no key may be NaN: these see all, and are zeroed after
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
    """Refuse a mask that isn't of `rows` samples, `queries` and `keys`."""
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
    """Refuse a mask of numbers."""
    if mask.dtype != torch.bool:
        raise input_error(
            f"the mask is of {mask.dtype}, which torch would add to the scores: give mask.bool(), or add it as `bias`"
        )


def check_bias(bias: Tensor, rows: int, heads: tuple[int, int], queries: int, keys: int) -> None:
    """Refuse a bias that is neither of all heads nor of this rank's; `heads` are both numbers."""
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
