"""rms_norm without a GPU: the reference, bad input, and what would be launched."""

import time
import timeit

import fake_gpu
import pytest
import torch
import torch.nn.functional as F

from mpcore.kernels import _dispatch, _norm
from mpcore.kernels._norm import WIDEST, WIDEST_NARROW
from mpcore.kernels.rms_norm import rms_norm

X, W = torch.randn(2, 3, 8), torch.randn(8)


def test_the_reference_is_the_formula():
    x, weight, residual = torch.randn(3, 2, 8, dtype=torch.float64)
    h = x + residual
    wanted = h / (h.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight[0]
    y, residual_out = rms_norm(x, weight[0], 0.1, residual=residual)
    assert y.dtype == torch.float64
    torch.testing.assert_close((y, residual_out), (wanted, h))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_reference_rounds_once(dtype):
    x, weight = X.to(dtype), W.to(dtype)
    wanted = (F.rms_norm(x.float(), (8,), eps=1e-6) * weight.float()).to(dtype)
    torch.testing.assert_close(rms_norm(x, weight), wanted, rtol=0, atol=0)


def test_the_reference_runs_under_torchs_own_autograd():
    x, weight, residual = (t.requires_grad_() for t in torch.randn(3, 2, 8, dtype=torch.float64))
    assert torch.autograd.gradgradcheck(
        lambda x, weight, residual: rms_norm(x, weight[0], residual=residual), (x, weight, residual)
    )


def test_on_a_cpu_the_reference_is_called_directly(monkeypatch):
    monkeypatch.setattr(_norm, "_reference", lambda *args: "reference")
    assert rms_norm(X, W) == rms_norm(X, W, impl="reference") == "reference"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": W[:7]}, r"weight has shape \(7,\), but the last dimension of x is 8"),
        ({"weight": X}, r"weight has shape \(2, 3, 8\)"),
        ({"x": X[0, 0, 0]}, "x is a scalar"),
        ({"x": X.long()}, "x is torch.int64"),
        ({"weight": W.double()}, "weight is torch.float64, which does not go with x of torch.float32"),
        ({"weight": W.to(torch.complex64)}, "weight is torch.complex64"),
        ({"weight": W.to("meta")}, "weight is on meta, but x is on cpu"),
        ({"residual": X[0]}, r"residual has shape \(3, 8\), but x has \(2, 3, 8\)"),
        ({"residual": X.int()}, "residual is torch.int32"),
        ({"impl": "triton"}, "impl='triton', but x is on cpu"),
        ({"impl": "fast"}, "impl 'fast' is none of"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(**{"x": X, "weight": W} | arguments)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)])
def test_empty_in_empty_out(shape):
    y, residual_out = rms_norm(torch.ones(shape), torch.ones(shape[-1]), residual=torch.ones(shape))
    assert y.shape == residual_out.shape == shape


def launched(M, D, residual=None, dtype=torch.bfloat16):
    x, weight = torch.empty(M, D, dtype=dtype), torch.empty(D, dtype=dtype)
    with fake_gpu.fake_gpu() as launches:
        torch.ops.mpcore.norm_forward(x, weight, None, residual, False, 1e-5)
        torch.ops.mpcore.norm_backward(x, residual, x, weight, None, None, None, torch.empty(1, M), False)
    return launches


def test_launches_of_rows_in_registers(monkeypatch):
    monkeypatch.setattr(_norm, "multiprocessors", lambda device: 132)
    forward, backward, total = launched(1001, 1024)
    assert [launch.grid for launch in (forward, backward, total)] == [(251, 1, 1), (251, 1, 1), (32, 1, 1)]
    arguments = forward.arguments
    assert (arguments["M"], arguments["eps"], arguments["D"], arguments["X_STRIDE"]) == (1001, 1e-5, 1024, 1024)
    assert (arguments["MAIN"], arguments["TAIL"], arguments["BLOCK_M"]) == (1024, 0, 4)
    assert arguments["residual_ptr"] is arguments["residual_out_ptr"] is None
    assert backward.arguments["partials_ptr"].shape == (1, 251, 1024)
    assert total.arguments["P"] == 251


def test_the_backward_grid_fills_the_gpu_once(monkeypatch):
    monkeypatch.setattr(_norm, "multiprocessors", lambda device: 132)
    assert [launch.grid for launch in launched(8192, 4096)] == [(8192, 1, 1), (264, 1, 1), (128, 1, 1)]
    assert [launch.grid for launch in launched(8192, 8192)] == [(8192, 1, 1), (132, 1, 1), (256, 1, 1)]


def test_wide_rows_of_half_precision_are_read_once_in_backward():
    for D in (WIDEST + 1, WIDEST_NARROW):
        launches = launched(5, D)
        assert [launch.name for launch in launches] == ["forward_kernel", "backward_kernel", "_sum_partials_kernel"]
        tail = launches[1].arguments["TAIL"]
        assert (launches[1].arguments["NARROW"], WIDEST + tail >= D) == (True, True)


@pytest.mark.parametrize(
    ("D", "dtypes", "hip", "bias", "widest"),
    [
        (16385, (torch.bfloat16, None), None, False, 16384),
        (12289, (torch.bfloat16, torch.bfloat16), None, True, 12288),
        (8193, (torch.bfloat16, torch.float32), None, False, 8192),
        (8193, (torch.bfloat16, torch.float16), None, False, 8192),
        (8193, (torch.float32, None), None, False, 8192),
        (8193, (torch.float16, None), "6.4", False, 8192),
    ],
)
def test_rows_that_no_program_can_hold_run_plain_torch(D, dtypes, hip, bias, widest, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(_norm, "runs_triton", lambda *_, **sizes: True)
    name, shift = ("layer_norm", torch.ones(D)) if bias else ("rms_norm", None)
    x, residual = (None if dtype is None else torch.randn(2, D).to(dtype) for dtype in dtypes)
    with fake_gpu.fake_gpu() as launches:
        _norm.norm(name, x, torch.ones(D), shift, residual, 1e-6, None)
        with pytest.raises(ValueError, match=f"no kernel of rows of {D} here, only of up to {widest}"):
            _norm.norm(name, x, torch.ones(D), shift, residual, 1e-6, "triton")
    assert launches == []


def test_nothing_is_launched_for_empty_tensors():
    assert launched(0, 8) == launched(8, 0) == []


def test_host_time_is_at_most_four_empty_functions(monkeypatch):
    monkeypatch.setattr(_dispatch, "INTERPRETING", True)  # the fake GPU's tensors are on the CPU
    x, weight, dy = torch.ones(4, 64, requires_grad=True), torch.ones(64, requires_grad=True), torch.ones(4, 64)

    def ours():
        torch.autograd.grad(rms_norm(x, weight, impl="triton"), (x, weight), dy)

    def empty():
        torch.autograd.grad(fake_gpu.Empty.apply(x, weight, None, 1e-6), (x, weight), dy)

    least = float("inf")
    with fake_gpu.fake_gpu(record=False):
        for _ in range(5):  # other processes slow one side more than the other, but not always
            turns = [
                [timeit.timeit(run, timer=time.process_time, number=50) for run in (ours, empty)] for _ in range(30)
            ]
            seconds = [min(each) for each in zip(*turns, strict=True)]  # in turns: both meet the same load
            least = min(least, seconds[0] / seconds[1])
            if least <= 4:
                break
    assert least <= 4
