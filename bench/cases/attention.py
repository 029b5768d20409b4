"""Attention, a row for each mask: causal beside every backend of torch's, each pinned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.protocol import Function, Inputs, Kernel, NotHereError, Shape, always, compiled, imported
from mpcore.kernels.attention import attention, attention_reference


def inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """query [B, T, H, K], key and value [B, T, Hkv, K]."""
    B, T, H, Hkv, K = (shape[name] for name in ("B", "T", "H", "Hkv", "K"))
    heads = {"query": H, "key": Hkv, "value": Hkv}
    return {name: torch.randn(B, T, h, K, dtype=dtype, device=device) for name, h in heads.items()}


def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The output, as peers return it."""
    return attention(query, key, value)[0]


def reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same of the reference."""
    return attention_reference(query, key, value)[0]


def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """torch's own, in our order of dimensions."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def pinned(backend: SDPBackend):
    """torch's own by one backend, which on CUDA only some have."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(query, key, value)

    def make(shape: Shape) -> Function:
        if not torch.cuda.is_available():
            raise NotHereError("a backend of CUDA")
        return run

    return make


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """FlexAttention's way to say so."""
    return i >= j


def flex(shape: Shape, mask_mod: Function = causal) -> Function:
    """FlexAttention, compiled, its mask made beforehand."""
    if not torch.cuda.is_available():
        raise NotHereError("compiled for CUDA only")
    mask = create_block_mask(mask_mod, None, None, shape["T"], shape["T"], device="cuda")
    attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)  # or an error: never run as it is

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = attend(q, k, v, block_mask=mask, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    return run


def flash4(f) -> Function:
    """FA4's, which returns its lse too."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = f(query, key, value, causal=True)
        return out[0] if isinstance(out, tuple) else out

    return run


def pairs(s: Shape) -> float:
    """Return how many keys all queries of a head see."""
    T, window, documents = s["T"], s.get("window", s["T"]), s.get("documents", 1)
    T, window = T // documents, min(window, T // documents)
    return documents * (window * T - window * (window - 1) / 2)


def cost(s: Shape, b: int) -> tuple[float, float]:
    """Two products forward and five backward, of the pairs that the mask leaves; half of T x T if it is causal."""
    once = 2.0 * s["B"] * s["H"] * s["K"] * (pairs(s) if "window" in s or "documents" in s else s["T"] * s["T"] / 2)
    return 2 * once, 7 * once


CAUSAL = Kernel(
    "attention",
    inputs,
    ours,
    reference,
    {
        "SDPA": always(sdpa),
        "SDPA flash": pinned(SDPBackend.FLASH_ATTENTION),
        "SDPA cuDNN": pinned(SDPBackend.CUDNN_ATTENTION),
        "SDPA efficient": pinned(SDPBackend.EFFICIENT_ATTENTION),
        "FlexAttention": flex,
        "FA4": imported("flash_attn.cute", "flash_attn_func", flash4),
    },
    cost=cost,
    shapes=[
        *({"B": 2, "T": t, "H": 32, "Hkv": 32, "K": 128} for t in (2048, 8192)),
        {"B": 2, "T": 8192, "H": 32, "Hkv": 8, "K": 128},
    ],
    toy={"B": 2, "T": 13, "H": 4, "Hkv": 2, "K": 16},
    unit="TFLOP/s",
    check={"B": 1, "T": 2048},
)


def masked(name: str, extra: Shape, toy: Shape, options: Callable[[Shape, Tensor], dict[str, Any]]) -> Kernel:
    """Make a row of another mask, beside SDPA with the mask as a tensor and FlexAttention with it compiled.

    Args:
        name: of the row.
        extra: sizes of the mask, besides those of `SHAPES`.
        toy: sizes without CUDA.
        options: of `attention`, from the shape and the query, which gives the device.
    """
    shapes = [{**shape, **extra} for shape in SHAPES]

    def ends(query: Tensor) -> Shape:
        return next(s for s in (toy, *shapes) if s["T"] == query.shape[1])  # the check keeps T

    def run(f: Function) -> Function:
        return lambda query, key, value: f(query, key, value, **options(ends(query), query))[0]

    def seen(i: Tensor, j: Tensor, s: Shape) -> Tensor:
        length = s["T"] // s.get("documents", 1)
        return (i >= j) & (i - j < s.get("window", s["T"])) & (i // length == j // length)

    def sdpa_mask(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        i = torch.arange(query.shape[1], device=query.device)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        mask = seen(i[:, None], i[None], ends(query))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    def flex_mask(s: Shape) -> Function:
        return flex(s, lambda b, h, i, j: seen(i, j, s))

    peers = {"SDPA": always(sdpa_mask), "FlexAttention": flex_mask}
    return replace(
        CAUSAL, name=name, ours=run(attention), reference=run(attention_reference), peers=peers,
        shapes=shapes, toy=toy, check={"H": 4, "Hkv": 4},
    )  # fmt: skip


def window(s: Shape, query: Tensor) -> dict[str, Any]:
    """A sliding window."""
    return {"window": s["window"]}


def documents(s: Shape, query: Tensor) -> dict[str, Any]:
    """Packed documents of one length."""
    step = s["T"] // s["documents"]
    return {"cu_seqlens": torch.arange(0, s["T"] + 1, step, dtype=torch.int32, device=query.device)}


def capped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Scores capped at 50, as in Gemma 2, in plain torch."""
    return attention_reference(query, key, value, softcap=50.0)[0]


SHAPES = [{"B": 1, "T": t, "H": 32, "Hkv": 32, "K": 128} for t in (8192, 2048)]
TOY = {"B": 1, "T": 12, "H": 4, "Hkv": 4, "K": 16}
MASKS = [
    CAUSAL,
    masked("attention, window", {"window": 1024}, TOY | {"window": 5}, window),
    masked("attention, documents", {"documents": 8}, TOY | {"documents": 3}, documents),
    replace(
        CAUSAL, name="attention, soft cap", reference=capped,
        ours=lambda query, key, value: attention(query, key, value, softcap=50.0)[0],
        peers={"eager": always(capped), "torch.compile": compiled(capped)}, shapes=SHAPES,
    ),
]  # fmt: skip
