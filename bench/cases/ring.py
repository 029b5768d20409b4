"""What one rank computes of a ring over 8 ranks, beside one attention call of the same queries, keys and FLOPs.

Nothing is sent: all blocks of keys lie here, and each is met, merged and led back through as the ring does it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from bench.protocol import Inputs, Kernel, Shape, always
from mpcore.kernels.attention import attention, attention_backward, attention_reference
from mpcore.layers.attention.ring import merge

RANKS = 8


class Ring(Function):
    """Every query sees every key, so that one call of torch's own is the same function."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Merged in float32, block after block."""
        wide, merged = torch.promote_types(query.dtype, torch.float32), None
        for k, v in zip(key.chunk(RANKS, 1), value.chunk(RANKS, 1), strict=True):
            part = attention(query, k, v, causal=False, out_dtype=wide)
            merged = part if merged is None else merge(*merged, *part)
        assert merged is not None
        output = merged[0].to(query.dtype)
        ctx.save_for_backward(query, key, value, output, merged[1])
        return output

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        """Each block's terms, from the merged output and log-sum-exp."""
        query, key, value, output, lse = ctx.saved_tensors
        wide = torch.promote_types(query.dtype, torch.float32)
        dq, parts = torch.zeros_like(query, dtype=wide), []
        for k, v in zip(key.chunk(RANKS, 1), value.chunk(RANKS, 1), strict=True):
            of_block = attention_backward(grad, query, k, v, output, lse, causal=False, out_dtype=wide)
            dq += of_block[0]
            parts.append([x.to(query.dtype) for x in of_block[1:]])
        dk, dv = (torch.cat(each, 1) for each in zip(*parts, strict=True))
        return dq.to(query.dtype), dk, dv


def inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """query [1, T/8, H, K] of one rank, key and value [1, T, Hkv, K] of all."""
    T, H, Hkv, K = (shape[name] for name in ("T", "H", "Hkv", "K"))
    sizes = {"query": (1, T // RANKS, H, K), "key": (1, T, Hkv, K), "value": (1, T, Hkv, K)}
    return {name: torch.randn(size, dtype=dtype, device=device) for name, size in sizes.items()}


def reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """All keys at once."""
    return attention_reference(query, key, value, causal=False)[0]


def whole(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """All keys at once, by our kernel: what the blocks cost."""
    return attention(query, key, value, causal=False)[0]


def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """All keys at once, by torch."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


def cost(s: Shape, b: int) -> tuple[float, float]:
    """Two products forward and five backward."""
    once = 2.0 * s["H"] * s["K"] * s["T"] * (s["T"] // RANKS)
    return 2 * once, 7 * once


RING = Kernel(
    "ring attention",
    inputs,
    Ring.apply,
    reference,
    {"SDPA": always(sdpa), "mpcore, one block": always(whole)},
    cost=cost,
    shapes=[{"T": 131072, "H": 8, "Hkv": 8, "K": 128}],
    toy={"T": 64, "H": 4, "Hkv": 2, "K": 16},
    unit="TFLOP/s",
    check={"T": 4096},
    slack=4,  # of float32, eight blocks merged in float32 round eight times
)
