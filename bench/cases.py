"""The table of all kernels: operator, inputs, reference in plain torch, peers, bytes or operations, and sizes.

`pytest bench` times its rows, and `bench.gpu_hour` checks and times them. The tests compile the same rows for GPUs that
are not there (`tests/kernels/compile_table.py`), and run them on a GPU (`tests/kernels/test_on_gpu.py`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.attention_cases import ATTENTION, MERGE
from bench.protocol import (
    FORWARD,
    Draw,
    Function,
    Kernel,
    Peer,
    Shape,
    always,
    compiled,
    ids,
    imported,
    in_float32,
    needs_cuda,
    plain,
    rates,
)
from mpcore.kernels import activation, adamw
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
from mpcore.kernels.router import route, route_reference, router_linear, router_linear_reference, top_k, top_k_reference
from mpcore.layers.loss import vocab_parallel_cross_entropy

LIGER = "liger_kernel.transformers.functional"

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
    {"x": "B T D", "residual": "B T D", "samples": lambda s, like: torch.arange(s["B"], device=like["device"])},
    functools.partial(dropout_add, p=DROPPED, key=7), functools.partial(dropout_add_reference, p=DROPPED, key=7),
    {
        **plain(lambda x, residual, samples: residual + F.dropout(x, DROPPED)),  # with a mask of torch's
        "Megatron": imported(
            "megatron.core.fusions.fused_bias_dropout:get_bias_dropout_add",
            lambda f, x, residual, samples: f(True, True)((x, None), residual, DROPPED),
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


def chosen_by(logits_of: Function, choose: Function) -> Function:
    """A router in parts: logits, and normalized weights of the K best experts."""

    def run(x: Tensor, weight: Tensor, k: int) -> tuple[Tensor, Tensor]:
        logits = logits_of(x, weight)
        scores = logits.softmax(-1)
        weights = scores.gather(-1, choose(scores.detach(), k))
        return logits, weights / weights.sum(-1, keepdim=True)

    return run


ROUTER = Kernel(
    "route", {"x": "T D", "weight": "E D", "k": lambda s, like: s["K"]},
    lambda **given: route(**given)[::3], lambda **given: route_reference(**given)[::3],
    {
        "in parts": always(chosen_by(router_linear, top_k)),  # what runs without `impl`
        **plain(chosen_by(router_linear_reference, lambda scores, k: scores.topk(k).indices)),
    },
    # reads tokens and weights, writes logits and scores of all, ids and weights of the choices; backward twice as much
    lambda s, b: (n := b * s["D"] * (s["T"] + s["E"]) + s["T"] * (8.0 * s["E"] + 12 * s["K"]), 3 * n),
    [{"T": 8192, "D": 2048, "E": e, "K": 8} for e in (64, 128)], {"T": 7, "D": 16, "E": 5, "K": 2},
    check={"T": 64}, constants=("bias",), random=True,  # near ties fall either way
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
    step, plain_step, {"torch fused": always(fused), "torch.compile": compiled(plain_step)},
    lambda s, b: ((2 * b + 24) * s["n"], 0),  # reads gradient, master and moments; writes weight, master and moments
    [{"n": 2**26}, {"n": 10**9}], {"n": 100}, passes=(FORWARD,), check={"n": 2**24}, in_float64=False,
)  # fmt: skip

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        *(*NORMS[:2], CROSS_ENTROPY, *HEADS, *ACTIVATIONS, *ATTENTION, ROPE, NORMS[2], ADAMW, DROPOUT_ADD, MOE_PERMUTE),
        *(*PRODUCTS, ROUTER, CHOICE, MERGE),
        *(quantize_row("quantize_fp8", False), quantize_row("quantize_fp8 both ways", True)),
    )
}
