"""cross_replica_hash what it is, and what it tells apart."""

import pytest
import torch

from mpcore.sharding import cross_replica_hash as module
from mpcore.sharding.cross_replica_hash import cross_replica_hash

WORD = 2**64


def plain_hash(data):
    """The formula in Python's integers."""
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    total = 0
    for i, word in enumerate([*words, len(data)]):
        z = (word + i * 0x9E3779B97F4A7C15) % WORD
        for _ in range(2):
            z = (z ^ z >> 32) * 0xD6E8FEB86659FD93 % WORD
        total += z ^ z >> 32
    return (total + WORD // 2) % WORD - WORD // 2


@pytest.mark.parametrize("words", [2**20, 3, 1])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 24, 64, 1001])
def test_the_hash_is_the_formula_whatever_its_pieces(size, words, monkeypatch):
    monkeypatch.setattr(module, "WORDS", words)
    data = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(size)).to(torch.uint8)
    found = cross_replica_hash(data)
    assert (found.dtype, found.shape) == (torch.int64, ())
    assert int(found) == plain_hash(bytes(data.tolist()))


ODD = [
    (torch.ones(9)[5:5], torch.ones(0)),
    (torch.arange(9).bfloat16()[3:3], torch.ones(0)),
    (torch.arange(20.0).as_strided((1,), (3,), 7), torch.tensor([7.0])),
    (torch.arange(20.0).as_strided((1, 1), (5, 2), 8), torch.tensor([8.0])),
    (torch.arange(20.0)[3:8], torch.arange(3.0, 8.0)),
]


@pytest.mark.parametrize(("x", "same"), ODD)
def test_empty_tensors_and_lone_elements_may_lie_anywhere(x, same):
    assert torch.equal(cross_replica_hash(x), cross_replica_hash(same))


def test_parameters_may_be_hashed():
    weight = torch.nn.Parameter(torch.ones(3))
    assert torch.equal(cross_replica_hash(weight), cross_replica_hash(weight.detach()))
    assert not cross_replica_hash(weight).requires_grad


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [0, 5, 2**20 + 3, 2**31 + 5])
def test_a_gpu_gives_the_same_bits(size):
    x = torch.arange(size, device="cuda", dtype=torch.int64).to(torch.uint8)
    found = cross_replica_hash(x)
    assert torch.equal(found, cross_replica_hash(x))
    if size < 2**24:
        assert torch.equal(found.cpu(), cross_replica_hash(x.cpu()))
