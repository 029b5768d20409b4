"""Numerics of rms_norm and layer_norm beside the laws of `test_laws.py`, and gradients added to main gradients."""

from types import ModuleType
from typing import NamedTuple

import laws
import pytest
import torch

from mpcore.kernels import layer_norm, rms_norm

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


RMS, LAYER, PLAIN = Norm(rms_norm, False), Norm(layer_norm, True), Norm(layer_norm, False)


@pytest.fixture(params=[RMS, LAYER], ids=lambda norm: norm.name)
def norm(request):
    return request.param


def test_the_norm_sees_the_residual_stream_as_it_is_stored(norm):
    made = norm.inputs(5, 24, dtype=BF16, residual=BF16)
    y, residual_out = norm.kernel(**made)
    del made["residual"]
    assert torch.equal(norm.kernel(**made | {"x": residual_out}), y)


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


def with_main_grads(inputs):
    """Parameters with main gradients that already hold something."""
    leaves = {name: torch.nn.Parameter(t.clone()) for name, t in inputs.items()}
    for name in ("weight", "bias"):
        if name in leaves:
            leaves[name].main_grad = torch.ones(leaves[name].shape)
            leaves[name].grad_added_to_main_grad = False
    return leaves


@pytest.mark.parametrize("D", [24, 1029])
def test_pitfall_32_main_gradients_are_added_to_once_each_time(norm, D):
    """A weight used twice, after what was there before; autograd's own gradient stays None."""
    made = norm.inputs(5, D, dtype=F32, weight=BF16)
    leaves, plain = with_main_grads(made), {name: t.clone().requires_grad_() for name, t in made.items()}
    for inputs in (leaves, plain):
        for scale in (1.0, 2.0):
            (norm.kernel(**inputs) * scale).sum().backward()
    assert torch.equal(leaves["x"].grad, plain["x"].grad)
    columns = sorted(leaves.keys() - {"x"})
    once = [
        torch.autograd.grad((norm.kernel(**plain) * scale).sum(), [plain[name] for name in columns])
        for scale in (1.0, 2.0)
    ]
    for name, *terms in zip(columns, *once, strict=True):
        assert leaves[name].grad is None
        assert leaves[name].grad_added_to_main_grad
        bound = 2 * torch.finfo(BF16).eps * sum(t.float().abs() for t in terms) + 1e-6
        assert ((leaves[name].main_grad - 1 - sum(t.float() for t in terms)).abs() <= bound).all()


def test_pitfall_32_main_gradients_are_left_alone_where_autograd_returns_gradients(norm):
    leaves = with_main_grads(norm.inputs(5, 24))
    columns = [leaves[name] for name in leaves.keys() - {"x"}]
    grads = torch.autograd.grad(norm.kernel(**leaves).sum(), columns)
    assert all(grad is not None and (column.main_grad == 1).all() for grad, column in zip(grads, columns, strict=True))
    torch.autograd.grad(norm.kernel(**leaves).sum(), leaves["x"])
    assert all((column.main_grad == 1).all() and not column.grad_added_to_main_grad for column in columns)


def test_pitfall_32_frozen_weights_add_nothing(norm):
    leaves = with_main_grads(norm.inputs(5, 24))
    leaves["weight"].requires_grad_(False)
    norm.kernel(**leaves).sum().backward()
    assert (leaves["weight"].main_grad == 1).all()
    assert leaves["weight"].grad is None


def test_a_main_gradient_of_a_wrong_shape_is_refused(norm):
    leaves = with_main_grads(norm.inputs(5, 24))
    leaves["weight"].main_grad = torch.ones(23)
    with pytest.raises(ValueError, match=r"main_grad is torch.float32 \(23,\) on \S+; for a parameter \(24,\)"):
        norm.kernel(**leaves).sum().backward()
