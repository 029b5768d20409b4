"""rope without a GPU: the reference, bad input, and what would be launched."""

import pytest
import torch
import torch.nn.functional as F
from fake_gpu import fake_gpu

from mpcore.kernels import rope as module
from mpcore.kernels.rope import rope, rope_qkv

B, T, H, KV, K = 2, 5, 3, 1, 8
Q, KEYS = torch.randn(B, T, H, K), torch.randn(B, T, KV, K)
COS, SIN = torch.randn(2, T, 3).unbind()


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_reference_is_the_formula(interleaved):
    """As a matrix for each token: J written out, the norm by torch's own."""
    gain = torch.randn(2, K)
    found = rope(
        *(t.double() for t in (Q, KEYS, COS, SIN)), interleaved=interleaved,
        q_weight=gain[0], k_weight=gain[1], eps=0.1,
    )  # fmt: skip
    for x, weight, y in zip((Q, KEYS), gain, found, strict=True):
        n = F.rms_norm(x.double(), (K,), weight.double(), 0.1)
        for t in range(T):
            turn = torch.eye(K, dtype=torch.float64)
            for i in range(3):
                a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 3)
                turn[a, a] = turn[b, b] = COS[t, i]
                turn[b, a], turn[a, b] = SIN[t, i], -SIN[t, i]
            torch.testing.assert_close(y[:, t], n[:, t] @ turn.t())


def test_the_reference_rounds_once():
    gain = torch.randn(2, K)
    how = {"q_weight": gain[0], "k_weight": gain[1]}
    found = rope(Q.bfloat16(), KEYS.bfloat16(), COS, SIN, **how)
    wanted = rope(Q.bfloat16().float(), KEYS.bfloat16().float(), COS, SIN, **how)
    assert all(torch.equal(y, exact.bfloat16()) for y, exact in zip(found, wanted, strict=True))


def test_the_reference_runs_under_torchs_own_autograd():
    inputs = [t.double().requires_grad_() for t in (Q[:1, :2], KEYS[:1, :2], COS[:2], SIN[:2], *torch.randn(2, K))]
    assert torch.autograd.gradgradcheck(lambda *t: rope(*t[:4], q_weight=t[4], k_weight=t[5]), inputs)


def test_a_packed_projection_is_its_parts():
    v = torch.randn(B, T, KV, K)
    found = rope_qkv(torch.cat([Q, KEYS, v], 2).flatten(2), H, KV, COS, SIN)
    for part, wanted in zip(found, (*rope(Q, KEYS, COS, SIN), v), strict=True):
        assert torch.equal(part, wanted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": Q[0]}, r"q \(5, 3, 8\), k .* are not \[B, T, H, K\]"),
        ({"q": Q.long()}, "q is torch.int64"),
        ({"q": Q[:, :, :0], "k": None}, r"q \(2, 5, 0, 8\) has 0 heads"),
        ({"k": KEYS[:, :4]}, r"k \(2, 4, 1, 8\), .* are not \[B, T, H, K\], \[B, T, Hkv, K\]"),
        ({"k": KEYS.half()}, "k is torch.float16, but q is torch.float32"),
        ({"sin": SIN[:, :2]}, r"cos \(5, 3\), sin \(5, 2\) are not .*\[T, R/2\], \[T, R/2\]"),
        ({"cos": torch.ones(T, 5), "sin": torch.ones(T, 5)}, "R at most 8"),
        ({"cos": COS[:4], "sin": SIN[:4]}, r"q \(2, 5, 3, 8\), .* cos \(4, 3\), .* are not"),
        ({"cos": COS.double()}, "cos is torch.float64, which does not go with q of torch.float32"),
        ({"q_weight": torch.ones(8)}, "q_weight and k_weight go together"),
        ({"k": None, "q_weight": torch.ones(8), "k_weight": torch.ones(8)}, "and need a k"),
        ({"q_weight": torch.ones(7), "k_weight": torch.ones(8)}, r"q_weight \(7,\), .* are not \[B, T, H, K\]"),
        ({"cos": COS.to("meta")}, "cos is on meta, but q is on cpu"),
        ({"impl": "triton"}, "impl='triton', but x is on cpu"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        rope(**{"q": Q, "k": KEYS, "cos": COS, "sin": SIN} | arguments)


def test_a_packed_projection_of_a_wrong_width():
    with pytest.raises(ValueError, match=r"qkv \(2, 5, 41\) is not \[B, T, \(3 \+ 2 x 1\) heads x head_dim\]"):
        rope_qkv(torch.ones(B, T, 41), H, KV, COS, SIN)


def launched(B, T, H, KV, K, norm=False):
    qkv, table = torch.empty(B, T, H + 2 * KV, K, dtype=torch.bfloat16), torch.empty(T, K // 2)
    q, k, v = qkv.split([H, KV, KV], 2)
    weights, inputs = (table.new_empty(K),) * 2 if norm else (None, None), (q, k) if norm else (None, None)
    with fake_gpu() as launches:
        torch.ops.mpcore.rope_forward(q, k, table, table, *weights, 1e-6, False)
        torch.ops.mpcore.rope_backward(q, k, v, *inputs, table, table, *weights, 1e-6, False)
    return launches


def test_launches(monkeypatch):
    monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    forward, backward = launched(2, 100, 32, 8, 128)
    assert (forward.grid, backward.grid) == ((50, 2, 1), (50, 3, 1))  # four tokens a program; queries, keys, values
    assert forward.kernel is not backward.kernel
    assert forward.kernel.src.fn is backward.kernel.src.fn
    arguments = forward.arguments
    assert (arguments["M"], arguments["T"], arguments["BLOCK_T"], arguments["BLOCK_H"]) == (200, 100, 4, 8)
    assert [arguments[f"k_{dim}"] for dim in ("batch", "token", "head")] == [100 * 48 * 128, 48 * 128, 128]
    forward, backward, total = launched(2, 1000, 32, 8, 128, norm=True)
    assert (forward.grid, backward.grid, total.grid) == ((500, 2, 1), (264, 3, 1), (4, 2, 1))
    assert launched(0, 3, 2, 1, 8) == launched(2, 0, 2, 1, 8) == []


def test_queries_alone_are_one_kind_of_program():
    q, table = torch.empty(2, 5, 3, 8), torch.empty(5, 4)
    with fake_gpu() as launches:
        torch.ops.mpcore.rope_forward(q, None, table, table, None, None, 1e-6, False)
    assert [launch.grid for launch in launches] == [(1, 1, 1)]
    assert launches[0].arguments["k_ptr"] is launches[0].arguments["v_ptr"] is None


def test_lengths_share_their_compiled_kernels():
    kernels = {launch.kernel.hash for T in (48, 64, 80) for launch in launched(2, T, 4, 4, 64)}
    assert len(kernels) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_a_gpu_errs_no_more_than_twice_the_reference(dtype, interleaved, norm):
    made = [torch.randn(2, 33, n, 96, device="cuda").to(dtype) for n in (5, 1)]
    weights = dict.fromkeys(("q_weight", "k_weight"), torch.randn(96, device="cuda")) if norm else {}
    table = torch.randn(2, 33, 24, device="cuda").unbind()
    runs = {}
    for impl, wide in (("triton", dtype), ("reference", dtype), ("exact", torch.float64)):
        leaves = [t.to(wide, copy=True).requires_grad_() for t in made]
        how = {"interleaved": interleaved, "impl": "reference" if impl == "exact" else impl}
        outputs = rope(*leaves, *(t.to(torch.promote_types(wide, torch.float32)) for t in table), **weights, **how)
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
        runs[impl] = [*outputs, *(leaf.grad for leaf in leaves)]
    for found, plain, exact in zip(*runs.values(), strict=True):
        bound = 2 * max((plain - exact).abs().max(), torch.finfo(dtype).eps * exact.abs().max())
        assert (found - exact).abs().max() <= bound
