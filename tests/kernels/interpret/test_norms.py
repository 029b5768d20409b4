"""Numerics of rms_norm and layer_norm, which keep the same laws."""

from types import ModuleType
from typing import NamedTuple

import laws
import pytest
import torch

from mpcore.kernels import _norm, layer_norm, rms_norm
from mpcore.kernels._norm import WIDEST, WIDEST_BIASED, WIDEST_NARROW
from tests.quick import some

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


class Norm(NamedTuple):
    module: ModuleType
    has_bias: bool

    @property
    def name(self):
        return self.module.__name__.rpartition(".")[2]

    @property
    def function(self):
        return getattr(self.module, self.name)

    def inputs(self, *shape, dtype=F32, weight=None, residual=None, mean=0.0):
        generator = torch.Generator().manual_seed(sum(shape))

        def draw(*shape):
            return laws.drawn(torch.randn, shape, generator=generator)

        made = {"x": (draw(*shape) + mean).to(dtype), "weight": draw(shape[-1]).to(weight or dtype)}
        if self.has_bias:
            made["bias"] = draw(shape[-1]).to(weight or dtype)
        if residual is not None:
            made["residual"] = draw(*shape).to(residual)
        return made

    def reference(self, **arguments):
        return getattr(self.module, f"{self.name}_reference")(**self.with_bias(arguments))

    def kernel(self, **arguments):
        return self.function(**self.with_bias(arguments), impl="triton")

    def with_bias(self, arguments):
        return arguments if self.name == "rms_norm" else {"bias": None} | arguments

    def check(self, inputs, layout="contiguous", **options):
        laws.check_errors(self.kernel, self.reference, inputs, layout, **options)


@pytest.fixture(params=["rms_norm", "layer_norm"])
def norm(request):
    return Norm(rms_norm if request.param == "rms_norm" else layer_norm, request.param == "layer_norm")


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("D", [1, 3, 257, 1000, 1280])  # the last is covered by 1024 columns and 256
def test_errors(norm, D, dtype):
    inputs = norm.inputs(13 if D <= 1000 else 3, D, dtype=dtype)
    # With D = 1 the exact gradient of LayerNorm is 0. A fused multiply-add on a GPU leaves the rounding of w dy.
    norm.check(inputs, gradients=D > 1 or norm.name == "rms_norm" or not inputs["x"].is_cuda)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("D", [3, 1000, 1280])
def test_errors_with_residual(norm, D, dtype):
    norm.check(norm.inputs(13 if D <= 1000 else 3, D, dtype=dtype, residual=dtype), eps=0.1)


@pytest.mark.parametrize(("D", "residual"), some((WIDEST + 8, None), (WIDEST_BIASED, BF16), of=[(WIDEST + 8, BF16)]))
def test_errors_of_wide_rows(norm, D, residual, monkeypatch):
    monkeypatch.setattr(_norm, "multiprocessors", lambda device: 9)  # so that rows are split over programs
    norm.check(norm.inputs(5, D, dtype=BF16, residual=residual))


@pytest.mark.parametrize("D", some(257, WIDEST + 8, of=[WIDEST_NARROW]))
def test_errors_of_layer_norm_without_bias(D, monkeypatch):
    norm = Norm(layer_norm, has_bias=False)
    monkeypatch.setattr(_norm, "multiprocessors", lambda device: 9)
    norm.check(norm.inputs(5, D, dtype=BF16))


@pytest.mark.parametrize(("M", "D"), [(64, 100)])
def test_errors_of_rows_with_a_large_mean(norm, M, D):
    norm.check(norm.inputs(M, D, mean=1000.0))


@pytest.mark.parametrize("layout", ["strided rows", "strided columns"])
@pytest.mark.parametrize("residual", [None, BF16])
def test_errors_of_strided_tensors(norm, layout, residual):
    norm.check(norm.inputs(2, 3, 40, dtype=BF16, residual=residual), layout)


def test_errors_of_rows_past_2_31_elements(norm):
    norm.check(norm.inputs(3, 40, residual=F32), "far rows")


@pytest.mark.parametrize(
    ("x", "weight", "residual"),
    [(BF16, F32, None), (F32, BF16, None), (BF16, F32, F32), (F32, F32, BF16), (F16, F16, F32)],
)
def test_errors_of_mixed_dtypes(norm, x, weight, residual):
    norm.check(norm.inputs(13, 200, dtype=x, weight=weight, residual=residual))


@pytest.mark.parametrize("D", [24])
def test_the_norm_sees_the_residual_stream_as_it_is_stored(norm, D):
    made = norm.inputs(5, D, dtype=BF16, residual=BF16)
    y, residual_out = norm.kernel(**made)
    del made["residual"]
    assert torch.equal(norm.kernel(**made | {"x": residual_out}), y)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0), (0,), (7,)])
@pytest.mark.parametrize("residual", [None, F32])
def test_empty_tensors_and_a_single_row(norm, shape, residual):
    norm.check(norm.inputs(*shape, residual=residual))


def test_transposed_batch_and_expanded_gradient(norm):
    made = {name: t.transpose(0, 1) if t.dim() == 3 else t for name, t in norm.inputs(4, 3, 24, residual=F32).items()}
    found = []
    for run in (norm.kernel, norm.reference):
        leaves = {name: t.detach().requires_grad_() for name, t in made.items()}
        outputs = run(**leaves)
        outputs[0].sum().backward()
        found.append([*outputs, *(leaf.grad for leaf in leaves.values())])
    assert all(y.is_contiguous() for y in found[0][:2])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("used", [0, 1])
def test_either_output_may_go_unused(norm, used):
    made = {name: t.requires_grad_() for name, t in norm.inputs(5, 24, residual=F32).items()}
    found = [
        torch.autograd.grad(run(**made)[used].square().sum(), made.values(), allow_unused=True)
        for run in (norm.kernel, norm.reference)
    ]
    torch.testing.assert_close(*found)


def test_a_second_derivative_is_refused(norm):
    made = {name: t.requires_grad_() for name, t in norm.inputs(2, 8).items()}
    with pytest.raises(RuntimeError, match=f"{norm.name} kernel has no second derivative"):
        torch.autograd.grad(norm.kernel(**made).sum(), made["x"], create_graph=True)


@pytest.mark.parametrize("residual", [None, F32])
def test_operators(norm, residual):
    made = norm.inputs(3, 24, dtype=BF16, weight=F32, residual=residual)
    x, weight, bias, how = made["x"], made["weight"], made.get("bias"), (norm.has_bias,)
    forward, backward = torch.ops.mpcore.norm_forward, torch.ops.mpcore.norm_backward
    laws.check_operator(forward, x, weight, bias, made.get("residual"), *how, 1e-6)
    _, _, stats = forward(x, weight, bias, made.get("residual"), *how, 1e-6)
    h = made.get("residual", x)
    laws.check_operator(backward, x, made.get("residual"), h, weight, bias, None, None, stats, *how)


@pytest.mark.parametrize("residual", [None, F32])
def test_compiles_in_one_graph(norm, residual):
    laws.check_compiles(norm.kernel, norm.inputs(3, 24, dtype=BF16, residual=residual))
