"""How tensors are seen as rows, and rows as tiles."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpcore.kernels._rows import MAX_ROWS, as_rows, count_rows, row_tile


@given(D=st.integers(1, 2**17), elements_per_thread=st.sampled_from([16, 32]), elements=st.sampled_from([4096, 8192]))
def test_a_tile_covers_the_row_with_few_idle_lanes(D, elements_per_thread, elements):
    main, tail, block_m, num_warps = row_tile(D, elements_per_thread, elements)
    for power in (main, max(tail, 1), block_m, num_warps):
        assert power & (power - 1) == 0
    assert D <= main + tail < (2 * D if D < 128 else 4 / 3 * D) + 1
    assert 1 <= num_warps <= 16
    assert main * block_m <= max(elements, main)


@pytest.mark.parametrize(("D", "lanes"), [(4096, 4096), (5120, 5120), (12288, 12288), (1000, 1024), (11008, 12288)])
def test_model_widths_waste_little(D, lanes):
    main, tail, *_ = row_tile(D, 32)
    assert main + tail == lanes


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
