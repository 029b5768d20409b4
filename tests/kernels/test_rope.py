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
        *(t.double() for t in (Q, KEYS, COS, SIN)), interleaved=interleaved, q_weight=gain[0], k_weight=gain[1], eps=0.1
    )
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
    assert len({launch.kernel.hash for T in (48, 64, 80) for launch in launched(2, T, 4, 4, 64)}) == 2
