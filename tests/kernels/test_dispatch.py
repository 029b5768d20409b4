"""Which implementation runs, and that everything runs without Triton."""

import subprocess
import sys

import pytest
import torch

from mpcore.kernels import _dispatch
from mpcore.kernels._dispatch import refuse_second_derivative, runs_triton

X = torch.ones(2)


def test_a_cpu_tensor_takes_the_reference():
    assert not runs_triton(None, X)
    assert not runs_triton("reference", X)


class CudaTensor:
    """What the choice looks at, without the device."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, dtype):
        self.dtype = dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cuda_tensor_takes_triton_where_it_is_there(dtype, monkeypatch):
    assert runs_triton(None, CudaTensor(dtype))
    assert runs_triton("triton", CudaTensor(dtype))
    assert not runs_triton("reference", CudaTensor(dtype))
    monkeypatch.setattr(_dispatch, "HAS_TRITON", False)
    assert not runs_triton(None, CudaTensor(dtype))


def test_float64_takes_the_reference_on_any_device():
    assert not runs_triton(None, CudaTensor(torch.float64))


@pytest.mark.parametrize(
    ("impl", "x", "message"),
    [
        ("cuda", X, "impl 'cuda' is none of"),
        ("triton", X, "x is on cpu"),
        ("triton", CudaTensor(torch.float64), "no torch.float64 kernel"),
    ],
)
def test_a_request_that_cannot_be_met_says_why(impl, x, message):
    with pytest.raises(ValueError, match=message):
        runs_triton(impl, x)


def test_a_request_for_triton_without_the_package(monkeypatch):
    monkeypatch.setattr(_dispatch, "HAS_TRITON", False)
    with pytest.raises(ValueError, match="can't be imported"):
        runs_triton("triton", CudaTensor(torch.float32))


def test_the_interpreter_runs_kernels_on_the_cpu(monkeypatch):
    monkeypatch.setattr(_dispatch, "INTERPRETING", True)
    assert runs_triton("triton", X)
    assert not runs_triton(None, X)  # it is slow; only an explicit request goes there
    with pytest.raises(ValueError, match="x is on meta"):
        runs_triton("triton", X.to("meta"))


def test_a_backward_that_is_differentiated_is_refused():
    with torch.no_grad():
        refuse_second_derivative("gelu")
    with torch.enable_grad(), pytest.raises(RuntimeError, match="gelu kernel has no second derivative"):
        refuse_second_derivative("gelu")


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
