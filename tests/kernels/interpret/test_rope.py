"""Numerics of rope: every kind of pairs, tables, heads and layouts, alone and packed, with and without the norm."""

import functools

import laws
import pytest
import torch

from mpcore.kernels import rope as module
from mpcore.kernels.rope import rope, rope_qkv, rope_reference

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
B, T = 2, 5


def tables(rows, R, dtype=torch.float32):
    angles = laws.drawn(torch.rand, *rows, R // 2, generator=torch.Generator().manual_seed(R)) * 10
    return {"cos": (1.1 * angles.cos()).to(dtype), "sin": (1.1 * angles.sin()).to(dtype)}


def draw(H, KV, K, norm=None, dtype=F32, rows=(B, T)):
    generator = torch.Generator().manual_seed(H + K)
    made = {
        "q": laws.drawn(torch.randn, *rows, H, K, generator=generator).to(dtype),
        "k": laws.drawn(torch.randn, *rows, KV, K, generator=generator).to(dtype),
    }
    for name in ("q_weight", "k_weight") if norm else ():
        made[name] = laws.drawn(torch.randn, K, generator=generator).to(norm)
    return made


def packed(run):
    """`run`, fed from a packed projection, with a third output that must come through untouched."""

    def function(qkv, H, KV, **options):
        if run == "kernel":
            return rope_qkv(qkv, H, KV, impl="triton", **options)
        q, k, v = qkv.unflatten(2, (H + 2 * KV, -1)).split([H, KV, KV], 2)
        exact = {
            n: o.to(q.dtype) if n in ("cos", "sin") and q.dtype == torch.float64 else o for n, o in options.items()
        }
        return *rope_reference(q, k, **exact), v

    return function


def reference(q, k, cos, sin, **options):
    """In float64 the table is exact too."""
    wide = q.dtype if q.dtype == torch.float64 else cos.dtype
    return rope_reference(q, k, cos.to(wide), sin.to(wide), **options)


kernel = functools.partial(rope, impl="triton")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("H", "KV", "K", "R"), [(4, 2, 8, 8), (3, 1, 12, 4), (9, 9, 80, 80), (1, 1, 2, 2), (5, 1, 7, 6)]
)
@pytest.mark.parametrize("norm", [None, F32])
def test_errors(H, KV, K, R, norm, interleaved):
    for dtype in (F32, BF16):
        how = {**tables((T,), R), "interleaved": interleaved, "eps": 1e-3}
        laws.check_errors(kernel, reference, draw(H, KV, K, norm, dtype), **how)


@pytest.mark.parametrize("norm", [None, BF16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_errors_of_the_packed_projection(norm, interleaved):
    H, KV, K = 5, 2, 12
    for dtype in (F32, BF16):
        made = draw(H, KV, K, norm, dtype)
        v = laws.drawn(torch.randn, B, T, KV, K, generator=torch.Generator().manual_seed(9)).to(dtype)
        made = {"qkv": torch.cat([made.pop("q"), made.pop("k"), v], 2).flatten(2), **made}
        how = {"H": H, "KV": KV, **tables((T,), 8), "interleaved": interleaved}
        for layout in ("contiguous", "strided rows"):
            laws.check_errors(packed("kernel"), packed("reference"), made, layout, **how)


@pytest.mark.parametrize("layout", ["strided rows", "strided columns"])
@pytest.mark.parametrize("norm", [None, F32])
def test_errors_of_strided_tensors(layout, norm):
    laws.check_errors(kernel, reference, draw(3, 2, 8, norm, BF16), layout, **tables((T,), 8))


def test_errors_of_rows_past_2_31_elements():
    made = draw(1, 1, 4, rows=(3, 1))
    made = {name: t.view(3, 4) for name, t in made.items()}

    def heads(run):
        return lambda q, k, **how: run(q.view(3, 1, 1, 4), k.view(3, 1, 1, 4), **how)

    laws.check_errors(heads(kernel), heads(reference), made, "far rows", **tables((1,), 4))


def test_transposed_tensors_and_gradients():
    """As the attention behind it gives gradients: heads before tokens; and as sequence-first gives the projection."""
    made = draw(4, 2, 8, F32)
    order = {name: t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() == 4 else t for name, t in made.items()}
    first = {name: t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() == 4 else t for name, t in made.items()}
    wanted = laws.results(reference, made, **tables((T,), 8))
    for inputs in (order, first):
        leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
        outputs = kernel(**leaves, **tables((T,), 8))
        generator = torch.Generator().manual_seed(1)
        gradients = [laws.drawn(torch.randn, y.shape, generator=generator).to(BF16).to(F32) for y in outputs]
        gradients = [dy.transpose(1, 2).contiguous().transpose(1, 2) for dy in gradients]
        torch.autograd.backward(outputs, gradients)
        for name, leaf in leaves.items():
            torch.testing.assert_close(leaf.grad, wanted[f"gradient of {name}"])
    made = {name: t.requires_grad_() for name, t in draw(4, 2, 8).items()}
    sum(y.sum() for y in kernel(**made, **tables((T,), 8))).backward()  # a gradient without strides
    (wanted,) = torch.autograd.grad(reference(**made, **tables((T,), 8))[0].sum(), made["q"])
    torch.testing.assert_close(made["q"].grad, wanted)


@pytest.mark.parametrize("norm", [None, F32])
def test_tables_of_each_sample(norm):
    laws.check_errors(kernel, reference, draw(3, 2, 8, norm, BF16), **tables((B, T), 8))


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_tables_of_half_precision_and_one_for_all_samples(dtype):
    laws.check_errors(kernel, reference, draw(3, 2, 8, dtype=BF16), **tables((1, T), 8, dtype))


def test_queries_alone():
    made = {"q": draw(3, 1, 12)["q"]}

    def alone(run):
        return lambda q, **how: run(q, None, **how)[0]

    laws.check_errors(alone(kernel), alone(reference), made, **tables((T,), 8))
    assert kernel(made["q"], None, **tables((T,), 8))[1] is None


def test_weight_gradients_when_a_program_takes_many_tokens(monkeypatch):
    monkeypatch.setattr(module, "multiprocessors", lambda device: 1)
    made = draw(9, 3, 64, F32, BF16, rows=(3, 21))
    laws.check_errors(kernel, reference, made, **tables((21,), 64))
    first, again = (laws.results(kernel, made, **tables((21,), 64)) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("rows", [(0, 5), (2, 0), (1, 1)])
@pytest.mark.parametrize("norm", [None, F32])
def test_empty_tensors_and_a_single_token(rows, norm):
    laws.check_errors(kernel, reference, draw(3, 2, 8, norm, rows=rows), **tables(rows[1:], 8))


def test_values_of_a_packed_projection_are_not_copied():
    qkv = torch.randn(B, T, 4 * 8)
    _, _, v = rope_qkv(qkv, 2, 1, impl="triton", **tables((T,), 8))
    assert v.data_ptr() == qkv[..., 24:].data_ptr()


def test_turned_heads_are_no_views():
    # views of one tensor, left by a compiled function as they are, have gradients of zeros under torch 2.11
    made = draw(3, 2, 8)
    qkv = torch.cat([made["q"], made["k"], made["k"]], 2).flatten(2).requires_grad_()
    q, k, _ = rope_qkv(qkv, 3, 2, impl="triton", **tables((T,), 8))
    assert not any(turned._is_view() for turned in (q, k, *kernel(**made, **tables((T,), 8))))


def test_a_second_derivative_is_refused():
    made = {name: t.requires_grad_() for name, t in draw(2, 1, 8).items()}
    with pytest.raises(RuntimeError, match="rope kernel has no second derivative"):
        torch.autograd.grad(kernel(**made, **tables((T,), 8))[0].sum(), made["q"], create_graph=True)


def test_learned_tables_are_refused():
    table = {name: t.requires_grad_() for name, t in tables((T,), 8).items()}
    with pytest.raises(ValueError, match="the rope kernel has no gradient for cos and sin"):
        kernel(**draw(2, 1, 8), **table)


@pytest.mark.parametrize("norm", [None, F32])
def test_operators(norm):
    made = draw(3, 2, 8, norm, BF16)
    q, k, weights = made["q"], made["k"], (made.get("q_weight"), made.get("k_weight"))
    table, how = tuple(tables((T,), 8).values()), (1e-6, True)
    laws.check_operator(torch.ops.mpcore.rope_forward, q, k, *table, *weights, *how)
    inputs = (q, k) if norm else (None, None)
    laws.check_operator(torch.ops.mpcore.rope_backward, q, k, k, *inputs, *table, *weights, *how)


@pytest.mark.parametrize("norm", [None, F32])
def test_compiles_in_one_graph(norm):
    made = draw(3, 2, 8, norm, BF16)
    laws.check_compiles(kernel, made, **tables((T,), 8))
    qkv = torch.cat([made.pop("q"), made["k"], made.pop("k")], 2).flatten(2)
    laws.check_compiles(packed("kernel"), {"qkv": qkv, **made}, H=3, KV=2, **tables((T,), 8))
