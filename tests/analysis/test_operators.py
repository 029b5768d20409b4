"""What operators compute, counted on fake tensors, against products and bytes on paper."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mpcore._torch.fake import fake_tensors
from mpcore.tools.analysis.dry_run import pretend
from mpcore.tools.analysis.operators import OperatorCounts, Operators, _pairs

aten = torch.ops.aten


def count(run: Callable[..., object], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> OperatorCounts:
    with fake_tensors(stands_for_gpu=False):
        given = [torch.empty(shape, dtype=dtype) for shape in shapes]
        with Operators() as found:
            run(*given)
    return found.tally


@pytest.mark.parametrize(("run", "moved", "launches"), [
    (lambda x: x + 1, 2, 1),  # it reads x and writes the sum
    (lambda x: x + x, 2 + 1, 1),  # an argument is read as often as it is given
    (lambda x: x.mul_(2), 1, 1),  # written where it was read
    (lambda x: torch.add(x, x.exp()), 2 + 3, 2), (lambda x: x.view(-1).view(3, 8).t()[0], 0, 0),
    (lambda x: torch.empty_like(x), 0, 0),
    (lambda x: (x.new_empty(9), torch.empty_strided((9,), (1,)), x.new_empty_strided((2,), (1,))), 0, 0),
    (lambda x: torch.ops.aten._unsafe_view(x, [24]), 0, 0),
    (lambda x: torch.zeros_like(x), 2, 1),  # its argument is counted as read
])  # fmt: skip
def test_operators_move_what_they_read_and_write(run, moved, launches):
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        assert count(run, (4, 6), dtype=dtype) == OperatorCounts(bytes=moved * 24 * size, launches=launches)


def test_collectives_are_not_counted():
    with pretend(2), fake_tensors(stands_for_gpu=False):
        x = torch.empty(4, 4)
        with Operators() as found:
            dist.all_reduce(x)
            torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", "0"))
    assert found.tally == OperatorCounts()


B, H, T, S, K, V = 2, 3, 5, 7, 4, 6


@pytest.mark.parametrize("heads", [H, 1])
@pytest.mark.parametrize("length", [T, S])
@pytest.mark.parametrize("causal", [False, True])
def test_pairs_are_those_of_queries_and_keys_in_the_heads_of_the_query(heads, length, causal):
    """torch's operators have [B, H, T, K], those of `mpcore.kernels` [B, T, H, K]."""
    q, k = torch.empty(B, H, T, K), torch.empty(B, heads, length, K)
    y, lse = torch.empty(B, H, T, K), torch.empty(B, H, T)
    every, triangle = B * H * T * length, B * H * (1 + 2 + 3 + 4 + 5)
    name = "_scaled_dot_product_flash_attention"
    want = every, triangle if causal and length == T else every
    assert _pairs(f"{name}_for_cpu", (q, k, k, 0.0, causal)) == want
    assert _pairs(f"{name}_backward", (y, q, k, k, y, lse, causal)) == want
    mine, keys = q.transpose(1, 2), k.transpose(1, 2)
    want = every, triangle if causal else every
    assert _pairs("attention_forward", (mine, keys, keys, None, None, causal)) == want
    assert _pairs("attention_backward", (y, y, mine, keys, keys, y, lse, None, None, causal)) == want
    low = torch.zeros(T)
    for own in (True, False):
        assert _pairs("attention_forward", (mine, keys, keys, low, low, own)) == (every, every // 2)
        assert _pairs("attention_backward", (y, y, mine, keys, keys, y, lse, low, low, own)) == (every, every // 2)


@pytest.mark.parametrize(("dtype", "width", "slow"), [("bfloat16", 12, 1), ("bfloat16", 24, 0), ("float32", 12, 0)])
def test_attention_is_no_product_and_counts_the_pairs_that_a_causal_mask_leaves(dtype, width, slow):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.nn.functional.scaled_dot_product_attention(q, k, v)

    found = count(attend, *[(B, H, T, width)] * 3, dtype=getattr(torch, dtype))
    pairs = B * H * T * T
    assert found.scores == 2 * pairs
    assert found.all_pairs == 2 * 4 * pairs * width
    assert found.attention == 4 * width * (pairs + B * H * 15)
    assert found.unaligned == slow * found.all_pairs
    assert (found.products, found.launches) == ({}, 2)
