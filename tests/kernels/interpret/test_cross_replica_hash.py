"""The hash kernel gives the 64 bits of the reference, whatever it is asked to hash."""

import math

import laws
import pytest
import torch

from mpcore.kernels import cross_replica_hash as module
from mpcore.kernels.cross_replica_hash import BLOCK, cross_replica_hash, cross_replica_hash_reference

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool,
]  # fmt: skip


def draw(size, dtype):
    bits = laws.drawn(torch.randint, 0, 256, (size * dtype.itemsize,), generator=torch.Generator().manual_seed(size))
    return (bits % 2).bool() if dtype == torch.bool else bits.to(torch.uint8).view(dtype)


def both(x):
    """The hash by both ways, which must agree; the kernel's scratch memory starts as garbage."""
    with laws.guarded_memory():
        found = cross_replica_hash(x, impl="triton")
    assert (found.dtype, found.shape, found.device) == (torch.int64, (), x.device)
    assert torch.equal(found, cross_replica_hash_reference(x))
    return int(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_length(dtype):
    found = [both(draw(size, dtype)) for size in (0, 1, 2, 3, 7, 8, 9, 1000, 8 * BLOCK + 3)]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("multiprocessors", [0, 1, 7])
def test_no_split_of_the_work_changes_it(multiprocessors, monkeypatch):
    x = draw(40 * BLOCK + 5, torch.bfloat16)
    wanted = cross_replica_hash_reference(x)
    monkeypatch.setattr(module, "multiprocessors", lambda device: multiprocessors)
    assert torch.equal(cross_replica_hash(x, impl="triton"), wanted)


def test_logical_order_counts_and_strides_do_not():
    x = draw(60, torch.float32).view(3, 4, 5)
    views = [
        x.transpose(0, 2),
        x[:, ::2],
        x[:, :, 1:],
        x[1:, 1, 1:],
        x.flatten()[1:],
        x[:1].expand(4, 4, 5),
        x[0, 0, 0],
    ]
    for view in views:
        assert both(view) == both(view.contiguous())
    assert both(x.transpose(0, 2)) != both(x)
    assert both(torch.view_as_complex(x[..., :2].contiguous()).conj()) == both(torch.complex(x[..., 0], -x[..., 1]))


def test_bytes_that_begin_anywhere():
    x = draw(200, torch.uint8)
    for start in range(9):
        assert both(x[start:180]) == both(x[start:180].clone())


def test_operator_and_compilation():
    x = draw(100, torch.bfloat16)
    laws.check_operator(torch.ops.mpcore.cross_replica_hash, x)
    laws.check_operator(torch.ops.mpcore.cross_replica_hash, draw(33, torch.int32).view(3, 11).t())
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: cross_replica_hash(x, impl="triton"), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), cross_replica_hash_reference(x))


def test_nothing_of_nan_is_lost():
    x = torch.tensor([math.nan, 0.0, -0.0])
    assert len({both(x), both(x.nan_to_num()), both(x.abs())}) == 3


def test_empty_tensors_and_lone_elements_may_lie_anywhere():
    base = torch.arange(20.0)
    for x in (base[5:5], base.bfloat16()[3:3], base.as_strided((1,), (3,), 7), base.as_strided((1, 1), (5, 2), 8)):
        assert both(x) == both(x.clone(memory_format=torch.contiguous_format))
