"""Which implementation runs, and that everything runs without Triton."""

import importlib
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mpcore.kernels import _choice, _dispatch, _self_test, use_kernels
from mpcore.kernels._dispatch import implementation, refuse_second_derivative
from mpcore.kernels.rms_norm import rms_norm

X = torch.ones(2)


def runs_triton(impl, x, **how):
    return _dispatch.runs_triton(impl, x, "rms_norm", **how)


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
    monkeypatch.setattr(_self_test, "passes", lambda *_: True)
    assert runs_triton(None, CudaTensor(dtype))
    assert runs_triton("triton", CudaTensor(dtype))
    assert not runs_triton("reference", CudaTensor(dtype))
    monkeypatch.setattr(_dispatch, "HAS_TRITON", False)
    with pytest.raises(ValueError, match="needs the triton package: pip install triton"):
        runs_triton(None, CudaTensor(dtype))
    with use_kernels("reference"):
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


# --- the choice -----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("why", ["result 0 is off by 0.3, more than 1e-06", RuntimeError("illegal address")])
def test_a_kernel_that_is_wrong_is_replaced_with_one_warning(gpu, monkeypatch, why):
    def run_kernel(name, impl, dtype, device):
        if impl == "triton" and isinstance(why, Exception):
            raise why
        return [torch.ones(2).double() * (1.3 if impl == "triton" else 1)]

    monkeypatch.setattr(_self_test, "fault", real_fault)
    monkeypatch.setattr(_self_test, "run_kernel", run_kernel)
    x, weight = torch.ones(2, 8), torch.ones(8)
    said = str(why) if isinstance(why, Exception) else "result 0 is off by 0.3"
    with pytest.warns(RuntimeWarning, match=f"rms_norm failed its self-test on cpu: .*{said}.*mpcore doctor") as seen:
        y = rms_norm(x, weight)
    assert len(seen) == 1
    assert torch.equal(y, rms_norm(x, weight, impl="reference"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert implementation(None, X, "rms_norm") == "reference"
        assert implementation("triton", X, "rms_norm") == "triton"  # who asks gets it
    with pytest.warns(RuntimeWarning, match="fp8_matmul failed"):
        assert not _dispatch.runs_torch(None, X, "fp8_matmul", True)


real_fault = _self_test.fault


def test_nothing_is_tested_while_torch_traces_or_runs_backward(gpu):
    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            assert implementation(None, dy, "rms_norm") == "triton"
            return dy

    leaf = torch.ones(2, requires_grad=True)
    Asks.apply(leaf).sum().backward()
    assert leaf.grad is not None
    with FakeTensorMode():
        assert implementation(None, torch.ones(2), "rms_norm") == "triton"
    traced = torch.compile(lambda x: x + (implementation(None, x, "rms_norm") == "triton"), backend="eager")
    assert traced(X).tolist() == [2, 2]
    assert gpu == []
    assert implementation(None, X, "rms_norm") == "triton"
    assert len(gpu) == 1


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


def test_what_runs_is_listed():
    found = dict(line.split() for line in _choice.describe())
    assert found.keys() == _self_test.OPERATORS.keys()
    assert (found["gelu"], found["plain_attention"], found["grouped_linear"]) == ("triton", "torch", "torch")


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


def test_how_a_launcher_becomes_an_operator(monkeypatch):
    """A launcher allocates and then launches; of nothing it launches nothing; what it writes gets a new version."""
    launched = []

    @_dispatch.operator("launcher_of_a_test(Tensor x, Tensor(a!)? y, Tensor(b!)? z) -> (Tensor, Tensor)")
    def launcher(x, y, z):
        out = torch.full_like(x, 7.0), torch.full_like(x, 8.0, dtype=torch.float64)
        yield out
        launched.append(x.shape)
        for each in (y, z):
            if each is not None:
                each.add_(0)

    @_dispatch.operator("reference_of_a_test(Tensor x) -> Tensor", lambda x: x * 2)
    def other(x):
        yield torch.full_like(x, 7.0)
        launched.append("other")

    @_dispatch.operator("nothing_of_a_test(Tensor x) -> ()")
    def nothing(x):
        yield
        launched.append("nothing")

    x, y, z = torch.ones(2), torch.ones(2), torch.ones(2)
    one, two = launcher(x, y, None)
    assert (one.tolist(), two.tolist(), launched) == ([7, 7], [8, 8], [(2,)])
    assert (y._version, z._version, x._version) == (2, 0, 0)  # its own write, and the operator's
    launcher(x, None, z)
    assert (y._version, z._version) == (2, 2)
    launched.clear()
    one, two = launcher(x[:0], y, z)
    assert (one.shape, two.dtype, launched) == ((0,), torch.float64, [])
    with FakeTensorMode():
        one, two = launcher(torch.ones(3), None, None)
    assert (one.shape, two.dtype, launched) == ((3,), torch.float64, [])
    monkeypatch.setattr(_dispatch, "launching_on_cpu", False)
    assert (other(x).tolist(), launched) == ([2, 2], [])
    assert nothing(x) is None
    assert launched == ["nothing"]
    monkeypatch.setattr(_dispatch, "launching_on_cpu", True)
    assert (other(x).tolist(), launched) == ([7, 7], ["nothing", "other"])
    assert nothing(x[:0]) is None
    assert len(launched) == 2
    for name in ("launcher", "reference", "nothing"):
        for key in ("CPU", "CUDA", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"mpcore::{name}_of_a_test", key), (name, key)


def test_an_operator_of_no_elements_gives_zeros():
    @_dispatch.operator("sum_of_a_test(Tensor x, int n) -> Tensor")
    def launcher(x, n):
        yield torch.full((n,), 7.0)

    assert launcher(torch.ones(2), 3).tolist() == [7, 7, 7]
    assert launcher(torch.ones(0), 3).tolist() == [0, 0, 0]
