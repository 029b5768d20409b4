"""The table of all kernels: operator, inputs, reference in plain torch, peers, bytes or operations, and sizes.

`pytest bench` times its rows, and `bench.gpu_hour` checks and times them. The tests compile the same rows for GPUs that
are not there (`tests/kernels/compile_table.py`), and run them on a GPU (`tests/kernels/test_on_gpu.py`).
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.protocol import FORWARD, Draw, Function, Kernel, Peer, Shape, always, compiled, imported, needs_cuda
from mpcore.kernels import activation, adamw
from mpcore.kernels._router_linear import router_linear, router_linear_reference
from mpcore.kernels.attention import attention, attention_backward, attention_reference
from mpcore.kernels.dropout_add import dropout_add, dropout_add_reference
from mpcore.kernels.fp8_matmul import fp8_matmul
from mpcore.kernels.grouped_linear import grouped_linear, grouped_linear_reference
from mpcore.kernels.layer_norm import layer_norm, layer_norm_reference
from mpcore.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_rows, linear_log_prob
from mpcore.kernels.moe_permute import (
    moe_permute,
    moe_permute_reference,
    moe_rows,
    moe_unpermute,
    moe_unpermute_reference,
)
from mpcore.kernels.quantize_fp8 import BLOCK, Quantized, quantize_fp8, quantize_fp8_reference
from mpcore.kernels.rms_norm import rms_norm, rms_norm_reference
from mpcore.kernels.rope import rope_qkv, rope_reference
from mpcore.kernels.top_k import top_k, top_k_reference
from mpcore.layers.attention.ring import merge
from mpcore.layers.loss import vocab_parallel_cross_entropy

LIGER = "liger_kernel.transformers.functional"


def plain(eager: Function) -> dict[str, Peer]:
    """A function of plain torch, as it is and compiled."""
    return {"eager": always(eager), "torch.compile": compiled(eager)}


def rates(forward: str, both: str) -> Callable[[Shape, int], tuple[float, float]]:
    """Bytes of elements that move in `(forward, forward+backward)`, each a factor and names of sizes: `"5 M D"`."""

    def cost(s: Shape, b: int) -> tuple[float, float]:
        first, second = (b * int(f.split()[0]) * math.prod(s[n] for n in f.split()[1:]) for f in (forward, both))
        return first, second

    return cost


def ids(end: str, *sizes: str) -> Draw:
    """Draw whole numbers below a size."""
    return lambda s, like: torch.randint(s[end], [s[n] for n in sizes], device=like["device"])


def in_float32(draw: Callable[..., Tensor], *sizes: str) -> Draw:
    """Draw in float32, whatever the case's dtype."""
    return lambda s, like: draw([s[n] for n in sizes], device=like["device"])


def first(function: Callable[..., tuple[Tensor, Tensor]]) -> Function:
    """The output of attention, as peers return it, without the log-sum-exp."""
    return lambda **given: function(**given)[0]


# --- norms and activations --------------------------------------------------------------------------------------------


def eager_rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """torch's own, after an addition where there is a residual stream."""
    h = x if residual is None else x + residual
    y = F.rms_norm(h, weight.shape, weight, 1e-6)
    return y if residual is None else (y, h)


def applied_layer_norm(f: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """By a peer's autograd function."""
    return f.apply(x, weight, bias, 1e-5)


NORMS = [
    Kernel(
        "rms_norm", {"x": "M D", "weight": "D"}, rms_norm, rms_norm_reference,
        {
            **plain(eager_rms_norm),
            "Liger": imported("liger_kernel.ops.rms_norm:LigerRMSNormFunction",
                              lambda f, x, weight: f.apply(x, weight, 1e-6, 0.0, "llama", False)),
            "quack": imported("quack.rmsnorm:rmsnorm", lambda f, x, weight: f(x, weight, eps=1e-6)),
        },
        rates("2 M D", "5 M D"), [{"M": 8192, "D": d} for d in (2048, 4096, 16384)], {"M": 5, "D": 96},
    ),
    Kernel(
        "add_rms_norm", {"x": "M D", "weight": "D", "residual": "M D"}, rms_norm, rms_norm_reference,
        {
            **plain(eager_rms_norm),
            "Liger": imported("liger_kernel.ops.fused_add_rms_norm:LigerFusedAddRMSNormFunction",
                              lambda f, x, weight, residual: f.apply(x, residual, weight, 1e-6, 0.0, "llama", False)),
            "quack": imported("quack.rmsnorm:rmsnorm", lambda f, x, weight, residual: f(
                x, weight, residual=residual, eps=1e-6, prenorm=True)),
        },
        rates("4 M D", "8 M D"), [{"M": 8192, "D": 4096}, {"M": 8192, "D": 8192}], {"M": 5, "D": 96},
    ),
    Kernel(
        "layer_norm", {"x": "M D", "weight": "D", "bias": "D"}, layer_norm, layer_norm_reference,
        {
            **plain(lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, 1e-5)),
            "Liger": imported("liger_kernel.ops.layer_norm:LigerLayerNormFunction", applied_layer_norm),
            "apex": imported("apex.contrib.layer_norm.layer_norm:FastLayerNormFN", applied_layer_norm),
        },
        rates("2 M D", "5 M D"), [{"M": 8192, "D": d} for d in (4096, 5120, 8192)], {"M": 5, "D": 96},
    ),
]  # fmt: skip


def gated(act: Callable[[Tensor], Tensor]) -> Function:
    """The plain way to write a gated activation."""

    def eager(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return act(gate) * up

    return eager


def activation_row(name: str, eager: Function, width: int, size: int, liger: str = "") -> Kernel:
    """Inputs are read once and outputs written once; backward reads x and dy and writes dx."""
    peers = plain(eager)
    if liger:  # takes the halves apart
        peers["Liger"] = imported(f"liger_kernel.ops.{name}:{liger}", lambda f, x: f.apply(*x.chunk(2, -1)))
        module = f"megatron.core.fusions.fused_bias_{name}:bias_{name}_impl"  # without a bias
        peers["Megatron"] = imported(module, lambda f, x: f(x, None))
    return Kernel(
        name, {"x": f"M {width}F"}, getattr(activation, name), getattr(activation, f"{name}_reference"), peers,
        rates(f"{width + 1} M F", f"{3 * width + 2} M F"), [{"M": m, "F": size} for m in (8192, 2048)],
        {"M": 5, "F": 40},
    )  # fmt: skip


gelu_tanh = functools.partial(F.gelu, approximate="tanh")
ACTIVATIONS = [
    activation_row("swiglu", gated(F.silu), 2, 14336, "LigerSiLUMulFunction"),
    activation_row("geglu", gated(gelu_tanh), 2, 14336, "LigerGELUMulFunction"),
    activation_row("gelu", gelu_tanh, 1, 16384),
    activation_row("relu_squared", lambda x: F.relu(x).square(), 1, 16384),
]

# --- losses -----------------------------------------------------------------------------------------------------------


def wide(logits: Tensor) -> Tensor:
    """In float32, or float64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def eager_cross_entropy(logits: Tensor, target: Tensor, reduction: str = "sum") -> Tensor:
    """torch's own in at least float32."""
    return F.cross_entropy(wide(logits), target, reduction=reduction)


def loss_of_head(reduction: str) -> Function:
    """All logits at once."""
    return lambda x, weight, target, scale=None: eager_cross_entropy(x @ weight.t(), target, reduction)


def eager_log_prob(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """log p of each target, and the entropy."""
    log_p = wide(x @ weight.t()).log_softmax(-1)
    return log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def reduced(reduction: str) -> Callable[..., Tensor]:
    """A peer's loss of logits, or of a head; it has no weights of tokens."""

    def call(f: Any, target: Tensor, scale: Any = None, **inputs: Tensor) -> Tensor:
        return f(*inputs.values(), target, reduction=reduction)

    return call


CROSS_ENTROPY = Kernel(
    "cross_entropy", {"logits": "M V", "target": ids("V", "M")},
    functools.partial(vocab_parallel_cross_entropy, reduction="sum"), eager_cross_entropy,
    {
        **plain(eager_cross_entropy),
        "Liger": imported(f"{LIGER}:liger_cross_entropy", reduced("sum")),
        "quack": imported("quack.cross_entropy:cross_entropy", reduced("sum")),
        "Megatron": imported(
            "megatron.core.fusions.fused_cross_entropy:fused_vocab_parallel_cross_entropy",
            lambda f, logits, target: f(logits[:, None], target[:, None], torch.distributed.group.WORLD).sum(),
        ),
    },
    rates("1 M V", "3 M V"), [{"M": 8192, "V": v} for v in (128256, 16032)], {"M": 5, "V": 37}, check={"M": 1024},
)  # fmt: skip


def head_row(name: str, ours: Function, eager: Function, peers: Mapping[str, Peer], **more: Draw) -> Kernel:
    """One product, and three; those that backward makes again are no work that anybody asked for."""
    return Kernel(
        name, {"x": "M D", "weight": lambda s, like: torch.randn(s["V"], s["D"], **like) * s["D"] ** -0.5,
               "target": ids("V", "M"), **more},
        ours, eager, {**plain(eager), **peers},
        lambda s, b: (2.0 * s["M"] * s["D"] * s["V"], 6.0 * s["M"] * s["D"] * s["V"]),
        [{"M": 8192, "D": 4096, "V": v} for v in (128256, 32000)], {"M": 6, "D": 8, "V": 37},
        unit="TFLOP/s", check={"M": 1024}, constants=("scale",),
    )  # fmt: skip


HEADS = [
    head_row("linear_cross_entropy", linear_cross_entropy, loss_of_head("sum"), {
        "Liger": imported(f"{LIGER}:liger_fused_linear_cross_entropy", reduced("sum")),
        "quack": imported("quack.linear_cross_entropy:chunked_linear_cross_entropy", reduced("sum")),
        "cut-cross-entropy": imported("cut_cross_entropy:linear_cross_entropy", reduced("sum")),
    }, scale=in_float32(torch.ones, "M")),
    head_row("linear_cross_entropy_rows", linear_cross_entropy_rows, loss_of_head("none"), {
        "cut-cross-entropy": imported("cut_cross_entropy:linear_cross_entropy", reduced("none")),
    }),
    head_row("linear_log_prob", linear_log_prob, eager_log_prob, {
        "verl": imported("verl.utils.kernel.linear_cross_entropy:linear_cross_entropy",
                         lambda f, x, weight, target: f(x, weight, target, 1.0, "none")),
    }),
]  # fmt: skip

# --- attention, a row for each mask -----------------------------------------------------------------------------------


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

# --- rotary positions, dropout, experts, FP8, AdamW -------------------------------------------------------------------


def angle(turn: Callable[[Tensor], Tensor]) -> Draw:
    """Cosines or sines [T, K/2] of rotary positions."""

    def make(s: Shape, like: Mapping[str, Any]) -> Tensor:
        rates = 10000.0 ** (-torch.arange(0, s["K"], 2, device=like["device"], dtype=torch.float32) / s["K"])
        return turn(torch.arange(s["T"], device=like["device"])[:, None] * rates)

    return make


def of_views(rotate: Callable[..., Any]) -> Function:
    """What rotates queries and keys, given views of the projection; autograd packs the gradient."""

    def run(qkv: Tensor, num_heads: int, num_kv_heads: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = num_heads, num_kv_heads, num_kv_heads
        q, k, v = qkv.unflatten(2, (sum(heads), -1)).split(heads, 2)
        return *rotate(q, k, cos, sin), v

    return run


def eager_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """As models write it: the halves swapped, one negated."""
    c, s = (torch.cat((table, table), -1)[:, None].to(q.dtype) for table in (cos, sin))
    return [x * c + torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) * s for x in (q, k)]


def liger_rope(f: Any, **inputs: Any) -> Any:
    """Liger's takes [B, H, T, K] and whole tables."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        c, s = (torch.cat((table, table), -1)[None].to(q.dtype) for table in (cos, sin))
        return [x.transpose(1, 2) for x in f.apply(q.transpose(1, 2), k.transpose(1, 2), c, s)]

    return of_views(rotate)(**inputs)


def rope_bytes(s: Shape, b: int) -> tuple[float, float]:
    """q and k read and written once forward; backward the values' gradient too, which goes to its place."""
    head = 2 * b * s["B"] * s["T"] * s["K"]
    return head * (s["H"] + s["Hkv"]), head * (2 * s["H"] + 3 * s["Hkv"])


ROPE = Kernel(
    "rope",
    {
        "qkv": lambda s, like: torch.randn(s["B"], s["T"], (s["H"] + 2 * s["Hkv"]) * s["K"], **like),
        "num_heads": lambda s, like: s["H"], "num_kv_heads": lambda s, like: s["Hkv"],
        "cos": angle(torch.cos), "sin": angle(torch.sin),
    },
    rope_qkv, of_views(rope_reference),
    {**plain(of_views(eager_rope)), "Liger": imported("liger_kernel.ops.rope:LigerRopeFunction", liger_rope)},
    rope_bytes, [{"B": b, "T": 8192 // b, "H": 32, "Hkv": 8, "K": 128} for b in (1, 4)],
    {"B": 2, "T": 5, "H": 8, "Hkv": 2, "K": 16}, constants=("cos", "sin"),
)  # fmt: skip

DROPPED = 0.1
DROPOUT_ADD = Kernel(
    "dropout_add",
    {"x": "B T D", "residual": "B T D", "bias": "D",
     "samples": lambda s, like: torch.arange(s["B"], device=like["device"])},
    functools.partial(dropout_add, p=DROPPED, key=7), functools.partial(dropout_add_reference, p=DROPPED, key=7),
    {
        **plain(lambda x, residual, bias, samples: residual + F.dropout(x + bias, DROPPED)),  # with a mask of torch's
        "Megatron": imported(
            "megatron.core.fusions.fused_bias_dropout:get_bias_dropout_add",
            lambda f, x, residual, bias, samples: f(True, True)((x, bias), residual, DROPPED),
        ),
    },
    # backward reads dy and writes dx; the gradient of the residual is dy itself
    rates("3 B T D", "5 B T D"), [{"B": 4, "T": 2048, "D": 4096}, {"B": 4, "T": 2048, "D": 8192}],
    {"B": 2, "T": 5, "D": 24}, random=True,
)  # fmt: skip


def eager_permute(x: Tensor, row: Tensor, weight: Tensor) -> Tensor:
    """By index_select, as most models write it."""
    T, K = row.shape
    order = row.flatten().argsort()
    rows = x.index_select(0, order // K)
    back = rows.index_select(0, row.flatten()).view(T, K, -1)
    return (back * weight[..., None]).sum(1).to(x.dtype)


def chosen_rows(s: Shape, like: Mapping[str, Any]) -> Tensor:
    """The row of each of K choices [T, K]."""
    experts = torch.rand(s["T"], s["E"], device=like["device"]).topk(s["K"]).indices
    return moe_rows(experts, s["E"], impl="reference")[0]


MOE_PERMUTE = Kernel(
    "moe_permute", {"x": "T D", "row": chosen_rows, "weight": in_float32(torch.rand, "T", "K")},
    lambda x, row, weight: moe_unpermute(moe_permute(x, row, row.numel()), row, weight),
    lambda x, row, weight: moe_unpermute_reference(moe_permute_reference(x, row, row.numel()), row, weight),
    plain(eager_permute),
    # (1 + K) T D there and as much back; backward also reads the rows again for the gradient of the weights
    lambda s, b: (2 * b * (1 + s["K"]) * s["T"] * s["D"], b * (4 + 5 * s["K"]) * s["T"] * s["D"]),
    [{"T": 8192, "D": 4096, "K": 8, "E": 64}, {"T": 8192, "D": 2048, "K": 4, "E": 32}],
    {"T": 7, "D": 8, "K": 2, "E": 5},
)  # fmt: skip


def as_bytes(quantized: Any) -> tuple[Tensor, ...]:
    """Values as bytes, which can be compared, and scales of each direction that is wanted."""
    return tuple(held for q in quantized if q is not None for held in (q.values.view(torch.uint8), q.scales))


def torchao(columns: bool) -> Peer:
    """Its training kernels, one for each direction; its scales are no powers of two."""

    def make(shape: Shape) -> Function:
        module = importlib.import_module("torchao.prototype.blockwise_fp8_training.kernels")
        names = ["fp8_blockwise_act_quant_lhs", "fp8_blockwise_act_quant_transposed_lhs"][: 1 + columns]
        kernels = [getattr(module, f"triton_{name}", None) or getattr(module, name) for name in names]
        return lambda x: as_bytes(Quantized(*kernel(x, BLOCK)) for kernel in kernels)

    return needs_cuda(make)


def quantize_row(name: str, columns: bool) -> Kernel:
    """Of rows alone, or of columns too: each writes a byte for an element, and four for a block."""
    ours, eager = (
        lambda x, f=f, **how: as_bytes(f(x, **{"columns": columns, **how}))
        for f in (quantize_fp8, quantize_fp8_reference)
    )
    return Kernel(
        name, {"x": "M K"}, ours, eager, {**plain(eager), "torchao": torchao(columns)},
        lambda s, b: ((b + (1 + columns) * (1 + 4 / BLOCK)) * s["M"] * s["K"], 0),
        [{"M": 8192, "K": 8192}, {"M": 8192, "K": 4096}], {"M": 130, "K": 140}, passes=(FORWARD,), random=True,
    )  # fmt: skip


# --- products ---------------------------------------------------------------------------------------------------------


def product_row(
    name: str, tensors: Mapping[str, str | Draw], ours: Function, reference: Function, peer: str, other: Function,
    **more: Any,
) -> Kernel:  # fmt: skip
    """A product of M tokens, K inputs and N outputs, beside one peer."""
    return Kernel(
        name, tensors, ours, reference, {peer: always(other)}, lambda s, b: (2.0 * s["M"] * s["K"] * s["N"], 0),
        [{"M": 8192, "K": 4096, "N": 14336, "E": 8}], {"M": 256, "K": 128, "N": 128, "E": 2},
        unit="TFLOP/s", passes=(FORWARD,), check={"M": 1024}, **more,
    )  # fmt: skip


def added_product(x: Tensor, dy: Tensor, main: Tensor) -> Tensor:
    """A weight gradient that the product adds to the float32 main gradient by itself."""
    if not x.is_cuda:
        return main.addmm_(dy.t(), x)
    return torch.addmm(main, dy.t(), x, out_dtype=torch.float32, out=main)


def fp8_linear(x: Tensor, weight: Tensor, quantized: Quantized, impl: str | None = None) -> Tensor:
    """The input is quantized in each call, the weight once a step."""
    given = quantize_fp8(x, impl=impl)[0]
    assert given is not None
    return fp8_matmul(given, quantized, x.dtype, impl=impl)


def quantized_weight(s: Shape, like: Mapping[str, Any]) -> Any:
    """A weight in blocks of 128 x 128."""
    return quantize_fp8(torch.randn(s["N"], s["K"], **like), square=True, impl="reference")[0]


PRODUCTS = [
    product_row(
        "weight gradient", {"x": "M K", "dy": "M N", "main": in_float32(torch.randn, "N", "K")}, added_product,
        lambda x, dy, main: main.add_(wide(dy).t() @ wide(x)),
        "two passes", lambda x, dy, main: main.add_(dy.t() @ x), random=True, slack=4,  # sums of another order
    ),
    product_row(
        "FP8 linear", {"x": "M K", "weight": "N K", "quantized": quantized_weight}, fp8_linear,
        functools.partial(fp8_linear, impl="reference"),
        "bfloat16", lambda x, weight, quantized: x @ weight.t(), random=True, in_float64=False,
    ),
    product_row(
        "grouped linear",
        {"x": "M K", "weight": "E N K",
         "counts": lambda s, like: torch.full((s["E"],), s["M"] // s["E"], device=like["device"])},
        grouped_linear, grouped_linear_reference,
        "one by one", lambda x, weight, counts: torch.cat(
            [part @ w.t() for part, w in zip(x.chunk(len(weight)), weight, strict=True)]),
    ),
]  # fmt: skip

ROUTER = Kernel(
    "router logits", {"x": "T D", "weight": "E D"}, router_linear, router_linear_reference,
    {"float32 copies": always(router_linear_reference)},
    lambda s, b: (2.0 * s["T"] * s["D"] * s["E"], 6.0 * s["T"] * s["D"] * s["E"]),
    [{"T": 8192, "D": 2048, "E": 128}], {"T": 7, "D": 16, "E": 5}, unit="TFLOP/s",
)  # fmt: skip
CHOICE = Kernel(
    "top_k", {"scores": "T E", "k": lambda s, like: s["K"], "bias": "E"}, top_k, top_k_reference,
    plain(top_k_reference),
    lambda s, b: (b * s["T"] * s["E"] + 8 * s["T"] * s["K"], 0),
    [{"T": 8192, "E": 128, "K": 8}, {"T": 8192, "E": 256, "K": 8}], {"T": 7, "E": 5, "K": 2}, passes=(FORWARD,),
)  # fmt: skip
HOW, LR = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}, 1e-3


def step(*, impl: str | None = None, scale: Tensor | None = None, **state: Any) -> tuple[Tensor, ...]:
    """In place; what has changed as the result."""
    adamw.adamw_foreach([adamw.AdamWState(**state)], **HOW, scale=scale, impl=impl)
    return tuple(state[name] for name in ("param", "exp_avg", "exp_avg_sq", "master") if name in state)


plain_step = functools.partial(step, impl="reference")


def fused(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, master: Tensor, now: Tensor):
    """torch's fused step of the master weights, and a copy."""
    torch._fused_adamw_(
        *([master], [grad.float()], [exp_avg], [exp_avg_sq], [], [now[3].float()]),
        **{"lr": LR, "beta1": HOW["betas"][0], "beta2": HOW["betas"][1], "weight_decay": HOW["weight_decay"]},
        **{"eps": HOW["eps"], "amsgrad": False, "maximize": False},
    )
    param.copy_(master)
    return param, exp_avg, exp_avg_sq, master


def foreach(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, master: Tensor, now: Tensor):
    """The formula in torch's lists of tensors, as its default optimizer runs it, and a copy."""
    lr, correct1, correct2 = (now[i].float() for i in range(3))
    g = [grad.float()]
    torch._foreach_mul_([master], 1 - LR * HOW["weight_decay"])
    torch._foreach_lerp_([exp_avg], g, 1 - HOW["betas"][0])
    torch._foreach_mul_([exp_avg_sq], HOW["betas"][1])
    torch._foreach_addcmul_([exp_avg_sq], g, g, 1 - HOW["betas"][1])
    below = torch._foreach_sqrt([exp_avg_sq])
    torch._foreach_div_(below, correct2)
    torch._foreach_add_(below, HOW["eps"])
    torch._foreach_mul_(below, -correct1 / lr)
    torch._foreach_addcdiv_([master], [exp_avg], below)
    param.copy_(master)
    return param, exp_avg, exp_avg_sq, master


def master(s: Shape, like: Mapping[str, Any]) -> Tensor:
    """The same for each call: the weights are this one rounded."""
    generator = torch.Generator(like["device"]).manual_seed(2)
    return torch.randn(s["n"], device=like["device"], generator=generator)


ADAMW = Kernel(
    "adamw",  # of weights and gradients in bfloat16, with float32 master and moments: 28 bytes a parameter
    {
        "param": lambda s, like: master(s, like).to(like["dtype"]), "grad": "n",
        "exp_avg": in_float32(torch.randn, "n"), "exp_avg_sq": in_float32(torch.rand, "n"), "master": master,
        "now": lambda s, like: adamw.adamw_now(torch.tensor([10.0], device=like["device"]), LR, HOW["betas"])[0],
    },
    step, plain_step, {"foreach": always(foreach), "torch fused": always(fused), "torch.compile": compiled(plain_step)},
    lambda s, b: ((2 * b + 24) * s["n"], 0),  # reads gradient, master and moments; writes weight, master and moments
    [{"n": 2**26}, {"n": 10**9}], {"n": 100}, passes=(FORWARD,), check={"n": 2**24}, in_float64=False,
)  # fmt: skip

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        *(*NORMS[:2], CROSS_ENTROPY, *HEADS, *ACTIVATIONS, *ATTENTION, ROPE, NORMS[2], ADAMW, DROPOUT_ADD, MOE_PERMUTE),
        *(*PRODUCTS, ROUTER, CHOICE),
        *(quantize_row("quantize_fp8", False), quantize_row("quantize_fp8 both ways", True)),
    )
}
