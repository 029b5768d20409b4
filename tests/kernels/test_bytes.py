"""The bytes that kernels move, counted from the tensors of their launches: the floor's, and at most 3 or 4 % more.

Each tensor of a launch counts once, since no kernel here reads or writes an element twice; partial sums count twice,
once where they are written and once where they are read.
"""

import pytest
import torch
from fake_gpu import fake_gpu

from mpcore.kernels import _activation, _norm, cross_replica_hash, dropout_add, rope

MODULES = (_activation, _norm, cross_replica_hash, dropout_add, rope)
M, D = 16384, 4096
ops = torch.ops.mpcore


def tensor(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)


def run_rms_norm():
    x, weight = tensor(M, D), tensor(D)
    ops.norm_forward(x, weight, None, None, False, False, 1e-6)
    yield 2 * x.nbytes
    ops.norm_backward(x, None, x, weight, *[None] * 3, tensor(1, M, dtype=torch.float32), False, False)
    yield 3 * x.nbytes


def run_layer_norm_with_residual():
    x, weight = tensor(M, D), tensor(D)
    ops.norm_forward(x, weight, weight, x, True, False, 1e-6)
    yield 4 * x.nbytes
    ops.norm_backward(x, x, x, weight, weight, None, None, tensor(2, M, dtype=torch.float32), True, False)
    yield 4 * x.nbytes


def run_swiglu():
    x = tensor(M, 2 * D)
    y = ops.activation_forward(x, None, "silu", True)
    yield 3 * y.nbytes
    ops.activation_backward(y, x, None, "silu", True)
    yield 5 * y.nbytes


def run_dropout_add():
    x, bias, samples = tensor(4, M // 4, D), tensor(D), tensor(4, dtype=torch.int64)
    ops.dropout_add_forward(x, x, bias, samples, None, 0.1, 3, 0, 1)
    yield 3 * x.nbytes
    ops.dropout_add_backward(x, bias, x.dtype, samples, None, 0.1, 3, 0, 1)
    yield 2 * x.nbytes


def run_rope(norm=False):
    H, KV, K = 32, 8, 128
    qkv, table = tensor(4, M // 4, H + 2 * KV, K), tensor(M // 4, K // 2, dtype=torch.float32)
    q, k, v = qkv.split([H, KV, KV], 2)
    weights, inputs = (tensor(K),) * 2 if norm else (None, None), (q, k) if norm else (None, None)
    ops.rope_forward(q, k, table, table, None, *weights, 1e-6, False, False)
    yield 2 * (q.nbytes + k.nbytes)
    ops.rope_backward(q, k, v, *inputs, table, table, None, *weights, 1e-6, False, False)
    yield (3 if norm else 2) * (q.nbytes + k.nbytes) + 2 * v.nbytes


def run_rope_with_norm():
    yield from run_rope(norm=True)


def run_hash():
    x = tensor(M, D)
    ops.cross_replica_hash(x)
    yield x.nbytes


def run_quantize():
    x = tensor(M, D)
    for rows, columns, floor in ((True, False, 3), (True, True, 4)):
        ops.quantize_fp8(x, False, rows, columns)
        yield floor * M * D


RUNS = [
    (run_rms_norm, 1.03),
    (run_layer_norm_with_residual, 1.03),
    (run_swiglu, 1.03),
    (run_dropout_add, 1.03),
    (run_rope, 1.03),
    (run_rope_with_norm, 1.03),
    (run_hash, 1.03),
    (run_quantize, 1.03),  # and a scale of four bytes for 128 elements of each
]


@pytest.mark.parametrize(("run", "bound"), RUNS)
def test_bytes_are_the_floors(run, bound, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # nothing reads gigabytes here
    for module in MODULES:
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    with fake_gpu() as launches:
        for floor in run():
            moved = 0
            for launch in launches:
                tensors = [t for name, t in launch.arguments.items() if name.endswith("_ptr") and t is not None]
                if run is run_hash:  # words and bytes are one and the same memory
                    tensors = [t for t in tensors if t.dtype != torch.uint8]
                moved += sum(t.numel() * t.element_size() for t in tensors)
            launches.clear()
            assert floor <= moved <= bound * floor, moved / floor
