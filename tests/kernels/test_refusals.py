"""Bad input of every kernel: a row for each argument of each check; `test_checks.py` has the checks that they share."""

from functools import partial

import laws
import pytest
import torch

from mpcore.kernels.activation import geglu, relu_squared, swiglu
from mpcore.kernels.adamw import adamw_now
from mpcore.kernels.attention import attention, attention_backward
from mpcore.kernels.cross_entropy import Loss, cross_entropy_backward, cross_entropy_stats
from mpcore.kernels.dropout_add import dropout_add
from mpcore.kernels.fp8_matmul import fp8_matmul
from mpcore.kernels.grouped_linear import grouped_linear
from mpcore.kernels.layer_norm import layer_norm
from mpcore.kernels.moe_permute import moe_permute, moe_rows, moe_unpermute
from mpcore.kernels.quantize_fp8 import Quantized, quantize_fp8
from mpcore.kernels.rms_norm import rms_norm
from mpcore.kernels.rope import rope, rope_qkv

B, T, H, KV, K, N, V = 2, 5, 3, 1, 8, 6, 11
X, W, SAMPLES = torch.randn(2, 3, 8), torch.randn(8), torch.tensor([4, 9])
Q, KEYS = torch.randn(B, T, H, K), torch.randn(B, T, KV, K)
COS, SIN = torch.randn(2, T, 3).unbind()
LOGITS, ROW, PLAIN = torch.randn(N, V, dtype=torch.float64), torch.rand(N, dtype=torch.float64), Loss(V)
TARGET = torch.tensor([0, 3, -100, 10, 5, 3])
EXPERTS, AT = torch.tensor([[2, 0], [0, 9], [2, 1], [-1, 0]]), torch.tensor([[4, 0], [1, -1], [5, 3], [-1, 2]])
P, NOW = torch.linspace(-1, 1, 6), adamw_now(torch.tensor([1.0]), 0.01, (0.9, 0.95))[0]
PLACE = torch.arange(2), torch.arange(3)


def factor(M, K, device="cpu"):
    scales = torch.ones(M, -(-K // 128), device=device)
    return Quantized(torch.zeros(M, K, dtype=torch.float8_e4m3fn, device=device), scales)


QUERY, KEY, LSE = torch.randn(1, 8, 4, 6), torch.randn(1, 8, 2, 6), torch.zeros(1, 4, 8)
A, F = factor(130, 4), factor(5, 4)
CALLS = {  # each with input that fits
    "rms_norm": partial(rms_norm, x=X, weight=W), "layer_norm": partial(layer_norm, x=X, weight=W, bias=W),
    "swiglu": partial(swiglu, x=X), "geglu": partial(geglu, x=X), "relu_squared": partial(relu_squared, x=X),
    "dropout_add": partial(dropout_add, x=X, residual=None, p=0.5, samples=SAMPLES),
    "rope": partial(rope, q=Q, k=KEYS, cos=COS, sin=SIN),
    "rope_qkv": partial(rope_qkv, qkv=torch.ones(B, T, 40), num_heads=3, num_kv_heads=1, cos=COS, sin=SIN),
    "stats": partial(cross_entropy_stats, logits=LOGITS, target=TARGET, loss=PLAIN),
    "backward": partial(cross_entropy_backward, logits=LOGITS, target=TARGET, stats=torch.ones(4, N), dloss=ROW,
                        loss=PLAIN),
    "moe_rows": partial(moe_rows, experts=EXPERTS, num_experts=4),
    "moe_permute": partial(moe_permute, x=torch.ones(4, 2), row=AT, rows=7),
    "moe_unpermute": partial(moe_unpermute, y=torch.ones(7, 2), row=AT),
    "grouped_linear": partial(grouped_linear, x=torch.ones(7, 2), weight=torch.ones(4, 3, 2),
                              counts=torch.ones(4).int()),
    "adamw": partial(laws.adamw, param=P, grad=P.flip(0), exp_avg=P / 2, exp_avg_sq=P.square(), now=NOW,
                     betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    "attention": partial(attention, query=QUERY, key=KEY, value=KEY),
    "attention_backward": partial(attention_backward, grad=QUERY, query=QUERY, key=KEY, value=KEY, output=QUERY,
                                  lse=LSE, dlse=LSE),
    "quantize_fp8": partial(quantize_fp8, x=torch.ones(3, 4)), "fp8_matmul": partial(fp8_matmul, a=A, b=F),
}  # fmt: skip
REFUSED = [
    ("rms_norm", {"weight": W[:7]}, r"weight has shape \(7,\), but the last dimension of x is 8"),
    ("rms_norm", {"residual": X[0]}, r"residual has shape \(3, 8\), but x has \(2, 3, 8\)"),
    ("rms_norm", {"impl": "triton"}, "impl='triton', but x is on cpu"),
    ("layer_norm", {"weight": W[:7]}, r"weight has shape \(7,\), but the last dimension of x is 8"),
    ("layer_norm", {"bias": W[:7]}, r"bias has shape \(7,\), but the last dimension of x is 8"),
    ("layer_norm", {"residual": X[0]}, r"residual has shape \(3, 8\), but x has \(2, 3, 8\)"),
    *((name, {"x": X.long()}, "x is torch.int64") for name in ("swiglu", "geglu", "relu_squared")),
    *((name, {"impl": "triton"}, "but x is on cpu") for name in ("swiglu", "geglu", "relu_squared")),
    *((name, {"x": X[..., :7]}, "of x is 7, but gate and up need an even number") for name in ("swiglu", "geglu")),
    ("geglu", {"approximate": "erf"}, "approximate 'erf' is neither 'tanh' nor 'none'"),
    *(("dropout_add", {"p": p}, rf"dropout probability {p} is not in \[0, 1\)") for p in (1.0, -0.1)),
    ("dropout_add", {"residual": X[0]}, r"residual has shape \(3, 8\), but x has \(2, 3, 8\)"),
    ("dropout_add", {"x": X[0]}, r"x \(3, 8\), samples \(2,\).* are not \[B, T, D\], \[B\]"),
    ("dropout_add", {"samples": None}, "dropout needs samples"),
    ("dropout_add", {"samples": torch.arange(3)}, r"samples \(3,\).* are not \[B, T, D\], \[B\]"),
    ("dropout_add", {"samples": SAMPLES.int()}, "samples is torch.int32 on cpu; it must be int64 on cpu"),
    ("dropout_add", {"samples": SAMPLES.to("meta")}, "samples is torch.int64 on meta; it must be int64 on cpu"),
    ("dropout_add", {"tokens": SAMPLES}, r"tokens \(2,\) are not \[B, T, D\], \[B\], \[T\]"),
    ("dropout_add", {"tokens": torch.arange(3).int()}, "tokens is torch.int32 on cpu; it must be int64 on cpu"),
    *(("dropout_add", {"sequence_dim": n}, f"sequence_dim {n} is neither 0 nor 1") for n in (-1, 2)),
    ("dropout_add", {"sequence_dim": 0}, r"x \(2, 3, 8\), samples \(2,\).* are not \[T, B, D\], \[B\]"),
    ("rope", {"q": Q[0]}, r"q \(5, 3, 8\), k .* are not \[B, T, H, K\]"),
    ("rope", {"q": Q[:, :, :0], "k": None}, r"q \(2, 5, 0, 8\) has 0 heads"),
    ("rope", {"q": Q.bool(), "k": None}, "q is torch.bool; it must be float64, float32, bfloat16 or float16"),
    ("rope", {"k": KEYS[:, :4]}, r"k \(2, 4, 1, 8\), .* are not \[B, T, H, K\], \[B, T, Hkv, K\]"),
    ("rope", {"k": KEYS.half()}, "k is torch.float16, but q is torch.float32"),
    ("rope", {"sin": SIN[:, :2]}, r"cos \(5, 3\), sin \(5, 2\) are not .*\[T, R/2\], \[T, R/2\]"),
    ("rope", {"cos": torch.ones(T, 5), "sin": torch.ones(T, 5)}, "R at most 8"),
    ("rope", {"cos": torch.ones(T, 0), "sin": torch.ones(T, 0)}, r"cos \(5, 0\) rotates R at most 8"),
    ("rope", {"cos": COS[:4], "sin": SIN[:4]}, r"q \(2, 5, 3, 8\), .* cos \(4, 3\), .* are not"),
    ("rope", {"cos": torch.ones(3, T, 2), "sin": torch.ones(3, T, 2)}, r"cos \(3, 5, 2\), .* \[B, T, R/2\]"),
    ("rope", {"cos": torch.ones(1, 4, 2), "sin": torch.ones(1, 4, 2)}, r"cos \(1, 4, 2\), .* \[1, T, R/2\]"),
    ("rope", {"cos": torch.ones(1, T, 2), "sin": torch.ones(2, T, 2)}, r"sin \(2, 5, 2\) are not .*\[1, T, R/2\]"),
    ("rope", {"cos": COS.double()}, "cos is torch.float64, which does not go with q of torch.float32"),
    ("rope", {"sin": SIN.double()}, "sin is torch.float64, which does not go with q of torch.float32"),
    *(("rope", {name: W}, "q_weight and k_weight go together") for name in ("q_weight", "k_weight")),
    ("rope", {"k": None, "q_weight": W, "k_weight": W}, "and need a k"),
    ("rope", {"q_weight": W[:7], "k_weight": W}, r"q_weight \(7,\), .* are not \[B, T, H, K\]"),
    ("rope", {"q_weight": W.int(), "k_weight": W}, "q_weight is torch.int32, which does not go"),
    ("rope", {"q_weight": W, "k_weight": W.to("meta")}, "k_weight is on meta, but q is on cpu"),
    ("rope_qkv", {"qkv": torch.ones(B, T, 41)}, r"\(2, 5, 41\) is not \[B, T, \(3 \+ 2 x 1\) heads x head_dim"),
    ("rope_qkv", {"qkv": torch.ones(T, 40)}, r"\(5, 40\) is not \[B, T, \(3 \+ 2 x 1\) heads"),
    ("rope_qkv", {"num_heads": 0}, r"is not \[B, T, \(0 \+ 2 x 1\) heads"),
    ("rope_qkv", {"num_kv_heads": 0}, r"is not \[B, T, \(3 \+ 2 x 0\) heads"),
    ("stats", {"logits": LOGITS[:, :0]}, r"logits \(6, 0\) have no columns"),
    ("stats", {"target": TARGET[:5]}, r"target has shape \(5,\), but logits \(6, 11\) have other rows"),
    ("stats", {"target": TARGET.double()}, "target is torch.float64; it must be int64 or int32"),
    *(("stats", {"loss": Loss(V, softcap=n)}, f"softcap {n} is not a positive number")
      for n in (-1.0, float("nan"), float("inf"))),
    ("stats", {"logits": LOGITS.float(), "impl": "triton"}, "impl='triton', but x is on cpu"),
    ("backward", {"logits": LOGITS[:, :0]}, r"logits \(6, 0\) have no columns"),
    ("backward", {"target": TARGET[:5]}, r"target has shape \(5,\), but logits \(6, 11\) have other rows"),
    *(("backward", {"stats": torch.ones(shape)}, f"stats have shape .*{shape[0]}, 6.; they are 4 or 5 numbers")
      for shape in ((3, N), (6, N))),
    ("backward", {"stats": torch.ones(())}, r"stats have shape \(\); they are 4 or 5 numbers"),
    ("backward", {"stats": torch.ones(4, 5)}, r"stats has shape \(5,\), but logits \(6, 11\) have other rows"),
    *(("backward", {name: ROW[:5], "stats": torch.ones(5, N)}, rf"{name} has shape \(5,\)")
      for name in ("dloss", "dlog_prob", "dentropy")),
    ("backward", {"dentropy": ROW}, "dentropy needs stats of 5 numbers"),
    ("backward", {"dentropy": ROW.to("meta"), "stats": torch.ones(5, N)}, "dentropy is on meta, but logits are on cpu"),
    ("moe_rows", {"experts": EXPERTS.double()}, r"experts \(4, 2\) of torch.float64 is not"),
    ("moe_rows", {"experts": EXPERTS[0]}, r"experts \(2,\) of torch.int64 is not"),
    ("moe_permute", {"x": torch.ones(3, 2)}, r"x \(3, 2\), row \(4, 2\) are not \[T, D\], \[T, K\]"),
    ("moe_permute", {"impl": "triton"}, "impl='triton', but x is on cpu"),
    ("moe_unpermute", {"y": torch.ones(7)}, r"y \(7,\), row \(4, 2\) are not \[R, D\], \[T, K\]"),
    ("moe_unpermute", {"weight": torch.ones(4)}, r"weight \(4,\) are not"),
    ("grouped_linear", {"weight": torch.ones(4, 3, 3)}, r"x \(7, 2\), weight"),
    ("grouped_linear", {"counts": torch.ones(3).int()}, r"counts \(3,\) are not"),
    ("grouped_linear", {"counts": torch.ones(4)}, "counts are torch.float32 on cpu"),
    ("grouped_linear", {"counts": torch.ones(4, device="meta").int()}, "on meta; they must be integers on cpu"),
    ("grouped_linear", {"weight": torch.ones(4, 3, 2).half()}, "x is torch.float32, but weight is torch.float16"),
    ("grouped_linear", {"impl": "torch"}, "on cpu"), ("grouped_linear", {"impl": "no"}, "impl 'no'"),
    ("adamw", {"grad": torch.ones(5)}, r"grad has shape \(5,\), but param has \(6,\)"),
    ("adamw", {"grad": torch.ones(6).int()}, "grad is torch.int32"),
    *(("adamw", {name: torch.ones(12)[::2]}, rf"{name} has strides \(2,\) at shape \(6,\): make it contiguous")
      for name in ("param", "exp_avg_sq")),
    ("adamw", {"master": torch.ones(6, dtype=torch.bfloat16)}, r"master is torch.bfloat16; it must be float32"),
    ("adamw", {"now": torch.ones(3).double()}, r"now is torch.float64 \(3,\) on cpu; adamw_now gives float64"),
    ("adamw", {"now": torch.ones(4, device="meta").double()}, r"now is torch.float64 \(4,\) on meta; adamw_now gives"),
    ("adamw", {"now": torch.ones(4)}, r"now is torch.float32 \(4,\) on cpu; adamw_now gives float64"),
    *(("adamw", {"key": key}, f"key {key} is not in") for key in (-1, 2**63)),
    ("adamw", {"place": PLACE[:1] * 2}, "place has 2 x 2 indices, but param has 6 elements"),
    ("adamw", {"place": (PLACE[0].int(), PLACE[1])}, r"indices of torch.int32 \(2,\) on cpu; they must be int64"),
    ("adamw", {"place": (PLACE[0], PLACE[1][None])}, r"indices of torch.int64 \(1, 3\) on cpu"),
    ("adamw", {"place": (PLACE[0].to("meta"), PLACE[1])}, r"int64 \(2,\) on meta; they must be"),
    ("adamw", {"scale": torch.ones((), device="meta")}, r"scale has shape \(\) on meta, but is one number on cpu"),
    ("adamw", {"scale": torch.ones(6)}, r"scale has shape \(6,\) on cpu, but is one number"),
    ("attention", {"key": KEY.double()}, "key is torch.float64 on cpu, but query is torch.float32"),
    ("attention", {"value": KEY.to("meta")}, "value is torch.float32 on meta, but query is torch.float32 on cpu"),
    ("attention", {"query": QUERY.long(), "key": KEY.long(), "value": KEY.long()}, "query is torch.int64; it must be"),
    ("attention", {"query": QUERY.expand(2, 8, 4, 6), "key": KEY.expand(2, 8, 2, 6), "value": KEY.expand(2, 8, 2, 6),
                   "cu_seqlens": torch.tensor([0, 8])}, "packs documents in one row, but the batch has 2"),
    *(("attention_backward", {name: x}, name) for name, x in (
        ("grad", QUERY[:, 1:]), ("grad", QUERY.double()), ("lse", LSE[:, 1:]), ("output", KEY), ("dlse", LSE.mT))),
    *(("attention_backward", {name: x.to("meta")}, f"{name} is on meta, but query is on cpu")
      for name, x in (("grad", QUERY), ("output", QUERY), ("lse", LSE), ("dlse", LSE))),
    ("quantize_fp8", {"x": torch.ones(1, 3, 4)}, r"x \(1, 3, 4\) is no matrix"),
    ("quantize_fp8", {"x": torch.ones(3, 4).long()}, "x is torch.int64; it must be"),
    ("quantize_fp8", {"impl": "triton"}, "impl='triton', but x is on cpu"),
    ("fp8_matmul", {"b": factor(5, 5)}, r"a \(130, 4\), b \(5, 5\) are not \[M, K\], \[N, K\]"),
    ("fp8_matmul", {"b": Quantized(torch.ones(5, 4), F.scales)}, "b is torch.float32 with"),
    ("fp8_matmul", {"b": F._replace(scales=F.scales.double())}, "with scales torch.float64"),
    ("fp8_matmul", {"b": F._replace(scales=F.scales.to("meta"))}, "scales on meta"),
    ("fp8_matmul", {"b": factor(5, 4, "meta")}, "b is on meta, its scales on meta, a on cpu"),
    ("fp8_matmul", {"b": F._replace(scales=torch.ones(1, 2))}, r"b \(5, 4\) has scales \(1, 2\)"),
    ("fp8_matmul", {"a": A._replace(scales=torch.ones(1, 1))}, r"a \(130, 4\) has scales \(1, 1\)"),
    ("fp8_matmul", {"dtype": torch.int32}, "dtype is torch.int32; it must be"),
    ("fp8_matmul", {"impl": "triton"}, "impl 'triton' is none of None, 'torch'"),
    ("fp8_matmul", {"a": factor(16, 128), "b": factor(16, 128), "impl": "torch"}, "on cpu torch has no fp8_matmul"),
]  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_input_that_fits_is_not_refused(name):
    CALLS[name]()


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_bad_input(name, changes, message):
    with pytest.raises(ValueError, match=message):
        CALLS[name](**changes)
