"""Numerics of the attention kernels: every mask, grouping, dtype and layout, and the blocks of a ring."""

import laws
import pytest
import torch

from mpcore.kernels.attention import attention, attention_backward, attention_reference

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
MASKS = ["causal", "full", "window", "packed", "packed full", "packed window", "bounds"]


def mask(name, T, keys=None):
    """Options of a mask of T queries, and of as many keys unless it can do with others."""
    ends = torch.tensor([0, T // 3, T // 3, T // 3 + 1, T])
    if name == "bounds":  # the first queries see nothing, nor do the last; both bounds jump
        index, keys = torch.arange(T, dtype=torch.int32), T if keys is None else keys
        low = (index - T // 2) // 8 * 8
        return {"bounds": (torch.where(index > T - 3, keys, low), index * keys // T - 5)}
    return {
        "causal": {},
        "full": {"causal": False},
        "window": {"window": max(1, T // 3)},
        "packed": {"cu_seqlens": ends},
        "packed full": {"cu_seqlens": ends, "causal": False},
        "packed window": {"cu_seqlens": ends, "window": max(1, T // 4)},
    }[name]


def draw(T, H=2, groups=1, K=64, *, keys=None, V=None, B=1, dtype=F32):
    generator = torch.Generator().manual_seed(T + H)
    shapes = {
        "query": (B, T, H, K),
        "key": (B, T if keys is None else keys, groups, K),
        "value": (B, T if keys is None else keys, groups, K if V is None else V),
    }
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def seen(function):
    """Without the lse of queries that see nothing: it is -inf, and an infinity has no error."""

    def call(**arguments):
        output, lse = function(**arguments)
        sees = lse.detach().isfinite()
        assert bool((lse.detach()[~sees] == -torch.inf).all())
        assert not output.detach().transpose(1, 2)[~sees].any()
        return output, torch.where(sees, lse, 0.0)

    return call


def triton(**arguments):
    return attention(**arguments, impl="triton")


def check(inputs, layout="contiguous", **options):
    laws.check_errors(seen(triton), seen(attention_reference), inputs, layout, **options)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("T", [1, 37, 130])
@pytest.mark.parametrize("name", MASKS)
def test_errors(name, T, dtype):
    heads = {"H": 32, "groups": 16} if T == 1 else {"H": 2}  # a lone row's error is more luck than law
    check(draw(T, dtype=dtype, **heads), **mask(name, T))
