"""The self-test of the kernels: its bound, what it compares, where its verdict is kept, and when it does not run."""

from types import SimpleNamespace

import pytest
import torch

from mpcore.kernels import _choice, _dispatch, _self_test
from mpcore.kernels._self_test import TESTS, fault, passes, run_kernel

F32, F64 = torch.float32, torch.float64


@pytest.mark.parametrize("name", TESTS)
def test_inputs_are_the_same_each_time_and_reach_every_part(name):
    """No input is constant; ids cover their range; each is of the shape that its kernel takes."""
    first, second = (TESTS[name][0]() for _ in range(2))
    for key, x in first.items():
        if isinstance(x, torch.Tensor):
            assert torch.equal(x, second[key])
            assert x.dtype in (F64, torch.int64, F32)
            assert x.unique().numel() > 1 or key == "scale"
    assert all(out.dtype == F64 for out in run_kernel(name, "reference", F32, "cpu"))


GRADIENTS = {"adamw": 1, "attention": 2 + 3, "attention_merge": 2, "dropout_add": 1 + 2, "fp8_matmul": 4, "geglu": 2,
             "layer_norm": 1 + 3, "linear_cross_entropy": 1 + 2, "moe_permute": 1 + 2, "quantize_fp8": 4,
             "relu_squared": 2, "rms_norm": 1 + 2, "rope": 2 + 2, "route": 4 + 2, "swiglu": 2, "top_k": 1}  # fmt: skip


@pytest.mark.parametrize("name", TESTS)
def test_outputs_and_all_gradients_are_compared(name):
    found = run_kernel(name, "reference", F64, "cpu")
    assert len(found) == GRADIENTS[name]
    assert all(x.any() for x in found)
    for x, y in zip(found, run_kernel(name, "reference", F32, "cpu"), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def results(monkeypatch, exact, plain, found):
    """What a kernel, its reference and the reference in float64 compute."""
    given = {("reference", F64): exact, ("reference", F32): plain, ("triton", F32): found}

    def run(name, impl, dtype, device):
        value = given[impl, dtype]
        if isinstance(value, Exception):
            raise value
        return [torch.tensor(x, dtype=F64) for x in value]

    monkeypatch.setattr(_self_test, "run_kernel", run)


EPS = torch.finfo(F32).eps


@pytest.mark.parametrize(("plain", "error", "right"), [
    (0.0, 4 * EPS * 8, True), (0.0, 4.1 * EPS * 8, False), (0.01, 0.02, True), (0.01, 0.0201, False),
    (-0.01, -0.02, True), (0.0, float("nan"), False), (float("nan"), 0.0, False),
])  # fmt: skip
def test_a_kernel_errs_at_most_twice_as_its_reference_or_by_four_roundings(plain, error, right, monkeypatch):
    """Of the largest value, which is 8."""
    results(monkeypatch, [[0.0, -8.0]], [[plain, -8.0]], [[error, -8.0]])
    said = fault("swiglu", "cpu")
    assert (said == "") == right
    if not right:
        assert said.startswith("result 0 is off by ")
        assert "more than" in said


def test_whatever_a_compiler_raises_is_the_finding_but_a_refusal_is_raised(monkeypatch):
    results(monkeypatch, [[1.0]], [[1.0]], RuntimeError("long\nstory\n the end \n"))
    assert fault("swiglu", "cpu") == "RuntimeError:  the end"
    results(monkeypatch, [[1.0]], [[1.0]], ValueError("x is on cpu"))
    with pytest.raises(ValueError, match="x is on cpu"):
        fault("swiglu", "cpu")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, no verdicts, and a test whose finding may be set; returns the calls."""
    calls = []
    monkeypatch.setattr(_self_test, "_verdicts", {})
    monkeypatch.setattr(_self_test, "fault", lambda name, device: calls.append((name, device)) or "")
    monkeypatch.setattr(_self_test, "_versions", lambda: {"torch": "1", "triton": "2", "kernels": "3"})
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return calls


CPU = torch.device("cpu")


def test_a_kernel_is_tested_once_by_the_name_of_its_test(cache, monkeypatch):
    x = torch.ones(2)
    assert passes("plain_attention", x)
    assert passes("attention", x)
    assert cache == [("attention", CPU)]
    _self_test._verdicts["geglu", CPU] = "is wrong"
    assert not passes("geglu", x)
    assert torch.compile(lambda y: y + passes("geglu", y), backend="eager")(x).tolist() == [1, 1]  # its verdict
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0))
    assert passes("swiglu", on_gpu)  # while a graph is captured nothing runs
    assert passes("swiglu", x.to("meta"))
    assert len(cache) == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert passes("swiglu", on_gpu)
    assert cache[1:] == [("swiglu", torch.device("cuda", 0))]
    assert _self_test.device_name(torch.device("cuda", 1)) == "GPU 1"
    assert _self_test.device_name(torch.device("meta")) == "meta"


class Fake:
    """What the choice looks at."""

    def __init__(self, device="cuda", dtype=F32):
        self.device, self.dtype, self.is_cuda, self.is_meta = (
            torch.device(device), dtype, device == "cuda", device == "meta",
        )  # fmt: skip


@pytest.mark.parametrize(("impl", "forced", "x", "triton", "interprets", "found"), [
    (None, None, Fake(), True, False, "chosen"), (None, None, Fake("cpu"), True, True, "reference"),
    (None, None, Fake(dtype=F64), True, False, "reference"),
    (None, None, Fake(), False, False, "needs the triton package"),
    (None, "reference", Fake(), True, False, "reference"), (None, "triton", Fake(), True, False, "triton"),
    ("reference", "triton", Fake(), True, False, "reference"), ("triton", "reference", Fake(), True, False, "triton"),
    ("triton", None, Fake("cpu"), True, True, "triton"), ("triton", None, Fake("cpu"), True, False, "x is on cpu"),
    ("triton", None, Fake("meta"), True, True, "x is on meta"), ("triton", None, Fake(), False, False, "be imported"),
    ("triton", None, Fake(dtype=F64), True, False, "no torch.float64 kernel"),
    ("torch", None, Fake(), True, False, "impl 'torch' is none of"),
])  # fmt: skip
def test_which_implementation_runs(impl, forced, x, triton, interprets, found, monkeypatch):
    monkeypatch.setattr(_dispatch, "HAS_TRITON", triton)
    monkeypatch.setattr(_dispatch, "INTERPRETING", interprets)
    monkeypatch.setattr(_dispatch, "chosen", lambda operator, x: operator)
    monkeypatch.setattr(_choice, "_forced", forced)
    if " " in found:
        with pytest.raises(ValueError, match=found):
            _dispatch.implementation(impl, x, "swiglu")
        return
    assert _dispatch.implementation(impl, x, "swiglu") == ("swiglu" if found == "chosen" else found)
    assert _dispatch.runs_triton(impl, x, "swiglu") == (found == "triton")
