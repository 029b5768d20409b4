"""How tensors are seen as rows, and rows as tiles."""

import pytest
import torch
from fake_gpu import calls
from hypothesis import given
from hypothesis import strategies as st

from mpcore.kernels._rows import MAX_ROWS, as_rows, by_heads, count_rows, row_tile, sum_partials


@given(D=st.integers(1, 2**17), elements_per_thread=st.sampled_from([16, 32]), elements=st.sampled_from([4096, 8192]))
def test_a_tile_covers_the_row_with_few_idle_lanes(D, elements_per_thread, elements):
    main, tail, block_m, num_warps = row_tile(D, elements_per_thread, elements)
    for power in (main, max(tail, 1), block_m, num_warps):
        assert power & (power - 1) == 0
    assert D <= main + tail < (2 * D if D < 128 else 4 / 3 * D) + 1
    assert 1 <= num_warps <= 16
    assert main * block_m <= max(elements, main)


def test_strided_rows_are_seen_in_place():
    x = torch.empty(6, 4, 20)
    for view, stride in ((x, 20), (x[..., :8], 20), (x[:, 1], 80), (x[:1, 1, :8], 8), (x[0, 0], 20)):
        rows, row_stride = as_rows(view)
        assert rows.data_ptr() == view.data_ptr()
        assert row_stride == stride


def test_other_strides_are_copied():
    x = torch.arange(24.0).view(2, 3, 4)
    for view in (x.transpose(0, 1), x.transpose(1, 2), x[..., ::2], x[0, 0].expand(5, 4)[:, :1].expand(5, 3)):
        rows, row_stride = as_rows(view)
        seen = rows.as_strided((count_rows(view), view.shape[-1]), (row_stride, 1))
        assert torch.equal(seen, view.reshape(seen.shape))


def test_more_rows_than_a_kernel_counts_are_refused():
    x = torch.empty(1, 1).expand(MAX_ROWS + 1, 1)
    with pytest.raises(ValueError, match="2147483648 rows are more than the 2147483647"):
        count_rows(x)
    assert count_rows(x[1:]) == MAX_ROWS


@pytest.mark.parametrize(("arguments", "tile"), [
    ((1, 32), (1, 0, 64, 1)),  # at most 64 rows, at least a warp
    ((8, 32), (8, 0, 64, 1)),
    ((100, 32), (128, 0, 32, 4)),  # below 128 columns one masked tile
    ((127, 32), (128, 0, 32, 4)), ((128, 32), (128, 0, 32, 4)), ((129, 32), (128, 1, 32, 4)),
    ((192, 32), (128, 64, 32, 4)),
    ((193, 32), (256, 0, 16, 4)),  # a tail as wide as the main part is one tile of both
    ((4096, 32), (4096, 0, 1, 4)), ((5120, 32), (4096, 1024, 1, 4)), ((8192, 32), (8192, 0, 1, 8)),
    ((1024, 16), (1024, 0, 4, 8)), ((4096, 16, 8192), (4096, 0, 2, 16)),
    ((16384, 16), (16384, 0, 1, 16)),  # at most 16 warps
])  # fmt: skip
def test_rows_that_share_a_program_and_its_warps(arguments, tile):
    assert row_tile(*arguments) == tile


def test_heads_are_named_with_their_strides_and_copied_only_where_a_head_has_gaps():
    x = torch.empty(2, 5, 3, 8)
    named = by_heads(q=x[:, 1:], k=None, v=x.transpose(2, 3))
    assert named["q_ptr"].data_ptr() == x[:, 1:].data_ptr()
    assert [named[f"q_{dim}"] for dim in ("batch", "token", "head")] == [120, 24, 8]
    assert [named[f"k_{dim}"] for dim in ("ptr", "batch", "token", "head")] == [None, 0, 0, 0]
    assert named["v_ptr"].is_contiguous()
    assert [named[f"v_{dim}"] for dim in ("batch", "token", "head")] == [120, 24, 3]


@pytest.mark.parametrize("both", [False, True])
def test_a_launch_of_sums(both):
    partials, first = torch.empty(1 + both, 7, 100), torch.empty(100)
    second = first.clone() if both else None
    with calls() as launches:
        sum_partials(partials, first, second)
        sum_partials(partials, first, second, accumulate=True)
    for launch, accumulate in zip(launches, (False, True), strict=True):
        assert (launch.kernel, launch.grid, launch.warps) == ("sum_partials_kernel", (4, 1 + both, 1), 4)
        assert launch.numbers == {"P": 7, "D": 100, "ACCUMULATE": accumulate, "BLOCK_P": 64, "BLOCK_D": 32}
        found = [launch.arguments[f"{name}_ptr"] for name in ("partials", "first", "second")]
        assert all(a is b for a, b in zip(found, (partials, first, second), strict=True))
