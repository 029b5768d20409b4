"""Which implementation runs, and that everything runs without Triton."""

import importlib
import subprocess
import sys
import threading

import pytest
import torch

from mpcore.kernels import _choice, _dispatch, _self_test, use_kernels
from mpcore.kernels._dispatch import implementation, refuse_second_derivative

X = torch.ones(2)


def runs_triton(impl, x, **how):
    return _dispatch.runs_triton(impl, x, "rms_norm", **how)


def test_a_backward_that_is_differentiated_is_refused():
    with torch.no_grad():
        refuse_second_derivative("geglu")
    with torch.enable_grad(), pytest.raises(RuntimeError, match="geglu kernel has no second derivative"):
        refuse_second_derivative("geglu")


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """CPU tensors count as those of a GPU on which no kernel has been tested; returns the tests that then ran."""
    ran = []

    def fault(name, device):
        ran.append((name, threading.current_thread() is threading.main_thread()))
        return ""

    monkeypatch.setattr(_dispatch, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(_self_test, "_verdicts", {})
    monkeypatch.setattr(_self_test, "fault", fault)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return ran


def test_triton_runs_memory_bound_kernels_and_torch_products(gpu):
    assert implementation(None, X, "rms_norm") == "triton"
    assert implementation(None, X, "plain_attention") == "torch"
    for product in ("grouped_linear", "fp8_matmul"):
        assert _dispatch.runs_torch(None, X, product, True)
        assert not _dispatch.runs_torch(None, X, product, False)
        assert not _dispatch.runs_torch("reference", X, product, True)
        with use_kernels("reference"):
            assert not _dispatch.runs_torch(None, X, product, True)
        with use_kernels("triton"):
            assert _dispatch.runs_torch(None, X, product, True)
    assert gpu == [("rms_norm", False), ("fp8_matmul", False)]
    assert set(_choice.TORCH_BY_RULE) < set(_self_test.OPERATORS)
    assert set(_self_test.OPERATORS.values()) == set(_self_test.TESTS)


def test_a_kernel_is_tested_once_before_its_first_run_and_the_next_process_reads_the_verdict(
    gpu, monkeypatch, tmp_path
):
    for _ in range(3):
        assert implementation(None, X, "rms_norm") == "triton"
    assert gpu == [("rms_norm", False)]  # in a thread of its own: no mode of the caller's holds there
    monkeypatch.setattr(_self_test, "_verdicts", {})  # another process
    assert implementation(None, X, "rms_norm") == "triton"
    assert len(gpu) == 1
    for versions in ({"torch": "9"}, {"torch": "9", "triton": "9"}, {"kernels": "changed"}):
        monkeypatch.setattr(_self_test, "_verdicts", {})
        monkeypatch.setattr(_self_test, "_versions", lambda new=versions: new)
        assert implementation(None, X, "rms_norm") == "triton"
    assert len(gpu) == 4
    (path, *_), others = list(tmp_path.rglob("*.json")), list(tmp_path.rglob("*.part"))
    assert not others
    path.write_text("{")  # a process was killed while it wrote
    monkeypatch.setattr(_self_test, "_verdicts", {})
    assert implementation(None, X, "rms_norm") == "triton"


def test_one_context_switches_every_kernel_and_is_undone(gpu):
    with use_kernels("reference"):
        assert implementation(None, X, "rms_norm") == "reference"
        with use_kernels("triton"):
            assert implementation(None, X, "plain_attention") == "triton"
        assert implementation(None, X, "rms_norm") == "reference"
        assert implementation("triton", X, "rms_norm") == "triton"
        found = []
        worker = threading.Thread(target=lambda: found.append(implementation(None, X, "rms_norm")))
        worker.start()
        worker.join()
        assert found == ["reference"]
    assert gpu == []
    assert implementation(None, X, "rms_norm") == "triton"
    with pytest.raises(ValueError, match="'torch' is neither 'triton' nor 'reference'"), use_kernels("torch"):
        pass


WITHOUT_TRITON = """
import importlib, pkgutil, sys
sys.modules["triton"] = None  # makes `import triton` raise ImportError
import torch
import mpcore.kernels
for module in pkgutil.iter_modules(mpcore.kernels.__path__):
    importlib.import_module(f"mpcore.kernels.{module.name}")
assert not any(name.startswith("triton.") for name in sys.modules)
from mpcore.kernels.rms_norm import rms_norm
x, weight = torch.ones(2, 8, requires_grad=True), torch.ones(8)
rms_norm(x, weight).sum().backward()
try:
    rms_norm(x, weight, impl="triton")
except ValueError as error:
    print(error)
"""


def test_everything_imports_and_runs_without_triton():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "can't be imported" in done.stdout


def test_every_operator_has_a_kernel_for_cpus_gpus_and_shapes():
    compile_table = importlib.import_module("compile_table")  # imports all that define operators
    assert compile_table.ops is torch.ops.mpcore
    importlib.import_module("mpcore.kernels.grouped_linear")
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("mpcore::")}
    assert {"mpcore::norm_forward", "mpcore::adamw", "mpcore::random_words"} < names
    for name in names:
        for key in ("CPU", "CUDA", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key), (name, key)
