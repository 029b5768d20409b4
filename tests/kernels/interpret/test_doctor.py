"""The doctor's check of a kernel passes right kernels; tests/test_command.py has broken ones."""

import pytest
import torch

from mpcore.doctor import KERNELS, check_kernel


@pytest.mark.parametrize("name", KERNELS)
def test_the_doctor_passes_a_right_kernel(name):
    finding = check_kernel(name, "cuda" if torch.cuda.is_available() else "cpu")
    assert finding.state == "ok", finding
