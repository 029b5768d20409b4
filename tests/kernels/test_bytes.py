"""The bytes that memory-bound kernels move, as docs/kernels.md has them: the floor's, and at most 5 % more."""

import compile_table
import pytest
import step_bytes
import torch
from test_compile import GOLDEN

from mpcore._torch.fake import fake_tensors
from mpcore.kernels.attention import key_bounds


@pytest.fixture(scope="module")
def moved():
    return compile_table.all_moved()


def test_the_table_has_what_is_counted(moved):
    assert moved == GOLDEN["moved"], f"regenerate by: python {compile_table.__file__}"


def test_every_memory_bound_kernel_is_at_its_floor(moved):
    for case, kernels in moved.items():
        for kernel, ratio in kernels.items():
            most = 1.7 if "fp32 square both ways" in case else 1.05  # two passes: 10 bytes of each element, not 6
            assert 1 <= ratio <= most, (case, kernel, ratio)


def test_all_kernels_but_products_are_counted(moved):
    counted = {case.split()[0] for case, kernels in moved.items() if kernels}
    named = {case.split()[0] for case in moved}
    assert named - counted == {"attention", "attention_merge", "column"}  # records have the merge


def test_no_pass_adds_a_weights_gradient_to_its_main_gradient():
    """Only torch's grouped products need one (`docs/records/2026-11-29_step_bytes.md`)."""
    added = {part: step_bytes.count(part)["add_"] for part in step_bytes.PARTS}
    assert [part for part, size in added.items() if size > 2**20] == ["experts of 30B-A3B"]
    copied = step_bytes.count("experts of 30B-A3B")["_to_copy"]
    assert copied < 2 * 8192 * 2048  # bytes of the tokens: the router copies none, but the parts of dlogits


@pytest.mark.parametrize(("window", "documents", "most"), [(3, False, 4), (None, True, 4), (3, True, 6)])
def test_bounds_of_a_mask_take_few_launches(window, documents, most):
    with fake_tensors(stands_for_gpu=True), step_bytes.Bytes() as counted:
        key_bounds(8, window=window, cu_seqlens=torch.zeros(3, dtype=torch.int32) if documents else None)
    assert sum(counted.calls.values()) == most + documents  # and zeros, the documents themselves
