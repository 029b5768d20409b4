"""The rows of attention in the table of `bench/cases.py`: one for each mask, a ring, and the merge of its blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.protocol import FORWARD, Draw, Function, Kernel, Peer, Shape, always, imported, in_float32, needs_cuda, plain
from mpcore.kernels.attention import attention, attention_backward, attention_merge, attention_reference


def first(function: Callable[..., tuple[Tensor, Tensor]]) -> Function:
    """The output of attention, as peers return it, without the log-sum-exp."""
    return lambda **given: function(**given)[0]


def sdpa(query: Tensor, key: Tensor, value: Tensor, **mask: Any) -> Tensor:
    """torch's own, in our order of dimensions."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **mask).transpose(1, 2)


def pinned(backend: SDPBackend) -> Peer:
    """torch's own by one backend, which on CUDA only some have."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(query, key, value, is_causal=True)

    return needs_cuda(lambda shape: run, "a backend of CUDA")


def seen(i: Tensor, j: Tensor, s: Shape) -> Tensor:
    """Whether query i sees key j: causal, within the window and the document of a shape that has them."""
    length = s["T"] // s.get("documents", 1)
    return (i >= j) & (i - j < s.get("window", s["T"])) & (i // length == j // length)


def sdpa_masked(shape: Shape) -> Function:
    """torch's own with a mask as a tensor."""

    def run(query: Tensor, key: Tensor, value: Tensor, **mask: Any) -> Tensor:
        i = torch.arange(query.shape[1], device=query.device)
        return sdpa(query, key, value, attn_mask=seen(i[:, None], i[None], shape))

    return run


def flex(shape: Shape) -> Function:
    """FlexAttention, compiled, its mask made beforehand."""
    causal = not shape.keys() & {"window", "documents"}
    of_pair: Any = (lambda b, h, i, j: i >= j) if causal else lambda b, h, i, j: seen(i, j, shape)
    mask = create_block_mask(of_pair, None, None, shape["T"], shape["T"], device="cuda")
    attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)  # or an error: never run as it is

    def run(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = attend(q, k, v, block_mask=mask, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    return run


def flash4(f: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """FA4's, which returns its lse too."""
    out = f(query, key, value, causal=True)
    return out[0] if isinstance(out, tuple) else out


def products(s: Shape, b: int) -> tuple[float, float]:
    """Two products forward and five backward, of the pairs that the mask leaves; half of T x T if it is causal."""
    T = s["T"] // s.get("documents", 1)
    window = min(s.get("window", T), T)
    pairs = s.get("documents", 1) * (window * T - window * (window - 1) / 2)
    once = 2.0 * s["B"] * s["H"] * s["K"] * (pairs if "window" in s or "documents" in s else T * T / 2)
    return 2 * once, 7 * once


FLEX = needs_cuda(flex, "compiled for CUDA only")
CAUSAL = Kernel(
    "attention", {"query": "B T H K", "key": "B T Hkv K", "value": "B T Hkv K"},
    first(attention), first(attention_reference),
    {
        "SDPA": always(functools.partial(sdpa, is_causal=True)),
        "SDPA flash": pinned(SDPBackend.FLASH_ATTENTION),
        "SDPA cuDNN": pinned(SDPBackend.CUDNN_ATTENTION),
        "SDPA efficient": pinned(SDPBackend.EFFICIENT_ATTENTION),
        "FlexAttention": FLEX,
        "FA4": imported("flash_attn.cute:flash_attn_func", flash4),
    },
    products,
    [{"B": 2, "T": t, "H": 32, "Hkv": h, "K": 128} for t, h in ((2048, 32), (8192, 32), (8192, 8))],
    {"B": 2, "T": 13, "H": 4, "Hkv": 2, "K": 16}, unit="TFLOP/s", check={"B": 1, "T": 2048},
)  # fmt: skip
LONG = [{"B": 1, "T": t, "H": 32, "Hkv": 32, "K": 128} for t in (8192, 2048)]


def masked(name: str, extra: Shape, toy: Shape, option: str, draw: Draw) -> Kernel:
    """Make a row of another mask, beside SDPA with the mask as a tensor and FlexAttention with it compiled.

    Args:
        name: of the row.
        extra, toy: sizes of the mask, besides those of `LONG`, and without CUDA.
        option: of `attention`, which `draw` makes of the shape.
    """
    return replace(
        CAUSAL, name=name, tensors={**CAUSAL.tensors, option: draw}, peers={"SDPA": sdpa_masked, "FlexAttention": FLEX},
        shapes=[{**s, **extra} for s in LONG], toy={"B": 1, "T": 12, "H": 4, "Hkv": 4, "K": 16, **toy},
        check={"H": 4, "Hkv": 4},
    )  # fmt: skip


class Ring(torch.autograd.Function):
    """One rank of a ring over 8 ranks. Nothing is sent: all blocks of keys lie here, and each is met, merged and led
    back through as the ring does it. Every query sees every key, so that one call of torch's own is the same function.
    """

    RANKS = 8

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, impl: str | None = None) -> Tensor:
        """Merged in float32, block after block."""
        ctx.impl = impl
        wide, merged = torch.promote_types(query.dtype, torch.float32), None
        for k, v in zip(key.chunk(Ring.RANKS, 1), value.chunk(Ring.RANKS, 1), strict=True):
            part = attention(query, k, v, causal=False, out_dtype=wide, impl=impl)
            merged = part if merged is None else attention_merge(*merged, *part)
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
        for k, v in zip(key.chunk(Ring.RANKS, 1), value.chunk(Ring.RANKS, 1), strict=True):
            how = {"causal": False, "out_dtype": wide, "impl": ctx.impl}
            of_block = attention_backward(grad, query, k, v, output, lse, **how)
            dq += of_block[0]
            parts.append([x.to(query.dtype) for x in of_block[1:]])
        dk, dv = (torch.cat(each, 1) for each in zip(*parts, strict=True))
        return dq.to(query.dtype), dk, dv, None


def ring_products(s: Shape, b: int) -> tuple[float, float]:
    """Two products forward and five backward, of the queries of one rank."""
    once = 2.0 * s["H"] * s["K"] * s["T"] * (s["T"] // Ring.RANKS)
    return 2 * once, 7 * once


MERGE = Kernel(
    "attention_merge",
    {"output": in_float32(torch.randn, "B", "T", "H", "K"), "lse": in_float32(torch.randn, "B", "H", "T"),
     "other": "B T H K", "other_lse": in_float32(torch.randn, "B", "H", "T")},
    attention_merge, functools.partial(attention_merge, impl="reference"),
    plain(functools.partial(attention_merge, impl="reference")),
    lambda s, b: (s["B"] * s["T"] * s["H"] * ((8 + b) * s["K"] + 12), 0),
    [{"B": 1, "T": 16384, "H": 8, "K": 128}], {"B": 1, "T": 5, "H": 2, "K": 24}, passes=(FORWARD,), check={"T": 1024},
)  # fmt: skip
ATTENTION = [
    CAUSAL,
    masked("attention, window", {"window": 1024}, {"window": 5}, "window", lambda s, like: s["window"]),
    masked("attention, documents", {"documents": 8}, {"documents": 3}, "cu_seqlens", lambda s, like: torch.arange(
        0, s["T"] + 1, s["T"] // s["documents"], dtype=torch.int32, device=like["device"])),  # of one length
    replace(  # at 50, as in Gemma 2
        CAUSAL, name="attention, soft cap", tensors={**CAUSAL.tensors, "softcap": lambda s, like: 50.0},
        peers=plain(first(attention_reference)), shapes=LONG,
    ),
    Kernel(
        "ring attention",
        {"query": lambda s, like: torch.randn(1, s["T"] // Ring.RANKS, s["H"], s["K"], **like),
         "key": "1 T Hkv K", "value": "1 T Hkv K"},
        Ring.apply, lambda query, key, value: attention_reference(query, key, value, causal=False)[0],
        {
            "SDPA": always(sdpa),
            "mpcore, torch's kernels": always(lambda query, key, value: Ring.apply(query, key, value, "torch")),
            "mpcore, one block": always(lambda query, key, value: attention(query, key, value, causal=False)[0]),
        },
        ring_products, [{"T": 131072, "H": 8, "Hkv": 8, "K": 128}], {"T": 64, "H": 4, "Hkv": 2, "K": 16},
        unit="TFLOP/s", check={"T": 4096},
        slack=4,  # of float32, eight blocks merged in float32 round eight times
    ),
]  # fmt: skip
