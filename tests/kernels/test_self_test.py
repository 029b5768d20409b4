"""The self-test of the kernels: its bound, what it compares, where its verdict is kept, and when it does not run."""

import hashlib
import json
import threading
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from mpcore.kernels import _choice, _dispatch, _flops, _self_test, use_kernels
from mpcore.kernels._self_test import OPERATORS, TESTS, fault, passes, run_kernel

F32, F64 = torch.float32, torch.float64


def test_every_operator_has_a_test():
    assert OPERATORS.keys() == TESTS.keys() | {"cross_entropy", "grouped_linear", "plain_attention"}
    assert {name: test for name, test in OPERATORS.items() if name != test} == {
        "cross_entropy": "linear_cross_entropy", "grouped_linear": "moe_permute", "plain_attention": "attention"
    }  # fmt: skip


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


# Odd sizes: rows and columns have tails, ids reach every expert and token, and a matrix of FP8 has partial blocks.
SHAPES = {
    "adamw": {"param": (300,), "grad": (300,)},
    "attention": {"query": (1, 37, 4, 16), "key": (1, 37, 2, 16), "value": (1, 37, 2, 16)},
    "dropout_add": {"x": (2, 9, 33), "residual": (2, 9, 33), "samples": (2,)},
    "fp8_matmul": {"a": (64, 512), "b": (256, 512)},
    "geglu": {"x": (9, 66)}, "gelu": {"x": (9, 33)}, "relu_squared": {"x": (9, 33)}, "swiglu": {"x": (9, 66)},
    "layer_norm": {"x": (9, 33), "weight": (33,), "bias": (33,)}, "rms_norm": {"x": (9, 33), "weight": (33,)},
    "linear_cross_entropy": {"x": (9, 16), "weight": (50, 16), "target": (9,), "scale": (9,)},
    "moe_permute": {"x": (9, 16), "weight": (9, 2), "chosen": (9, 2)}, "quantize_fp8": {"x": (130, 140)},
    "rope": {"q": (1, 9, 2, 16), "k": (1, 9, 2, 16), "cos": (9, 8), "sin": (9, 8)},
}  # fmt: skip
IDS = {"dropout_add": ("samples", 9), "fp8_matmul": ("a", 3), "linear_cross_entropy": ("target", 50)}
IDS["moe_permute"] = ("chosen", 4)


@pytest.mark.parametrize("name", TESTS)
def test_the_shapes_that_a_self_test_takes(name):
    made = TESTS[name][0]()
    assert {key: tuple(x.shape) for key, x in made.items() if isinstance(x, torch.Tensor)} == SHAPES[name]
    if name in IDS:
        key, end = IDS[name]
        assert made[key].dtype == torch.int64
        assert 0 <= made[key].min() <= made[key].max() < end
        assert made[key].max() == end - 1 or made[key].numel() < 10
    assert made.get("p", 0.3) == 0.3


@pytest.mark.parametrize("draw", [lambda: _self_test._draw(3, 2), lambda: _self_test._ids(5, 3)])
def test_inputs_are_drawn_on_the_cpu_whatever_the_default_device(draw):
    with torch.device("meta"):
        assert draw().device == torch.device("cpu")


GRADIENTS = {"adamw": 1, "attention": 2 + 3, "dropout_add": 1 + 2, "fp8_matmul": 4, "geglu": 2, "gelu": 2,
             "layer_norm": 1 + 3, "linear_cross_entropy": 1 + 2, "moe_permute": 1 + 2, "quantize_fp8": 4,
             "relu_squared": 2, "rms_norm": 1 + 2, "rope": 2 + 2, "swiglu": 2}  # fmt: skip


@pytest.mark.parametrize("name", TESTS)
def test_outputs_and_all_gradients_are_compared(name):
    found = run_kernel(name, "reference", F64, "cpu")
    assert len(found) == GRADIENTS[name]
    assert all(x.any() for x in found)
    for x, y in zip(found, run_kernel(name, "reference", F32, "cpu"), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_gradients_are_of_weights_that_rise(monkeypatch):
    """Of each output: 1/n, 2/n, .. 1, so that no two elements can be swapped."""
    monkeypatch.setitem(TESTS, "gelu", (lambda: {"x": torch.ones(2, 2, dtype=F64), "n": torch.arange(2)}, scaled))
    y, dx = run_kernel("gelu", "reference", F32, "cpu")
    assert (y.tolist(), dx.tolist()) == ([[3, 3], [3, 3]], [[0.75, 1.5], [2.25, 3.0]])


def scaled(x, n, impl):
    assert (x.dtype, n.dtype, x.requires_grad, impl) == (F32, torch.int64, True, "reference")
    return 3 * x


def test_adamws_test_steps_with_its_options(monkeypatch):
    from mpcore.kernels import adamw

    seen = []
    monkeypatch.setattr(adamw, "adamw_foreach", lambda states, **how: seen.append((states, how)))
    param, grad = torch.ones(3), torch.full((3,), 2.0)
    found = _self_test._adamw(param, grad, "triton")
    ((state,), how) = seen[0]
    assert how == {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "impl": "triton"}
    assert state.now.tolist() == pytest.approx([1e-2, 0.1, 0.05**0.5, 1.0])
    assert found is state.param is not param
    assert state.grad is grad
    assert not state.exp_avg.any()
    assert not state.exp_avg_sq.any()


# --- the bound --------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("plain", "error", "right"),
    [(0.0, 4 * EPS * 8, True), (0.0, 4.1 * EPS * 8, False), (0.01, 0.02, True), (0.01, 0.0201, False),
     (-0.01, -0.02, True), (0.0, float("nan"), False), (float("nan"), 0.0, False)],
)  # fmt: skip
def test_a_kernel_errs_at_most_twice_as_its_reference_or_by_four_roundings(plain, error, right, monkeypatch):
    """Of the largest value, which is 8."""
    results(monkeypatch, [[0.0, -8.0]], [[plain, -8.0]], [[error, -8.0]])
    said = fault("gelu", "cpu")
    assert (said == "") == right
    if not right:
        assert said.startswith("result 0 is off by ")
        assert "more than" in said


def test_which_result_is_wrong_is_said(monkeypatch):
    results(monkeypatch, [[1.0], [2.0]], [[1.0], [2.0]], [[1.0], [2.5]])
    assert fault("gelu", "cpu") == f"result 1 is off by 0.5, more than {4 * EPS * 2:.2g}"


def test_whatever_a_compiler_raises_is_the_finding_but_a_refusal_is_raised(monkeypatch):
    results(monkeypatch, [[1.0]], [[1.0]], RuntimeError("long\nstory\n the end \n"))
    assert fault("gelu", "cpu") == "RuntimeError:  the end"
    results(monkeypatch, [[1.0]], [[1.0]], ValueError("x is on cpu"))
    with pytest.raises(ValueError, match="x is on cpu"):
        fault("gelu", "cpu")


# --- verdicts ---------------------------------------------------------------------------------------------------------


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


def test_a_verdict_is_a_file_of_the_device_and_the_versions(cache, tmp_path):
    assert _self_test._verdict("gelu", CPU) == ""
    about = {"device": "cpu", "torch": "1", "triton": "2", "kernels": "3"}
    digest = hashlib.sha256(json.dumps(["gelu", about]).encode()).hexdigest()[:16]
    (path,) = (tmp_path / "mpcore_self_test").iterdir()
    assert path.name == f"gelu_{digest}.json"
    assert json.loads(path.read_text()) == {"test": "gelu", "on": about, "fault": ""}
    assert cache == [("gelu", CPU)]
    path.write_text(json.dumps({"fault": "is wrong"}))
    assert _self_test._verdict("gelu", CPU) == "is wrong"
    for damaged in ("{", "[]", "{}", "3"):
        path.write_text(damaged)
        assert _self_test._verdict("gelu", CPU) == ""
    assert len(cache) == 5


def test_a_cache_that_cannot_be_written_and_a_refusal(cache, monkeypatch, tmp_path):
    (tmp_path / "mpcore_self_test").write_text("a file")
    assert _self_test._verdict("gelu", CPU) == ""
    assert _self_test._verdict("gelu", CPU) == ""
    assert len(cache) == 2

    def refuse(name, device):
        assert threading.current_thread().name.startswith("mpcore self-test of gelu")
        raise ValueError("no FP8")

    monkeypatch.setattr(_self_test, "fault", refuse)
    assert _self_test._verdict("gelu", CPU) == "no FP8"


def test_a_kernel_is_tested_once_by_the_name_of_its_test(cache, monkeypatch):
    x = torch.ones(2)
    assert passes("plain_attention", x)
    assert passes("attention", x)
    assert cache == [("attention", CPU)]
    _self_test._verdicts["gelu", CPU] = "is wrong"
    assert not passes("gelu", x)
    assert torch.compile(lambda y: y + passes("gelu", y), backend="eager")(x).tolist() == [1, 1]  # its verdict
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


def test_where_triton_keeps_kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert _self_test.triton_cache() == tmp_path
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _self_test.triton_cache() == tmp_path / ".triton" / "cache"


def test_a_verdict_holds_for_versions_and_sources(monkeypatch):
    found = _self_test._versions.__wrapped__()
    assert found.keys() == {"torch", "triton", "kernels"}
    assert (found["torch"], found["triton"]) == (torch.__version__, metadata.version("triton"))
    assert len(found["kernels"]) == 16
    assert found == _self_test._versions.__wrapped__()

    def gone(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", gone)
    import triton

    assert _self_test._versions.__wrapped__()["triton"] == triton.__version__


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", OPERATORS)
def test_rules_name_torchs_products_and_triton_for_all_else(operator):
    torchs = operator in ("plain_attention", "grouped_linear", "fp8_matmul")
    assert _choice.by_rule(operator) == ("torch" if torchs else "triton")


def test_what_runs_where_a_self_test_fails(monkeypatch):
    asked = []
    monkeypatch.setattr(_self_test, "passes", lambda operator, x: asked.append(operator))
    x = torch.ones(2)
    assert _choice.chosen("gelu", x) == _choice.chosen("fp8_matmul", x) == "reference"
    assert asked == ["gelu", "fp8_matmul"]
    assert _choice.chosen("plain_attention", x) == _choice.chosen("grouped_linear", x) == "torch"
    assert len(asked) == 2  # torch's own are not tested


class Fake:
    """What the choice looks at."""

    def __init__(self, device="cuda", dtype=F32):
        self.device, self.dtype, self.is_cuda, self.is_meta = (
            torch.device(device),
            dtype,
            device == "cuda",
            device == "meta",
        )


@pytest.mark.parametrize(
    ("impl", "forced", "x", "triton", "interprets", "found"),
    [
        (None, None, Fake(), True, False, "chosen"), (None, None, Fake("cpu"), True, True, "reference"),
        (None, None, Fake(dtype=F64), True, False, "reference"),
        (None, None, Fake(), False, False, "needs the triton package"),
        (None, "reference", Fake(), True, False, "reference"), (None, "triton", Fake(), True, False, "triton"),
        ("reference", "triton", Fake(), True, False, "reference"),
        ("triton", "reference", Fake(), True, False, "triton"),
        ("triton", None, Fake("cpu"), True, True, "triton"), ("triton", None, Fake("cpu"), True, False, "x is on cpu"),
        ("triton", None, Fake("meta"), True, True, "x is on meta"),
        ("triton", None, Fake(), False, False, "be imported"),
        ("triton", None, Fake(dtype=F64), True, False, "no torch.float64 kernel"), ("torch", None, Fake(), True, False,
                                                                                  "impl 'torch' is none of"),
    ],
)  # fmt: skip
def test_which_implementation_runs(impl, forced, x, triton, interprets, found, monkeypatch):
    monkeypatch.setattr(_dispatch, "HAS_TRITON", triton)
    monkeypatch.setattr(_dispatch, "INTERPRETING", interprets)
    monkeypatch.setattr(_dispatch, "chosen", lambda operator, x: operator)
    monkeypatch.setattr(_choice, "_forced", forced)
    if " " in found:
        with pytest.raises(ValueError, match=found):
            _dispatch.implementation(impl, x, "gelu")
        return
    assert _dispatch.implementation(impl, x, "gelu") == ("gelu" if found == "chosen" else found)
    assert _dispatch.runs_triton(impl, x, "gelu") == (found == "triton")


@pytest.mark.parametrize(
    ("impl", "gpu", "fits", "choice", "forced", "found"),
    [
        (None, True, True, "torch", None, True), (None, True, True, "reference", None, False),
        (None, True, False, "torch", None, False), (None, False, True, "torch", None, False),
        (None, True, True, "torch", "reference", False), (None, True, True, "torch", "triton", True),
        ("torch", True, True, "reference", None, True), ("torch", True, True, "torch", "reference", True),
        ("reference", True, True, "torch", None, False), ("torch", False, True, "torch", None, None),
        ("torch", True, False, "torch", None, None), ("triton", True, True, "torch", None, None),
    ],
)  # fmt: skip
def test_whether_torchs_product_runs(impl, gpu, fits, choice, forced, found, monkeypatch):
    monkeypatch.setattr(_dispatch, "is_on_gpu", lambda x: gpu)
    monkeypatch.setattr(_dispatch, "chosen", lambda operator, x: choice)
    monkeypatch.setattr(_choice, "_forced", forced)
    x = torch.ones(2)
    if found is None:
        with pytest.raises(
            ValueError, match=r"torch has no fp8_matmul of these inputs|impl 'triton' is none of None, 'torch'"
        ):
            _dispatch.runs_torch(impl, x, "fp8_matmul", fits)
        return
    assert _dispatch.runs_torch(impl, x, "fp8_matmul", fits) is found


def test_a_dry_run_for_a_gpu_follows_the_rule(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(_dispatch, "chosen", lambda *given: pytest.fail("nothing can be measured"))
    mode = FakeTensorMode()
    mode.stands_for_gpu = True
    with mode:
        x = torch.ones(2)
    assert _dispatch.implementation(None, x, "gelu") == "triton"
    assert _dispatch.implementation(None, x, "plain_attention") == "torch"
    assert _dispatch.runs_torch(None, x, "grouped_linear", True)
    assert not _dispatch.runs_torch(None, x, "grouped_linear", False)
    with FakeTensorMode():
        assert _dispatch.implementation(None, torch.ones(2), "gelu") == "reference"


def test_use_kernels_is_undone_after_an_error():
    with pytest.raises(ArithmeticError), use_kernels("reference"):
        raise ArithmeticError
    assert _choice.forced() is None


def test_formulas_are_registered_at_once_where_the_counter_is_there(monkeypatch):
    import sys

    seen = []
    counter = SimpleNamespace(register_flop_formula=lambda op: lambda formula: seen.append((op, formula)))
    monkeypatch.setattr(_flops, "_formulas", [])
    monkeypatch.setitem(sys.modules, "torch.utils.flop_counter", counter)
    op, other = torch.ops.mpcore.norm_forward, torch.ops.mpcore.norm_backward
    _flops.register_flops(op, len)
    assert (seen, _flops._formulas) == ([(op, len)], [(op, len)])
    monkeypatch.delitem(sys.modules, "torch.utils.flop_counter")
    _flops.register_flops(other, sum)
    assert (len(seen), _flops._formulas[1:]) == (1, [(other, sum)])
    finder = next(each for each in sys.meta_path if isinstance(each, _flops._OnImport))
    assert finder.find_spec("torch.utils", None) is None
    before = [*sys.meta_path]
    spec = finder.find_spec("torch.utils.flop_counter", None)
    assert sorted(map(id, sys.meta_path)) == sorted(map(id, before))
    spec.loader.exec_module(made := type(sys)("torch.utils.flop_counter"))
    assert made.FlopCounterMode
    assert {op, other} <= made.flop_registry.keys()
