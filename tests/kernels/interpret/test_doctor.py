"""The doctor's check of a kernel passes right kernels; tests/test_command.py has broken ones."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from mpcore.kernels import _dispatch, _norm, _self_test, rms_norm
from mpcore.kernels._self_test import TESTS
from mpcore.tools.doctor import check_kernel


@pytest.mark.parametrize("name", TESTS)
def test_the_doctor_passes_a_right_kernel(name):
    finding = check_kernel(name, "cuda" if torch.cuda.is_available() else "cpu")
    torchs = name == "fp8_matmul" and not torch.cuda.is_available()  # and not of CPUs
    assert finding.state == ("skipped" if torchs else "ok"), finding


def test_a_wrong_kernel_is_found_before_its_first_run_and_plain_torch_runs(monkeypatch, tmp_path):
    """Through the whole stack: the choice, the kernel in the interpreter, its reference, the cache and the fallback."""
    monkeypatch.setattr(_dispatch, "is_on_gpu", lambda x: True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x, weight, right = torch.randn(3, 20), torch.ones(20), _norm.Norm.apply
    for planted, runs in ((False, "triton"), (True, "reference")):
        monkeypatch.setattr(_self_test, "_verdicts", {})
        monkeypatch.setattr(_self_test, "_versions", lambda planted=planted: {"kernels": str(planted)})
        if planted:
            monkeypatch.setattr(_norm, "Norm", SimpleNamespace(apply=lambda *given: right(*given) * 1.001))
        with pytest.warns(RuntimeWarning, match="rms_norm failed") if planted else nullcontext():
            y = rms_norm.rms_norm(x, weight)
        assert _dispatch.implementation(None, x, "rms_norm") == runs
        torch.testing.assert_close(y, rms_norm.rms_norm(x, weight, impl="reference"), atol=1e-6, rtol=1e-6)
