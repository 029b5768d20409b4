"""Causal attention beside every backend of torch's, each pinned."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.kernels.protocol import Function, Inputs, Kernel, NotHereError, Shape, always, compare, imported
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


def flex(shape: Shape) -> Function:
    """FlexAttention, compiled, its mask made beforehand."""
    if not torch.cuda.is_available():
        raise NotHereError("compiled for CUDA only")
    mask = create_block_mask(causal, None, None, shape["T"], shape["T"], device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)  # or an error: never run as it is

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = compiled(q, k, v, block_mask=mask, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    return run


def flash4(f) -> Function:
    """FA4's, which returns its lse too."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = f(query, key, value, causal=True)
        return out[0] if isinstance(out, tuple) else out

    return run


def cost(s: Shape, b: int) -> tuple[float, float]:
    """Two products forward and five backward, of the lower half."""
    once = 2.0 * s["B"] * s["H"] * s["K"] * s["T"] * s["T"] / 2
    return 2 * once, 7 * once


ATTENTION = Kernel(
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
        {"B": 2, "T": 8192, "H": 32, "Hkv": 32, "K": 64},
    ],
    toy={"B": 2, "T": 13, "H": 4, "Hkv": 2, "K": 16},
    unit="TFLOP/s",
    check={"B": 1, "T": 2048},
)


@pytest.mark.parametrize(("kernel", "shape", "dtype", "which"), ATTENTION.cases())
def test_attention(request, kernel, shape, dtype, which) -> None:
    """Right, and on CUDA as fast as it is."""
    compare(request, kernel, shape, dtype, which)
