"""The bytes that memory-bound kernels move, as docs/kernels.md has them: the floor's, and at most 5 % more."""

import compile_table
import pytest
from test_compile import GOLDEN

# docs/decisions.md: where no multiprocessor holds a row and its sums, backward reads it twice.
TWO_PASSES = {f"{norm} D={D}" for norm in ("rms_norm", "layer_norm") for D in ("16384 fp32 residual", "65536 bf16")}
TWICE = {"backward_rows_kernel", "backward_columns_kernel", "sum_partials_kernel"}


@pytest.fixture(scope="module")
def moved():
    return compile_table.all_moved()


def test_the_table_has_what_is_counted(moved):
    assert moved == GOLDEN["moved"], f"regenerate by: python {compile_table.__file__}"


def test_every_memory_bound_kernel_is_at_its_floor(moved):
    for case, kernels in moved.items():
        for kernel, ratio in kernels.items():
            if case in TWO_PASSES and kernel in TWICE:
                assert ratio < 1.7, (case, kernel)
            else:
                assert 1 <= ratio <= 1.05, (case, kernel, ratio)


def test_all_kernels_but_products_are_counted(moved):
    counted = {case.split()[0] for case, kernels in moved.items() if kernels}
    named = {case.split()[0] for case in moved}
    assert named - counted == {"attention", "column"}
