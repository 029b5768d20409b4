"""rms_norm without a GPU: the reference, bad input, and what would be launched."""

import time
import timeit
from types import SimpleNamespace

import fake_gpu
import pytest
import torch
import torch.nn.functional as F

from mpcore.kernels import _dispatch, _norm
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


BF16, F32 = torch.bfloat16, torch.float32


def called(M, D, *, dtype=BF16, bias=False, stream=None, subtract_mean=False, target="sm_90", main=False):
    """The launches of both passes of rows that are 8 elements longer in memory, and the tensors."""
    made = {name: torch.empty(M, D + 8, dtype=dtype)[:, :D] for name in ("x", "dy")}
    made |= {"weight": torch.empty(D, dtype=dtype), "bias": torch.empty(D, dtype=dtype) if bias else None}
    made["stream"] = None if stream is None else torch.empty(M, D + 16, dtype=stream)[:, :D]
    x, weight, shift, added, ops = made["x"], made["weight"], made["bias"], made["stream"], torch.ops.mpcore
    made["main"] = tuple(torch.empty(D) if main and t is not None else None for t in (weight, shift))
    with fake_gpu.calls(target) as launches:
        made["out"] = ops.norm_forward(x, weight, shift, added, subtract_mean, 1e-5)
        h, stats = x if added is None else made["out"][1], made["out"][2]
        made["back"] = ops.norm_backward(made["dy"], added, h, weight, shift, *made["main"], stats, subtract_mean)
    return launches, made


# By width and options: tile and warps of forward, then warps, programs, tile and stages of backward, for 1001 rows. A
# row of D = 5120 is 4096 + 1024; up to 4096 elements share a program, twice as many where a norm subtracts a mean from
# rows of a power of two; 16 warps run at once on each of the 132 multiprocessors, one program where there is a bias.
TILES = [
    (1024, {}, (1024, 0, 4), 4, (8, 251, 1024, 0, 4, False, 3)),
    (1000, {}, (1024, 0, 4), 4, (8, 251, 1024, 0, 4, False, 3)),
    (4096, {}, (4096, 0, 1), 4, (8, 264, 4096, 0, 1, False, 3)),
    (5120, {}, (4096, 1024, 1), 4, (8, 264, 4096, 1024, 1, False, 3)),
    (8192, {}, (8192, 0, 1), 8, (16, 132, 8192, 0, 1, False, 3)),
    (8193, {}, (8192, 1, 1), 8, (16, 132, 8192, 1, 1, True, 3)),
    (16384, {}, (16384, 0, 1), 16, (16, 132, 8192, 8192, 1, True, 3)),
    (12288, {"stream": BF16, "target": "sm_80"}, (8192, 4096, 1), 8, (16, 132, 8192, 4096, 1, True, 3)),
    (16384, {"stream": BF16, "target": "sm_80"}, (16384, 0, 1), 16, (16, 132, 8192, 8192, 1, True, 3)),
    (8192, {"stream": F32, "dtype": F32, "target": "sm_80"}, (8192, 0, 1), 8, (16, 132, 8192, 0, 1, False, 2)),
    (8192, {"stream": F32, "dtype": F32}, (8192, 0, 1), 8, (16, 132, 8192, 0, 1, False, 3)),
    (4096, {"subtract_mean": True}, (4096, 0, 1), 4, (16, 132, 4096, 0, 2, False, 3)),
    (5120, {"subtract_mean": True}, (4096, 1024, 1), 4, (8, 264, 4096, 1024, 1, False, 3)),
    (1024, {"subtract_mean": True, "bias": True}, (1024, 0, 4), 4, (16, 126, 1024, 0, 8, False, 3)),
    (5120, {"subtract_mean": True, "bias": True}, (4096, 1024, 1), 4, (8, 132, 4096, 1024, 1, False, 3)),
]


@pytest.mark.parametrize(("D", "options", "tile", "warps", "back"), TILES)
def test_launches_of_both_passes(D, options, tile, warps, back):
    (forward, backward, total), made = called(1001, D, **options)
    subtract_mean, stream = options.get("subtract_mean", False), made["stream"] is not None
    names = {"bias"} if made["bias"] is not None else set()
    wide = {"RESIDUAL_STRIDE": D + 16} if stream else {"RESIDUAL_STRIDE": 0}
    assert (forward.kernel, forward.warps) == ("forward_kernel", warps)
    assert forward.grid == (-(-1001 // tile[2]), 1, 1)
    assert forward.given == {"x", "weight", "y", "stats"} | names | ({"residual", "residual_out"} if stream else set())
    assert forward.numbers == {
        "M": 1001, "eps": 1e-5, "X_STRIDE": D + 8, "D": D, "SUBTRACT_MEAN": subtract_mean,
        "MAIN": tile[0], "TAIL": tile[1], "BLOCK_M": tile[2], **wide,
    }  # fmt: skip
    y, residual_out, stats = made["out"]
    assert [forward.at(n) for n in ("x", "weight", "y", "stats")] == [
        t.data_ptr() for t in (made["x"], made["weight"], y, stats)
    ]
    assert (y.shape, y.dtype) == ((1001, D), made["x"].dtype)
    assert (stats.shape, stats.dtype) == ((1 + subtract_mean, 1001), F32)
    assert residual_out.shape == ((1001, D) if stream else (0,))
    if stream:
        assert [forward.at(n) for n in ("residual", "residual_out")] == [
            t.data_ptr() for t in (made["stream"], residual_out)
        ]

    warps, programs, main, tail, block, narrow, stages = back
    assert (backward.kernel, backward.grid, backward.warps) == ("backward_kernel", (programs, 1, 1), warps)
    assert backward.given == {"dy", "h", "weight", "stats", "dh", "partials"} | ({"dstream"} if stream else set())
    assert backward.numbers == {
        "M": 1001, "DY_STRIDE": D + 8, "DSTREAM_STRIDE": D + 16 if stream else 0, "H_STRIDE": D if stream else D + 8,
        "D": D, "SUBTRACT_MEAN": subtract_mean, "HAS_BIAS": bool(names), "MAIN": main, "TAIL": tail,
        "BLOCK_M": block, "NARROW": narrow, "STAGES": stages,
    }  # fmt: skip
    dh, dweight, dbias = made["back"]
    assert backward.arguments["partials_ptr"].shape == (1 + len(names), programs, D)
    assert backward.arguments["partials_ptr"].dtype == F32
    assert [backward.at(n) for n in ("dy", "stats", "dh")] == [t.data_ptr() for t in (made["dy"], stats, dh)]
    assert (dh.shape, dh.dtype, dweight.shape, dbias.shape) == ((1001, D), made["x"].dtype, (D,), (D * len(names),))
    assert total.at("partials") == backward.at("partials")
    assert (total.at("first"), "second" in total.given) == (dweight.data_ptr(), bool(names))
    assert not total.numbers["ACCUMULATE"]


def test_programs_of_one_warp_fill_a_multiprocessor_with_sixteen():
    (_, backward, _), _ = called(64 * 132 * 16 + 1, 8)
    assert (backward.grid, backward.warps, backward.numbers["BLOCK_M"]) == ((132 * 16, 1, 1), 1, 64)


@pytest.mark.parametrize("bias", [False, True])
def test_sums_go_to_main_gradients_where_there_are_any(bias):
    (_, _, total), made = called(5, 8, bias=bias, subtract_mean=bias, main=True)
    mains = [t for t in made["main"] if t is not None]
    assert [total.at(name) for name in ("first", "second")[: 1 + bias]] == [t.data_ptr() for t in mains]
    assert (total.numbers["ACCUMULATE"], "second" in total.given) == (True, bias)
    assert [t.shape for t in made["back"][1:]] == [(0,), (0,)]  # autograd gets nothing


@pytest.mark.parametrize(
    ("x", "residual", "bias", "hip", "widest"),
    [
        (BF16, None, False, None, 16384), (torch.float16, None, False, None, 16384), (F32, None, False, None, 8192),
        (BF16, None, True, None, 12288), (BF16, BF16, False, None, 16384), (BF16, F32, False, None, 8192),
        (BF16, torch.float16, True, None, 8192), (BF16, None, False, "6.4", 8192), (F32, None, True, None, 8192),
    ],
)  # fmt: skip
def test_the_widest_row_of_a_kernel_and_the_next(x, residual, bias, hip, widest, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    seen = []
    monkeypatch.setattr(_norm, "runs_triton", lambda impl, x, name: seen.append(name) or True)
    monkeypatch.setattr(_norm, "Norm", SimpleNamespace(apply=lambda *given: ("kernel", *given[4:])))
    monkeypatch.setattr(_norm, "_reference", lambda *given: ("reference", *given[4:]))
    name = "layer_norm" if bias else "rms_norm"
    for D in (widest, widest + 1):
        made = [None if t is None else torch.empty(1, D, dtype=t) for t in (x, residual)]
        given = name, made[0], torch.empty(D), torch.empty(D) if bias else None, made[1], 1e-3
        assert _norm.norm(*given, None) == ("kernel" if widest == D else "reference", bias, 1e-3)
        assert seen[-1] == name
        if widest == D:
            assert _norm.norm(*given, "triton")[0] == "kernel"
            continue
        with pytest.raises(ValueError, match=f"no kernel of rows of {D} here, only of up to {widest}"):
            _norm.norm(*given, "triton")


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
