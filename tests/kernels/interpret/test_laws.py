"""The laws of all kernels by tables: a row is a case.

A row has a function that makes the kernel, its reference, their inputs and options; and how the inputs lie in memory.
"""

import functools
import math

import laws
import pytest
import torch
from attention_cases import draw, mask, seen

from mpcore.kernels import _norm, activation
from mpcore.kernels import linear_cross_entropy as heads
from mpcore.kernels._norm import WIDEST, WIDEST_BIASED, WIDEST_NARROW
from mpcore.kernels._rows import sum_partials
from mpcore.kernels.attention import attention, attention_reference
from mpcore.kernels.cross_entropy import Loss
from mpcore.kernels.moe_permute import moe_permute_reference, moe_rows_reference, moe_unpermute_reference
from tests.kernels.interpret import test_cross_entropy as loss
from tests.kernels.interpret import test_dropout_add as dropout
from tests.kernels.interpret import test_moe as moe
from tests.kernels.interpret import test_norms as norms
from tests.kernels.interpret import test_rope as rope
from tests.oracles import linear_loss

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
STRIDED, FAR = ("strided rows", "strided columns"), "far rows"
ops = torch.ops.mpcore
ACTIVATIONS = {  # the function, its options, and its name as an operator
    "swiglu": ("swiglu", {}, "silu"), "geglu": ("geglu", {"approximate": "tanh"}, "gelu_tanh"),
    "exact geglu": ("geglu", {"approximate": "none"}, "gelu_none"), "relu_squared": ("relu_squared", {}, "squared"),
}  # fmt: skip
NORMS = {"rms_norm": norms.RMS, "layer_norm": norms.LAYER, "layer_norm without bias": norms.PLAIN}
BOTH = ("rms_norm", "layer_norm")
TERMS = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0}
HEADS = [("linear_cross_entropy", {}), ("linear_cross_entropy", TERMS), ("linear_cross_entropy_rows", TERMS),
         ("linear_log_prob", {}), ("linear_log_prob", {"softcap": 5.0})]  # fmt: skip
MASKS = ("causal", "full", "window", "packed", "packed full", "packed window", "bounds")
SHORT = ("causal", "packed window", "bounds")  # of fewer tokens in `make test`
LONG = (None, "exact geglu", "linear_cross_entropy_rows", "causal", "window")


def activated(kind, *shape, dtype=F32):
    name, options, _ = ACTIVATIONS[kind]
    kernel = functools.partial(getattr(activation, name), impl="triton", **options)
    reference = functools.partial(getattr(activation, f"{name}_reference"), **options)
    shape = (*shape[:-1], shape[-1] * (1 + (name != "relu_squared")))
    x = 3 * laws.drawn(torch.randn, *shape, generator=torch.Generator().manual_seed(sum(shape)))
    return kernel, reference, {"x": x.to(dtype)}, {}


def normed(kind, *shape, **how):
    norm, eps = NORMS[kind], {"eps": how.pop("eps")} if "eps" in how else {}
    inputs = norm.inputs(*shape, **how)
    # With D = 1 the exact gradient of LayerNorm is 0. A fused multiply-add on a GPU leaves the rounding of w dy.
    exact = {"gradients": False} if shape[-1] == 1 and norm is norms.LAYER and inputs["x"].is_cuda else {}
    return norm.kernel, norm.reference, inputs, eps | exact


def rotated(H, KV, K, R=0, norm=None, dtype=F32, rows=(rope.B, rope.T), table=None, table_dtype=F32, **how):
    how |= rope.tables(table or rows[1:], R or K, table_dtype)
    return rope.kernel, rope.reference, rope.draw(H, KV, K, norm, dtype, rows), how


def packed(H, KV, K, R=0, norm=None, dtype=F32, **how):
    made = rope.draw(H, KV, K, norm, dtype)
    v = laws.drawn(torch.randn, *made["k"].shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    made = {"qkv": torch.cat([made.pop("q"), made.pop("k"), v], 2).flatten(2), **made}
    how |= {"H": H, "KV": KV, **rope.tables((rope.T,), R or K)}
    return rope.packed("kernel"), rope.packed("reference"), made, how


def far_heads():
    """Three tokens of one head, as rows."""

    def heads(run):
        return lambda q, k, **how: run(q.view(3, 1, 1, 4), k.view(3, 1, 1, 4), **how)

    made = {name: t.view(3, 4) for name, t in rope.draw(1, 1, 4, rows=(3, 1)).items()}
    return heads(rope.kernel), heads(rope.reference), made, rope.tables((1,), 4)


def queries():
    def alone(run):
        return lambda q, **how: run(q, None, **how)[0]

    return alone(rope.kernel), alone(rope.reference), {"q": rope.draw(3, 1, 12)["q"]}, rope.tables((rope.T,), 12)


def dropped(*shape, dtype=F32, residual=F32, p=0.3, **options):
    made = dropout.draw(*shape, dtype=dtype, residual=residual)
    samples = dropout.samples_of(shape[1 - options.get("sequence_dim", 1)])
    where = {"p": p, "key": dropout.KEY, "samples": samples} if p else {"p": p}
    return dropout.kernel, dropout.dropout_add_reference, made, where | options


def permuted(T, K, D, rows, dtype=F32):
    row, _ = moe_rows_reference(moe.choices(T, K, 4), 4)
    return moe.permute, moe_permute_reference, {"x": moe.draw(T, D, dtype=dtype)}, {"row": row, "rows": rows}


def unpermuted(T, K, D, rows, dtype=F32, weighted=True):
    row, _ = moe_rows_reference(moe.choices(T, K, 4), 4)
    made = {"y": moe.draw(rows, D, dtype=dtype)} | ({"weight": moe.draw(T, K)} if weighted else {})
    return moe.unpermute, moe_unpermute_reference, made, {"row": row}


def attended(name, T, keys=None, dtype=F32, softcap=None, scale=None, **sizes):
    """With eight roundings on a GPU in float32: `ex2.approx` errs by two, and a score in powers of two, up to 10, is
    rounded before it is an exponent.
    """
    inputs = draw(T, keys=keys, dtype=dtype, **sizes)
    roundings = 8 if inputs["query"].is_cuda and dtype == F32 else 1
    how = {"softcap": softcap, "scale": scale, "roundings": roundings} | mask(name, T, keys)
    return seen(functools.partial(attention, impl="triton")), seen(attention_reference), inputs, how


def attending(name):
    """In one graph: without the checks of what sees nothing."""
    how = {"softcap": 20.0, **mask(name, 9)}
    return functools.partial(attention, impl="triton"), None, draw(9, 4, 2, dtype=BF16), how


def scored(*shape, dtype=F32, ids=torch.int64, ignored=1, **how):
    logits, target = loss.draw(*shape, dtype=dtype, ignored=ignored)
    return loss.kernels, loss.truth, {"logits": logits}, {"target": target.to(ids), **how}


def headed(function, N, D=8, V=1001, dtype=F32, **terms):
    """A head and its loss, or log-probabilities; the losses of rows, or their scaled sum."""
    generator = torch.Generator().manual_seed(N)
    inputs = {
        n: laws.drawn(torch.randn, shape, generator=generator) for n, shape in (("x", (N, D)), ("weight", (V, D)))
    }
    target = laws.drawn(torch.randint, 0, V, (N,), generator=generator)
    target[1] = -100
    scale = [laws.drawn(torch.rand, N, generator=generator)] * (function == "linear_cross_entropy")

    def kernel(x, weight):
        how = {"impl": "triton", "chunk_rows": 6}
        y = getattr(heads, function)(x, weight, target, *scale, Loss(V, **terms), **how)
        return y.view(1) if scale else y

    def reference(x, weight):
        y = getattr(linear_loss, f"{function}_reference")(x, weight, target, *scale, **terms)
        return y.view(1) if scale else y

    return kernel, reference, {name: x.to(dtype) for name, x in inputs.items()}, {}


def row(make, *sizes, layout="contiguous", slow=False, **how):
    name = f"{make.__name__}, {sizes}, {how}, {layout}"
    return pytest.param(functools.partial(make, *sizes, **how), layout, id=name, marks=[pytest.mark.slow] * slow)


ERRORS = [
    *(row(activated, kind, 3 if F > 1000 else 50, F, dtype=dtype)
      for kind in ACTIVATIONS for F in (1, 100, 2100) for dtype in (F32, BF16)),
    *(row(activated, kind, 3, 100, dtype=BF16, layout=layout) for kind in ACTIVATIONS for layout in (*STRIDED, FAR)),
    *(row(activated, kind, *shape) for kind in ACTIVATIONS for shape in ((0, 8), (2, 0, 8), (3, 0), (0,), (7,))),
    # 1280 columns are covered by 1024 and 256
    *(row(normed, kind, 13 if D <= 1000 else 3, D, dtype=dtype, slow=(D in (3, 1000)) == (dtype == F32))
      for kind in BOTH for D in (1, 3, 257, 1000, 1280) for dtype in (F32, BF16)),
    *(row(normed, kind, 13 if D <= 1000 else 3, D, dtype=dtype, residual=dtype, eps=0.1,
          slow=(D != 1000) == (dtype == F32)) for kind in BOTH for D in (3, 1000, 1280) for dtype in (F32, BF16)),
    *(row(normed, kind, 5, D, dtype=BF16, residual=residual, slow=slow) for kind in BOTH
      for D, residual, slow in ((WIDEST + 8, None, kind == "layer_norm"), (WIDEST_BIASED, BF16, kind == "rms_norm"),
                                (WIDEST + 8, BF16, True))),
    *(row(normed, "layer_norm without bias", 5, D, dtype=BF16, slow=D == WIDEST_NARROW)
      for D in (257, WIDEST + 8, WIDEST_NARROW)),
    *(row(normed, kind, 64, 100, mean=1000.0) for kind in BOTH),
    *(row(normed, kind, 2, 3, 40, dtype=BF16, residual=residual, layout=layout)
      for kind in BOTH for layout in STRIDED for residual in (None, BF16)),
    *(row(normed, kind, 3, 40, residual=F32, layout=FAR) for kind in BOTH),
    *(row(normed, kind, 13, 200, dtype=x, weight=weight, residual=residual) for kind in BOTH for x, weight, residual in
      ((BF16, F32, None), (F32, BF16, None), (BF16, F32, F32), (F32, F32, BF16), (F16, F16, F32))),
    *(row(normed, kind, *shape, residual=residual) for kind in BOTH for residual in (None, F32)
      for shape in ((0, 8), (2, 0, 8), (3, 0), (0,), (7,))),
    *(row(rotated, *sizes, norm=norm, dtype=dtype, interleaved=interleaved, eps=1e-3,
          slow=(norm is None) == ((dtype == BF16) == interleaved))
      for sizes in ((4, 2, 8, 8), (3, 1, 12, 4), (9, 9, 80, 80), (1, 1, 2, 2), (5, 1, 7, 6))
      for norm in (None, F32) for dtype in (F32, BF16) for interleaved in (False, True)),
    *(row(packed, 5, 2, 12, 8, norm=norm, dtype=dtype, interleaved=interleaved, layout=layout,
          slow=(norm is None) == ((dtype == BF16) == interleaved))
      for norm in (None, BF16) for dtype in (F32, BF16) for interleaved in (False, True)
      for layout in ("contiguous", "strided rows")),
    *(row(rotated, 3, 2, 8, norm=norm, dtype=BF16, layout=layout) for norm in (None, F32) for layout in STRIDED),
    row(far_heads, layout=FAR), row(queries),
    *(row(rotated, 3, 2, 8, norm=norm, dtype=BF16, table=(rope.B, rope.T)) for norm in (None, F32)),
    *(row(rotated, 3, 2, 8, dtype=BF16, table=(1, rope.T), table_dtype=dtype) for dtype in (BF16, F32)),
    *(row(rotated, 3, 2, 8, norm=norm, rows=rows) for norm in (None, F32) for rows in ((0, 5), (2, 0), (1, 1))),
    *(row(dropped, 2, 3 if D < 1000 else 1, D, dtype=dtype, residual=dtype, p=p)
      for D in (1, 6, 257, 2100) for dtype in (F32, BF16) for p in (0.0, 0.3)),
    *(row(dropped, 2, 5, 100, dtype=x, residual=residual) for x, residual in ((BF16, F32), (F32, BF16), (F16, F32))),
    *(row(dropped, 3, 1, 100, dtype=BF16, residual=BF16, sequence_dim=0, layout=layout) for layout in (*STRIDED, FAR)),
    *(row(dropped, *shape, sequence_dim=dim)
      for shape in ((0, 3, 8), (2, 0, 8), (2, 3, 0), (1, 1, 1)) for dim in (0, 1)),
    row(dropped, 7, p=0), row(dropped, 2, 3, 4, 5, residual=BF16, p=0),
    # with as many rows as choices, with more and with fewer
    *(row(make, *sizes, dtype=dtype, layout=layout, **how) for layout in ("contiguous", *STRIDED)
      for sizes, dtype in (((7, 2, 100, 14), BF16), ((20, 3, 33, 50), F32), ((6, 3, 1100, 20), F16))
      for make, how in ((permuted, {}), (unpermuted, {}), (unpermuted, {"weighted": False}))),
    *(row(make, T, 2, 8, rows) for make in (permuted, unpermuted) for T, rows in ((0, 3), (3, 0))),
    *(row(attended, name, 130, slow=name in SHORT) for name in MASKS),
    *(row(attended, name, 130, dtype=F16, slow=name != "packed window") for name in ("full", *SHORT)),
    *(row(attended, name, 37, H=4, groups=2, slow=name not in SHORT) for name in MASKS),
    *(row(attended, name, 37, H=4, groups=2, dtype=BF16, slow=True) for name in ("window", "packed", "packed full")),
    *(row(attended, name, 1, H=32, groups=16, slow=name != "causal")
      for name in MASKS),  # here and below: the reference's error of few numbers is luck
    *(row(attended, name, 37, H=6, groups=2, B=2, dtype=BF16) for name in ("causal", "bounds")),
    *(row(attended, "window", 37, K=K, V=V, dtype=dtype, **({"H": 8, "groups": 4} if K < 64 else {}))
      for dtype, sizes in ((F32, ((96, 64), (128, 80), (256, 256), (6, 40))),
                           (BF16, ((32, 32), (192, 128), (256, 256)))) for K, V in sizes),
    *(row(attended, "causal", 70, dtype=dtype, softcap=softcap, scale=0.3, slow=(dtype == F32) == (softcap > 1))
      for dtype in (F32, BF16) for softcap in (0.5, 20.0)),
    *(row(attended, name, T, keys, dtype, slow=slow, **({"H": 64, "groups": 64} if T == 1 else {}))
      for name in ("bounds", "full") for slow, sizes in (
          (False, ((37, 130, F32), (70, 1, F32), (130, 37, BF16))),
          (True, ((1, 70, F32), (130, 37, F32), (37, 130, BF16)))) for T, keys, dtype in sizes),
    *(row(attended, "causal", 37, B=2, dtype=BF16, layout=layout) for layout in STRIDED),
    *(row(attended, "causal", 3, H=8, groups=4, dtype=dtype, layout=FAR) for dtype in (F32, BF16)),
    *(row(attended, "full", T, keys, dtype, H=H, groups=min(H, 1), B=B) for dtype in (F32, BF16)
      for B, T, H, keys in ((0, 4, 2, 4), (1, 0, 2, 3), (1, 3, 2, 0), (2, 0, 2, 0), (1, 3, 0, 3))),
    *(row(scored, N, V, dtype=dtype, **how) for N, V in ((3, 1), (9, 7), (9, 1000), (5, 4096), (9, 4099), (3, 12565))
      for dtype in (F32, BF16) for how in ({}, loss.ALL)[: 1 + (V > 1)]),  # of one word the gradient is rounding alone
    *(row(scored, 3, V, dtype=dtype, softcap=softcap, **loss.ALL)
      for V in (1000, 4099) for dtype in (F32, BF16) for softcap in (0.5, 30.0)),
    *(row(scored, 3, V, dtype=BF16, layout=layout, **loss.ALL) for V in (100, 4099) for layout in (*STRIDED, FAR)),
    *(row(scored, *shape, ids=ids, ignored=0, **loss.ALL)
      for shape in ((0, 8), (2, 0, 8), (2, 3, 8)) for ids in (torch.int64, torch.int32)),
    *(row(headed, name, N, dtype=dtype, slow=(N == 5) == (dtype == BF16), **terms)
      for N in (5, 20) for dtype in (F32, BF16) for name, terms in HEADS),
]  # fmt: skip


@pytest.mark.parametrize(("make", "layout"), ERRORS)
def test_errors(make, layout, monkeypatch):
    kernel, reference, inputs, options = make()
    if "x" in inputs and inputs["x"].shape[-1] >= WIDEST_BIASED:
        monkeypatch.setattr(_norm, "multiprocessors", lambda device: 9)  # so that rows are split over programs
    laws.check_errors(kernel, reference, inputs, layout, **options)


COMPILED = {  # the name in the error of a second derivative
    **{(ACTIVATIONS[kind][0], kind): functools.partial(activated, kind, 3, 24, dtype=BF16) for kind in ACTIVATIONS},
    **{(kind, residual): functools.partial(normed, kind, 3, 24, dtype=BF16, residual=residual)
       for kind in BOTH for residual in (None, F32)},
    **{("rope", make.__name__, norm): functools.partial(make, 3, 2, 8, norm=norm, dtype=BF16)
       for make in (rotated, packed) for norm in (None, F32)},
    ("dropout_add",): functools.partial(dropped, 2, 3, 24, dtype=BF16, residual=BF16),
    ("moe_permute",): functools.partial(permuted, 6, 2, 8, 12),
    ("moe_unpermute",): functools.partial(unpermuted, 6, 2, 8, 12),
    **{("", name): functools.partial(headed, name, 13, 8, 25, BF16, **terms) for name, terms in HEADS[1:4]},
    **{("attention", name): functools.partial(attending, name) for name in ("causal", "packed window", "window")},
}  # fmt: skip


def but_long(cases):
    return [pytest.param(case, marks=[pytest.mark.slow] * (case[-1] in LONG)) for case in cases]


@pytest.mark.parametrize("case", but_long(COMPILED), ids=str)
def test_compiles_in_one_graph_and_has_no_second_derivative(case):
    kernel, _, inputs, options = COMPILED[case]()
    laws.check_compiles(kernel, inputs, **options)
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    outputs = kernel(**leaves, **options)
    total = sum(y.sum() for y in (outputs if isinstance(outputs, tuple) else (outputs,)))
    with pytest.raises(RuntimeError, match=f"{case[0]}.* has no second derivative"):
        torch.autograd.grad(total, next(iter(leaves.values())), create_graph=True)


def of_activation(kind):
    x = activated(kind, 3, 24, dtype=BF16)[2]["x"]
    given = x, ACTIVATIONS[kind][2], kind != "relu_squared"
    yield ops.activation_forward, *given
    yield ops.activation_backward, ops.activation_forward(*given), *given


def of_norm(kind, residual):
    made, has_bias = NORMS[kind].inputs(3, 24, dtype=BF16, weight=F32, residual=residual), NORMS[kind].has_bias
    x, weight, bias, residual = made["x"], made["weight"], made.get("bias"), made.get("residual")
    forward = x, weight, bias, residual, has_bias, 1e-6
    yield ops.norm_forward, *forward
    stats = ops.norm_forward(*forward)[2]
    for mains in (None, None), (torch.ones(24), torch.ones(24) if has_bias else None):
        yield ops.norm_backward, x, residual, x if residual is None else residual, weight, bias, *mains, stats, has_bias


def of_rope(norm):
    made, table = rope.draw(3, 2, 8, norm, BF16), tuple(rope.tables((rope.T,), 8).values())
    q, k, weights = made["q"], made["k"], (made.get("q_weight"), made.get("k_weight"))
    yield ops.rope_forward, q, k, *table, *weights, 1e-6, True
    yield ops.rope_backward, q, k, k, *((q, k) if norm else (None, None)), *table, *weights, 1e-6, True


def of_dropout(residual):
    made, where = dropout.draw(2, 3, 24, dtype=BF16, residual=residual), (dropout.samples_of(2), torch.arange(3))
    yield ops.dropout_add, made["x"], made.get("residual"), residual or BF16, *where, 0.3, 12345, 2, 1


def of_moe():
    (row, _), x, y, weight = moe_rows_reference(moe.choices(6, 2, 3), 3), *map(moe.draw, (6, 12, 6), (8, 8, 2))
    yield ops.moe_permute, x, row, 12
    yield ops.moe_unpermute, y, row, weight
    yield ops.moe_unpermute_backward, x, y, row, weight


OPERATORS = [
    *((of_activation, kind) for kind in ACTIVATIONS), *((of_norm, kind, each) for kind in BOTH for each in (None, F32)),
    *((of, each) for of in (of_rope, of_dropout) for each in (None, F32)), (of_moe,),
]  # fmt: skip


@pytest.mark.parametrize("case", but_long(OPERATORS), ids=lambda case: f"{case[0].__name__}{case[1:]}")
def test_operators(case):
    for operator, *arguments in case[0](*case[1:]):
        laws.check_operator(operator, *arguments)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_extreme_values_of_activations(kind):
    z = torch.tensor([-1e4, -90.0, -12.0, -1e-30, -0.0, 0.0, 1e-30, 12.0, 90.0, 1e4, math.nan])
    x = z if kind == "relu_squared" else torch.cat([z, torch.ones_like(z)])
    found, wanted = (laws.results(run, {"x": x}) for run in activated(kind, 1)[:2])
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("P", "D"), [(1, 1), (64, 32), (65, 33), (300, 70)])
def test_sums_of_partials(P, D, dtype):
    partials = laws.drawn(torch.randn, 2, P, D, generator=torch.Generator().manual_seed(P))
    with laws.guarded_memory():
        first, second = partials.new_empty(D, dtype=dtype), partials.new_empty(D)
        sum_partials(laws.place(partials, "contiguous", 0), first, second)
    wanted = partials.double().sum(1)
    torch.testing.assert_close(first.double(), wanted[0].to(dtype).double(), atol=1e-5, rtol=torch.finfo(dtype).eps)
    torch.testing.assert_close(second.double(), wanted[1], atol=1e-5, rtol=1e-6)
    alone = torch.empty(D)
    sum_partials(partials[1:], alone)
    assert torch.equal(alone, second)
