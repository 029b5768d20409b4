"""rope without a GPU: the reference, bad input, and what would be launched."""

import pytest
import torch
import torch.nn.functional as F
from fake_gpu import fake_gpu

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


def test_a_packed_projection_is_its_parts():
    v = torch.randn(B, T, KV, K)
    found = rope_qkv(torch.cat([Q, KEYS, v], 2).flatten(2), H, KV, COS, SIN)
    for part, wanted in zip(found, (*rope(Q, KEYS, COS, SIN), v), strict=True):
        assert torch.equal(part, wanted)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"q": Q[0]}, r"q \(5, 3, 8\), k .* are not \[B, T, H, K\]"),
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
    ({"sin": SIN.double()}, "sin is torch.float64, which does not go with q of torch.float32"),
    ({"cos": COS.long()}, "cos is torch.int64, which does not go with q of torch.float32"),
    ({"q": Q.bool(), "k": None}, "q is torch.bool; it must be float64, float32, bfloat16 or float16"),
    ({"q": Q.cfloat(), "k": KEYS.cfloat()}, "q is torch.complex64"),
    ({"q_weight": torch.ones(8), "k_weight": torch.ones(8).to("meta")}, "k_weight is on meta, but q is on cpu"),
    ({"q_weight": torch.ones(8).to("meta"), "k_weight": torch.ones(8)}, "q_weight is on meta, but q is on cpu"),
    ({"q_weight": torch.ones(8).int(), "k_weight": torch.ones(8)}, "q_weight is torch.int32, which does not go"),
    ({"q_weight": torch.ones(8), "k_weight": torch.ones(8).double()}, "k_weight is torch.float64, which does not"),
    ({"k_weight": torch.ones(8)}, "q_weight and k_weight go together"),
    ({"cos": torch.ones(T, 0), "sin": torch.ones(T, 0)}, r"cos \(5, 0\) rotates R at most 8"),
    ({"cos": torch.ones(3, T, 2), "sin": torch.ones(3, T, 2)}, r"cos \(3, 5, 2\), .* \[B, T, R/2\]"),
    ({"cos": torch.ones(1, 4, 2), "sin": torch.ones(1, 4, 2)}, r"cos \(1, 4, 2\), .* \[1, T, R/2\]"),
    ({"cos": torch.ones(1, T, 2), "sin": torch.ones(2, T, 2)}, r"sin \(2, 5, 2\) are not .*\[1, T, R/2\]"),
])  # fmt: skip
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        rope(**{"q": Q, "k": KEYS, "cos": COS, "sin": SIN} | arguments)


@pytest.mark.parametrize(("qkv", "heads", "shown"), [
    (torch.ones(B, T, 41), (3, 1), r"\(2, 5, 41\) is not \[B, T, \(3 \+ 2 x 1\) heads"),
    (torch.ones(B, T, 40), (0, 1), r"\(2, 5, 40\) is not \[B, T, \(0 \+ 2 x 1\) heads"),
    (torch.ones(B, T, 40), (3, 0), r"\(2, 5, 40\) is not \[B, T, \(3 \+ 2 x 0\) heads"),
    (torch.ones(T, 40), (3, 1), r"\(5, 40\) is not \[B, T, \(3 \+ 2 x 1\) heads"),
    (torch.ones(1, B, T, 40), (3, 1), r"\(1, 2, 5, 40\) is not \[B, T, \(3 \+ 2 x 1\) heads"),
])  # fmt: skip
def test_a_projection_that_is_not_packed(qkv, heads, shown):
    with pytest.raises(ValueError, match=f"qkv {shown} x head_dim"):
        rope_qkv(qkv, *heads, COS, SIN)
    assert rope_qkv(torch.ones(B, T, 30), 1, 1, COS, SIN)[2].shape == (B, T, 1, 10)


@pytest.mark.parametrize("shape", [(T, 3), (1, T, 3), (B, T, 3)])
def test_a_table_of_tokens_of_one_sample_or_of_each(shape):
    cos, sin = torch.randn(2, *shape).unbind()
    found = rope(Q, KEYS, cos, sin)
    for b in range(B):
        own = [t if t.dim() == 2 else t[b % len(t)] for t in (cos, sin)]
        for y, x in zip(found, (Q, KEYS), strict=True):
            assert torch.equal(y[b], rope(x[b : b + 1], None, *own)[0][0])


def launched(B, T, H, KV, K, norm=False):
    qkv, table = torch.empty(B, T, H + 2 * KV, K, dtype=torch.bfloat16), torch.empty(T, K // 2)
    q, k, v = qkv.split([H, KV, KV], 2)
    weights, inputs = (table.new_empty(K),) * 2 if norm else (None, None), (q, k) if norm else (None, None)
    with fake_gpu() as launches:
        torch.ops.mpcore.rope_forward(q, k, table, table, *weights, 1e-6, False)
        torch.ops.mpcore.rope_backward(q, k, v, *inputs, table, table, *weights, 1e-6, False)
    return launches


def test_lengths_share_their_compiled_kernels():
    kernels = {launch.kernel.hash for T in (48, 64, 80) for launch in launched(2, T, 4, 4, 64)}
    assert len(kernels) == 2
