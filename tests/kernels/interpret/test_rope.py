"""Numerics of rope beside the laws of `test_laws.py`: strides, many tokens in a program, views, and what is refused."""

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


def test_weight_gradients_when_a_program_takes_many_tokens(monkeypatch):
    monkeypatch.setattr(module, "multiprocessors", lambda device: 1)
    made = draw(9, 3, 64, F32, BF16, rows=(3, 21))
    laws.check_errors(kernel, reference, made, **tables((21,), 64))
    first, again = (laws.results(kernel, made, **tables((21,), 64)) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


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


def test_learned_tables_are_refused():
    table = {name: t.requires_grad_() for name, t in tables((T,), 8).items()}
    with pytest.raises(ValueError, match="the rope kernel has no gradient for cos and sin"):
        kernel(**draw(2, 1, 8), **table)
